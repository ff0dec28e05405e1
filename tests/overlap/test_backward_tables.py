"""Order of the backward's work, tables of its gate, and of the sum: integers, no GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import overlap_pieces, overlap_tables
from maskc.runtime.exchange import Addend, SumTable, copy_table
from maskc.runtime.hopper import mask_form
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.machine import BACKWARD_FACTOR, FORWARD_FLOPS
from maskc.runtime.overlap_order import (
    ITEM_LIMIT,
    Heads,
    Planned,
    Trial,
    backward_items,
    head_groups,
    masks_of_heads,
    soonest_backward,
    steady_backward,
)
from maskc.runtime.overlap_plan import OverlapPlan, joined, overlap_plan, plan_visits
from maskc.runtime.overlap_sum import GradientSum
from maskc.runtime.overlap_tables import (
    Units,
    backward_load,
    backward_tables,
    expected_arrivals,
)
from maskc.runtime.plan import plan
from maskc.runtime.transport import KeyShape, Loopback
from tests.dist.cases import FORMS, Case, vectors

CPU = torch.device("cpu")


@st.composite
def work(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int, list[float]]:  # type: ignore[type-arg]
    """(last slot by tile, load, first piece by unit, own slots, group, arrivals by piece)."""
    tiles, units, slots = draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    latest = np.array(sorted(draw(st.lists(st.integers(0, slots - 1), min_size=tiles, max_size=tiles)), reverse=True))
    load = np.array(draw(st.lists(st.lists(st.integers(0, 9), min_size=tiles, max_size=tiles), min_size=units, max_size=units)))
    own = draw(st.integers(0, slots))
    groups = draw(st.integers(1, units))
    gaps = draw(st.lists(st.floats(0, 50), min_size=slots * groups, max_size=slots * groups))
    first = np.arange(units) * groups // units * slots
    return latest, load, first, own, draw(st.integers(1, units)), np.cumsum(gaps).tolist()


@given(work())
def test_pieces_come_first_in_the_order_of_arrival_and_own_tiles_last(given: object) -> None:
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    planned, pieces = backward_items(latest, load, first, own, group, arrivals, 0.5)
    items = [(int(i) & 0xFFFF, int(i) >> 16) for i in planned.packed]
    units, tiles = load.shape
    assert sorted(items) == sorted((t, u) for u in range(units) for t in range(tiles))
    wanted = [-1 if latest[t] < own else int(latest[t] + first[u]) for t, u in items]
    assert pieces.tolist() == wanted
    foreign = [piece for piece in wanted if piece >= 0]
    assert wanted[: len(foreign)] == sorted(foreign)
    assert planned.ready.tolist() == [arrivals[piece] if piece >= 0 else 0.0 for piece in wanted]
    assert planned.spent.tolist() == [0.5 * load[u, t] for t, u in items]
    mine = items[len(foreign) :]
    order = [(u // group, -int(load[u, t])) for t, u in mine]
    assert order == sorted(order)


@given(work(), st.data())
def test_tiles_whose_gradients_leave_as_they_end_are_spread(given: object, data: st.DataObject) -> None:
    """Those of others over half of the work, head by head as own ones; own ones that others see come last."""
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    lent = np.array(data.draw(st.lists(st.booleans(), min_size=len(latest), max_size=len(latest))))
    planned, pieces = backward_items(latest, load, first, own, group, arrivals, 1.0, lent=lent)
    items = [(int(i) & 0xFFFF, int(i) >> 16) for i in planned.packed]
    assert sorted(items) == sorted((t, u) for u in range(load.shape[0]) for t in range(load.shape[1]))
    kinds = ["piece" if latest[t] >= own else "lent" if lent[t] else "own" for t, _ in items]
    turn = [first[u] if kind == "piece" else 0 for kind, (_, u) in zip(kinds, items, strict=True)]
    total, places = int(load.sum()) or 1, [0.0] * len(items)
    work = {kind: sum(int(load[u, t]) for k, (t, u) in zip(kinds, items, strict=True) if k == kind) for kind in set(kinds)}
    share = work.get("lent", 0) / total
    for kind, begin, end in (("piece", 0.0, 0.5), ("own", 0.0, 1 - share), ("lent", 1 - share, 1.0)):
        of = [i for i, k in enumerate(kinds) if k == kind]
        assert of == sorted(of, key=lambda i: (turn[i], items[i][1] // group, -load[items[i][1], items[i][0]], *items[i]))
        done = 0.0
        for i in of:
            cost = int(load[items[i][1], items[i][0]])
            places[i] = begin + (end - begin) * (done + cost / 2) / (work[kind] or 1)
            done += cost
    assert places == pytest.approx(sorted(places))
    assert [piece >= 0 for piece in pieces] == [kind == "piece" for kind in kinds]


@given(work(), st.integers(1, 4), st.sampled_from((0.0, 0.5)), st.sampled_from((0.0, 0.7, 1.0)))
def test_items_go_first_once_they_would_end_late(given: object, processors: int, eager: float, share: float) -> None:
    """Against the rule, looked up item by item."""
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    planned, _ = backward_items(latest, load, first, own, group, arrivals, 0.5)
    ready, spent = planned.ready.tolist(), planned.spent.tolist()
    soonest = planned.soonest_end(processors)
    assert soonest == pytest.approx(max(sum(spent) / processors, *(r + s for r, s in zip(ready, spent, strict=True))))
    left, free, wanted, done = list(range(len(spent))), [0.0] * processors, [], {}
    while left:
        clock = min(free)
        there = [i for i in left if max(0.0, ready[i] - eager * spent[i]) <= clock]
        late = [i for i in there if share * soonest - spent[i] <= clock]
        if late:
            item = min(late, key=lambda i: (share * soonest - spent[i], i))
        else:
            item = min(there or left, key=lambda i: i if there else (max(0.0, ready[i] - eager * spent[i]), i))
        left.remove(item)
        wanted.append(item)
        done[item] = max(clock, ready[item]) + spent[item]
        free[free.index(clock)] = done[item]
    order, ends = planned.evenly(processors, eager, share)
    assert order.tolist() == wanted
    assert ends.tolist() == pytest.approx([done[i] for i in range(len(spent))])
    assert ends.tolist() == pytest.approx(planned.ends(order, processors).tolist())
    never, _ = planned.evenly(processors, eager, math.inf)
    assert planned.order(processors, eager).tolist() == never.tolist()


def test_a_long_tile_does_not_end_last() -> None:
    """That of the second head begins in time, all other tiles of a head go together."""
    load = np.array([[1] * 16, [1] * 15 + [9]])
    planned, _ = backward_items(np.zeros(16, dtype=np.int64), load, np.zeros(2, dtype=np.int64), 1, 1, [0.0], 1.0)
    order, ends = planned.evenly(4)
    assert ends.max() == planned.soonest_end(4) == load.sum() / 4 == 10
    assert planned.ends(np.arange(32), 4).max() == 13
    assert [int(i) >> 16 for i in planned.packed[order]] == [0] * 4 + [1] + [0] * 12 + [1] * 15
    first = planned.packed[planned.evenly(4, share=0.0)[0][0]]
    assert (int(first) & 0xFFFF, int(first) >> 16) == (15, 1)


@given(work(), st.integers(1, 4), st.booleans())
def test_the_order_after_which_all_gradients_are_gone_soonest(given: object, processors: int, leave: bool) -> None:
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    planned, pieces = backward_items(latest, load, first, own, group, arrivals, 0.5)
    leaving = [2.0 if at % 2 else 0.0 for at in range(len(arrivals))] if leave else []
    trials = Trial(), Trial(0.5, 1.0, 0.0), Trial(0.0, 0.0, 0.1), Trial(1.0, 0.0, 0.2)
    tried = []
    for trial in trials:
        order, done = planned.evenly(processors, trial.eager, trial.share)
        sent = 0.0
        for piece, seconds in enumerate(leaving):
            of = [done[i] for i in range(len(pieces)) if pieces[i] == piece]
            sent = max([sent, *of]) + seconds if seconds else sent
        tried.append((max(sent, done.max()) * (1 + trial.price), planned.packed[order].tolist()))
    chosen = soonest_backward(planned, pieces, processors, leaving, trials)
    best = min(tried, key=lambda found: found[0])
    assert chosen.tolist() == best[1]


def test_a_multiprocessor_waits_for_a_long_tile_whose_gradients_take_long() -> None:
    """Free at 6, it may take an own one until 12, or wait until 10 and be done at 18: gradients are gone at 24 and not at 26."""
    spent = np.array([8.0] * 4 + [6.0] * 8)
    planned = Planned(np.arange(12, dtype=np.uint32), np.array([10.0] * 4 + [0.0] * 8), spent)
    pieces = np.array([0] * 4 + [-1] * 8)
    first, late = [planned.evenly(4, eager)[0].tolist() for eager in (0.0, 0.5)]
    assert first == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]
    assert late == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]
    assert soonest_backward(planned, pieces, 4, [6.0], overlap_tables.TRIALS).tolist() == late
    assert soonest_backward(planned, pieces, 4, [], overlap_tables.TRIALS).tolist() == first


@given(work(), st.integers(1, 3), st.sampled_from((0.0, 0.5)))
def test_of_many_items_the_last_end_together(given: object, processors: int, eager: float) -> None:
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    planned, _ = backward_items(latest, load, first, own, group, arrivals, 1.0)
    before = planned.packed[planned.order(processors, eager)].tolist()
    chosen = steady_backward(planned, processors, eager).tolist()
    work = {int(i): int(s) for i, s in zip(planned.packed, planned.spent, strict=True)}
    last, left = len(before), 2 * processors * max(work.values())
    while last and left > sum(work[i] for i in before[last:]):
        last -= 1
    assert chosen[:last] == before[:last]
    tail = before[last:]
    even = Planned(np.array(tail, dtype=np.uint32), np.zeros(len(tail)), np.array([work[i] for i in tail], dtype=float))
    assert chosen[last:] == even.packed[even.evenly(processors)[0]].tolist()


def test_gradients_take_twice_as_long_as_their_keys() -> None:
    v = BoundaryVectors(1024, 1024, 1, 1, True)
    p = plan(v, world_size=2, chunk=256, order="zigzag")
    o = overlap_plan(p, 0)
    arrivals = expected_arrivals(o, 1000, 2, 1e9, 0.0)
    late, offer, copy = overlap_tables.LATE, overlap_tables.START_SECONDS, overlap_tables.COPY_SECONDS
    piece = late * (256 * 1000 / 2 / 1e9 + 2 * copy)
    assert arrivals == pytest.approx([0, 0, offer + piece, offer + 2 * piece, 0, 0, offer + 3 * piece, offer + 4 * piece])
    leaving = overlap_tables._leaving(arrivals)
    assert leaving[3:] == pytest.approx([2 * piece, 0, 0, 2 * piece, 2 * piece])
    assert leaving[:2] == [0, 0]


@given(st.integers(0, 100), st.sampled_from([1, 6, 32]), st.sampled_from([8, 64, 512]), st.floats(1e8, 1e12))
def test_the_backward_takes_the_fewest_groups_that_give_enough_pieces(seed: int, heads: int, chunk: int, rate: float) -> None:
    v = vectors(Case(2, 2048, seed, "lts"))
    p = plan(v, world_size=2, chunk=chunk)
    o, row_bytes = overlap_plan(p, 0), heads * 256
    most, _ = overlap_pieces.choose_pieces(o, p.keys, heads, row_bytes, rate)
    groups, rows = overlap_pieces.choose_backward_pieces(o, p.keys, heads, row_bytes, rate)
    least = overlap_pieces._least_bytes(o, row_bytes, rate)
    assert rows == round(least / row_bytes * groups)

    def pieces(count: int) -> int:
        return count * len(joined(o, p.keys, round(least / row_bytes * count)).pulls)

    assert heads % groups == 0
    assert groups <= most, "pieces are no smaller than those of the forward"
    assert groups == most or pieces(groups) >= overlap_pieces.ENOUGH_PIECES
    fewer = [g for g in range(1, groups) if heads % g == 0]
    assert all(pieces(g) < overlap_pieces.ENOUGH_PIECES for g in fewer)


def test_limits_of_an_item() -> None:
    with pytest.raises(ValueError, match="at most"):
        backward_items(*(np.zeros(s, dtype=np.int64) for s in (ITEM_LIMIT + 1, (1, ITEM_LIMIT + 1), 1)), 1, 1, [0.0], 1.0)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("deterministic", [False, True])
def test_tables_of_the_backward_gate(number: int, deterministic: bool) -> None:
    case = Case(
        2, 700, number, FORMS[number % len(FORMS)], causal=number % 2 == 0, chunk=96, heads=(4, 2, 2), batch=(2, 1 + number % 2)
    )
    v = vectors(case)
    p = plan(v, world_size=2, chunk=96)
    o = overlap_plan(p, 1)
    local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, o.columns)
    spec = select_backward(MaskForm(lts=True), 128, "bf16", deterministic=deterministic)
    units = Units(2, 4, 2, 2, 1, groups=1 + number % 2)
    arrivals, processors, given = expected_arrivals(o, 1024, units.groups, 1e9, 1e-6), 132 if number < 3 else 1, number % 3 == 0
    first = 5 * number  # words of the forward
    tables = backward_tables(local, o, spec, units, arrivals, processors, CPU, first, given)
    tiles = -(-o.rows // spec.block_kv)
    assert sorted(tables.items.tolist()) == sorted(t | u << 16 for t in range(tiles) for u in range(2 * 2 * 2))
    ranges = o.block_slots(spec.block_kv)
    words = tables.blocks.numpy().view(np.uint32)
    assert [((int(w) & 0xFFFF) - first, (int(w) >> 16) - first) for w in words] == [tuple(r) for r in ranges.tolist()]
    assert len(tables.tiles) == first + len(o.slots)
    assert not tables.tiles[:first].any()
    for slot, at in enumerate(o.slots):
        touched = {t for t in range(tiles) if t * spec.block_kv < at.start + at.rows and (t + 1) * spec.block_kv > at.start}
        assert tables.tiles[first + slot] == len(touched)
    if deterministic:
        order = [(int(i) & 0xFFFF, int(i) >> 16) for i in tables.items]
        for unit in range(8):
            assert [t for t, u in order if u == unit] == list(range(tiles))


@given(work(), st.integers(0, 40), st.booleans())
def test_tiles_as_without_copies(given: object, filling: int, told: bool) -> None:
    """One unit after the other, behind own tiles of units of which those are about `filling`, of no more than half of them."""
    latest, load, first, own, group, arrivals = given  # type: ignore[misc]
    lent = np.zeros(len(latest), dtype=np.bool_) if told else None
    planned, _ = backward_items(latest, load, first, own, group, arrivals, 1.0, lent, True, filling)
    items = [(int(i) >> 16, int(i) & 0xFFFF) for i in planned.packed]
    units, tiles = load.shape
    if group > 1:
        assert items == sorted(items, key=lambda i: (i[0] // group, -load[i], i[1], i[0]))
        return
    mine = [t for t in range(tiles) if latest[t] < own]
    before = min(range(1, units + 1), key=lambda n: (abs(n * len(mine) - filling), n % 2)) if mine else 0
    early = [(u, t) for u in range(min(before, units // 2)) for t in mine]
    assert items == early + [(u, t) for u in range(units) for t in range(tiles) if (u, t) not in early]


def balanced(rows: int, rank: int) -> tuple[OverlapPlan, BoundaryVectors]:
    """A causal call of so many rows on two ranks: the plan of one, and its mask."""
    v = BoundaryVectors(2 * rows, 2 * rows, 1, 1, True)
    p = plan(v, world_size=2, chunk=rows // 4, order="zigzag")
    o = overlap_plan(p, rank)
    return o, localize(v, p.rows, p.rows.chunks_of(rank), p.keys, o.columns)


class Causal:
    """A causal call of 16384 rows a rank, of which L2 holds those of two heads, and how its tiles come."""

    def __init__(self, rank: int, heads: int) -> None:
        self.o, self.local = balanced(16384, rank)
        self.spec, self.units = select_backward(mask_form(self.local), 128, "bf16"), Units(1, 2 * heads, 2, 1, heads)
        self.tiles = self.o.rows // 128
        self.own = [t for t, (_, last) in enumerate(self.o.block_slots(128).tolist()) if last < self.o.own]
        self.load = backward_load(self.local, self.spec, self.units)
        flops = BACKWARD_FACTOR * FORWARD_FLOPS * self.spec.block_q * self.spec.block_kv * 128 * heads
        self.alone = float(self.load.sum()) * flops / overlap_tables.UNMASKED_WORK / overlap_tables.BACKWARD_RATE

    def order(self, processors: int, last: float) -> list[int]:
        """last: when the last keys come, in times of the kernel alone."""
        of_link = expected_arrivals(self.o, 1024, 1, 1e12, 0.0)
        arrivals = tuple(at / max(of_link) * last * self.alone for at in of_link)
        on = self.local, self.o, self.spec, self.units
        return backward_tables(*on, arrivals, processors, CPU, 0, True).items.tolist()  # type: ignore[no-any-return]

    def end(self, order: list[int], processors: int) -> float:
        """Over the soonest."""
        work = np.array([self.load[i >> 16, i & 0xFFFF] for i in order], dtype=float)
        items = Planned(np.arange(len(order), dtype=np.uint32), np.zeros(len(order)), work)
        return float(items.ends(np.arange(len(order)), processors).max() / items.soonest_end(processors))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("processors", [2, 9])
def test_tiles_come_as_they_lie_where_the_cache_cannot_hold_their_rows(
    rank: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own tiles of one unit fill the time, and the last ones end together."""
    two, four = Causal(rank, 2), Causal(rank, 4)
    lie = [*four.own, *(t for t in range(four.tiles) if t not in four.own), *(t | 1 << 16 for t in range(four.tiles))]
    body = four.tiles * 5 // 4
    assert four.order(processors, 0.03)[:body] == lie[:body] != two.order(processors, 0.03)[:body]
    assert four.end(four.order(processors, 0.03), processors) < 1.01
    many, mixed = 2 * four.tiles // overlap_tables.IN_STEP, []
    monkeypatch.setattr(overlap_tables, "soonest_backward", lambda *args: mixed.append(args) or soonest_backward(*args))
    assert four.order(many, 0.03)[: four.tiles] == lie[: four.tiles]
    assert not mixed
    assert four.order(many + 1, 0.03)[: four.tiles] != lie[: four.tiles]
    assert len(mixed) == 1


def test_multiprocessors_are_left_to_sums_where_they_pay() -> None:
    """By how long the kernel takes, with 1 MB of gradients summed over four CTAs: 5 MB."""
    keys = Layout(2, (0, 1024, 2048), (0, 1))
    o = plan_visits(keys, (frozenset({0}), frozenset({0, 1})), 1, 2)
    spec = select_backward(MaskForm(lts=True), 128, "bf16")
    arrivals = 0.0, 50e-6

    def spare(splits: int, kernel: float) -> int:
        return overlap_tables.spare_processors(o, spec, Units(1, 8, 1, splits, 8 // splits), arrivals, kernel, 100)

    moved = 5 * 1024 * 256 * 4
    behind = moved / overlap_tables.MEMORY_RATE + 2 * 50e-6
    for kernel in (1e-5, 1e-4, 2e-4, 4e-4, 1e-3, 5e-3):
        assert spare(1, kernel) == 0, "one CTA has all of its query heads"
        wanted = moved / overlap_tables.SUM_RATE / (overlap_tables.SUM_TIME * kernel)
        assert wanted <= spare(4, kernel) < wanted + 1 or spare(4, kernel) == 4 <= wanted
    assert [spare(4, 100 * behind * x) for x in (0.99, 1.01)] == [1, 0]


def test_heads_find_their_pieces_and_masks() -> None:
    """Eight query heads of four key heads, copied in two groups over five slots; four of two mask heads, of two batch items."""
    assert head_groups(8, 4, 2, 5).tolist() == [0, 0, 0, 0, 5, 5, 5, 5]
    dealt = Heads(4, 2, np.zeros(4, dtype=np.int64))
    assert masks_of_heads(dealt, 4, True).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert masks_of_heads(dealt, 2, True).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert masks_of_heads(dealt, 2, False).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_units_find_their_masks() -> None:
    """As `work_of` in bwd/shared.cuh.j2 computes it."""
    case = Case(2, 64, 0, "lts", heads=(8, 4, 2), batch=(2, 2))
    v = vectors(case)
    units = Units(2, 8, 4, 2, 1)
    found = units.masks(v)
    for unit in range(16):
        split, kv_head, item = unit % 2, unit // 2 % 4, unit // 8
        first_head = (kv_head * 2 + split) * 1
        assert found[unit] == item * v.heads + first_head // (8 // v.heads)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_sum_as_a_table_gives_the_sum(batch: int) -> None:
    """The table's addends, carried out in Python, against the torch path of the same object."""
    case = Case(3, 48, 1, "none", causal=False, chunk=8, order="balanced", heads=(2, 2, 1), batch=(batch, 1), dims=(8, 4))
    p = case.plan(vectors(case))
    o = overlap_plan(p, 1)
    shape = KeyShape(batch, 2, 8, 4, torch.float32)
    link = Loopback(p.keys, 1, o.sources, shape, pinned=False, lends=o.lends)
    sums = GradientSum(o, p.keys, shape, link, CPU)
    g = torch.Generator().manual_seed(0)
    splits = 2
    made = [torch.randn(splits, batch, 2, o.rows, d, generator=g) for d in (8, 4)]
    rows = p.keys.local_length(1)
    out = [torch.zeros(batch, rows, 2, d) for d in (8, 4)]
    staged = {(r, c): link.staged(r, c) for r, chunks in o.lends for c in chunks}
    for pair in staged.values():
        for t in pair:
            t.normal_(generator=g)
    heads = [h for pair in staged.values() for t in pair for h in t.flatten(0, 1)]
    by_address = {t.data_ptr(): t.flatten() for t in heads}
    assert by_address
    addends = sums.addends()
    for a in addends:
        size = a.rows * a.dim
        total = torch.zeros(size)
        if a.own is not None:
            for s in range(splits):
                total += made[a.which][s].flatten()[a.own : a.own + size]
        for address in a.parts:
            total += by_address[address]
        for row in range(a.rows):
            at = a.out + row * a.step
            out[a.which].view(-1)[at : at + a.dim] = total[row * a.dim : (row + 1) * a.dim]
    want = [torch.zeros_like(t) for t in out]
    sums.add_on_host((made[0], made[1]), (want[0], want[1]))
    for got, wanted in zip(out, want, strict=True):
        torch.testing.assert_close(got, wanted)
    table = SumTable.of(addends, CPU)
    assert table.count == len(addends) == 2 * 2 * batch * len(p.keys.chunks_of(1))
    assert table.pieces.numel() == 48 * len(addends)
    assert table.parts.numel() == 8 * sum(len(a.parts) for a in addends)


def test_copies_that_are_not_one_piece_are_refused() -> None:
    t = torch.zeros(4, 4)
    assert copy_table([(t, t)], CPU).numel() == 24
    with pytest.raises(ValueError, match="no plain copy"):
        copy_table([(t, t.T)], CPU)
    with pytest.raises(ValueError, match="no plain copy"):
        copy_table([(t, t[:2])], CPU)


def test_an_empty_addend_list() -> None:
    table = SumTable.of([Addend(0, 0, 4, None, 0, 4, ())], CPU)
    assert table.longest == 0
