"""The clock between GPUs on a simulated one: hosts are ahead, late rounds are made again, squares are whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import overlap_clock
from benchmarks.overlap_clock import (
    CYCLES,
    FEWEST,
    FIRST,
    LONGEST,
    MARGIN,
    MOST,
    MOST_OPEN,
    PATIENCE,
    SECONDS,
    SECONDS_OPEN,
    SPARE,
    Clock,
    Figure,
    Round,
    goes_on,
    medians,
    orders,
    squares,
    turns,
)

FIRST_WAIT = SPARE + MARGIN * FIRST


@dataclass
class Machine:
    """A host and its GPU's only stream, in milliseconds. now, free: when the host and the GPU come to what is next."""

    now: float = 0.0
    free: float = 0.0
    slept: list[float] = field(default_factory=list)
    of_other_rank: Callable[[Tensor], Tensor] = torch.clone

    def enqueue(self, ms: float) -> None:
        self.free = max(self.now, self.free) + ms

    def call(self, host: float, gpu: float) -> None:
        """Its kernel is enqueued halfway."""
        self.now += host / 2
        self.enqueue(gpu)
        self.now += host / 2

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / CYCLES)
        self.enqueue(cycles / CYCLES)

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def gather(self, everyone: list[Tensor], mine: Tensor, group: object) -> None:
        everyone[:] = [mine, self.of_other_rank(mine)]


@dataclass
class Event:
    machine: Machine
    at: float = 0.0

    def record(self) -> None:
        self.at = max(self.machine.now, self.machine.free)

    def query(self) -> bool:
        return self.at <= self.machine.now

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    cuda = SimpleNamespace(_sleep=made.sleep, synchronize=made.synchronize, Event=lambda enable_timing: Event(made))
    monkeypatch.setattr(overlap_clock, "ON_GPUS", True)
    monkeypatch.setattr(overlap_clock.torch, "cuda", cuda)
    reduce = SimpleNamespace(all_reduce=lambda *_, **__: None, all_gather=made.gather, ReduceOp=overlap_clock.dist.ReduceOp)
    monkeypatch.setattr(overlap_clock, "dist", reduce)
    ticks = SimpleNamespace(perf_counter=lambda: made.now / 1e3, monotonic=lambda: made.now / 1e3)
    monkeypatch.setattr(overlap_clock, "time", ticks)
    return made


def a_clock() -> Clock:
    return Clock(SimpleNamespace(group=None, world=2), torch.device("cpu"))  # type: ignore[arg-type]


Costs = dict[str, tuple[float, float]]
"""ms of the host and of the GPU."""


def step(machine: Machine, clock: Clock, costs: Costs) -> Callable[[str], None]:
    """Runs a way forward and, twice as long, backward."""

    def run(name: str) -> None:
        host, gpu = costs[name]
        clock.time(name, "forward", lambda: machine.call(host, gpu))
        clock.time(name, "backward", lambda: machine.call(2 * host, 2 * gpu))

    return run


def sides(found: list[Round]) -> dict[str, float]:
    return {name: medians([made.calls[name, "forward"] for made in found])[0].slowest for name in {n for n, _ in found[0].calls}}


def test_of_short_calls_the_gpu_s_time_is_told_though_hosts_take_longer(machine: Machine) -> None:
    clock, costs = a_clock(), {"gated": (1.5, 0.3), "dual": (0.5, 0.5), "attention": (0.2, 0.25)}
    found = squares(clock, step(machine, clock, costs), list(costs), 100.0, lambda _: False)
    assert len(found) == MOST
    assert not any(made.late for made in found)
    assert sides(found) == pytest.approx({name: gpu for name, (_, gpu) in costs.items()})


def test_before_long_calls_nobody_waits(machine: Machine) -> None:
    """The host is ahead by a call, so a pause would only let GPUs cool."""
    clock, costs = a_clock(), {"gated": (1.5, 50.0), "dual": (0.5, 49.0)}
    found = squares(clock, step(machine, clock, costs), list(costs), 1.0, lambda _: False)
    assert not any(made.late for made in found)
    machine.slept.clear()
    turns(clock, step(machine, clock, costs), [["gated", "dual"]] * 4)
    assert len(machine.slept) == 1, "the first: behind what all ranks tell each other, nothing runs"


def test_copies_alone_are_in_time_behind_steps_however_long(machine: Machine) -> None:
    clock = a_clock()
    run = step(machine, clock, {"ring": (1.0, 60.0), "communication": (2.0, 0.3)})
    turns(clock, run, [["ring"]] * 3)
    found = turns(clock, run, [["communication"]] * 3)
    assert [made.late for made in found] == [False] * 3
    assert sides(found) == {"communication": pytest.approx(0.3)}


def test_a_round_in_which_a_host_was_late_is_made_again(machine: Machine) -> None:
    clock, calls = a_clock(), 0

    def run(name: str) -> None:
        nonlocal calls
        calls += 1
        hiccup = 30.0 if calls in (3, 11) else 0.0
        clock.time(name, "forward", lambda: machine.call(0.5 + hiccup, 0.25))

    found = turns(clock, run, [["a", "b"], ["b", "a"]] * 3)
    assert len(found) == 6
    assert calls == 16
    assert Counter(tuple(name for name, _ in made.calls) for made in found) == {("a", "b"): 3, ("b", "a"): 3}
    assert sides(found) == {"a": 0.25, "b": 0.25}


def test_a_gpu_waits_for_what_a_host_takes_less_what_it_does_meanwhile(machine: Machine) -> None:
    """Of the call before, the shortest time seen; twice as long for a call that came late."""
    clock = a_clock()

    def run(call: tuple[str, float, float]) -> None:
        name, host, gpu = call
        clock.time(name, "forward", lambda: machine.call(host, gpu))

    def waits(*calls: tuple[str, float, float]) -> list[float]:
        machine.slept.clear()
        turns(clock, run, [calls])
        return machine.slept

    assert waits(("a", 2.0, 3.0), ("b", 2.0, 8.0)) == [FIRST_WAIT, FIRST_WAIT]
    waits(("a", 1.0, 1.5), ("a", 1.0, 5.0))
    needed = SPARE + MARGIN * 1.0
    assert waits(("a", 1.0, 3.0), ("a", 1.0, 3.0)) == pytest.approx([needed, needed - 1.5], abs=1e-5)
    assert waits(("b", 2.0, 8.0), ("a", 1.0, 3.0)) == pytest.approx([SPARE + MARGIN * 2.0], abs=1e-5), "b takes 8"
    waits(*(("c", host, 20.0) for host in (1.0, 5.0, 3.0)))
    assert waits(("c", 3.0, 20.0))[0] == pytest.approx(SPARE + MARGIN * 3.0, abs=1e-5), "usually"
    assert waits(("d", 30.0, 3.0))[:2] == pytest.approx([FIRST_WAIT, SPARE + MARGIN * 30.0], abs=1e-5), "it was not known"
    late, *again = waits(("a", 40.0, 3.0))
    assert late == pytest.approx(needed, abs=1e-5)
    assert again[:2] == pytest.approx([2 * needed, 4 * needed], abs=1e-5)


def test_hosts_that_need_longer_than_they_did_get_it(machine: Machine) -> None:
    clock, host = a_clock(), 0.5

    def run(name: str) -> None:
        clock.time(name, "forward", lambda: machine.call(host, 0.25))

    turns(clock, run, [["a"]] * 9)
    host = 8.0
    found = turns(clock, run, [["a"]] * 3)
    assert not any(made.late for made in found)


@pytest.mark.parametrize("other", [True, False])
def test_rounds_never_end_for_a_host_that_is_always_late_and_say_so(machine: Machine, other: bool) -> None:
    """This one's, or that of another rank."""
    clock, costs = a_clock(), {"gated": (0.5 if other else 2 * LONGEST, 0.25)}
    if other:
        machine.of_other_rank = lambda mine: torch.stack([mine[:, 0], torch.ones_like(mine[:, 1])], 1)
    ran: list[str] = []

    def run(name: str) -> None:
        ran.append(name)
        step(machine, clock, costs)(name)

    found = squares(clock, run, list(costs), 1e6, lambda _: True)
    assert [made.late for made in found] == [True]
    assert len(ran) in (2 * PATIENCE, 3 * PATIENCE), "of them up to two rounds that do not count"
    ran.clear()
    assert [made.late for made in turns(clock, run, [["gated"]] * 2)] == [True, True]
    assert len(ran) == 2 * PATIENCE


def test_squares_that_were_in_time_count_when_hosts_no_longer_are(machine: Machine) -> None:
    clock, made = a_clock(), 0

    def run(name: str) -> None:
        nonlocal made
        made += 1
        host = 0.5 if made <= 9 else 3 * LONGEST
        clock.time(name, "forward", lambda: machine.call(host, 0.25))

    found = squares(clock, run, ["a", "b"], 1e6, lambda _: True)
    assert [done.late for done in found] == [False, False]


def test_times_are_those_of_the_slowest_rank(machine: Machine) -> None:
    clock = a_clock()
    machine.of_other_rank = lambda mine: mine * torch.tensor([3.0, 0.0])
    (found,) = turns(clock, step(machine, clock, {"a": (0.1, 5.0)}), [["a"]])
    assert found.calls["a", "forward"] == (15.0, 10.0)


def test_medians_and_quartiles_of_rounds() -> None:
    found, quartiles = medians([Figure(4, 1), Figure(1, 2), Figure(2, 3), Figure(3, 8), Figure(5, 9)])
    assert found == (3, 3)
    assert quartiles == (2, 4)


@pytest.mark.parametrize("n", range(1, 8))
def test_each_is_right_behind_every_other_equally_often(n: int) -> None:
    rows = orders(n)
    assert all(sorted(row) == list(range(n)) for row in rows)
    behind = Counter(pair for row in rows for pair in pairwise(row))
    assert len(behind) == n * (n - 1)
    assert len(set(behind.values())) <= 1
    assert len(set(Counter(row[0] for row in rows).values())) == 1


@given(rounds=st.integers(1, 60), until=st.floats(0, 30), seconds=st.floats(0, 100), undecided=st.booleans())
def test_more_squares_as_the_time_allows_and_bars_ask_for(rounds: int, until: float, seconds: float, undecided: bool) -> None:
    more = goes_on(rounds, until, seconds, undecided)
    if until > seconds:
        assert not more
    elif rounds < FEWEST or (rounds < MOST and until <= SECONDS):
        assert more
    elif rounds >= MOST_OPEN or until > SECONDS_OPEN:
        assert not more
    else:
        assert more == undecided


def test_long_calls_have_two_squares_of_four_shorter_ones_three_and_doubtful_ones_more(machine: Machine) -> None:
    def rounds(ms: float, seconds: float = 100.0, undecided: bool = False) -> int:
        clock, ways = a_clock(), dict.fromkeys("abcd", (0.5, ms))
        return len(squares(clock, step(machine, clock, ways), list(ways), seconds, lambda _: undecided))

    assert [rounds(ms) for ms in (130, 65, 33, 1)] == [8, 8, 12, 12]
    assert [rounds(ms, undecided=True) for ms in (130, 100, 65, 1)] == [8, 12, 24, 24]
    assert rounds(130, seconds=1.0) == 4


def test_a_cell_can_be_measured_until_it_is_firm(machine: Machine) -> None:
    clock, ways = a_clock(), {"gated": (0.5, 65.0), "dual": (0.5, 64.0)}
    assert len(squares(clock, step(machine, clock, ways), list(ways), 1e3, lambda rounds: len(rounds) < 90, 100)) == 90
    assert len(squares(clock, step(machine, clock, ways), list(ways), 1e3, lambda _: True, 100)) == 100
    assert len(squares(clock, step(machine, clock, ways), list(ways), 15.0, lambda _: True, 100)) < 40
