"""An independent branch and bound for chunks to ranks: confirms the optimum of an instance, or brackets it.

It shares no code with maskc.runtime.balance. For a target T it fills one rank after another: the heaviest item left,
then its partners in descending order, as long as the rank can still reach T minus the slack that all ranks have together.
The first feasible T, from the lower bound upwards, is the optimum; a search that runs out of nodes leaves a bracket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """No assignment has a makespan below `low`; one with `high` exists."""

    low: int
    high: int

    @property
    def exact(self) -> bool:
        return self.low == self.high


class OutOfNodes(Exception):
    pass


def solve(weights: Sequence[int], ranks: int, node_limit: int = 200_000, known: int | None = None) -> Bracket:
    """Bracket of the smallest makespan with at most ceil(n / ranks) chunks a rank. `known`: a makespan that was reached."""
    k = max(1, -(-len(weights) // ranks))
    items = sorted([*weights, *[0] * (ranks * k - len(weights))], reverse=True)
    low = max(-(-sum(items) // ranks), items[0] + sum(items[len(items) - k + 1 :] if k > 1 else []))
    high = min(_first_fit(items, ranks, k), known if known is not None else sum(items))
    while low < high:
        search = _Fill(items, k, low, ranks * low - sum(items), node_limit)
        try:
            if search.feasible(tuple(range(len(items))), search.slack):
                return Bracket(low, low)
        except OutOfNodes:
            return Bracket(low, high)
        low += 1
    return Bracket(high, high)


def _first_fit(items: Sequence[int], ranks: int, k: int) -> int:
    loads, counts = [0] * ranks, [0] * ranks
    for w in items:
        r = min((r for r in range(ranks) if counts[r] < k), key=lambda r: (loads[r], r))
        loads[r] += w
        counts[r] += 1
    return max(loads)


class _Fill:
    def __init__(self, items: Sequence[int], k: int, target: int, slack: int, node_limit: int) -> None:
        self.items, self.k, self.target, self.slack, self.nodes = items, k, target, slack, node_limit

    def feasible(self, left: tuple[int, ...], slack: int) -> bool:
        """Can the items `left` (numbers, heaviest first) be grouped by k within the target, losing at most `slack`?"""
        if not left:
            return True
        rest = left[1:]
        return self._partners(rest, 0, self.k - 1, self.target - self.items[left[0]], slack, ())

    def _partners(self, rest: tuple[int, ...], at: int, count: int, room: int, slack: int, taken: tuple[int, ...]) -> bool:
        """Choose `count` more of rest[at:] with a sum in [room - slack, room], then go on with the next rank."""
        self.nodes -= 1
        if self.nodes < 0:
            raise OutOfNodes
        if count == 0:
            if not 0 <= room <= slack:
                return False
            gone = set(taken)
            return self.feasible(tuple(i for i in rest if i not in gone), slack - room)
        w = self.items
        previous = None
        for i in range(at, len(rest) - count + 1):
            weight = w[rest[i]]
            if weight == previous:
                continue  # equal items are interchangeable
            previous = weight
            if sum(w[j] for j in rest[i : i + count]) < room - slack:
                return False  # the heaviest choice left is too light
            if weight + sum(w[j] for j in rest[len(rest) - count + 1 :]) > room:
                continue  # even with the lightest others
            if self._partners(rest, i + 1, count - 1, room - weight, slack, (*taken, rest[i])):
                return True
        return False
