"""Figures of rounds, and when more of these are worth their time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap_clock import Figure, Round
from benchmarks.overlap_pairs import FIRM, Interval, of_rounds, undecided
from benchmarks.overlap_times import middle_of


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
    assert found["beyond_step_ms"] == pytest.approx((0.3 * (1.1 + 1.15) / 2, 0.3 * 0.9, 0.3 * 1.4)), "of the means of pairs"


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


@pytest.mark.parametrize("count", range(1, 11))
def test_the_middle_lies_in_the_interval_as_often_as_it_says(count: int) -> None:
    """Of values whose distances from it are 1, 2, 4, ..., all choices of signs are equally likely."""
    found = [middle_of([sign * 2**i for i, sign in enumerate(signs)]) for signs in product((-1.0, 1.0), repeat=count)]
    inside = sum(low <= 0 <= high for _, low, high in found) / len(found)
    assert inside >= (0.95 if count > 5 else 1 - 2 / 2**count)
    assert inside <= 0.98 or count <= 6, "no wider than it must be"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(-10, 10))
def test_the_middle_moves_with_its_values_and_not_with_one_of_them(values: list[float], by: float) -> None:
    middle, low, high = middle_of(values)
    assert min(values) <= low <= middle <= high <= max(values)
    assert middle_of([x + by for x in values]) == pytest.approx((middle + by, low + by, high + by), abs=1e-6)
    assert middle_of([*[3.0] * 9, 1e9])[0] == 3.0
