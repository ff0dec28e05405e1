"""A lower bound by counting: chunks that come in few sizes do not fit evenly, however they are dealt out.

The heaviest chunks are told apart by size; the lightest few are one class, all others another, and so many chunks of a class
weigh at least what its lightest ones do. A rank may then take certain numbers of each class without exceeding a makespan T.
Whether the ranks together can take every chunk is decided exactly, by dynamic programming over the ranks. If they cannot,
T is impossible. Shares no code with maskc.runtime.balance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

STATES = 20_000
"""Numbers of taken heavy chunks that are told apart: as many sizes are kept as this allows."""

Share = tuple[int, ...]
"""Chunks of each class on one rank."""


@dataclass(frozen=True)
class _Classes:
    """Per class, the least that 0, 1, 2, ... of its chunks weigh together; the last class has no need to be counted."""

    least: tuple[tuple[int, ...], ...]
    k: int

    @classmethod
    def of(cls, items: Sequence[int], k: int) -> _Classes:
        """Of items in descending order, k a rank."""
        states, kept = 1, 0
        groups: list[Sequence[int]] = []
        for size, count in sorted(Counter(items).items(), reverse=True):
            states *= count + 1
            if states > STATES:
                break
            groups.append([size] * count)
            kept += count
        few = min(2 * k - 1, len(items) - kept)
        groups += [items[::-1][:few], items[kept : len(items) - few][::-1]]
        return cls(tuple((0, *accumulate(group)) for group in groups), k)

    @property
    def counts(self) -> Share:
        return tuple(len(x) - 1 for x in self.least[:-1])

    def shares(self, limit: int, taken: Share = (), weight: int = 0) -> Iterator[Share]:
        """Everything that a rank can hold within the limit."""
        left, least = self.k - sum(taken), self.least[len(taken)]
        if len(taken) == len(self.least) - 1:
            if left < len(least) and weight + least[left] <= limit:
                yield taken
            return
        for n in range(min(left, len(least) - 1) + 1):
            if weight + least[n] > limit:
                return
            yield from self.shares(limit, (*taken, n), weight + least[n])

    def fit(self, ranks: int, limit: int) -> bool:
        """Whether so many ranks can take all of them."""
        taken: NDArray[np.bool_] = np.zeros([c + 1 for c in self.counts], dtype=bool)
        taken[(0,) * len(self.counts)] = True
        shares = list(self.shares(limit))
        for _ in range(ranks):
            after = np.zeros_like(taken)
            for share in shares:
                source = taken[tuple(slice(0, c + 1 - s) for c, s in zip(self.counts, share, strict=True))]
                after[tuple(slice(s, None) for s in share)] |= source
            taken = after
        return bool(taken[(-1,) * len(self.counts)])


def impossible(weights: Sequence[int], ranks: int, makespan: int) -> bool:
    """Whether counting proves that no assignment with at most ceil(n / ranks) chunks a rank has such a makespan."""
    return not _classes(weights, ranks).fit(ranks, makespan)


def counting_bound(weights: Sequence[int], ranks: int, reached: int) -> int:
    """The smallest makespan that is not proved impossible. `reached`: one that exists."""
    classes = _classes(weights, ranks)
    low, high = -(-sum(weights) // ranks), reached
    while low < high:
        middle = (low + high) // 2
        if classes.fit(ranks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _classes(weights: Sequence[int], ranks: int) -> _Classes:
    k = max(1, -(-len(weights) // ranks))
    return _Classes.of(sorted([*weights, *[0] * (ranks * k - len(weights))], reverse=True), k)
