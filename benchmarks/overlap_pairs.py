"""What bars between GPUs look at: figures of each round in which ways ran behind each other, their middle, and how firm it is.

A long call takes 1 to 2 % more or less from one time to the next, at the limit of power, so a ratio of eight rounds is known
to a percent or so. Where its interval holds the bar, rounds do not tell on which side of it the way is: more of them are
made, and in the end it is called level, be its middle above or below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.overlap_bars import AT_LEAST, DIRECTIONS, LARGE, NEAR
from benchmarks.overlap_clock import Round
from benchmarks.overlap_times import middle_of

FIRM = 0.005
"""Width of an interval from which on more rounds are not worth their time."""


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def of_rounds(rounds: Sequence[Round]) -> dict[str, Interval]:
    """Of the gated way, by direction and for the step, what was measured.

    faster_: the time of dual chunk over its own. share_: the mean attention of the ranks by dual chunk over its time, which is
    the share of what two losses allow. beyond_: what it takes beyond its attention alone, ms.
    """
    found: dict[str, list[float]] = {}
    for made in rounds:
        parts = {d: {way: made.calls[way, d] for way, of in made.calls if of == d} for d in DIRECTIONS}
        for d in (*DIRECTIONS, "step"):
            some = [parts[d]] if d in parts else list(parts.values())
            gated, alone = (sum(p[way].slowest for p in some) for way in ("gated", "attention"))
            found.setdefault(f"beyond_{d}_ms", []).append(gated - alone)
            if "dual-chunk gather" in some[0]:
                dual = sum(p["dual-chunk gather"].slowest for p in some)
                mean = sum(p["dual-chunk attention"].mean for p in some)
                found.setdefault(f"faster_{d}", []).append(dual / gated)
                found.setdefault(f"share_{d}", []).append(mean / gated)
    return {name: Interval(*middle_of(values)) for name, values in found.items()}


def undecided(figures: Mapping[str, Interval]) -> bool:
    """Whether more rounds may tell on which side of a bar the way is."""

    def asked(name: str, bar: float) -> bool:
        _, low, high = figures[name]
        return low <= bar <= high and high - low > FIRM

    for d in (*DIRECTIONS, "step"):
        if f"faster_{d}" not in figures:
            continue
        if asked(f"faster_{d}", 1.0) or asked(f"share_{d}", NEAR):
            return True
        allowed = figures[f"faster_{d}"].value / figures[f"share_{d}"].value
        if allowed > LARGE and asked(f"faster_{d}", AT_LEAST):
            return True
    return False
