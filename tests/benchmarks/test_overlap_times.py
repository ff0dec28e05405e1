"""Runs whose host came late are taken again, a few times, with a longer sleep of the GPU."""

from __future__ import annotations

import pytest

from benchmarks.overlap_times import PATIENCE, Stopwatch


class Run:
    def __init__(self, ms: float, late: bool) -> None:
        self.ms, self.late = ms, late


def watch(monkeypatch: pytest.MonkeyPatch, late: dict[str, int]) -> tuple[Stopwatch, list[str]]:
    """Of runs that come late so often before they do not, and the order in which they were enqueued. Milliseconds count them."""
    clock, order = Stopwatch({}, (), lambda: None), list[str]()
    clock.runs = dict.fromkeys(late, lambda: None)
    clock._issue, clock._patience = dict.fromkeys(late, 1e-3), dict.fromkeys(late, PATIENCE)

    def enqueue(name: str) -> Run:
        order.append(name)
        return Run(order.count(name), order.count(name) <= late[name])

    monkeypatch.setattr(clock, "_enqueue", enqueue)
    monkeypatch.setattr(clock, "_wait", lambda: None)
    return clock, order


def test_a_late_run_does_not_count_and_the_next_sleep_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = watch(monkeypatch, {"a": 2, "b": 0})
    found = clock.rounds(lambda _: 0.0, fewest=3)
    assert found == {"a": [3, 4, 5], "b": [1, 2, 3]}
    assert clock._issue == {"a": 4e-3, "b": 1e-3}
    assert sorted(order[:2]) == ["a", "b"]
    assert order[2:4] == ["a", "a"]


def test_a_host_that_is_always_late_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = watch(monkeypatch, {"a": 1000})
    assert clock.rounds(lambda _: 0.0, fewest=3)["a"] == [PATIENCE + 1, PATIENCE + 2, PATIENCE + 3]
    assert len(order) == PATIENCE + 3
    assert clock._issue["a"] == pytest.approx(2**PATIENCE * 1e-3)
