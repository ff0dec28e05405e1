"""Times of ways that are compared, on several GPUs at once: what is fair, and how often each is measured.

Ranks leave a barrier on their GPUs together and begin, hosts being ahead; a time is that of the slowest rank, the median over
rounds. The barrier wakes the links between the GPUs, which costs power for 50 ms: the same before every call.

Long calls run at the limit of power: how fast they are depends on what ran before, by some percent, as a GPU comes cool out
of copies or a pause and hot out of attention. So ways that are compared, attention alone among them, go through whole
Williams squares with nothing in between: in as many rounds as there are of them each comes once right behind every other
one, and first once. All of them have equally many rounds. What nothing is compared with comes after them, in rounds of
its own.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap_times import Taken
from benchmarks.overlap_ways import ON_GPUS
from maskc.runtime.comm import Peer

CYCLES = 2_000_000
"""Of a millisecond that a GPU waits before the barrier while its host enqueues."""
LONGEST = 8.0
"""Of that wait, ms."""
LONG = 0.02
"""Seconds of a step before which nobody waits: its host is ahead as soon as one such step runs."""
SECONDS = 6.5
"""For the squares of a cell."""
FEWEST, MOST = 8, 12
"""Rounds of these, in whole squares; the fewest whatever they take, where the time of all cells is not over."""
OTHERS = 3
"""Rounds of ways that no bar looks at."""
Times = dict[tuple[str, str], tuple[float, float]]
"""(way, direction): slowest rank and mean of the ranks, ms."""
Name = TypeVar("Name")


class OnHost(NamedTuple):
    """As `Taken`, in a rehearsal."""

    ms: float
    late: bool = False


class Clock:
    """Times of all ranks. Without a GPU, of the host, for a rehearsal. ahead: ms that GPUs wait, so that hosts are ahead."""

    def __init__(self, peer: Peer, device: torch.device, ahead: float) -> None:
        self.peer, self.device = peer, device
        self.token = torch.zeros(1, device=device)
        self.cycles = int(ahead * CYCLES)
        if ON_GPUS:  # a start for hosts
            torch.cuda._sleep(int(LONGEST * CYCLES))
        self.taken: dict[tuple[str, str], list[Taken | OnHost]] = {}
        self.host: dict[tuple[str, str], list[float]] = {}
        self.ends: deque[torch.cuda.Event] = deque(maxlen=2)

    def time(self, name: str, direction: str, run: Callable[[], Any]) -> Any:
        if not ON_GPUS:
            dist.all_reduce(self.token, group=self.peer.group)
            started = time.perf_counter()
            result = run()
            self.taken.setdefault((name, direction), []).append(OnHost(1e3 * (time.perf_counter() - started)))
            return result
        if len(self.ends) > 1:  # else queues fill up, and a host that waits for room seems slow
            self.ends[0].synchronize()
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        dist.all_reduce(self.token, group=self.peer.group)  # last: no GPU starts before the other, whichever host comes late
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        result = run()
        self.host.setdefault((name, direction), []).append(1e3 * (time.perf_counter() - began))
        late = start.query()  # type: ignore[no-untyped-call]
        end.record()
        self.ends.append(end)
        self.taken.setdefault((name, direction), []).append(Taken(start, end, late))
        return result

    def times(self) -> tuple[Times, Times, dict[tuple[str, str], int]]:
        """Medians, quartiles of the slowest rank, and over how many rounds: those in which no GPU waited for its host."""
        if ON_GPUS:
            torch.cuda.synchronize()
        found: Times = {}
        spread: Times = {}
        counted = {}
        for key, runs in self.taken.items():
            mine = torch.tensor([[run.ms for run in runs], [run.late for run in runs]], device=self.device)
            everyone = [torch.empty_like(mine) for _ in range(self.peer.world)]
            dist.all_gather(everyone, mine, group=self.peer.group)
            table, late = torch.stack(everyone, 1)
            table = table[:, in_time(late.any(0))]
            slowest = table.max(0).values
            low, middle, high = torch.quantile(slowest, slowest.new_tensor([0.25, 0.5, 0.75])).tolist()
            found[key], spread[key] = (middle, table.mean(0).quantile(0.5).item()), (low, high)
            counted[key] = len(slowest)
        return found, spread, counted


def in_time(late: Tensor) -> Tensor:
    """Which rounds count: those in which nobody was late, or all if there is none. Both [rounds], bool."""
    return torch.ones_like(late) if late.all() else ~late


class Pace(NamedTuple):
    """rounds of the ways that are compared. ahead: ms that GPUs wait for their hosts before each call."""

    rounds: int
    ahead: float


def pace(peer: Peer, device: torch.device, steps: Sequence[Sequence[Callable[[], Any]]], left: float) -> Pace:
    """The same on all ranks, from a step of the first way, and of the others where it is short. left: seconds, at most.

    Of two steps the faster one counts: what happens once must not make calls pass for long ones, for which no GPU waits.
    """
    longest, whole, timed = 0.0, 0.0, 0
    for calls in steps:
        tries = []
        for _ in range(2):
            began = time.monotonic()
            for call in calls:
                started = time.monotonic()
                call()
                longest = max(longest, time.monotonic() - started)
                if ON_GPUS:
                    torch.cuda.synchronize()
            tries.append(time.monotonic() - began)
        whole += min(tries)
        found = torch.tensor([longest, whole, -left], device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peer.group)
        longest, whole, timed = *found.tolist()[:2], timed + 1
        left = -found[2].item()
        if whole > LONG * timed:
            break
    step = whole / max(1, timed)
    ahead = 0.0 if step > LONG else min(LONGEST, 1.0 + 1.3e3 * longest)
    return Pace(whole_squares(len(steps), step + 2e-3 * ahead, left), ahead)


def whole_squares(ways: int, step: float, left: float) -> int:
    """Rounds of so many ways that are worth their time. step, left: seconds, of one step and at most."""
    square, one = len(orders(ways)), ways * step
    worth = max(FEWEST, min(MOST, int(SECONDS / one)))
    return max(square, min(worth, int(left / one)) // square * square)


def orders(n: int) -> list[tuple[int, ...]]:
    """Orders of n things in which each follows every other one equally often (Williams 1949); twice n of them where n is odd."""
    if n < 2:
        return [tuple(range(n))]
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    rows = [tuple((x + i) % n for x in first) for i in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def rounds(compared: Sequence[Name], others: Sequence[Name], count: int) -> Iterator[list[Name]]:
    """What is measured in each round, in order, the same on all ranks: `count` rounds of `compared`, then OTHERS of `others`."""
    rng = random.Random(0)
    compared, square = rng.sample(list(compared), len(compared)), orders(len(compared))
    for i in range(count):
        yield [compared[x] for x in square[i % len(square)]]
    for _ in range(OTHERS):
        yield rng.sample(list(others), len(others))
