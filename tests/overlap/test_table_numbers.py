"""What the tables of gated kernels tell the order of work: how many heads go together, seconds, and which orders are tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import hopper, overlap_tables
from maskc.runtime.hopper import L2_BYTES, mask_form
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.overlap_order import Planned, backward_items, forward_items, soonest_backward, soonest_forward, steady_backward
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan
from maskc.runtime.overlap_tables import Units, backward_tables, forward_work, gate_tables
from maskc.runtime.plan import plan
from tests.dist.cases import Case, vectors

CPU = torch.device("cpu")


def causal(rows: int) -> tuple[OverlapPlan, BoundaryVectors, Layout]:
    """Rank 0 of two, of so many rows each."""
    v = BoundaryVectors(2 * rows, 2 * rows, 1, 1, True)
    p = plan(v, world_size=2, chunk=rows // 4, order="zigzag")
    o = overlap_plan(p, 0)
    return o, localize(v, p.rows, p.rows.chunks_of(0), p.keys, o.columns), p.keys


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """What the functions of the order were last called with."""
    calls: dict[str, tuple[Any, ...]] = {}
    for f in (forward_items, soonest_forward, backward_items, soonest_backward, steady_backward):

        def noted(*args: Any, call: Any = f) -> Any:
            calls[call.__name__] = args
            return call(*args)

        monkeypatch.setattr(overlap_tables, f.__name__, noted)
    return calls


@pytest.mark.parametrize(("rows", "batch", "group"), [(1024, 1, 12), (1024, 4, 48), (2048, 4, 48), (8192, 4, 24), (32768, 1, 6)])
def test_heads_whose_keys_stay_in_cache_go_together(rows: int, batch: int, group: int, told: dict[str, tuple[Any, ...]]) -> None:
    """Six query heads share a key head; K and V of 2 * `rows` keys are 1 KiB a key."""
    o, local, _ = causal(rows)
    spec = forward_spec(mask_form(local), 128, "bf16")
    kv_bytes = 512 * o.rows
    assert group == min(12 * batch, 6 * max(1, L2_BYTES // kv_bytes))
    arrivals, processors = (0.0,) * (2 * len(o.slots)), 7
    tables = gate_tables(local, o, spec, 12, batch, 2, 2, arrivals, processors, CPU)
    parts, whole, dealt, masked, together, due, seconds, of = told["forward_items"]
    assert (together, masked, due, of) == (group, False, arrivals, processors)
    assert (dealt.heads, dealt.batch, dealt.first_piece.tolist()) == (12, batch, [0] * 6 + [len(o.slots)] * 6)
    work = forward_work(local, o.block_slots(spec.block_kv), len(o.slots), spec)
    assert all(np.array_equal(a, b) for a, b in zip((parts, whole), work, strict=True))
    flops = 4 * spec.block_q * spec.block_kv * 128 / overlap_tables.UNMASKED_WORK
    assert seconds == pytest.approx(flops / overlap_tables.FORWARD_RATE * processors)
    assert len(tables.items) == 12 * batch * -(-local.nq // spec.block_q)


def test_keys_of_a_head_that_do_not_stay_in_cache(told: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its query heads go together all the same."""
    monkeypatch.setattr(hopper, "L2_BYTES", 512 * 2048 - 1)
    o, local, _ = causal(1024)
    spec = forward_spec(mask_form(local), 128, "bf16")
    gate_tables(local, o, spec, 12, 1, 2, 1, (0.0,) * len(o.slots), 1, CPU)
    assert told["forward_items"][4] == 6


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batch_items_with_masks_of_their_own(batch: int, told: dict[str, tuple[Any, ...]]) -> None:
    """And blocks with keys of several slots, which count where their last key does."""
    case = Case(2, 700, 0, "lts", chunk=96, heads=(4, 2, 2), batch=(batch, batch))
    v = vectors(case)
    p = plan(v, world_size=2, chunk=96)
    o = overlap_plan(p, 1)
    local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, o.columns)
    spec = forward_spec(mask_form(local), 128, "bf16")
    gate_tables(local, o, spec, 4, batch, 2, 1, (0.0,) * len(o.slots), 1, CPU)
    assert told["forward_items"][3] is (batch > 1)
    work = overlap_tables._tiles(local, spec.block_q, spec.block_kv)
    assert work.shape[0] == batch * local.heads
    ranges = o.block_slots(spec.block_kv)
    parts, whole = forward_work(local, ranges, len(o.slots), spec)
    assert any(first < last for first, last in ranges.tolist())
    for slot in range(len(o.slots)):
        assert np.array_equal(parts[:, :, slot], work[:, :, ranges[:, 1] == slot].sum(2))
    assert np.array_equal(whole, work.sum(2) + overlap_tables.ROW_WORK)


@pytest.mark.parametrize("heads", [2, 8])
def test_few_items_are_taken_by_more_than_one_rule(heads: int, told: dict[str, tuple[Any, ...]]) -> None:
    o, local, _ = causal(4096)
    spec = forward_spec(mask_form(local), 128, "bf16")
    items = heads * -(-local.nq // spec.block_q)
    for processors, few in ((items // overlap_tables.FEW, False), (items // overlap_tables.FEW + 1, True)):
        gate_tables(local, o, spec, heads, 1, 1, 1, (0.0,) * len(o.slots), processors, CPU)
        assert told["soonest_forward"][2] == (overlap_tables.FORWARD_EAGER if few else (0.0,))


class Backward:
    """A backward of 4096 rows, of which L2 holds those of all heads: by which rule its items go, and in which order."""

    def __init__(self, told: dict[str, tuple[Any, ...]]) -> None:
        self.o, self.local, _ = causal(4096)
        self.spec, self.told = select_backward(mask_form(self.local), 128, "bf16"), told
        self.units = Units(1, 8, 4, 1, 2)
        load = overlap_tables.backward_load(self.local, self.spec, self.units)
        flops = overlap_tables.BACKWARD_FACTOR * 4 * self.spec.block_q * self.spec.block_kv * 128 * 2
        self.alone = float(load.sum()) * flops / overlap_tables.UNMASKED_WORK / overlap_tables.BACKWARD_RATE
        self.load, self.items = load, load.size

    def __call__(self, last: float, processors: int = 1, given: bool = False) -> tuple[Planned, Any]:
        """last: when the last keys come, in times of the kernel alone."""
        self.told.clear()
        arrivals = tuple(last * self.alone if i >= self.o.own else 0.0 for i in range(len(self.o.slots)))
        tables = backward_tables(self.local, self.o, self.spec, self.units, arrivals, processors, CPU, 0, given)
        rule = self.told["soonest_backward" if "soonest_backward" in self.told else "steady_backward"]
        assert tables.items.numel() == self.items
        return rule[0], rule


def test_little_traffic_changes_no_order(told: dict[str, tuple[Any, ...]]) -> None:
    call, little = Backward(told), overlap_tables.LITTLE / 3  # keys, and gradients of twice their bytes
    for last, in_line in ((0.99 * little, True), (1.01 * little, False)):
        items, _ = call(last)
        assert told["backward_items"][8] is in_line
        assert float(items.spent.sum()) == pytest.approx(call.alone)
        assert sorted(set(items.ready.tolist())) == pytest.approx([0.0, last * call.alone])
    columns = overlap_tables._tiles(call.local, call.spec.block_q, call.spec.block_kv).sum(1)
    assert np.array_equal(call.load, np.repeat(columns + overlap_tables.ROW_WORK, 4, axis=0))
    assert told["backward_items"][4] == 1, "heads that go together where items are many"


@pytest.mark.parametrize("given", [False, True])
def test_few_items_of_a_backward_end_together(given: bool, told: dict[str, tuple[Any, ...]]) -> None:
    call = Backward(told)
    many = call.items // overlap_tables.FEW
    _, rule = call(0.5, many, given)
    assert "soonest_backward" not in told
    assert rule[1:] == (many, 0.0 if given else overlap_tables.BACKWARD_EAGER)
    _, (_, pieces, processors, leaving, trials) = call(0.5, many + 1, given)
    assert (processors, trials) == (many + 1, overlap_tables.TRIALS)
    assert sum(leaving) == (0 if given else pytest.approx(2 * 0.5 * call.alone))
    assert set(pieces.tolist()) == {-1, *range(call.o.own, len(call.o.slots))}
    assert told["backward_items"][4] == 4, "L2 holds 4096 rows of eight heads, and two are a unit"
    assert told["backward_items"][9] == overlap_tables.WAVES * (many + 1)


def test_query_heads_of_a_key_head_that_the_cache_does_not_hold(told: dict[str, tuple[Any, ...]]) -> None:
    """16384 rows of two heads are what it holds, and four are a unit."""
    o, local, _ = causal(16384)
    spec = select_backward(mask_form(local), 128, "bf16")
    backward_tables(local, o, spec, Units(1, 8, 2, 1, 4), (1.0,) * len(o.slots), 200, CPU)
    assert "soonest_backward" in told
    assert told["backward_items"][4] == 1
    for given in (False, True):
        backward_tables(local, o, spec, Units(1, 8, 2, 1, 4), (1.0,) * len(o.slots), 4, CPU, 0, given)
        assert told["backward_items"][8] is given, "pushed gradients of many tiles leave early"


def test_trials_come_by_rising_price() -> None:
    prices = [trial.price for trial in overlap_tables.TRIALS]
    assert prices == sorted(prices)
    assert prices[0] == 0


def test_own_tiles_that_others_see_are_known(told: dict[str, tuple[Any, ...]]) -> None:
    """By the chunk of a tile's last key; tiles of others' keys are none."""
    call = Backward(told)
    call(0.5, 1, True)
    lent = told["backward_items"][7]
    read = {c for _, chunks in call.o.lends for c in chunks}
    want = [
        any(s.start <= 128 * t + 127 < s.start + s.rows and s.chunk in read for s in call.o.slots[: call.o.own])
        for t in range(64)
    ]
    assert lent.tolist() == want
    assert 0 < sum(want) < sum(latest < call.o.own for _, latest in call.o.block_slots(128).tolist())
    call(0.5, 1, False)
    assert told["backward_items"][7] is None


def test_a_mask_of_tiles_costs_by_their_kind() -> None:
    spec = forward_spec(MaskForm(), 128, "bf16")
    v = BoundaryVectors(2 * spec.block_q, 3 * spec.block_kv, 1, 1, True)
    work = overlap_tables._tiles(v, spec.block_q, spec.block_kv)
    assert set(np.unique(work)) <= {0, overlap_tables.PARTIAL_WORK, overlap_tables.UNMASKED_WORK}
    assert (overlap_tables.PARTIAL_WORK, overlap_tables.UNMASKED_WORK, overlap_tables.ROW_WORK) == (18, 16, 16), (
        "as row_runs counts"
    )
