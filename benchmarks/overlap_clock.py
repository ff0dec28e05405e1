"""Times of ways that are compared, on several GPUs at once: what is fair, and how often each is measured.

Ranks leave a barrier on their GPUs together and begin, hosts being ahead; a time is that of the slowest rank. GPUs wait before
the barrier for as long as a host needs, less what the call before takes them; rounds in which one had to wait for its host
after all are made again, with twice as long. The barrier wakes the links between the GPUs, which costs power for 50 ms: the
same before every call.

Long calls run at the limit of power: how fast they are depends on what ran before, by some percent, as a GPU comes cool out
of copies or a pause and hot out of attention. So ways that are compared, attention alone among them, go through whole
Williams squares with nothing in between: in as many rounds as there are of them each comes once right behind every other
one, and first once. All of them have equally many rounds, more where these do not tell on which side of a bar a way is. What
nothing is compared with comes after them, in rounds of its own.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.overlap_times import Taken
from benchmarks.overlap_ways import ON_GPUS
from maskc.runtime.comm import Peer

CYCLES = 2_000_000
"""Of a millisecond that a GPU waits."""
FIRST, SPARE, MARGIN, LONGEST = 2.0, 1.0, 1.3, 50.0
"""Milliseconds that a GPU gives its host: taken for a call not seen before; so many more, and so many times what calls took; at
most."""
PATIENCE = 6
"""How often a round is made whose host is late; then it is taken as it is, where none was in time."""
SHORT = 0.5
"""Seconds. A round that does not count is made twice where it is over sooner: what is done for the first time takes long."""
FEWEST, MOST, SECONDS = 8, 12, 6.5
"""Rounds of what is compared, in whole squares; the fewest whatever they take, where the time of all cells is not over."""
MOST_OPEN, SECONDS_OPEN = 24, 20.0
"""The same where a bar is not decided."""
OTHERS = 3
"""Rounds of ways that no bar looks at."""
Key: TypeAlias = tuple[str, str]
"""(way, direction)."""
Name = TypeVar("Name")


class OnHost(NamedTuple):
    """As `Taken`, in a rehearsal."""

    ms: float
    late: bool = False


class Figure(NamedTuple):
    """Of a call: slowest rank and mean of the ranks, ms."""

    slowest: float
    mean: float


class Round(NamedTuple):
    """late: a GPU had to wait for its host in one of the calls."""

    calls: dict[Key, Figure]
    late: bool


class Clock:
    """Times of all ranks. Without a GPU, of the host, for a rehearsal."""

    def __init__(self, peer: Peer, device: torch.device) -> None:
        self.peer, self.device = peer, device
        self.token = torch.zeros(1, device=device)
        self.host: dict[Key, list[float]] = {}
        self._rounds: list[list[tuple[Key, Taken | OnHost]]] = []
        self._ends: deque[torch.cuda.Event] = deque(maxlen=2)
        self._more: dict[Key, float] = {}
        self._shortest: dict[Key, float] = {}
        self._before: Key | None = None

    def begin(self) -> None:
        """A round."""
        self._rounds.append([])

    def time(self, name: str, direction: str, run: Callable[[], Any]) -> Any:
        """What `run` returns, which is enqueued and timed."""
        key = name, direction
        if ON_GPUS:
            if len(self._ends) > 1:  # else queues fill up, and a host that waits for room seems slow
                self._ends[0].synchronize()
            if (wait := self._head_start(key)) > 0:
                torch.cuda._sleep(int(wait * CYCLES))  # type: ignore[no-untyped-call]
        dist.all_reduce(self.token, group=self.peer.group)  # last: no GPU starts before the other, whichever host comes late
        gc.disable()
        try:
            result, taken = self._take(key, run) if ON_GPUS else _on_host(run)
        finally:
            gc.enable()
        self._rounds[-1].append((key, taken))
        self._before = key
        return result

    def _take(self, key: Key, run: Callable[[], Any]) -> tuple[Any, Taken]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        result = run()
        self.host.setdefault(key, []).append(1e3 * (time.perf_counter() - began))
        late = start.query()  # type: ignore[no-untyped-call]
        end.record()
        self._ends.append(end)
        return result, Taken(start, end, late)

    def _head_start(self, key: Key) -> float:
        """Milliseconds: the host comes to a call when this GPU begins with the one before."""
        host = statistics.median(self.host[key]) if key in self.host else FIRST
        needed = min(LONGEST, self._more.get(key, 1.0) * (SPARE + MARGIN * host))
        return needed - (0.0 if self._before is None else self._shortest.get(self._before, 0.0))

    def collect(self) -> list[Round]:
        """Those since the last time. All ranks enter, and their GPUs have nothing left to do."""
        if ON_GPUS:
            torch.cuda.synchronize()
        calls = [call for made in self._rounds for call in made]
        mine = torch.tensor([[taken.ms, taken.late] for _, taken in calls], device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.peer.world)]
        dist.all_gather(everyone, mine, group=self.peer.group)
        ms, late = torch.stack(everyone).unbind(2)
        figures = [Figure(*two) for two in zip(ms.max(0).values.tolist(), ms.mean(0).tolist(), strict=True)]
        found, at = [], 0
        for made in self._rounds:
            of = slice(at, at := at + len(made))
            found.append(Round(dict(zip((key for key, _ in made), figures[of], strict=True)), bool(late[:, of].any())))
        for key in {key for key, taken in calls if taken.late and key in self._shortest}:  # else it was not known what it takes
            self._more[key] = 2 * self._more.get(key, 1.0)
        for key, taken in calls:
            self._shortest[key] = min(taken.ms, self._shortest.get(key, taken.ms))
        self._rounds, self._before = [], None
        return found

    def latest(self, seconds: float) -> float:
        """The most of all ranks."""
        found = torch.tensor([seconds], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.peer.group)
        return float(found.item())


def _on_host(run: Callable[[], Any]) -> tuple[Any, OnHost]:
    started = time.perf_counter()
    return run(), OnHost(1e3 * (time.perf_counter() - started))


def turns(clock: Clock, run: Callable[[Name], object], rounds: Iterable[Sequence[Name]]) -> list[Round]:
    """Rounds, each with what runs in it in order, the same on all ranks; those again in which a host was late."""
    left, found, made = list(rounds), list[Round](), list[Round]()
    for _ in range(PATIENCE):
        for names in left:
            clock.begin()
            for name in names:
                run(name)
        made = clock.collect()
        found += [done for done in made if not done.late]
        left = [names for names, done in zip(left, made, strict=True) if done.late]
        if not left:
            break
    return found or made


def squares(
    clock: Clock,
    run: Callable[[Name], object],
    names: Sequence[Name],
    seconds: float,
    undecided: Callable[[Sequence[Round]], bool],
    most: int = MOST_OPEN,
) -> list[Round]:
    """Whole squares of what is compared, behind a round that does not count. seconds: at most, the same on all ranks.

    most: rounds of what is not decided.
    """
    names = random.Random(0).sample(list(names), len(names))
    square, found = [[names[x] for x in order] for order in orders(len(names))], list[Round]()
    started = time.monotonic()
    turns(clock, run, [names])
    if clock.latest(time.monotonic() - started) < SHORT:
        turns(clock, run, [names])
    used, longest = clock.latest(time.monotonic() - started), 0.0
    more = True
    while more:
        before, made = used, turns(clock, run, square)
        late = made[0].late
        if late and found:  # hosts that were in time before
            break
        found += made
        used = clock.latest(time.monotonic() - started)
        longest = max(longest, used - before)
        more = not late and goes_on(len(found), used + longest, seconds, undecided(found), most)
    return found


def medians(figures: Sequence[Figure]) -> tuple[Figure, tuple[float, float]]:
    """Of rounds, and the quartiles of the slowest rank."""
    slowest, mean = np.array(figures).T
    low, high = np.quantile(slowest, (0.25, 0.75))
    return Figure(float(np.median(slowest)), float(np.median(mean))), (float(low), float(high))


def goes_on(rounds: int, until: float, seconds: float, undecided: bool, most: int = MOST_OPEN) -> bool:
    """Whether another square is worth its time. until: seconds of all of them, it included. most: as in `squares`."""
    if until > seconds:
        return False
    if rounds < FEWEST or (rounds < MOST and until <= SECONDS):
        return True
    return rounds < most and until <= SECONDS_OPEN * most / MOST_OPEN and undecided


def orders(n: int) -> list[tuple[int, ...]]:
    """Orders of n things in which each follows every other one equally often (Williams 1949); twice n of them where n is odd."""
    if n < 2:
        return [tuple(range(n))]
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    rows = [tuple((x + i) % n for x in first) for i in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]
