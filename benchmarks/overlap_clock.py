"""Times of ways that are compared, on several GPUs at once: what is fair, and how often each is measured.

Ranks leave a barrier on their GPUs together, then wait so long that hosts are ahead; a time is that of the slowest rank, the
median over rounds.

Long calls run at the limit of power: how fast they are depends on what ran before, by some percent, as a GPU comes cool out
of copies and hot out of attention. So ways that are compared go through a Williams square: in as many rounds as there are
of them each comes once right behind every other one, and first once. Behind them in a round come the others. Where
calls are long, the two ways of the bars are measured again, in turn, for PAIR_SECONDS.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from benchmarks.overlap_ways import ON_GPUS
from maskc.runtime.comm import Peer

CYCLES = 2_000_000
"""Of a millisecond that a GPU waits after the barrier while its host enqueues."""
LONGEST = 8.0
"""Of that wait, ms."""
BUDGET = 0.1
"""Seconds of a way in a cell, which the number of rounds follows."""
FEWEST, MOST = 4, 16
"""Rounds."""
OTHERS = 3
"""Rounds of ways that no bar looks at."""
LONG = 0.02
"""Seconds of a step whose two ways are measured again."""
PAIR_SECONDS, MOST_PAIRS = 2.0, 8
"""For all these rounds, and how many there are at most."""
Times = dict[tuple[str, str], tuple[float, float]]
"""(way, direction): slowest rank and mean of the ranks, ms."""
Name = TypeVar("Name")


class Clock:
    """Times of all ranks. Without a GPU, of the host, for a rehearsal. ahead: ms that GPUs wait, so that hosts are ahead."""

    def __init__(self, peer: Peer, device: torch.device, ahead: float) -> None:
        self.peer, self.device = peer, device
        self.token = torch.zeros(1, device=device)
        self.cycles = int(ahead * CYCLES)
        self.marks: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
        self.host: dict[tuple[str, str], list[float]] = {}

    def time(self, name: str, direction: str, run: Callable[[], Any]) -> Any:
        dist.all_reduce(self.token, group=self.peer.group)
        if not ON_GPUS:
            started = time.perf_counter()
            result = run()
            self.marks.setdefault((name, direction), []).append((started, time.perf_counter()))
            return result
        torch.cuda._sleep(self.cycles)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        result = run()
        self.host.setdefault((name, direction), []).append(1e3 * (time.perf_counter() - began))
        end.record()
        self.marks.setdefault((name, direction), []).append((start, end))
        return result

    def times(self) -> tuple[Times, dict[tuple[str, str], tuple[float, float]]]:
        """Medians over the rounds, and the quartiles of the slowest rank."""
        if ON_GPUS:
            torch.cuda.synchronize()
        found: Times = {}
        spread = {}
        for key, pairs in self.marks.items():
            ms = [a.elapsed_time(b) if ON_GPUS else 1e3 * (b - a) for a, b in pairs]
            mine = torch.tensor(ms, device=self.device)
            everyone = [torch.empty_like(mine) for _ in range(self.peer.world)]
            dist.all_gather(everyone, mine, group=self.peer.group)
            table = torch.stack(everyone)
            slowest = table.max(0).values
            found[key] = slowest.median().item(), table.mean(0).median().item()
            low, high = torch.quantile(slowest, slowest.new_tensor([0.25, 0.75])).tolist()
            spread[key] = low, high
        return found, spread


class Pace(NamedTuple):
    """rounds of all ways, pairs: rounds of two alone. ahead: ms that GPUs wait for their hosts."""

    rounds: int
    pairs: int
    ahead: float


def pace(peer: Peer, device: torch.device, steps: Mapping[str, Sequence[Callable[[], Any]]], ways: int, left: float) -> Pace:
    """The same on all ranks, from one step of some of the ways, which makes the machine warm. left: seconds, at most.

    Whole squares of them, so many that one of `ways` ways takes about BUDGET.
    """
    longest, whole = 0.0, 0.0
    for calls in steps.values():
        for call in calls:
            started = time.monotonic()
            call()
            longest = max(longest, time.monotonic() - started)
            if ON_GPUS:
                torch.cuda.synchronize()
            whole += time.monotonic() - started
    found = torch.tensor([longest, whole, -left], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=peer.group)
    longest, whole, left = found.tolist()
    step, ahead = whole / max(1, len(steps)), min(LONGEST, 1.0 + 1.3e3 * longest)
    one = step + 2e-3 * ahead
    square = len(orders(len(steps)))
    most = min(BUDGET, -left / max(1, ways)) / one
    rounds = max(-(-FEWEST // square), int(min(MOST, most)) // square) * square
    pairs = min(MOST_PAIRS, int(min(PAIR_SECONDS, -left / 4) / one / 2)) if step > LONG else 0
    return Pace(rounds, pairs, ahead)


def orders(n: int) -> list[tuple[int, ...]]:
    """Orders of n things in which each follows every other one equally often (Williams 1949); twice n of them where n is odd."""
    if n < 2:
        return [tuple(range(n))]
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    rows = [tuple((x + i) % n for x in first) for i in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def rounds(compared: Sequence[Name], others: Sequence[Name], pair: Sequence[Name], planned: Pace) -> Iterator[list[Name]]:
    """What is measured in each round, in order; the same on all ranks."""
    rng = random.Random(0)
    compared, square = rng.sample(list(compared), len(compared)), orders(len(compared))
    for i in range(planned.rounds):
        yield [compared[x] for x in square[i % len(square)]] + (rng.sample(list(others), len(others)) if i < OTHERS else [])
    for i in range(planned.pairs if len(pair) > 1 else 0):
        yield list(pair if i % 2 == 0 else reversed(pair))
