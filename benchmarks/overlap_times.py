"""How benchmarks/overlap.py times what it compares: rounds of everything in random order, and pairs of two close things."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import numpy as np
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime.protocol import Stream
from maskc.runtime.transport import CudaQueues

CLOCK = 1.98e9
"""Cycles per second of the GPU."""
HICCUP = 1e-3
"""Seconds that the host may take longer than it did before, at any run."""
FEWEST, FEWEST_LONG, MOST = 15, 5, 60
"""Rounds of a cell; of one where something takes longer than LONG."""
LONG = 50.0
"""Milliseconds."""
FEWEST_PAIRS, MOST_PAIRS = 5, 40
PATIENCE, LONGEST_ISSUE = 5, 50e-3
"""How often each run is taken again because its host came late, and seconds that the GPU sleeps for a host at most."""
SIDES: tuple[Stream, Stream] = ("copy", "send")
Runs = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]


class Taken(NamedTuple):
    """One run that is enqueued. late: the GPU was there before all of it was."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    late: bool

    @property
    def ms(self) -> float:
        return float(self.start.elapsed_time(self.end))


class Stopwatch:
    """Times runs on torch's current stream and the streams of `queues`; finish: after which a rank can be used again.

    The GPU sleeps before each run until the host has enqueued it, as in a model, where the host is ahead; where a host was
    slower than before, the run does not count. Copies start no earlier than the clock. one_by_one: each ends before the next
    is enqueued, where queues would fill up. results: what each run gave. Raises MaskcError M721 where a chunk did not arrive.
    """

    def __init__(self, runs: Runs, queues: Sequence[CudaQueues], finish: Callable[[], None], one_by_one: bool = False) -> None:
        self.runs, self.queues, self.finish, self.one_by_one = runs, queues, finish, one_by_one
        self.results: dict[str, Any] = {}
        self._issue: dict[str, float] = {}
        self._patience = dict.fromkeys(runs, PATIENCE)
        for again in range(2):
            for name, run in runs.items():
                started = time.monotonic()
                try:
                    self.results[name] = run()
                    took = time.monotonic() - started
                    torch.cuda.synchronize()
                    finish()
                except MaskcError as problem:
                    problem.add_note(name)
                    raise
                self._issue[name] = min(took, LONGEST_ISSUE) if again else took

    def rounds(self, worth: Callable[[Times], float], seldom: Collection[str] = (), fewest: int = FEWEST) -> Times:
        """Milliseconds of every run in every round, in random order.

        worth: seconds that may be spent, by the times so far. seldom: not in each round; few figures need them. fewest:
        rounds.
        """
        rng, started = random.Random(0), time.monotonic()
        out: Times = {name: [] for name in self.runs}
        rounds = 0
        while rounds < fewest or (rounds < MOST and time.monotonic() - started < worth(out)):
            names = [n for n in self.runs if n not in seldom or rounds % (fewest // 5 + 1) == 0]
            rounds += 1
            for name, ms in self._round(rng.sample(names, len(names))):
                out[name].append(ms)
            if max(out[name][0] for name in self.runs if name not in seldom) > LONG:
                fewest = min(fewest, FEWEST_LONG)
        return out

    def ratios(self, a: str, b: str, seconds: float, bar: float) -> list[float]:
        """Time of b over that of a, each from a, b, b, a behind each other, so that a drift of the clock cancels out.

        bar: on which side of it the ratio is, is to be told where there is time for it.
        """
        out: list[float] = []
        until = time.monotonic() + seconds
        while len(out) < FEWEST_PAIRS or (len(out) < MOST_PAIRS and time.monotonic() < until and _open(out, bar)):
            taken = [self._enqueue(name) for name in (a, b, b, a)]
            self._wait()
            first, second, third, fourth = (run.ms for run in taken)
            out.append((second + third) / (first + fourth))
        return out

    def _round(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Milliseconds of each; of those whose host came late, when they are taken again."""
        while names:
            taken = []
            for name in names:
                taken.append((name, self._enqueue(name)))
                if self.one_by_one:
                    self._wait()
            self._wait()
            names = [name for name, run in taken if run.late and self._patience[name]]
            for name in names:
                self._patience[name] -= 1
                self._issue[name] = min(2 * self._issue[name], LONGEST_ISSUE)
            yield from ((name, run.ms) for name, run in taken if name not in names)

    def _enqueue(self, name: str) -> Taken:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int((self._issue[name] * 1.3 + HICCUP) * CLOCK))  # type: ignore[no-untyped-call]
        start.record()
        for of, stream in product(self.queues, SIDES):
            of.follow(stream, "compute")
        gc.disable()
        try:
            self.runs[name]()
        finally:
            gc.enable()
        for of, stream in product(self.queues, SIDES):
            of.follow("compute", stream)
        late = start.query()  # type: ignore[no-untyped-call]
        end.record()
        return Taken(start, end, late)

    def _wait(self) -> None:
        torch.cuda.synchronize()
        self.finish()


def figures(t: dict[str, float], name: str) -> dict[str, float | None]:
    """E and hidden / min of the medians; None where nothing is copied."""
    attention, copies, overlapped = t["attention"], t["copies"], t[name]
    if copies <= 0:
        return {"e": None, "hidden": None}
    return {
        "e": 1 - (overlapped - attention) / copies,
        "hidden": (attention + copies - overlapped) / min(attention, copies),
    }


def interval(times: Times, name: str) -> tuple[float, float]:
    """95 % of E over resampled medians; what was timed in the same rounds is drawn together."""
    drawn = {n: _medians(times[n]) for n in ("attention", "copies", name)}
    low, high = np.percentile(1 - (drawn[name] - drawn["attention"]) / drawn["copies"], (2.5, 97.5))
    return float(low), float(high)


def middle_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of the means of all pairs (Hodges and Lehmann 1963), and the two of these means that it lies between.

    The middle of the values' distribution does so, 95 % of the time, if that is symmetric (Wilcoxon's signed ranks); of five
    values or fewer the two are the least and the greatest. As little moved by what happens once as the median, and as firm as
    that of one and a half times as many values.
    """
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    signs = np.ones(1)  # by the sum of the ranks of what lies above the middle: how many of all choices of signs
    for rank in range(1, len(values) + 1):
        signs = np.pad(signs, (0, rank)) + np.pad(signs, (rank, 0))
    cut = max(0, int((2 * signs.cumsum() <= 0.05 * signs.sum()).sum()) - 1)
    return statistics.median(means), means[cut], means[-1 - cut]


def _open(ratios: Sequence[float], bar: float) -> bool:
    _, low, high = middle_of(ratios)
    return low <= bar <= high


def _medians(values: Sequence[float]) -> Any:
    rng = np.random.default_rng(len(values))
    return np.median(rng.choice(np.array(values), (1000, len(values))), axis=1)
