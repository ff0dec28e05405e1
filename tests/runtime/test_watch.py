"""The thread that ends waits: when a call hangs, when somebody else gave up, and never otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from maskc.runtime import watch as watch_module
from maskc.runtime.watch import Watch


class End:
    """Of a call."""

    def __init__(self, ended: bool = False) -> None:
        self.ended = ended

    def query(self) -> bool:
        return self.ended


def until(what: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.005)
    return what()


class Clock:
    """In place of `time`: seconds pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)


def test_a_call_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    call, stops = End(), []
    watch = Watch(lambda: "", lambda: stops.append(1), 10.0)
    watch.entered(call)
    clock.now = 9.0
    time.sleep(0.05)
    assert not stops
    clock.now = 11.0
    assert until(lambda: bool(stops))
    call.ended = True
    assert until(lambda: not watch._calls)
    time.sleep(0.05)  # of the look in which it was found
    seen = len(stops)
    time.sleep(0.1)
    assert len(stops) == seen, "nothing is left to stop"
    watch.close()


def test_time_counts_from_the_end_of_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    first, second, stops = End(), End(), []
    watch = Watch(lambda: "", lambda: stops.append(1), 10.0)
    watch.entered(first)
    watch.entered(second)
    clock.now = 9.0
    first.ended = True
    assert until(lambda: len(watch._calls) == 1)
    clock.now = 18.0
    time.sleep(0.1)
    assert not stops, "the second had the GPU for 9 s only"
    clock.now = 19.5
    assert until(lambda: bool(stops))
    second.ended = True
    watch.close()


def test_trouble_stops_at_once() -> None:
    stops: list[int] = []
    watch = Watch(lambda: "rank 1 gave up", lambda: stops.append(1), 60.0)
    watch.entered(End())
    assert until(lambda: bool(stops))
    watch.close()


def test_what_has_ended_is_in_no_trouble() -> None:
    stops: list[int] = []
    watch = Watch(lambda: "rank 1 gave up", lambda: stops.append(1), 0.0)
    watch.entered(End(ended=True))
    time.sleep(0.2)
    assert not stops
    watch.close()


def test_the_thread_leaves_behind_the_last_call() -> None:
    call, stops = End(), []
    watch = Watch(lambda: "", lambda: stops.append(1), 0.1)
    watch.entered(call)
    thread = watch._thread
    assert thread is not None
    watch.leave()
    assert until(lambda: bool(stops)), "a call that hangs is stopped all the same"
    assert thread.is_alive()
    call.ended = True
    assert until(lambda: not thread.is_alive())


def test_events_of_calls_that_have_ended_are_used_again() -> None:
    """And no others: that of a call that goes on says when it ends."""
    watch, ended, going = Watch(lambda: "", lambda: None, 10.0), End(True), End()
    assert watch.spare() is None
    watch.entered(ended)
    watch.entered(going)
    assert until(lambda: len(watch._calls) == 1)
    assert [watch.spare(), watch.spare()] == [ended, None]
    going.ended = True
    assert until(lambda: not watch._calls)
    assert [watch.spare(), watch.spare()] == [going, None]
    watch.close()


def test_a_thread_that_waits_is_woken_by_every_call() -> None:
    watch = Watch(lambda: "", lambda: None, 10.0)
    for _ in range(5):
        watch.entered(End(True))
        assert until(lambda: not watch._calls and watch._waiting)
    watch.close()
