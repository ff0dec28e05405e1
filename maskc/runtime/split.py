"""Exact two-way split: 2k items into two halves of k items each, with the smaller possible larger sum.

Up to k = 8 the halves are a constant 0/1 table and one matrix product rates all of them for many rank pairs at once;
beyond, the items are cut in two and the subsets of both parts meet in the middle. All sums are exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
TABLE_LIMIT = 8
"""Largest k whose table of halves (6435 x 16) is worth keeping."""
SPLIT_LIMIT = 16
"""Largest k that `best_splits` takes: meet in the middle then costs about 10 ms."""
EXACT_FLOAT32 = 1 << 24
EXACT_FLOAT64 = 1 << 53


@dataclass(frozen=True, slots=True)
class Split:
    """Peak of the two sums, and which of the 2k items form the first half (bool [2k])."""

    peak: int
    first: NDArray[np.bool_]


def best_splits(items: Ints) -> list[Split]:
    """The best halving of each row of `items` [pairs, 2k], k <= SPLIT_LIMIT, non-negative. Ties: the first in table order."""
    k = items.shape[1] // 2
    return _by_table(items, k) if k <= TABLE_LIMIT else [_meet(row, k) for row in items]


@lru_cache(maxsize=TABLE_LIMIT)
def _halves(k: int, double: bool) -> NDArray[np.float32] | NDArray[np.float64]:
    """0/1 table [C(2k - 1, k - 1), 2k] of the halves that hold item 0."""
    picks = np.array(list(combinations(range(1, 2 * k), k - 1)), dtype=np.intp)
    table = np.zeros((len(picks), 2 * k), np.float64 if double else np.float32)
    table[:, 0] = 1
    table[np.arange(len(picks))[:, None], picks] = 1
    return table


def _by_table(items: Ints, k: int) -> list[Split]:
    total = items.sum(1)
    top = int(total.max(initial=0))
    if top >= EXACT_FLOAT64:
        return [_meet(row, k) for row in items]
    table = _halves(k, top >= EXACT_FLOAT32)
    sums = table @ items.T.astype(table.dtype)
    peaks = np.maximum(sums, total.astype(table.dtype) - sums)
    best = peaks.argmin(0)
    return [Split(int(peaks[row, i]), table[row] > 0) for i, row in enumerate(best)]


@lru_cache(maxsize=SPLIT_LIMIT)
def _subsets(n: int) -> tuple[NDArray[np.bool_], tuple[NDArray[np.intp], ...]]:
    """All subsets of n items as bool [2^n, n], and their numbers bucketed by size."""
    bits = (np.arange(1 << n)[:, None] >> np.arange(n) & 1).astype(bool)
    size = bits.sum(1)
    return bits, tuple(np.flatnonzero(size == s) for s in range(n + 1))


def _meet(row: Ints, k: int) -> Split:
    """Meet in the middle: sums of the left k items against sorted sums of the right k, per subset size."""
    total = int(row.sum())
    bits, buckets = _subsets(k)
    left, right = bits @ row[:k], bits @ row[k:]
    best = Split(total, np.arange(2 * k) < k)
    best_peak = total + 1
    for size in range(k + 1):
        left_ids, right_ids = buckets[size], buckets[k - size]
        right_ids = right_ids[np.argsort(right[right_ids], kind="stable")]
        wanted = (total + 1) // 2 - left[left_ids]
        at = np.searchsorted(right[right_ids], wanted).clip(max=len(right_ids) - 1)  # smallest sum >= half, or the largest
        sums = left[left_ids] + right[right_ids[at]]
        peaks = np.maximum(sums, total - sums)
        i = int(peaks.argmin())
        if peaks[i] < best_peak:
            best_peak = int(peaks[i])
            best = Split(best_peak, np.concatenate((bits[left_ids[i]], bits[right_ids[at[i]]])))
    return best
