"""Visit and copy order: what every plan must obey, for any layout, any needs, any nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import MaskForm
from maskc.runtime import overlap_tables
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.overlap_order import (
    ITEM_LIMIT,
    Heads,
    forward_end,
    head_groups,
    items_when_due,
    latest_slots,
    masks_of_heads,
    work_items,
)
from maskc.runtime.overlap_plan import joined, overlap_plan, visit_order
from maskc.runtime.plan import plan
from maskc.tiles import TileClass, classify
from tests.dist.cases import FORMS, Case, vectors


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, list[frozenset[int]], int]:
    """(keys, what each rank needs, ranks per node)."""
    nodes, node_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world = nodes * node_size
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=90))
    owner = draw(st.lists(st.integers(0, world - 1), min_size=len(sizes), max_size=len(sizes)))
    bounds = (0, *np.cumsum(sizes).tolist())
    needed = [frozenset(draw(st.sets(st.integers(0, len(sizes) - 1)))) for _ in range(world)]
    return Layout(world, bounds, tuple(owner)), needed, node_size


@given(problems())
def test_every_needed_chunk_once_own_ones_first(problem: tuple[Layout, list[frozenset[int]], int]) -> None:
    keys, needed, node_size = problem
    for rank in range(keys.world):
        p = visit_order(keys, needed, rank, node_size)
        visited = [s.chunk for s in p.slots]
        assert sorted(visited) == sorted(needed[rank])
        assert all(keys.owner[c] == rank for c in visited[: p.own])
        assert all(keys.owner[c] != rank for c in visited[p.own :])
        assert not set(p.carried) & needed[rank]


@given(problems(), st.integers(1, 30))
def test_joined_slots_are_one_piece_at_both_ends(problem: tuple[Layout, list[frozenset[int]], int], rows: int) -> None:
    keys, needed, _ = problem
    for rank in range(keys.world):
        plain = visit_order(keys, needed, rank, keys.world)
        p = joined(plain, keys, rows)
        assert p.columns == plain.columns
        assert p.slots[: p.own] == plain.slots[: plain.own]
        stop = p.rows
        for slot in p.slots:
            assert slot.start + slot.rows == stop
            stop = slot.start
            assert slot.rows == sum(keys.size_of(c) for c in slot.chunks)
            theirs = keys.chunks_of(keys.owner[slot.chunk])
            at = theirs.index(slot.chunk)
            assert theirs[at : at + len(slot.chunks)] == slot.chunks
            assert len(slot.chunks) == 1 or sum(keys.size_of(c) for c in slot.chunks[1:]) < rows


@given(problems())
def test_the_buffer_is_tiled_from_right_to_left(problem: tuple[Layout, list[frozenset[int]], int]) -> None:
    keys, needed, node_size = problem
    for rank in range(keys.world):
        p = visit_order(keys, needed, rank, node_size)
        stop = p.rows
        for slot in p.slots:
            assert slot.rows == keys.size_of(slot.chunk)
            assert slot.start + slot.rows == stop
            stop = slot.start
        assert stop == 0
        own = [c for c in p.columns if keys.owner[c] == rank]
        assert own == sorted(own), "the rank's own tensor is one piece of the buffer"


@given(problems())
def test_chunks_enter_a_node_once_and_come_from_a_rank_that_has_them(problem: tuple[Layout, list[frozenset[int]], int]) -> None:
    keys, needed, node_size = problem
    plans = [visit_order(keys, needed, rank, node_size) for rank in range(keys.world)]
    entered: list[tuple[int, int]] = []
    for p in plans:
        entered += [(p.rank // node_size, s.chunk) for s in p.pulls if s.across]
        entered += [(p.rank // node_size, c) for c in p.carried]
        for slot in p.pulls:
            if slot.source != keys.owner[slot.chunk]:
                relay = plans[slot.source]
                assert relay.rank // node_size == p.rank // node_size
                assert slot.chunk in relay.carried or any(s.chunk == slot.chunk and s.across for s in relay.pulls)
    wanted = {(r // node_size, c) for r in range(keys.world) for c in needed[r] if keys.owner[c] // node_size != r // node_size}
    assert sorted(entered) == sorted(wanted), "nothing twice, nothing that no rank of the node needs"


@given(problems(), st.integers(1, 12))
def test_blocks_name_the_slots_that_their_keys_lie_in(problem: tuple[Layout, list[frozenset[int]], int], block: int) -> None:
    keys, needed, node_size = problem
    p = visit_order(keys, needed, 0, node_size)
    slot_of = {row: i for i, s in enumerate(p.slots) for row in range(s.start, s.start + s.rows)}
    table = p.block_slots(block)
    assert len(table) == -(-p.rows // block)
    for i, (oldest, newest) in enumerate(table.tolist()):
        inside = [slot_of[row] for row in range(i * block, min((i + 1) * block, p.rows))]
        assert (oldest, newest) == (min(inside), max(inside))


@given(st.integers(0, 1000), st.sampled_from(FORMS), st.integers(1, 4), st.sampled_from([1, 3, 8]))
def test_no_tile_lies_in_a_chunk_that_is_not_planned(seed: int, form: str, world: int, chunk: int) -> None:
    """The kernel's tiles over the buffer are the visible cells of the rank's rows: nothing visible is missing."""
    case = Case(world, 40, seed, form, chunk=chunk)
    v = vectors(case)
    p = plan(v, world_size=world, chunk=chunk)
    for rank in range(world):
        order = overlap_plan(p, rank)
        rows = p.rows.chunks_of(rank)
        local = localize(v, p.rows, rows, p.keys, order.columns)
        assert (local.nq, local.nk) == (p.rows.local_length(rank), order.rows)
        whole = localize(v, p.rows, rows, p.keys, tuple(range(p.keys.chunk_count)))
        assert int((~local.masked()).sum()) == int((~whole.masked()).sum())


@st.composite
def works(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int, bool, int]:
    batch, mask_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    masked = draw(st.booleans())
    masks, blocks = (batch if masked else 1) * mask_heads, draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = masks, blocks
    return (
        rng.integers(0, 5, shape),
        rng.integers(0, 4, shape),
        mask_heads * ratio,
        batch,
        masked,
        draw(st.integers(1, 4)),
    )


@pytest.mark.parametrize("last_by_work", [False, True])
@given(problem=works())
def test_items_go_by_latest_chunk_then_heads_together_then_work(
    last_by_work: bool, problem: tuple[np.ndarray, np.ndarray, int, int, bool, int]
) -> None:
    """Those that come last by heads together and work alone, where it is asked for."""
    latest, work, heads, batch, masked, group = problem
    groups = 2 if heads % 2 == 0 else 1
    slots = int(latest.max()) + 2
    dealt = Heads(heads, batch, head_groups(heads, heads, groups, slots), own=1)
    items = work_items(latest, work, dealt, masked, group, last_by_work=last_by_work)
    blocks, which = items & 0xFFFF, items >> 16
    assert sorted(items.tolist()) == sorted(b | w << 16 for b in range(latest.shape[1]) for w in range(heads * batch))
    mask_heads = latest.shape[0] // batch if masked else latest.shape[0]
    mask = (which // heads * mask_heads if masked else 0) + which % heads // (heads // mask_heads)
    piece = latest[mask, blocks] + which % heads // (heads // groups) * slots
    stage = np.where(latest[mask, blocks] < 1, -1, piece)
    if last_by_work:
        stage = np.where((stage >= 0) & (which % heads // (heads // groups) == groups - 1), groups * slots, stage)
    keys = list(zip(stage.tolist(), (which // group).tolist(), (-work[mask, blocks]).tolist(), strict=True))
    assert keys == sorted(keys)


@given(problem=works(), seconds=st.sampled_from([0.0, 0.5, 1e3]))
def test_items_go_as_without_copies_but_for_what_is_not_due(
    problem: tuple[np.ndarray, np.ndarray, int, int, bool, int], seconds: float
) -> None:
    latest, work, heads, batch, masked, group = problem
    slots = int(latest.max()) + 1
    dealt = Heads(heads, batch, np.zeros(heads, dtype=np.int64), own=1)
    arrivals = [0.0, *(3.0 * s for s in range(1, slots))]
    items = items_when_due(latest, work, dealt, masked, group, arrivals, seconds)
    plain = work_items(np.zeros_like(latest), work, dealt, masked, group).tolist()
    assert sorted(items.tolist()) == sorted(plain)
    mask = masks_of_heads(dealt, latest.shape[0], masked)

    def due(item: int) -> float:
        slot = latest[mask[item >> 16], item & 0xFFFF]
        return arrivals[slot] if slot >= 1 else 0.0

    clock, left = 0.0, plain
    for item in items.tolist():
        clock = max(clock, min(map(due, left)))
        assert item == next(i for i in left if due(i) <= clock)
        left = [i for i in left if i != item]
        clock += float(work[mask[item >> 16], item & 0xFFFF]) * seconds


def test_rows_that_see_only_own_chunks_wait_for_nothing() -> None:
    slots = np.array([[2, 2], [1, 1], [0, 0]])
    seen = np.array([[[False, False, True], [True, False, True], [False, False, False], [False, True, False]]])
    assert latest_slots(seen, slots, own=1).tolist() == [[0, 2, 0, 1]]


def test_the_planned_end_of_a_forward_by_hand() -> None:
    """Two heads in two groups, one tile each and a long one; slot 0 is the rank's own."""
    short, long = [(0, 1.0), (1, 1.0)], [(0, 3.0), (1, 2.0)]
    parts, mask, first = [[short, long]], np.zeros(2, dtype=np.int64), np.array([0, 2])
    arrivals = [0.0, 4.0, 0.0, 9.0]
    items = np.array([0, 1, 0 | 1 << 16, 1 | 1 << 16], dtype=np.uint32)
    # Head 0: 4 + 1 and 4 + 2; head 1 waits for 9: its short tile on the first CTA, the long one on the other.
    assert forward_end(items, parts, mask, first, arrivals, 2) == 11.0
    assert forward_end(items[:2], parts, mask, first, arrivals, 2) == 6.0
    assert forward_end(items, parts, mask, first, [0.0] * 4, 1) == 14.0


def test_where_items_are_few_the_order_that_ends_sooner_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    v = BoundaryVectors(2048, 2048, 1, 1, True)
    p = plan(v, world_size=2, chunk=256, order="contiguous")
    o = overlap_plan(p, 1)
    local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, o.columns)
    spec = forward_spec(MaskForm(ute=True), 128, "bf16")
    asked: list[list[int]] = []

    def end(items: np.ndarray, *given: object) -> float:
        asked.append(items.tolist())
        return -float(len(asked))

    monkeypatch.setattr(overlap_tables, "forward_end", end)
    given = o, spec, 4, 1, 2, 2, overlap_tables.expected_arrivals(o, 1024, 2, 1e9, 1e-6)
    taken = overlap_tables.gate_tables(local, *given, 132, torch.device("cpu")).items.tolist()
    assert len(asked) == 3
    assert taken == asked[2], "the last of three, which this clock calls shortest"
    overlap_tables.gate_tables(local, *given, 1, torch.device("cpu"))
    assert len(asked) == 3, "many items: no order is tried"


def test_items_that_do_not_fit_are_refused() -> None:
    zero = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match=str(ITEM_LIMIT)):
        work_items(zero, zero, Heads(ITEM_LIMIT + 1, 1, zero[0], 1), False, 1)


def test_a_causal_rank_takes_its_early_rows_before_the_last_chunk() -> None:
    """Zigzag on two ranks: rank 0's first half needs its own chunk alone, its second half everything."""
    v = BoundaryVectors(1024, 1024, 1, 1, True)
    p = plan(v, world_size=2, chunk=256, order="zigzag")
    order = overlap_plan(p, 0)
    assert [s.chunk for s in order.slots] == [3, 0, 2, 1]
    assert order.own == 2
    local = localize(v, p.rows, p.rows.chunks_of(0), p.keys, order.columns)
    seen = (classify(local, 128, 128) != TileClass.SKIP.value)[0].numpy()
    latest = latest_slots(seen, order.block_slots(128), order.own)
    assert latest.tolist() == [[1, 1, 3, 3]]
    assert (work_items(latest, seen.sum(2), Heads(1, 1, np.zeros(1, dtype=np.int64), 2), False, 1) & 0xFFFF).tolist() == [
        1,
        0,
        3,
        2,
    ]
