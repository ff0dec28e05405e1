"""Figures of rounds, and when more of these are worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap_clock import Figure, Round
from benchmarks.overlap_pairs import FIRM, Interval, of_rounds, undecided
from benchmarks.overlap_times import median_of


def a_round(gated: float, dual: float | None = None, drift: float = 1.0) -> Round:
    """Attention alone takes 1 ms on the slowest rank, by dual chunk 0.9 in the mean; backward everything twice that."""
    ways = {"gated": (gated, gated), "attention": (1.0, 0.95)}
    ways |= {} if dual is None else {"dual-chunk gather": (dual, dual), "dual-chunk attention": (1.2, 0.9)}
    scales = {"forward": drift, "backward": 2 * drift}
    return Round({(n, d): Figure(x * s, y * s) for n, (x, y) in ways.items() for d, s in scales.items()}, False)


def test_what_drifts_cancels_out() -> None:
    found = of_rounds([a_round(1.1, 1.65, drift) for drift in (1.0, 1.2, 0.9, 1.4)])
    for d in ("forward", "backward", "step"):
        assert found[f"faster_{d}"] == pytest.approx((1.5, 1.5, 1.5))
        assert found[f"share_{d}"] == pytest.approx((0.9 / 1.1,) * 3)
    assert found["beyond_step_ms"] == pytest.approx((0.3 * 1.1, 0.3 * 0.9, 0.3 * 1.4))


def test_without_dual_chunk_there_is_only_what_attention_leaves() -> None:
    assert set(of_rounds([a_round(1.1)])) == {f"beyond_{d}_ms" for d in ("forward", "backward", "step")}
    assert not undecided(of_rounds([a_round(1.1)]))


def figures(faster: Sequence[float], share: Sequence[float]) -> dict[str, Interval]:
    made = {"faster": Interval(*faster), "share": Interval(*share)}
    return {f"{name}_{d}": x for d in ("forward", "backward", "step") for name, x in made.items()}


@pytest.mark.parametrize(
    ("faster", "share", "more"),
    [
        ((1.02, 1.01, 1.03), (0.98, 0.96, 0.99), False),
        ((1.0, 0.99, 1.01), (0.98, 0.96, 0.99), True),
        ((0.98, 0.97, 0.99), (0.98, 0.96, 0.99), False),
        ((1.0, 1 - FIRM / 3, 1 + FIRM / 3), (0.98, 0.96, 0.99), False),
        ((1.02, 1.01, 1.03), (0.96, 0.94, 0.97), True),
        ((1.5, 1.4, 1.6), (0.98, 0.96, 0.99), False),
        ((1.6, 1.4, 1.7), (0.98, 0.96, 0.99), True),
    ],
)
def test_rounds_go_on_where_a_bar_lies_in_an_interval_that_is_wide(
    faster: tuple[float, ...], share: tuple[float, ...], more: bool
) -> None:
    """1.5 times is asked for where more than 1.6 is allowed: faster over share."""
    assert undecided(figures(faster, share)) == more


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_interval_of_a_median_is_the_narrowest_that_holds_it_often_enough(values: list[float]) -> None:
    middle, low, high = median_of(values)
    count, ordered = len(values), sorted(values)
    assert low <= middle <= high

    def missed(cut: int) -> float:
        """How often the median of the distribution lies outside, exactly."""
        return 2 * sum(comb(count, k) for k in range(cut + 1)) / 2**count

    widest = [cut for cut in range((count + 1) // 2) if missed(cut) <= 0.05]
    cut = max(widest, default=0)
    assert (low, high) == (ordered[cut], ordered[count - 1 - cut])
