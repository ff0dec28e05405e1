"""What is compared follows each other equally often, in whole squares with nothing between."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import overlap_clock
from benchmarks.overlap_clock import FEWEST, MOST, OTHERS, in_time, orders, pace, rounds, whole_squares


@pytest.mark.parametrize("n", range(1, 8))
def test_each_is_right_behind_every_other_equally_often(n: int) -> None:
    rows = orders(n)
    assert all(sorted(row) == list(range(n)) for row in rows)
    behind = Counter(pair for row in rows for pair in pairwise(row))
    assert len(behind) == n * (n - 1)
    assert len(set(behind.values())) <= 1
    assert len(set(Counter(row[0] for row in rows).values())) == 1


def test_whole_squares_and_then_the_others_apart() -> None:
    found = list(rounds("abcd", "xy", 8))
    assert [sorted(names) for names in found] == [list("abcd")] * 8 + [list("xy")] * OTHERS
    assert found[4:8] == found[:4]
    assert len({tuple(names) for names in found[:4]}) == 4
    assert list(rounds("", "x", 8))[8:] == [["x"]] * OTHERS


@pytest.mark.parametrize("ways", range(1, 6))
@given(step=st.floats(1e-4, 10), left=st.floats(0.0, 200))
def test_rounds_are_whole_squares_that_the_time_allows(ways: int, step: float, left: float) -> None:
    square = len(orders(ways))
    found = whole_squares(ways, step, left)
    assert found % square == 0
    assert square <= found <= max(square, MOST)
    assert found == square or found * ways * step <= left
    if left > (FEWEST + square) * ways * step:
        assert found > FEWEST - square


def test_long_calls_have_two_squares_of_four_and_shorter_ones_three() -> None:
    assert [whole_squares(4, step, 100) for step in (0.39, 0.196, 0.1, 0.003)] == [8, 8, 12, 12]
    assert whole_squares(2, 0.003, 100) == 12


@pytest.mark.parametrize(("late", "counts"), [("0100", "1011"), ("1111", "1111"), ("0000", "1111")])
def test_rounds_in_which_a_host_was_late_do_not_count(late: str, counts: str) -> None:
    found = in_time(torch.tensor([x == "1" for x in late]))
    assert "".join("01"[x] for x in found.tolist()) == counts


@pytest.mark.parametrize(("seconds", "ahead"), [((0.05, 0.001), True), ((0.05, 0.05), False), ((0.001, 0.05), True)])
def test_what_takes_long_once_is_not_a_long_call(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], ahead: bool
) -> None:
    """GPUs wait for the hosts of short calls alone."""
    now, takes = [0.0], iter(seconds)
    monkeypatch.setattr(overlap_clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(overlap_clock.dist, "all_reduce", lambda *_, **__: None)

    def call() -> None:
        now[0] += next(takes)

    planned = pace(SimpleNamespace(group=None), torch.device("cpu"), [[call]], 100.0)  # type: ignore[arg-type]
    assert (planned.ahead > 0) == ahead
