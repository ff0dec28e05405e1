"""What is compared follows each other equally often, and first come all of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.overlap_clock import OTHERS, Pace, orders, rounds


@pytest.mark.parametrize("n", range(1, 8))
def test_each_is_right_behind_every_other_equally_often(n: int) -> None:
    rows = orders(n)
    assert all(sorted(row) == list(range(n)) for row in rows)
    behind = Counter(pair for row in rows for pair in pairwise(row))
    assert len(behind) == n * (n - 1)
    assert len(set(behind.values())) <= 1
    assert len(set(Counter(row[0] for row in rows).values())) == 1


def test_a_square_then_the_pair_in_turn() -> None:
    found = list(rounds("abcd", "xy", "ab", Pace(8, 3, 1.0)))
    assert [sorted(names) for names in found[:OTHERS]] == [list("abcdxy")] * OTHERS
    assert [sorted(names) for names in found[OTHERS:8]] == [list("abcd")] * (8 - OTHERS)
    assert [names[:4] for names in found[4:8]] == [names[:4] for names in found[:4]]
    assert found[8:] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert not any({"x", "y"} & set(names[:4]) for names in found)
