"""Plans: pure, equal, picklable; positions, labels and weights; orders; refusals."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import MaskcError
from maskc.runtime.chunking import COARSE, EVEN, FINE, default_chunk, fullest
from maskc.runtime.layout import contiguous, usual_owners, zigzag
from maskc.runtime.plan import CHUNK_LIMIT, AttentionPlan, plan
from maskc.runtime.tile_work import TileCosts, tile_work
from tests.dist.cases import FORMS, Case, vectors

DOC = "input doc : segments\nmask doc_causal = same(doc) and k <= q\nmask local = same(doc) and k <= q < k + 3"


def doc_mask(lengths: list[int] | list[list[int]], name: str = "doc_causal", n: int | None = None):
    many = [maskc.segments(lengths=x) for x in lengths] if isinstance(lengths[0], list) else maskc.segments(lengths=lengths)
    total = n or (sum(lengths) if not isinstance(lengths[0], list) else max(map(sum, lengths)))  # type: ignore[arg-type]
    return maskc.compile_text(DOC, name).bind(doc=many, nq=total, nk=total)


def test_equal_inputs_make_equal_plans() -> None:
    a, b = (plan(doc_mask([5, 3, 8]), world_size=2, chunk=2) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest
    copy = pickle.loads(pickle.dumps(a))
    assert copy == a
    assert copy.digest == a.digest
    assert torch.equal(copy.positions(1), a.positions(1))
    others = [plan(doc_mask([5, 4, 7]), world_size=2, chunk=2), plan(doc_mask([5, 3, 8]), world_size=4, chunk=2)]
    assert len({a.digest, *(p.digest for p in others)}) == 3
    with pytest.raises(TypeError):
        a[0]  # type: ignore[index]


# ---------------------------------------------------------------- the data contract


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["contiguous", "zigzag", "balanced"]))
@settings(max_examples=60, deadline=None)
def test_shards_are_a_partition(n: int, world: int, chunk: int, order: str) -> None:
    p = plan(BoundaryVectors(n, n, 1, 1, True), world_size=world, chunk=chunk, order=order)  # type: ignore[arg-type]
    x = torch.arange(2 * n).view(1, n, 2)
    parts = [p.shard(x, rank) for rank in range(world)]
    assert sorted(torch.cat(parts, 1)[0, :, 0].tolist()) == list(range(0, 2 * n, 2))
    for rank, part in enumerate(parts):
        positions = p.positions(rank)
        assert (positions.diff() > 0).all()
        assert torch.equal(part[0, :, 0], 2 * positions)
    assert sum(p.loss_weight(rank) for rank in range(world)) == pytest.approx(world)


def test_positions_of_packed_documents() -> None:
    """Documents [4, 4] in zigzag on two ranks: rank 0 holds 0, 3, 4, 7 with document order, 0, 1, 6, 7 with plain zigzag."""
    mask = doc_mask([4, 4])
    p = plan(mask, world_size=2, order="zigzag-document")
    assert p.positions(0).tolist() == [0, 3, 4, 7]
    assert p.positions(0, per="doc").tolist() == [0, 3, 0, 3]
    assert p.positions(1).tolist() == [1, 2, 5, 6]
    assert p.positions(1, per="doc").tolist() == [1, 2, 1, 2]
    q = plan(mask, world_size=2, order="zigzag")
    assert q.positions(0).tolist() == [0, 1, 6, 7]
    assert q.positions(0, per="doc").tolist() == [0, 1, 2, 3]


def test_rotary_embedding_after_sharding() -> None:
    """q . k after rotation by local positions is what it was globally; three axes of positions shard like one."""
    p = plan(doc_mask([7, 9]), world_size=2, chunk=3)
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 16, 4, generator=g, dtype=torch.float64) for _ in range(2))
    axes = torch.randint(0, 50, (3, 16), generator=g)

    def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position[None, :, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    for positions in (torch.arange(16), *axes):
        whole = rotate(q, positions)[0] @ rotate(k, positions)[0].T
        for rank in range(2):
            local = p.shard(positions, rank, 0)
            mine = rotate(p.shard(q, rank), local)[0] @ rotate(k, positions)[0].T
            torch.testing.assert_close(mine, p.shard(whole, rank, 0), rtol=1e-12, atol=1e-12)


def test_labels_stop_at_document_ends() -> None:
    p = plan(doc_mask([5, 3]), world_size=2, chunk=2)
    labels = torch.arange(8)[None]
    assert p.shift_labels(labels).tolist() == [[1, 2, 3, 4, -100, 6, 7, -100]]
    assert p.roll(labels, -1).tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert p.roll(labels, -2, per="doc", fill=-1).tolist() == [[2, 3, 4, -1, -1, 7, -1, -1]]
    assert p.roll(labels, -2, per="doc").tolist() == [[2, 3, 4, 0, 1, 7, 5, 6]]
    assert p.roll(labels, 2, fill=9).tolist() == [[9, 9, 0, 1, 2, 3, 4, 5]]
    plain = plan(BoundaryVectors(4, 4, 1, 1, True), world_size=2)
    assert plain.shift_labels(torch.arange(4)[None]).tolist() == [[1, 2, 3, -100]]


def test_documents_may_differ_over_the_batch() -> None:
    p = plan(doc_mask([[5, 3], [2, 6]]), world_size=2, chunk=2)
    labels = torch.arange(16).view(2, 8)
    assert p.shift_labels(labels).tolist() == [[1, 2, 3, 4, -100, 6, 7, -100], [9, -100, 11, 12, 13, 14, 15, -100]]
    held = p.positions(0)
    expected = [[x if x < 5 else x - 5 for x in held.tolist()], [x if x < 2 else x - 2 for x in held.tolist()]]
    assert p.positions(0, per="doc").tolist() == expected
    with pytest.raises(MaskcError, match="M712"):
        plan(doc_mask([[5, 3], [2, 6]]), world_size=2, order="zigzag-document")


def test_padding_counts_as_a_document_of_its_own() -> None:
    p = plan(doc_mask([3, 2], n=8), world_size=1)
    assert p.positions(0, per="doc").tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert p.shift_labels(torch.arange(8)[None]).tolist() == [[1, 2, -100, 4, -100, 6, 7, -100]]


def test_loss_weights_count_labels() -> None:
    p = plan(doc_mask([5, 3, 4]), world_size=3, chunk=2)
    labels = torch.tensor([[1, 1, -100, 1, -100, -100, -100, 1, 1, 1, -100, 1]])
    kept = [int((p.shard(labels, r) != -100).sum()) for r in range(3)]
    assert [p.loss_weight(r, labels) for r in range(3)] == [3 * n / 7 for n in kept]
    assert p.loss_weight(0, torch.full((1, 12), -100)) == 0.0
    assert plan(doc_mask([1]), world_size=2).loss_weight(1) == 0.0


# ---------------------------------------------------------------- workloads, needs, orders


@given(st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_needs_never_drop_a_visible_pair(seed: int) -> None:
    case = Case(3, 45, seed, FORMS[seed % len(FORMS)], seed % 2 == 0, chunk=(1, 4, 7)[seed % 3], heads=(2, 1, 2), batch=(2, 2))
    v = vectors(case)
    p = case.plan(v)
    visible = (~v.masked()).any(0).any(0)
    work = tile_work(v, p.rows, p.keys)
    for i in range(p.rows.chunk_count):
        for j in range(p.keys.chunk_count):
            cells = visible[slice(*p.rows.range_of(i)), slice(*p.keys.range_of(j))]
            needed = bool(p.parts[0].need[i] >> j & 1)
            assert needed == bool(work.need[i, j])
            assert needed or not cells.any()
            if p.tile == (1, 1):
                assert needed == bool(cells.any())
    for rank in range(3):
        assert p.needed(rank) == {j for i in p.rows.chunks_of(rank) for j in range(p.keys.chunk_count) if work.need[i, j]}


def test_several_masks_share_one_assignment() -> None:
    """Documents [4, 8], window 3, chunks of 3: {0,3}|{1,2} works 27/19 cells in full layers and 15/15 in windowed ones."""
    full, local = doc_mask([4, 8]), doc_mask([4, 8], "local")
    unit = TileCosts(1, 1)
    both = plan([full, local], world_size=2, chunk=3, assign=[0, 1, 1, 0], costs=unit)
    assert both.part_workloads(0) == (27, 19)
    assert both.part_workloads(1) == (15, 15)
    assert plan(full, world_size=2, chunk=3, assign=[0, 1, 0, 1], costs=unit).part_workloads() == (18, 28)
    weighted = plan([full, local], world_size=2, chunk=3, weights=[1, 5], costs=unit)
    assert weighted.workloads == tuple(
        a + 5 * b for a, b in zip(weighted.part_workloads(0), weighted.part_workloads(1), strict=True)
    )
    assert weighted.optimal
    assert weighted.part(local) == 1


def test_balanced_is_never_worse_than_the_usual_orders() -> None:
    for seed in range(10):
        cuts = np.sort(np.random.default_rng(seed).integers(1, 4096, 9)).tolist()
        mask = doc_mask([b - a for a, b in zip([0, *cuts], [*cuts, 4096], strict=True)])
        balanced = plan(mask, world_size=4, chunk=128)
        for order in ("contiguous", "zigzag"):
            assert balanced.makespan <= plan(mask, world_size=4, order=order, chunk=128).makespan  # type: ignore[arg-type]
        assert balanced.imbalance < 1.02


def test_epsilon_trades_balance_for_traffic() -> None:
    mask = doc_mask([700, 300, 900, 148])

    def received(p: AttentionPlan) -> int:
        return max(sum(p.keys.size_of(c) for c in p.needed(r) if p.keys.owner[c] != r) for r in range(p.world))

    tight, loose = plan(mask, world_size=4, chunk=64), plan(mask, world_size=4, chunk=64, epsilon=0.2)
    assert received(loose) <= received(tight)
    assert loose.imbalance <= max(1.2, tight.imbalance) + 0.05


def test_batches_and_heads_add_up() -> None:
    one = plan(doc_mask([5, 3]), world_size=2, chunk=2, costs=TileCosts(1, 1))
    two = plan(doc_mask([[5, 3], [5, 3]]), world_size=2, chunk=2, costs=TileCosts(1, 1))
    assert sum(two.workloads) == 2 * sum(one.workloads)
    v = vectors(Case(2, 16, 0, "lts", heads=(2, 1, 2), batch=(2, 2)))
    p = plan(v, world_size=2, chunk=2, costs=TileCosts(1, 1))
    rows, keys = p.tile
    seen = torch.nn.functional.max_pool2d((~v.masked()).float().flatten(0, 1), (rows, keys), ceil_mode=True)
    assert sum(p.workloads) == int(seen.sum())


def test_costs_are_fitted_from_times() -> None:
    rng = np.random.default_rng(0)
    samples = [(p, u, r, 1e-4 + 2.6e-6 * p + 2e-6 * u + 0.5e-6 * r) for p, u, r in rng.integers(1, 500, (30, 3)).tolist()]
    assert TileCosts.fit(samples, unit=100) == TileCosts(130, 100, 25)
    falling = [(p, u, r, 1e-2 + 2e-6 * u - 0.5e-6 * r) for p, u, r, _ in samples]
    assert TileCosts.fit(falling, unit=100) == TileCosts(1, 100, 0), "a cost is never negative, that of a PARTIAL tile at least 1"


@pytest.mark.parametrize("world", range(1, 6))
def test_usual_owners(world: int) -> None:
    """Those of the layouts where chunks go up evenly; elsewhere never one that gives a rank more than its share."""
    for chunks in range(4 * world + 2):
        found = usual_owners(chunks, world)
        assert all(o.count(r) <= -(-chunks // world) for o in found.values() for r in range(world))
        assert all(len(o) == chunks for o in found.values())
        if chunks and chunks % (2 * world) == 0:
            assert found == {"contiguous": contiguous(chunks, world, 1).owner, "zigzag": zigzag(chunks, world, 1).owner}


def test_a_zigzag_that_gives_a_rank_two_of_three_chunks_is_left_out() -> None:
    assert list(usual_owners(3, 4)) == ["contiguous"]


def test_traffic_in_bytes() -> None:
    """[4, 4] documents, contiguous on four ranks of two rows: ranks 1 and 3 need the two rows before theirs."""
    p = plan(doc_mask([4, 4]), world_size=4, order="contiguous", heads_kv=2, head_dim=8)
    row = 2 * 2 * 8 * 2
    assert p.traffic() == ((0, 2 * row, 0, 0), (0, 0, 0, 0), (0, 0, 0, 2 * row), (0, 0, 0, 0))
    backward = p.traffic(direction="backward")
    assert backward[0][1] == 2 * row
    assert backward[1][0] == 2 * 2 * row  # gradients in fp32
    assert p.traffic(batch=0) == ((0,) * 4,) * 4
    for named in ({"batch": -1}, {"itemsize": 0}, {"batch": 1.5}, {"batch": None}):
        with pytest.raises(MaskcError, match=f"M717.*{next(iter(named))} is {next(iter(named.values()))}"):
            p.traffic(**named)  # type: ignore[arg-type]
    with pytest.raises(MaskcError, match="M715"):
        plan(doc_mask([4, 4]), world_size=4).traffic()


def test_rows_a_rank_receives() -> None:
    """What schedules move is what is needed: [4, 4] documents, four ranks of two rows in order."""
    p = plan(doc_mask([4, 4]), world_size=4, order="contiguous")
    assert p.received() == (0, 2, 0, 2)
    for order in ("balanced", "zigzag"):
        p = plan(doc_mask([700, 300, 900, 148]), world_size=4, chunk=64, order=order)  # type: ignore[arg-type]
        sent = p.schedule("all-gather").rows_sent(p.keys)
        assert p.received() == tuple(sum(row[r] for row in sent) for r in range(4))


# ---------------------------------------------------------------- chunks that nobody names


@given(st.integers(1, 300_000), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_default_chunks_are_about_as_many_as_wanted(length: int, world: int) -> None:
    for per_rank in (FINE, COARSE):
        size = default_chunk(length, world, per_rank, 4096)
        share = -(-length // (per_rank * world))
        assert size == share if share <= 64 else size % 128 == 0
        assert share <= 64 or 0.5 * share - 64 <= size <= 2 * share + 128
        assert -(-length // size) <= 4096 or share == size
        rounded_up = -(-share // 128) * 128 if share > 64 else share
        assert fullest(length, world, size) <= fullest(length, world, rounded_up)


@pytest.mark.parametrize(
    ("length", "world", "size", "most"),
    [(65536, 8, 1024, 8192), (73728, 8, 1152, 9216), (100_000, 8, 1792, 12_544), (8192, 8, 128, 1024), (1000, 16, 8, 64)],
)
def test_default_chunks_leave_ranks_as_many_rows(length: int, world: int, size: int, most: int) -> None:
    """100,000 rows on 8 ranks: 56 chunks of 1792 are 12,544 rows a rank at most; 61 of 1664 would be 13,312."""
    assert default_chunk(length, world) == size
    assert fullest(length, world, size) == most


def test_no_default_is_beyond_the_limit() -> None:
    for world in (512, 1000, 4096):
        assert plan(BoundaryVectors(8192, 8192, 1, 1, True), world_size=world).rows.chunk_count <= CHUNK_LIMIT


def test_the_default_is_as_even_and_no_slower_than_eight_chunks_a_rank() -> None:
    """By the model, see test_arcs.py."""
    causal = BoundaryVectors(8192, 8192, 1, 1, True)
    assert plan(causal, world_size=4).rows.chunk == 256  # in zigzag no keys are saved by larger ones
    for seed in range(6):
        cuts = np.sort(np.random.default_rng(seed).integers(1, 32768, 40)).tolist()
        mask = doc_mask([b - a for a, b in zip([0, *cuts], [*cuts, 32768], strict=True)])
        p, fine = plan(mask, world_size=8), plan(mask, world_size=8, chunk=512)
        assert p.imbalance <= max(1 + EVEN, fine.imbalance)
        assert p.makespan < fine.makespan or max(p.received()) <= max(fine.received())
        assert plan(mask, world_size=8, nodes=2).rows.chunk == plan(mask, world_size=8, epsilon=0.02).rows.chunk == 512


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("M701", {"world_size": 0}),
        ("M701", {}),
        ("M702", {"world_size": 2, "chunk": 0}),
        ("M702", {"world_size": 2, "chunk": 4, "assign": [0, 1, 0]}),
        ("M702", {"world_size": 2, "chunk": 4, "assign": [0, 2]}),
        ("M713", {"world_size": 2, "order": "random"}),
        ("M716", {"world_size": 4, "nodes": 3}),
        ("M715", {"world_size": 2, "weights": [1, 2]}),
        ("M712", {"world_size": 2, "documents": "paragraph"}),
        ("M712", {"world_size": 2, "documents": ["doc"]}),
        ("M705", {"world_size": 2, "nq": 9}),
        ("M701", {"world_size": 2.0}),
        ("M701", {"world_size": "2"}),
        ("M701", {"world_size": True}),
        ("M701", {"world_size": 2**40}),
        ("M701", {"group": 3}),
        ("M701", {"group": torch.ones(2)}),
        ("M701", {"group": SimpleNamespace(get_group=None, size=lambda: 2)}),
        ("M702", {"world_size": 2, "chunk": 2.5}),
        ("M702", {"world_size": 2, "chunk": "4"}),
        ("M702", {"world_size": 2, "assign": []}),
        ("M702", {"world_size": 2, "assign": [0, 1] * 9}),
        ("M702", {"world_size": 2, "assign": [0.0, 1.0]}),
        ("M702", {"world_size": 2, "assign": "01"}),
        ("M716", {"world_size": 2, "nodes": 1.0}),
        ("M713", {"world_size": 2, "order": ["zigzag"]}),
        ("M715", {"world_size": 2, "weights": 3}),
        ("M715", {"world_size": 2, "weights": [1.5]}),
        ("M717", {"world_size": 2, "epsilon": -0.01}),
        ("M717", {"world_size": 2, "epsilon": float("nan")}),
        ("M717", {"world_size": 2, "epsilon": "2 %"}),
        ("M717", {"world_size": 2, "heads_kv": 0}),
        ("M717", {"world_size": 2, "head_dim": "64"}),
        ("M717", {"world_size": 2, "nq": "8"}),
        ("M717", {"world_size": 2, "prune": "no"}),
        ("M717", {"world_size": 2, "costs": 3}),
        ("M717", {"world_size": 2, "effort": "best"}),
        ("M717", {"world_size": 2, "machine": "H200"}),
        ("M702", {"world_size": 2, "chunk": 4, "assign": [0, 1], "order": "zigzag"}),
        ("M717", {"world_size": 2, "order": "zigzag", "epsilon": 0.02}),
        ("M717", {"world_size": 2, "chunk": 4, "assign": [0, 1], "epsilon": 0.02}),
    ],
)
def test_wrong_arguments(code: str, arguments: dict) -> None:
    with pytest.raises(MaskcError) as e:
        plan(doc_mask([5, 3]), **arguments)
    assert e.value.code == code


@pytest.mark.parametrize("spec", ["std:causal", None, 3, maskc.compile("std:causal"), [doc_mask([5, 3]), 3]], ids=str)
def test_what_is_no_bound_mask(spec: object) -> None:
    with pytest.raises(MaskcError, match="M717"):
        plan(spec, world_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("M703", lambda p: p.shard(torch.zeros(1, 8), "0")),
        ("M703", lambda p: p.needed(2)),
        ("M706", lambda p: p.part(1)),
        ("M706", lambda p: p.schedule("ring", -1)),
        ("M706", lambda p: p.part_workloads(-1)),
        ("M717", lambda p: p.part(None)),
        ("M717", lambda p: p.needed(0, "std:causal")),
        ("M710", lambda p: p.shard([0] * 8, 0)),
        ("M710", lambda p: p.shift_labels([[0] * 8])),
        ("M703", lambda p: p.shard(torch.zeros(1, 8), True)),
        ("M710", lambda p: p.shard(torch.zeros(1, 8), 0, dim="rows")),
        ("M710", lambda p: p.roll(torch.zeros(1, 8), 1.5)),
        ("M710", lambda p: p.roll(torch.zeros(1, 8), 10**20)),
        ("M710", lambda p: p.loss_weight(0, [1] * 8)),
        ("M713", lambda p: p.positions(0, per="docs")),
        ("M713", lambda p: p.roll(torch.zeros(1, 8), 1, per="documents")),
        ("M713", lambda p: p.shard(torch.zeros(1, 8), 0, of="columns")),
        ("M713", lambda p: p.traffic(direction="both")),
        ("M713", lambda p: p.schedule("gossip")),
        ("M701", lambda p: p.unshard(torch.zeros(1, 4))),
    ],
)
def test_wrong_uses(code: str, use: Callable[[AttentionPlan], object]) -> None:
    p = plan(doc_mask([5, 3]), world_size=2, chunk=2, heads_kv=1, head_dim=8)
    with pytest.raises(MaskcError) as e:
        use(p)
    assert e.value.code == code


def test_labels_do_not_leak_where_several_inputs_could_be_the_documents() -> None:
    text = "input doc : segments\ninput turn : segments\nmask m = same(doc) and (k <= q or same(turn))"
    spec = maskc.compile_text(text).bind(doc=maskc.segments(lengths=[5, 3]), turn=maskc.segments(lengths=[2, 6]), nq=8, nk=8)
    labels = torch.arange(8)[None]
    with pytest.raises(MaskcError, match=r"M712.*`doc`, `turn`"):
        plan(spec, world_size=2).shift_labels(labels)
    assert plan(spec, world_size=2, documents="doc").shift_labels(labels).tolist() == [[1, 2, 3, 4, -100, 6, 7, -100]]


def test_sizes_must_be_known() -> None:
    with pytest.raises(MaskcError, match="M711"):
        plan(maskc.compile_text("mask m = k <= q").bind(), world_size=2)
    assert plan(maskc.compile_text("mask m = k <= q").bind(), world_size=2, nq=9, nk=9).rows.length == 9


def test_ranks_may_be_numbers_of_numpy() -> None:
    p = plan(doc_mask([5, 3]), world_size=2, chunk=2)
    assert torch.equal(p.positions(np.int64(1)), p.positions(1))  # type: ignore[arg-type]


def test_a_plan_is_for_its_own_data() -> None:
    p = plan(doc_mask([5, 3]), world_size=2, chunk=2)
    with pytest.raises(MaskcError, match=r"M706.*doc_causal"):
        p.part(doc_mask([4, 4]))
    with pytest.raises(MaskcError, match="M706"):
        p.part(doc_mask([5, 3], "local"))
    with pytest.raises(MaskcError, match="M4"):
        p.part(doc_mask([5, 4]))
    with pytest.raises(MaskcError, match="M710"):
        p.shard(torch.zeros(1, 9), 0)
    with pytest.raises(MaskcError, match="M703"):
        p.shard(torch.zeros(1, 8), 2)
    with pytest.raises(MaskcError, match="M712"):
        plan(BoundaryVectors(8, 8, 1, 1, True), world_size=2).positions(0, per="doc")


def test_a_plan_survives_replacing_fields() -> None:
    p = plan(doc_mask([5, 3]), world_size=2, chunk=2)
    assert replace(p, prune=False).digest != p.digest
    assert int(replace(p, prune=False).handle) != int(p.handle)


def test_a_plan_is_one_opaque_value() -> None:
    """What splits batches along their tensors, as pipelines do, leaves a plan whole or fails."""
    from torch.utils import _pytree

    p = plan(doc_mask([5, 3]), world_size=2, chunk=2)
    assert _pytree.tree_leaves({"plan": [p]}) == [p]
    with pytest.raises(TypeError, match="subscript"):
        p[0:1]  # type: ignore[index]
    with pytest.raises(TypeError, match="len"):
        len(p)  # type: ignore[arg-type]
