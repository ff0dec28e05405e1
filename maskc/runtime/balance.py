"""Balancing: chunks to ranks, every rank at most ceil(N / P) chunks, the largest workload as small as can be had.

Stage 1: longest-processing-time-first; then exact repartition of rank pairs, accepted when the pair's own peak drops
(ties at the global peak do not stall it); then exact covers over as many ranks as fit (cover.py), which also prove lower
bounds. Integers only, seeded, and limited by work done, never by a clock: every rank computes the same assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from maskc.runtime.cover import CoverProblem, cover_ranks
from maskc.runtime.split import SPLIT_LIMIT, Split, best_splits

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop: within `gap_ppm` millionths of the lower bound, or after so many pair splits and cover nodes.

    The limits stand for time (a split of k <= 8 takes about 10 us, a node about 5 us) because a clock would end
    differently on every rank.
    """

    gap_ppm: int = 1000
    splits: int = 512
    nodes: int = 1000


REACH_LIMIT = 1 << 27
"""Bits that may be shifted for a bound of sums."""
RUN_TIME = Effort()
"""Default of a plan: 0.1 % above the bound, or about 5 ms."""
THOROUGH = Effort(gap_ppm=0, splits=100_000, nodes=400_000)
"""About 2 s at most: for benchmarks and for plans that serve many steps."""
PARTNER_BATCH = 4
COVER_WIDTH = 60_000
COVER_FAILURES = 60
FIRST_NODES = 1500
"""Nodes of the first search for a target; later ones get more."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`owner[i]` = rank of chunk i; `workloads` per rank. No assignment has a makespan below `proven_bound`."""

    owner: tuple[int, ...]
    workloads: tuple[int, ...]
    lower_bound: int
    proven_bound: int

    @property
    def makespan(self) -> int:
        return max(self.workloads)

    @property
    def optimal(self) -> bool:
        """The makespan meets the proven bound: a certificate."""
        return self.makespan == self.proven_bound

    @property
    def imbalance(self) -> float:
        """Makespan over mean workload; 1.0 when there is no work."""
        total = sum(self.workloads)
        return self.makespan * len(self.workloads) / total if total else 1.0


def balance(weights: Sequence[int], ranks: int, effort: Effort = RUN_TIME, pairs: bool = True, covers: bool = True) -> Assignment:
    """Stage 1 for chunk workloads (non-negative integers). `pairs` and `covers` switch its parts off, for comparison.

    N need not divide by the number of ranks: missing chunks count as empty ones.
    """
    search = _Search.start(weights, ranks, effort)
    if search.k > 2 and pairs:
        search.pair_descent()
        if covers:
            search.cover()
    return search.result()


def with_owner(a: Assignment, weights: Sequence[int], owner: Sequence[int]) -> Assignment:
    """The same chunks owned otherwise, with the bounds of `a`."""
    loads = [0] * len(a.workloads)
    for weight, rank in zip(weights, owner, strict=True):
        loads[rank] += weight
    return replace(a, owner=tuple(owner), workloads=tuple(loads))


def bounds(weights: Ints, ranks: int, k: int) -> int:
    """Lower bound of the makespan of ranks * k weights (descending), k per rank.

    The largest of: the mean rounded up; for each j, the j + 1 lightest of the ranks * j + 1 heaviest (some rank holds
    that many of them) with the k - j - 1 lightest of all; the smallest sum of k weights that reaches those two.
    """
    up_to = [0, *accumulate(weights.tolist())]
    bound = -(-up_to[-1] // ranks)
    for j in range(k):
        crowded, lightest = up_to[ranks * j + 1] - up_to[ranks * j - j], up_to[-1] - up_to[-(k - j)]
        bound = max(bound, crowded + lightest)
    return _reachable(weights, k, bound)


def _reachable(weights: Ints, k: int, bound: int) -> int:
    """The smallest sum of exactly k weights that is >= bound; bound itself when finding it would take too long."""
    size = bound + int(weights.max(initial=0)) + 1
    if size * len(weights) * k > REACH_LIMIT:
        return bound
    keep = (1 << size) - 1
    sums = [1] + [0] * k  # bit s of sums[c]: some c weights sum to s
    for i, w in enumerate(weights.tolist()):
        left = len(weights) - 1 - i
        for c in range(min(k, i + 1), max(0, k - left - 1), -1):  # fewer could not become k any more
            sums[c] |= (sums[c - 1] << w) & keep
    above = sums[k] >> bound
    return bound + ((above & -above).bit_length() - 1) if above else bound


def lpt(weights: Ints, ranks: int, k: int) -> NDArray[np.intp]:
    """Items per rank [ranks, k]: one after the other to the least loaded rank with a free slot; LPT if `weights` descend."""
    groups: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, r) for r in range(ranks)]
    for i, w in enumerate(weights.tolist()):
        load, r = heapq.heappop(heap)
        groups[r].append(i)
        if len(groups[r]) < k:
            heapq.heappush(heap, (load + w, r))
    return np.array(groups, dtype=np.intp).reshape(ranks, k)


def greedy(weights: Sequence[int], ranks: int) -> Assignment:
    """The min-heap way: chunks in the order of the sequence, each to the least loaded rank with a free slot."""
    w = np.asarray(weights, dtype=np.int64)
    k = max(1, -(-len(w) // ranks))
    padded = np.concatenate((w, np.zeros(ranks * k - len(w), np.int64)))
    groups = lpt(padded, ranks, k)
    owner = np.empty(ranks * k, np.int64)
    owner[groups] = np.arange(ranks)[:, None]
    bound = bounds(-np.sort(-padded), ranks, k)
    return Assignment(tuple(owner[: len(w)].tolist()), tuple(padded[groups].sum(1).tolist()), bound, bound)


class _Search:
    """The working state of stage 1: items sorted descending, `groups` [ranks, k] of item numbers, their loads."""

    def __init__(self, weights: Ints, order: NDArray[np.intp], real: int, unit: int, ranks: int, effort: Effort) -> None:
        self.weights, self.order, self.real, self.unit, self.ranks, self.effort = weights, order, real, unit, ranks, effort
        self.k = len(weights) // ranks
        self.groups = lpt(weights, ranks, self.k)
        self.loads: Ints = weights[self.groups].sum(1)
        self.lower = bounds(weights, ranks, self.k)
        self.proven = self.peak if self.k <= 2 else self.lower  # heaviest with lightest is optimal for two per rank
        self.splits, self.nodes = effort.splits, effort.nodes
        self.rng = np.random.default_rng(0)

    @classmethod
    def start(cls, weights: Sequence[int], ranks: int, effort: Effort) -> _Search:
        real = np.asarray(weights, dtype=np.int64)
        k = max(1, -(-len(real) // ranks))
        padded = np.zeros(ranks * k, np.int64)
        padded[: len(real)] = real
        order = np.argsort(-padded, kind="stable")
        unit = max(1, int(np.gcd.reduce(padded)))
        return cls(padded[order] // unit, order, len(real), unit, ranks, effort)

    @property
    def peak(self) -> int:
        return int(self.loads.max())

    @property
    def goal(self) -> int:
        """A makespan that is good enough."""
        return self.proven + self.proven * self.effort.gap_ppm // 1_000_000

    def result(self) -> Assignment:
        owner = np.empty(len(self.order), np.int64)
        owner[self.order[self.groups]] = np.arange(self.ranks)[:, None]
        u = self.unit
        loads = tuple(int(x) * u for x in self.loads)
        return Assignment(tuple(owner[: self.real].tolist()), loads, self.lower * u, self.proven * u)

    def _set(self, ranks: Sequence[int], groups: NDArray[np.intp]) -> None:
        self.groups[list(ranks)] = groups
        self.loads[list(ranks)] = self.weights[groups].sum(1)

    def pair_descent(self) -> None:
        """Split the heaviest rank with the partner that lowers their common peak most, until no rank above the goal can."""
        if self.k > SPLIT_LIMIT:
            return
        parked = np.zeros(self.ranks, bool)
        while self.splits > 0:
            over = np.flatnonzero((self.loads > self.goal) & ~parked)
            if len(over) == 0:
                return
            heavy = int(over[self.loads[over].argmax()])
            found = self._best_partner(heavy)
            if found is None:
                parked[heavy] = True
                continue
            partner, split = found
            items = np.concatenate((self.groups[heavy], self.groups[partner]))
            self._set((heavy, partner), np.stack((items[split.first], items[~split.first])))
            parked[:] = False

    def _best_partner(self, heavy: int) -> tuple[int, Split] | None:
        """The partner whose exact split with `heavy` has the lowest peak below the load of `heavy`, lightest first."""
        partners = np.argsort(self.loads, kind="stable")
        partners = partners[partners != heavy]
        best: tuple[int, Split] | None = None
        best_peak = int(self.loads[heavy])
        for at in range(0, len(partners), PARTNER_BATCH):
            batch = partners[at : at + PARTNER_BATCH]
            if best_peak * 2 <= self.loads[heavy] + self.loads[batch[0]]:
                break  # no later pair has a smaller mean
            items = np.concatenate((np.repeat(self.groups[heavy][None], len(batch), 0), self.groups[batch]), axis=1)
            self.splits -= len(batch)
            for partner, split in zip(batch.tolist(), best_splits(self.weights[items]), strict=True):
                if split.peak < best_peak:
                    best, best_peak = (partner, split), split.peak
            if best_peak <= self.goal:
                break
        return best

    def cover(self) -> None:
        """Exact covers: of all ranks at once where they fit, else of the heaviest with some others."""
        m = min(self.ranks, cover_ranks(self.k))
        if self.peak <= self.goal or m < 3:
            return
        if m == self.ranks:
            self._cover_all()
        else:
            self._cover_some(m)

    def _cover_all(self) -> None:
        problem = CoverProblem(self.weights, self.k)
        limit = min(FIRST_NODES, self.nodes // 3)  # a small budget is not spent on the first target alone
        target = self._first_target(problem)
        while self.nodes > 0 and self.peak > self.goal:
            found = problem.search(target, min(limit, self.nodes), self.rng)
            self.nodes -= max(found.nodes, 100)
            if found.groups is not None:
                self._set(range(self.ranks), np.array(found.groups, dtype=np.intp))
                target = self.proven
            elif found.impossible:
                self.proven = max(self.proven, problem.next_sum(target))
                target = self.proven
            elif target + 1 < self.peak:
                target = min(self.peak - 1, self.proven + max(1, 2 * (target - self.proven)))
            else:
                limit *= 2
                target = max(self.proven, (self.proven + self.peak - 1) // 2)
            if target >= self.peak:
                limit *= 2
                target = self.peak - 1

    def _first_target(self, problem: CoverProblem) -> int:
        """The loosest target, up to the goal and 16 above the bound, that keeps the list of candidates short."""
        for extra in (16, 8, 4, 2, 1):
            target = self.proven + extra
            if target <= self.goal and problem.width(target) <= COVER_WIDTH:
                return target
        return self.proven

    def _cover_some(self, m: int) -> None:
        failures = 0
        while self.nodes > 0 and self.peak > self.goal and failures < COVER_FAILURES:
            ranks = self._team(m)
            items = np.sort(self.groups[ranks].ravel())
            target = max(self.goal, -(-int(self.loads[ranks].sum()) // m))
            if target >= self.peak:
                failures, self.nodes = failures + 1, self.nodes - 100
                continue
            found = CoverProblem(self.weights[items], self.k).search(target, min(FIRST_NODES, self.nodes), self.rng)
            self.nodes -= max(found.nodes, 100)
            if found.groups is None:
                failures += 1
                continue
            self._set(ranks, items[np.array(found.groups, dtype=np.intp)])
            self.pair_descent()

    def _team(self, m: int) -> list[int]:
        """The heaviest rank, about half of the others from the lightest, the rest at random."""
        by_load = np.argsort(self.loads, kind="stable")
        heavy, others = int(by_load[-1]), by_load[:-1]
        light = others[: (m - 1) // 2]
        rest = self.rng.permutation(others[(m - 1) // 2 :])[: m - 1 - len(light)]
        return [heavy, *light.tolist(), *rest.tolist()]
