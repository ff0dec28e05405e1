"""Figures of benchmarks/overlap.py: by hand, and against a harness with known times. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import overlap, overlap_rank, overlap_times
from benchmarks.overlap import dry, missed
from benchmarks.overlap_bounds import Needs, best, forward_needs, soonest_end
from benchmarks.overlap_cells import Cell, cells, everything_gathered, problem
from benchmarks.overlap_record import Record, claim, merged
from benchmarks.overlap_times import figures, interval, middle_of
from maskc.runtime.overlap_order import Heads, forward_items, head_groups
from maskc.runtime.overlap_plan import Cut, OverlapPlan, Slot
from maskc.runtime.transport import HostQueues


def test_efficiency_by_hand() -> None:
    t = {"attention": 2.0, "copies": 1.5, "gated": 2.1, "copy-then-attend": 3.5}
    assert figures(t, "gated") == {"e": pytest.approx(1 - 0.1 / 1.5), "hidden": pytest.approx(1.4 / 1.5)}
    assert figures(t, "copy-then-attend") == {"e": 0.0, "hidden": 0.0}
    worse = figures({**t, "gated": 4.0}, "gated")
    assert worse["e"] is not None
    assert worse["e"] < 0, "never clamped"
    assert figures({**t, "copies": 0.0}, "gated") == {"e": None, "hidden": None}


def test_the_interval_holds_the_truth_and_shrinks() -> None:
    noise = [0.01 * (i % 7 - 3) for i in range(21)]
    times = {"attention": [2 + x for x in noise], "copies": [1.5 - x for x in noise], "gated": [2.3 + x / 2 for x in noise]}
    low, high = interval(times, "gated")
    assert low <= 1 - 0.3 / 1.5 <= high
    assert high - low < 0.1
    exact = {name: [values[10]] * 21 for name, values in times.items()}
    low, high = interval(exact, "gated")
    assert low == high


def test_rounds_go_on_while_the_bar_is_in_the_interval() -> None:
    def times(gated: float, noise: float, copies: float = 1.5) -> dict[str, list[float]]:
        some = [noise * (i % 7 - 3) for i in range(21)]
        return {"attention": [2 + x for x in some], "copies": [copies] * 21, "gated": [gated - x for x in some]}

    assert overlap.worth("forward", 1.0, times(2.0, 0.0)) == 0.0, "E is 1, known exactly"
    assert overlap.worth("forward", 1.0, times(2.15, 0.02)) == 2.0, "E is about 0.9"
    assert overlap.worth("backward", 1.0, times(2.15, 0.02)) == 1.0, "0.8 is asked for, but the interval is wide"
    assert overlap.worth("forward", 1.0, times(2.15, 0.0, 0.4)) == 0.0, "nothing is asked for"
    assert overlap.worth("forward", 1.0, times(4.2, 0.02, 4.0)) == 2.0, "hidden / min is about 0.9, E is 0.45"
    assert overlap.worth("forward", 1.0, times(2.0, 0.0, 0.0)) == 1.0, "nothing is copied"


def test_a_record_keeps_cells_of_the_same_kernels(tmp_path: Path) -> None:
    cell, other = Cell("causal", 1024, 2, 1, 2, 1), Cell("causal", 1024, 2, 1, 2, 2)

    def row(of: Cell, direction: str, value: int) -> dict[str, Any]:
        sizes = {"seqlen": of.seqlen, "heads": of.heads, "kv_heads": of.heads_kv, "world": of.world, "link": of.link}
        return {"mask": of.mask, **sizes, "direction": direction, "value": value}

    first, second = tmp_path / "a.json", tmp_path / "b.json"
    record = Record(first, {"device": "a GPU", "digest": "abc"})
    record.put([row(cell, "forward", 1), row(cell, "forward", 2)])
    record.put([row(other, "backward", 3)])
    again = Record(first, record.head)
    again.resume()
    assert again.has(cell, "forward")
    assert not again.has(cell, "backward")
    assert not again.has(other, "forward")
    again.put([row(cell, "forward", 4)])
    assert [r["value"] for r in again.rows] == [3, 4]
    Record(second, record.head, [row(other, "backward", 5)]).write()
    whole = merged(tmp_path / "c.json", [first, second])
    assert [r["value"] for r in whole.rows] == [4, 5]
    changed = Record(second, {**record.head, "digest": "def"}, whole.rows)
    changed.resume()
    assert changed.rows == [], "of other kernels"
    changed.write()
    with pytest.raises(ValueError, match="other kernels"):
        merged(first, [first, second])


def test_a_cell_is_dealt_once(tmp_path: Path) -> None:
    cell, other = Cell("causal", 1024, 2, 1, 2, 1), Cell("causal", 1024, 2, 1, 2, 2)
    claims = tmp_path / "claims"
    assert [claim(claims, c) for c in (cell, cell, other, cell)] == [True, False, True, False]
    assert claim(None, cell)


def test_a_median_lies_in_its_interval() -> None:
    middle, low, high = middle_of([1.0, 1.2, 0.9, 1.1, 1.05])
    assert middle == pytest.approx(1.05)
    assert 0.9 <= low <= middle <= high <= 1.2


def test_bars_by_hand() -> None:
    row: dict[str, Any] = {
        "direction": "forward",
        "t_comm_ms": 1.0,
        "t_attention_ms": 1.5,
        "e": 0.91,
        "hidden": 0.91,
        "e_possible": 0.95,
        "hidden_possible": 0.95,
        "against_copy_first": 0.7,
        "gate_overhead": 0.001,
        "gate_low": -0.001,
        "gate_high": 0.002,
    }
    assert missed(row) == []
    assert "E 0.890 < 0.90, possible 0.950" in missed({**row, "e": 0.89})[0]
    assert missed({**row, "e": 0.89, "direction": "backward"}) == []
    assert missed({**row, "e": 0.5, "hidden": 0.5, "t_attention_ms": 4.0}) == [], "copies are less than half"
    assert "hidden/min 0.890" in missed({**row, "hidden": 0.89, "t_attention_ms": 0.9})[0]
    assert "+2.0%" in missed({**row, "against_copy_first": 1.02})[0]
    assert "gate +0.60%" in missed({**row, "gate_overhead": 0.006})[0]


def test_the_soonest_end_by_hand() -> None:
    """Ten of work on own keys, two pieces with four and six; the last tile of the second has three left."""
    needs = Needs(20.0, np.array([1.0, 3.0]), np.array([4.0, 6.0]), np.array([1, 1]))
    assert soonest_end(needs, 4, 2.0, 1.0) == 2.2, "attention takes longer, but the last tile takes 1.2 behind the last piece"
    assert soonest_end(needs, 1, 2.0, 1.0) == 2.0, "attention takes longer"
    assert soonest_end(needs, 1, 2.0, 3.0) == pytest.approx(3.0 + 0.1 * 6)
    assert soonest_end(needs, 4, 2.0, 3.0, behind=0.5) == pytest.approx(3.0 + 1.2 + 0.5)
    first = Needs(20.0, needs.after, needs.of, needs.rows, first=1.0)
    assert soonest_end(first, 4, 2.0, 1.0, leaving=5.0) == pytest.approx(0.5 + 0.4 + 5.0)
    assert best(2.0, 1.0, 2.1) == pytest.approx((0.9, 0.9))


@given(st.integers(0, 1 << 20), st.integers(1, 6))
def test_no_order_of_a_forward_ends_sooner(seed: int, processors: int) -> None:
    rng = np.random.default_rng(seed)
    slots, blocks, groups = int(rng.integers(2, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 3))
    own = int(rng.integers(0, slots))
    places = tuple(Slot(i, 0 if i < own else 1, False, 10 * (slots - 1 - i), 10) for i in range(slots))
    cut = Cut(OverlapPlan(0, own, places, (), 10 * slots), groups, groups)
    parts = rng.integers(0, 4, (1, blocks, slots))
    whole, dealt = parts.sum(2) + 1, Heads(groups * 2, 1, head_groups(groups * 2, groups, groups, slots))
    needs = forward_needs(parts, whole, dealt, False, cut)
    keys = 20.0
    arrivals = np.zeros(cut.words)
    arrivals[list(cut.pieces)] = keys * (1 + np.arange(len(cut.pieces))) / len(cut.pieces)
    items = forward_items(parts, whole, dealt, False, 1, arrivals.tolist(), 1.0, processors)
    for eager in (0.0, 0.5):
        end = max(keys, float(items.ends(items.order(processors, eager), processors).max()))
        assert soonest_end(needs, processors, needs.total / processors, keys) <= end + 1e-9


def test_cells_are_what_the_grid_asks_for() -> None:
    found = list(cells())
    assert len(found) == len(set(found))
    assert {c.heads_kv for c in found} >= {1, 8, 32}
    assert {c.world for c in found} >= {2, 8}
    assert {c.link for c in found} == {1, 2}
    assert {c.seqlen for c in found} >= {32_768, 131_072, 262_144}
    assert any((c.heads, c.heads_kv, c.seqlen // c.world) == (64, 1, 8192) for c in found)


def test_a_cell_looks_at_the_rank_that_receives_most() -> None:
    cell = Cell("causal_document", 8192, 32, 8, 4, 1)
    made = problem(cell)
    received = sum(s.rows for s in made.order.pulls)
    assert received > 0
    other, order = everything_gathered(cell)
    assert len(order.slots) == other.p.keys.chunk_count, "the baseline gathers everything"
    assert "model" in dry(cell)


class Clock:
    """An event that tells made-up times."""

    ticks = 0.0

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None:
        Clock.ticks += 0.5
        self.at = Clock.ticks

    def query(self) -> bool:
        """Whether it has come: not while the host is ahead."""
        return False

    def elapsed_time(self, end: Clock) -> float:
        return end.at - self.at


def test_a_cell_runs_through_on_host_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself, with a backend of the CPU and a clock that counts: rows as the file wants them."""

    for name, value in (("Event", Clock), ("synchronize", lambda: None), ("_sleep", lambda cycles: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(overlap_rank, "CudaQueues", lambda device: HostQueues())
    monkeypatch.setattr(overlap_rank.Rank, "peer_by_peer", lambda self: None)
    monkeypatch.setattr(overlap.hopper, "multiprocessors", lambda device: 4)
    cell = Cell("causal_document", 1024, 2, 1, 2, 2)
    executors = ["gated", "sm-copy", "copy-then-attend", "dual-chunk gather"]
    needed = {"mask", "seqlen", "kv_heads", "direction", "executor", "link", "t_attention_ms", "t_comm_ms", "t_overlap_ms"}
    pairing = overlap.Pairing(problem(cell), torch.device("cpu"))
    for direction, more in (("forward", ["peer by peer"]), ("backward", [])):
        rows = overlap.measure(pairing, 0.0, direction)
        assert [r["executor"] for r in rows] == [*executors, *more]
        for r in rows:
            assert needed | {"e", "e_low", "e_high"} <= set(r)
            assert r["direction"] == direction
            assert r["same_bits"]
            assert r["t_overlap_ms"] == 0.5
            assert r["repeats"] == overlap_times.FEWEST
            assert (r["bytes_out"] > 0) == (direction == "backward")
        told = overlap.line(cell, rows)
        assert "\n" not in told
        assert "DIFFER" not in told
