"""Figures of benchmarks/overlap.py: by hand, and against a harness with known times. Nothing is measured here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import overlap, overlap_rank
from benchmarks.overlap import dry, figures, interval
from benchmarks.overlap_cells import Cell, cells, everything_gathered, problem
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

    def elapsed_time(self, end: Clock) -> float:
        return end.at - self.at


def test_a_cell_runs_through_on_host_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself, with a backend of the CPU and a clock that counts: rows as the file wants them."""

    for name, value in (("Event", Clock), ("synchronize", lambda: None), ("_sleep", lambda cycles: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(overlap_rank, "CudaQueues", lambda device: HostQueues())
    monkeypatch.setattr(overlap_rank.Rank, "peer_by_peer", lambda self: None)
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
            assert r["repeats"] == overlap.FEWEST
            assert (r["bytes_out"] > 0) == (direction == "backward")
        told = overlap.line(cell, rows)
        assert "\n" not in told
        assert "DIFFER" not in told
