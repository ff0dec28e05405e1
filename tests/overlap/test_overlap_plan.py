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
    TAIL,
    Heads,
    Planned,
    forward_items,
    head_groups,
    masks_of_heads,
    soonest_forward,
)
from maskc.runtime.overlap_plan import FEW_HEADS, joined, overlap_plan, plan_visits, turns_of_chunks
from maskc.runtime.plan import plan
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
        p = plan_visits(keys, needed, rank, node_size)
        visited = [s.chunk for s in p.slots]
        assert sorted(visited) == sorted(needed[rank])
        assert all(keys.owner[c] == rank for c in visited[: p.own])
        assert all(keys.owner[c] != rank for c in visited[p.own :])
        assert not set(p.carried) & needed[rank]


@given(problems(), st.integers(1, 30))
def test_joined_slots_are_one_piece_at_both_ends(problem: tuple[Layout, list[frozenset[int]], int], rows: int) -> None:
    keys, needed, _ = problem
    for rank in range(keys.world):
        plain = plan_visits(keys, needed, rank, keys.world)
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
        p = plan_visits(keys, needed, rank, node_size)
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
    plans = [plan_visits(keys, needed, rank, node_size) for rank in range(keys.world)]
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
    p = plan_visits(keys, needed, 0, node_size)
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


@given(problems(), st.data())
def test_turns_come_before_the_cyclic_order_and_after_the_way(
    problem: tuple[Layout, list[frozenset[int]], int], data: st.DataObject
) -> None:
    keys, needed, node_size = problem
    turns = data.draw(st.lists(st.integers(0, 3), min_size=keys.chunk_count, max_size=keys.chunk_count))
    for rank in range(keys.world):
        plain, p = (plan_visits(keys, needed, rank, node_size, t) for t in ((), turns))
        assert sorted(s.chunk for s in p.slots) == sorted(s.chunk for s in plain.slots)
        assert p.own == plain.own
        near = [keys.owner[s.chunk] // node_size == rank // node_size for s in p.pulls]
        assert near == sorted(near, reverse=True), "what comes from other nodes stays last"
        inside = [turns[s.chunk] for s, here in zip(p.pulls, near, strict=True) if here]
        assert inside == sorted(inside)


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 9)), max_size=6), st.integers(0, 255))
def test_chunks_come_by_the_rows_that_need_them(rows: list[tuple[int, int]], own: int) -> None:
    turns = turns_of_chunks(rows, own, 8)
    wanted = 0
    for need, _ in rows:
        wanted |= need
    assert [bool(t) for t in turns] == [bool(wanted & ~own & 1 << c) for c in range(8)]
    there, left = own, rows
    for turn in sorted(set(turns) - {0}):
        come = sum(1 << c for c in range(8) if turns[c] == turn)
        left = [(need, work) for need, work in left if need & ~there]
        served = [work / (need & ~there).bit_count() for need, work in left if not need & ~(there | come)]
        assert served, "each turn completes what some rows need"
        assert max(served) >= max(work / (need & ~there).bit_count() for need, work in left)
        there |= come


@pytest.mark.parametrize("heads_kv", [1, FEW_HEADS + 1])
def test_few_key_heads_get_chunks_document_by_document(heads_kv: int) -> None:
    """Two ranks, two causal documents in four chunks each, dealt by turns: a document's rows need none of the other one's."""
    starts = torch.arange(1024) // 512 * 512
    v = BoundaryVectors(1024, 1024, 1, 1, True, lts=(starts + 512).int()[None, None])
    heads = heads_kv * 2
    p = plan(v, world_size=2, chunk=128, order="zigzag", heads=heads, heads_kv=heads_kv)
    order = overlap_plan(p, 0)
    assert sum(w.rows for w in order.work) == 512 * heads
    documents = [c // 4 for c in (s.chunk for s in order.pulls)]
    plain = plan_visits(p.keys, [p.needed(r) for r in range(2)], 0, 2)
    if heads_kv == 1:
        assert documents == sorted(documents) or documents == sorted(documents, reverse=True)
    else:
        assert order.slots == plain.slots


# ---------------------------------------------------------------- the order of work


@st.composite
def planned(draw: st.DrawFn) -> Planned:
    count = draw(st.integers(1, 25))
    ready, spent = (draw(st.lists(st.integers(low, 9), min_size=count, max_size=count)) for low in (0, 1))
    return Planned(np.arange(count, dtype=np.uint32), np.array(ready, dtype=float), np.array(spent, dtype=float))


@given(planned(), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_multiprocessor_takes_the_first_item_that_need_not_wait(items: Planned, processors: int, eager: float) -> None:
    order = items.order(processors, eager)
    ends = items.ends(order, processors)
    start = items.ready - eager * items.spent
    left, free = list(range(len(items.packed))), [0.0] * processors
    for item in order.tolist():
        clock = min(free)
        ready = [i for i in left if start[i] <= clock]
        assert item == (ready[0] if ready else min(left, key=lambda i: (start[i], i)))
        left.remove(item)
        free.remove(clock)
        free.append(max(clock, items.ready[item]) + items.spent[item])
        assert ends[item] == free[-1]
    assert not left


@given(planned(), st.integers(1, 4))
def test_items_that_wait_are_no_earlier_than_ready(items: Planned, processors: int) -> None:
    for eager in (0.0, 0.5, 1.0):
        order = items.order(processors, eager)
        ends = items.ends(order, processors)
        assert sorted(order.tolist()) == list(range(len(items.packed)))
        assert (ends >= items.ready + items.spent).all()


@given(planned(), st.integers(1, 4))
def test_the_order_that_ends_soonest_is_taken(items: Planned, processors: int) -> None:
    ends = {e: items.ends(items.order(processors, e), processors).max() for e in (0.0, 0.3, 1.0)}
    chosen = soonest_forward(items, processors, ends)
    best = min(ends, key=lambda e: ends[e])
    assert chosen.tolist() == items.packed[items.order(processors, best)].tolist()


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(7, 9), st.integers(0, 1 << 30))
def test_work_by_slot(slots_of_blocks: list[int], slots: int, seed: int) -> None:
    last = np.array(sorted(slots_of_blocks, reverse=True), dtype=np.int64)
    work = np.random.default_rng(seed).integers(0, 100, (2, 3, len(last)))
    found = overlap_tables.by_slot(work, last, slots)
    for slot in range(slots):
        assert (found[:, :, slot] == sum((work[:, :, b] for b in range(len(last)) if last[b] == slot), np.zeros((2, 3)))).all()


@st.composite
def works(draw: st.DrawFn) -> tuple[np.ndarray, int, int, bool, int]:
    """(work of [masks, Q blocks, slots], heads, batch items, whether masks differ between those, heads together)."""
    batch, mask_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    masked = draw(st.booleans())
    masks, blocks, slots = (batch if masked else 1) * mask_heads, draw(st.integers(1, 8)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    return rng.integers(0, 4, (masks, blocks, slots)), mask_heads * ratio, batch, masked, draw(st.integers(1, 4))


@given(works(), st.integers(1, 3))
def test_row_tiles_are_ready_when_they_never_wait(problem: tuple[np.ndarray, int, int, bool, int], processors: int) -> None:
    parts, heads, batch, masked, group = problem
    masks, blocks, slots = parts.shape
    groups = 2 if heads % 2 == 0 else 1
    arrivals = [0.0 if s == 0 else 3.0 * (g * slots + s) for g in range(groups) for s in range(slots)]
    dealt = Heads(heads, batch, head_groups(heads, heads, groups, slots))
    whole = parts.sum(2) + 1
    items = forward_items(parts, whole, dealt, masked, group, arrivals, 0.5, processors)
    found = [(int(i) & 0xFFFF, int(i) >> 16) for i in items.packed]
    assert sorted(found) == sorted((b, h) for b in range(blocks) for h in range(heads * batch))
    mask = masks_of_heads(dealt, masks, masked)
    longest = TAIL * int(whole.max()) * processors  # work of the heads that end together
    last = max(0, heads * batch - 1 - longest * heads * batch // int(whole[mask].sum())) // group
    plain = [(min(h // group, last), -int(whole[mask[h], b])) for b, h in found]
    assert plain == sorted(plain)

    def waits(block: int, head: int, start: float) -> float:
        """How long a tile that begins then waits, slot by slot."""
        clock, waited = start + 0.5, 0.0
        for slot in range(slots):
            if work := int(parts[mask[head], block, slot]):
                due = arrivals[dealt.first_piece[head % heads] + slot]
                waited, clock = waited + max(0.0, due - clock), max(clock, due) + 0.5 * work
        return waited

    for (block, head), ready, spent in zip(found, items.ready.tolist(), items.spent.tolist(), strict=True):
        assert spent == 0.5 * whole[mask[head], block]
        assert waits(block, head, ready) < 1e-9
        assert ready == 0 or waits(block, head, ready - 0.25) > 0.2


def test_items_that_do_not_fit_are_refused() -> None:
    parts, whole = np.zeros((1, 1, 1), dtype=np.int64), np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ValueError, match=str(ITEM_LIMIT)):
        forward_items(parts, whole, Heads(ITEM_LIMIT + 1, 1, np.zeros(ITEM_LIMIT + 1, dtype=np.int64)), False, 1, [0.0], 1.0, 1)


def test_a_causal_rank_takes_its_early_rows_before_the_last_chunk() -> None:
    """Zigzag on two ranks: rank 0's first half needs its own chunk alone, its second half everything."""
    v = BoundaryVectors(1024, 1024, 1, 1, True)
    p = plan(v, world_size=2, chunk=256, order="zigzag")
    order = overlap_plan(p, 0)
    assert [s.chunk for s in order.slots] == [3, 0, 2, 1]
    assert order.own == 2
    local = localize(v, p.rows, p.rows.chunks_of(0), p.keys, order.columns)
    spec = forward_spec(MaskForm(blocks=True), 128, "bf16")  # tiles of 128 x 128
    tables = overlap_tables.gate_tables(local, order, spec, 1, 1, 1, 1, (0.0, 0.0, 1.0, 1.0), 1, torch.device("cpu"))
    assert (tables.items.numpy() & 0xFFFF).tolist() == [1, 0, 3, 2]
