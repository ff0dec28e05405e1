"""Exact cover: m * k items into m groups of k, every sum at most a target; found, proved impossible, or given up.

With total weight W and target T the groups may stay below T by m * T - W together. So only k-subsets with a sum in
[T - budget, T] can occur, usually a few thousand, and a depth-first search that always covers the heaviest item left
and spends the budget as it goes needs few nodes. A search that ends by itself without a cover proves that none exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Masks = NDArray[np.uint64]
SUBSET_LIMIT = 750_000
"""A cover takes at most this many k-subsets of its m * k items, and at most 64 items."""
CANDIDATE_LIMIT = 2_000_000
"""Pairs of half-subsets looked at while listing candidates; a wider window counts as given up."""


def cover_ranks(k: int) -> int:
    """How many ranks of k items one cover can repartition: C(m * k, k) <= SUBSET_LIMIT and m * k <= 64. 0 for none."""
    m = 64 // k
    while m > 1 and _choose(m * k, k) > SUBSET_LIMIT:
        m -= 1
    return m if m > 1 else 0


def _choose(n: int, k: int) -> int:
    out = 1
    for i in range(k):
        out = out * (n - i) // (i + 1)
    return out


@dataclass(frozen=True, slots=True)
class Cover:
    """`groups` (item numbers) when found. `impossible`: the search ended without one, which is a proof. `nodes`: work done."""

    groups: tuple[tuple[int, ...], ...] | None
    impossible: bool
    nodes: int


class CoverProblem:
    """Items to repartition into groups of k; one object serves searches for several targets.

    Args:
        weights: int64 [m * k], descending, m * k <= 64.
    """

    def __init__(self, weights: Ints, k: int) -> None:
        self.weights, self.k, self.m = weights, k, len(weights) // k
        self.total = int(weights.sum())
        self.ties = len(np.unique(weights)) < len(weights)
        # a candidate is its k // 2 first items and its other items; both halves are listed and matched by their sums
        self.low_picks, self.low_masks = _half_subsets(len(weights), k // 2)
        self.high_picks, self.high_masks = _half_subsets(len(weights), k - k // 2)
        self.low_sums = weights[self.low_picks].sum(1)
        high_sums = weights[self.high_picks].sum(1)
        self.high_order = np.argsort(high_sums, kind="stable")
        self.high_sums = high_sums[self.high_order]

    def width(self, target: int) -> int:
        """Pairs of half-subsets that `search` would have to look at for this target."""
        first, last = self._window(target)
        return int((last - first).sum())

    def search(self, target: int, node_limit: int, rng: np.random.Generator) -> Cover:
        """Groups with sums <= target. `rng` orders candidates of equal slack, so that restarts differ."""
        if self.m * target < self.total:
            return Cover(None, True, 0)
        if self.width(target) > CANDIDATE_LIMIT:
            return Cover(None, False, 0)
        masks, slack = self._candidates(target)
        lowest = _lowest_bit(masks)
        order = np.lexsort((rng.random(len(masks)), slack, lowest))
        run = _Search(node_limit, self.weights, self.ties)
        chosen = run.search(masks[order], slack[order], lowest[order], self.m * target - self.total)
        if chosen is None:
            return Cover(None, not run.stopped, run.nodes)
        return Cover(tuple(tuple(_bits(c, len(self.weights))) for c in chosen), False, run.nodes)

    def next_sum(self, after: int) -> int:
        """The smallest sum above `after` that a group can have: the next makespan to consider."""
        at = np.searchsorted(self.high_sums, after - self.low_sums, side="right")
        there = at < len(self.high_sums)
        return int((self.low_sums[there] + self.high_sums[at[there]]).min())

    def _window(self, target: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        least = target - (self.m * target - self.total)
        first = np.searchsorted(self.high_sums, least - self.low_sums)
        return first, np.searchsorted(self.high_sums, target - self.low_sums, side="right")

    def _candidates(self, target: int) -> tuple[Masks, Ints]:
        """Masks and slack (target - sum) of the k-subsets that a cover within the target may use."""
        first, last = self._window(target)
        counts = last - first
        low = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(len(low)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        high = self.high_order[at]
        ordered = self.low_picks[low, -1] < self.high_picks[high, 0]
        low, high, at = low[ordered], high[ordered], at[ordered]
        return self.low_masks[low] | self.high_masks[high], target - self.low_sums[low] - self.high_sums[at]


def _bits(mask: int, items: int) -> list[int]:
    return [i for i in range(items) if mask >> i & 1]


def _lowest_bit(masks: Masks) -> NDArray[np.int64]:
    low = masks & (~masks + np.uint64(1))
    return np.frexp(low.astype(np.float64))[1].astype(np.int64) - 1


class _Search:
    """Depth-first search over candidate groups. `nodes` counts the groups tried, `stopped` says that the limit cut it short."""

    def __init__(self, node_limit: int, weights: Ints, ties: bool) -> None:
        self.node_limit, self.nodes, self.stopped, self.ties, self.weights = node_limit, 0, False, ties, weights
        self.everything = (1 << len(weights)) - 1

    def search(self, masks: Masks, slack: Ints, lowest: Ints, budget: int, covered: int = 0) -> list[int] | None:
        """Groups that cover the rest, or None. The candidates are disjoint from `covered` and sorted by lowest item."""
        if covered == self.everything:
            return []
        if len(masks) == 0 or int(np.bitwise_or.reduce(masks)) | covered != self.everything:
            return None
        end = int(np.searchsorted(lowest, lowest[0], side="right"))
        rest, rest_slack, rest_lowest = masks[end:], slack[end:], lowest[end:]
        tried: set[tuple[int, ...]] = set()
        for pick, cost in zip(masks[:end].tolist(), slack[:end].tolist(), strict=True):
            if cost > budget:
                break
            if self.ties and self._seen(pick, tried):
                continue
            if self.nodes >= self.node_limit:
                self.stopped = True
                return None
            self.nodes += 1
            free = (rest & np.uint64(pick)) == 0
            free &= rest_slack <= budget - cost
            found = self.search(rest[free], rest_slack[free], rest_lowest[free], budget - cost, covered | pick)
            if found is not None:
                return [pick, *found]
        return None

    def _seen(self, pick: int, tried: set[tuple[int, ...]]) -> bool:
        """Groups of equal weights lead to equal rests: one of them is enough."""
        key = tuple(self.weights[_bits(pick, len(self.weights))].tolist())
        if key in tried:
            return True
        tried.add(key)
        return False


@lru_cache(maxsize=32)
def _half_subsets(n: int, size: int) -> tuple[NDArray[np.intp], Masks]:
    """All subsets of a size, as ascending item numbers [C(n, size), size] and as bit masks."""
    picks = np.array(list(combinations(range(n), size)), dtype=np.intp)
    return picks, np.bitwise_or.reduce(np.uint64(1) << picks.astype(np.uint64), axis=1)
