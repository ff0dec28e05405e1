"""Localization is lossless: every assignment, ragged chunks, every vector form, masks per head and per batch item."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from benchmarks.masks import mask_case
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import MaskcError
from maskc.runtime import ops
from maskc.runtime.layout import Layout, contiguous, even_bounds, zigzag, zigzag_documents
from maskc.runtime.localize import RowMap, equal_on_host, localize, localized, on_host
from maskc.runtime.plan import plan
from maskc.runtime.plan_report import local_vectors
from maskc.tiles import block_minmax, classify

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@st.composite
def layouts(draw: st.DrawFn, world: int | None = None) -> Layout:
    """Equal or ragged chunks, any owners; some ranks may own nothing."""
    world = world or draw(st.integers(1, 4))
    if draw(st.booleans()):
        bounds = even_bounds(draw(st.integers(1, 30)), draw(st.integers(1, 9)))
    else:
        bounds = (0, *sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=8))))
    return Layout(world, bounds, tuple(draw(st.integers(0, world - 1)) for _ in bounds[1:]))


@st.composite
def masks(draw: st.DrawFn, nq: int, nk: int) -> BoundaryVectors:
    """Any subset of the vectors, with or without the triangle, DIAG and a block table; values as they come."""
    batch, heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    seed = draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)

    def vector() -> torch.Tensor:
        return torch.randint(0, nq + 1, (batch, heads, nk), generator=g, dtype=torch.int32)

    present = {n: vector() for n in ("lts", "ute", "diag") if draw(st.booleans())}
    present |= {n: vector() for n, other in (("lte", "lts"), ("uts", "ute")) if other in present and draw(st.booleans())}
    v = BoundaryVectors(nq, nk, batch, heads, draw(st.booleans()), **present)
    if draw(st.booleans()):
        keep = torch.rand(batch, heads, -(-nq // 4), -(-nk // 2), generator=g) < 0.7
        v = replace(v, blocks=BlockTable(keep, 4, 2))
    return v


def rows_of(layout: Layout, chunks: tuple[int, ...] | list[int]) -> list[int]:
    return [x for c in chunks for x in range(*layout.range_of(c))]


@given(layouts())
def test_p1_p2_the_map_counts_owned_rows(layout: Layout) -> None:
    n = layout.length
    xs = torch.tensor([INT_MIN, *range(-3, n + 4), INT_MAX], dtype=torch.int32)
    total = torch.zeros_like(xs)
    for rank in range(layout.world):
        row_map, owned = RowMap.of(layout, layout.chunks_of(rank)), rows_of(layout, layout.chunks_of(rank))
        got = row_map(xs)
        assert got.tolist() == [sum(y < x for y in owned) for x in xs.tolist()]
        assert got.dtype == torch.int32
        assert torch.equal(row_map._computed(xs.clamp(0, n)), got)  # as on a GPU
        assert (got.diff() >= 0).all()
        assert row_map.length == len(owned) == layout.local_length(rank)
        total += got
    assert torch.equal(total, xs.clamp(0, n))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_p3_p5_local_masks_are_the_rows_and_columns_of_the_mask(data: st.DataObject) -> None:
    rows = data.draw(layouts())
    keys = rows if data.draw(st.booleans()) else data.draw(layouts(rows.world))
    v = data.draw(masks(rows.length, keys.length))
    whole = v.masked()
    visible = 0
    for rank in range(rows.world):
        chunks = data.draw(st.permutations(range(keys.chunk_count)))
        chunks = chunks[: data.draw(st.integers(0, len(chunks)))]
        local = localize(v, rows, rows.chunks_of(rank), keys, chunks)
        picked = whole[:, :, rows_of(rows, rows.chunks_of(rank))][:, :, :, rows_of(keys, chunks)]
        assert torch.equal(local.masked(), picked)
        assert not local.causal
        if v.blocks is None:
            assert torch.equal(local.elsewhere, (~whole).any(2)[:, :, rows_of(keys, chunks)])
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in local.tensors if t is not None)
        every = localize(v, rows, rows.chunks_of(rank), keys, range(keys.chunk_count))
        visible += int((~every.masked()).sum())
    assert visible == int((~whole).sum())


@given(st.data())
@settings(deadline=None)
def test_p4_one_rank_changes_nothing_but_the_triangle(data: st.DataObject) -> None:
    layout = contiguous(data.draw(st.integers(1, 30)), 1, 4)
    v = replace(data.draw(masks(layout.length, layout.length)), causal=False)
    local = localize(v, layout, layout.chunks_of(0), layout, layout.chunks_of(0))
    for a, b in zip(v.tensors, local.tensors, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if v.blocks is not None:
        assert local.blocks is not None
        assert torch.equal(v.blocks.keep, local.blocks.keep)


@given(layouts())
def test_p6_ranks_hold_every_row_once(layout: Layout) -> None:
    held = [x for rank in range(layout.world) for x in rows_of(layout, layout.chunks_of(rank))]
    assert sorted(held) == list(range(layout.length))


def test_p7_unsorted_chunks_are_refused() -> None:
    layout = Layout(2, even_bounds(24, 4), (0, 1, 0, 1, 0, 1))
    with pytest.raises(MaskcError, match=r"M704.*ascending.*4, 1"):
        RowMap.of(layout, (4, 1))
    with pytest.raises(MaskcError, match="M704"):
        RowMap.of(layout, (1, 1))


@given(st.data())
@settings(deadline=None)
def test_p8_extremes_of_local_vectors_are_their_own(data: st.DataObject) -> None:
    """L never falls, so block extremes of local vectors are the mapped extremes of the whole."""
    layout = data.draw(layouts())
    v = data.draw(masks(layout.length, layout.length))
    row_map = RowMap.of(layout, layout.chunks_of(0))
    local = localize(replace(v, causal=False), layout, layout.chunks_of(0), layout, range(layout.chunk_count))
    for name in ("lts", "lte", "uts", "ute", "diag"):
        mine, theirs = getattr(block_minmax(local, 4), name), getattr(block_minmax(v, 4), name)
        if mine is not None:
            assert torch.equal(mine.low, row_map(theirs.low))
            assert torch.equal(mine.high, row_map(theirs.high))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_p9_ranks_together_equal_one(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    v = data.draw(masks(layout.length, layout.length))
    g = torch.Generator().manual_seed(0)
    q, k, val = (torch.randn(v.batch, layout.length, 3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    out, lse = ops.forward(v, q, k, val, 0.5)
    for rank in range(layout.world):
        local = localize(v, layout, layout.chunks_of(rank), layout, range(layout.chunk_count))
        rows = rows_of(layout, layout.chunks_of(rank))
        if rows:
            part, part_lse = ops.forward(local, q[:, rows].contiguous(), k, val, 0.5)
            torch.testing.assert_close(part, out[:, rows], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(part_lse, lse[:, :, rows], rtol=1e-12, atol=1e-12)


def test_the_triangle_takes_a_free_slot_or_becomes_diag() -> None:
    """Upper slot free; upper slot that starts at 0; lower slot free; two intervals beside the triangle."""
    f = torch.full((1, 1, 8), 3, dtype=torch.int32)
    layout = contiguous(8, 2)

    def forms(**vectors: torch.Tensor) -> set[str]:
        v = localize(BoundaryVectors(8, 8, 1, 1, True, **vectors), layout, (1,), layout, (0, 1))
        return {n for n in ("lts", "lte", "uts", "ute", "diag") if getattr(v, n) is not None}

    assert forms() == {"ute"}
    assert forms(lts=f) == {"lts", "ute"}
    assert forms(lts=f, lte=f) == {"lts", "lte", "ute"}
    assert forms(ute=f, lts=f) == {"lts", "ute"}
    assert forms(uts=f, ute=f) == {"lts", "lte", "ute"}
    assert forms(lts=f, lte=f, uts=f, ute=f) == {"lts", "lte", "uts", "ute", "diag"}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("lengths", [[[3, 4, 2], [5, 2]], [[1], [7, 1, 1], [4]], [[2, 2, 2, 2, 2, 3]]])
def test_packed_blockwise_needs_diag(world: int, lengths: list[list[int]]) -> None:
    """Suite mask 94: `k <= q and same(sample) and (same(part) or q in last(part))` has three masked intervals."""
    sample, part, last = [], [], []
    for i, parts in enumerate(lengths):
        for j, n in enumerate(parts):
            sample += [i] * n
            part += [(i, j)] * n
            last += [j == len(parts) - 1] * n
    n = len(sample)
    visible = torch.tensor(
        [[k <= q and sample[q] == sample[k] and (part[q] == part[k] or last[q]) for k in range(n)] for q in range(n)]
    )
    ends = {p: i + 1 for i, p in enumerate(part)}
    sample_end = {s: i + 1 for i, s in enumerate(sample)}
    last_start = {s: min(i for i in range(n) if sample[i] == s and last[i]) for s in sample}
    hidden = [(ends[part[k]], max(ends[part[k]], last_start[sample[k]])) for k in range(n)]
    tail = [(sample_end[sample[k]], n) for k in range(n)]
    bounds = (*zip(*tail, strict=True), *zip(*hidden, strict=True))
    v = BoundaryVectors(n, n, 1, 1, True, *(torch.tensor([[x]], dtype=torch.int32) for x in bounds))
    assert torch.equal(~v.masked()[0, 0], visible)
    for layout in (contiguous(n, world), zigzag(n, world), zigzag_documents(((0, 3), (3, n)), n, world)):
        for rank in range(world):
            local = localize(v, layout, layout.chunks_of(rank), layout, range(layout.chunk_count))
            assert local.diag is not None
            assert torch.equal(~local.masked()[0, 0], visible[rows_of(layout, layout.chunks_of(rank))])


@pytest.mark.parametrize("name", ["causal", "sliding_window", "causal_document", "prefix_lm_document", "share_question"])
def test_ranks_have_the_tiles_of_the_whole_mask(name: str) -> None:
    """Chunks of whole tiles: no tile is cut, and none becomes PARTIAL that was UNMASKED."""
    case = mask_case(name, 512)
    spec = maskc.compile(case.mask).bind(nq=512, nk=512, **case.inputs)
    v, p = spec.vectors(512, 512), plan(spec, world_size=4, chunk=32)

    def tiles(x: BoundaryVectors) -> torch.Tensor:
        return classify(x, 16, 16).flatten().bincount(minlength=3)[1:]

    found = torch.zeros(2, dtype=torch.int64)
    for rank in range(4):
        found += tiles(localize(v, p.rows, p.rows.chunks_of(rank), p.keys, sorted(p.needed(rank))))
    assert torch.equal(found, tiles(v))


def test_worked_example(golden) -> None:
    """24 rows in chunks of 4 on ranks {0,5}, {1,4}, {2,3}; every column masks rows [10, 22)."""
    lts, lte = (torch.full((1, 1, 24), x, dtype=torch.int32) for x in (10, 22))
    v = BoundaryVectors(24, 24, 1, 1, False, lts=lts, lte=lte)
    golden("local_vectors.txt", local_vectors(v, plan(v, world_size=3, chunk=4, assign=[0, 1, 2, 2, 1, 0])))
    layout = Layout(3, even_bounds(24, 4), (0, 1, 2, 2, 1, 0))
    row_map = RowMap.of(layout, (1, 4))
    xs = [0, 1, 2, 3, 4, 6, 8, 10, 16, 18, 20, 24, 10**9]
    assert row_map(torch.tensor(xs, dtype=torch.int32)).tolist() == [0, 0, 0, 0, 0, 2, 4, 4, 4, 6, 8, 8, 8]


def test_local_masks_live_as_long_as_their_mask() -> None:
    """All layers of a batch share one localized mask, and no cache keeps it beyond the batch."""
    layout = contiguous(8, 2)
    v = BoundaryVectors(8, 8, 1, 1, True)
    local = localized(v, layout, (0,), layout, (0, 1), None)
    assert localized(v, layout, (0,), layout, (0, 1), None) is local
    assert localized(v, layout, (1,), layout, (0, 1), None) is not local
    alive = weakref.ref(local)
    del local
    gc.collect()
    assert alive() is not None
    del v
    gc.collect()
    assert alive() is None


def test_vectors_elsewhere_are_known_on_the_host() -> None:
    """What is localized on a device is localized on the host, too, when asked for, and nothing is read from the device."""
    layout = zigzag(16, 2, 4)
    host = BoundaryVectors(16, 16, 1, 1, True, lts=torch.full((1, 1, 16), 9, dtype=torch.int32))
    there = replace(host, lts=torch.empty(1, 1, 16, dtype=torch.int32, device="meta"))
    equal_on_host(there, host)
    assert on_host(there) is on_host(host) is host
    made = localized(there, layout, (0, 3), layout, (3, 1, 0), None)
    assert made.device.type == "meta"
    assert torch.equal(on_host(made).masked(), localize(host, layout, (0, 3), layout, (3, 1, 0)).masked())
    alone = localized(replace(host, lts=None), layout, (0, 3), layout, (3, 1, 0), torch.device("meta"))
    assert torch.equal(on_host(alone).masked(), localize(replace(host, lts=None), layout, (0, 3), layout, (3, 1, 0)).masked())


def test_a_triangle_alone_is_not_kept_alive() -> None:
    """It has no vectors and so counts as one of the host, while what it is localized to lies on a GPU."""
    layout = zigzag(16, 2)
    triangle = BoundaryVectors(16, 16, 1, 1, True)
    made = localized(triangle, layout, (0, 3), layout, (3, 1, 0), torch.device("meta"))
    gone = weakref.ref(triangle), weakref.ref(made)
    del triangle, made
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_nothing_is_sent() -> None:
    """Planning and localizing work where torch.distributed cannot even be imported."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.distributed_c10d":
            raise ImportError("blocked")
import torch
sys.modules["torch.distributed"] = None
sys.meta_path.insert(0, Block())
from maskc.boundary import BoundaryVectors
from maskc.runtime.plan import plan
from maskc.runtime.localize import localize
v = BoundaryVectors(64, 64, 1, 1, True)
p = plan(v, world_size=4)
assert localize(v, p.rows, p.rows.chunks_of(1), p.keys, p.keys.chunks_of(2)).nq == 16
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
