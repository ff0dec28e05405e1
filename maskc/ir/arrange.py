"""The intervals of one column in order, with the gaps between them; or the comparison that has to be decided first.

Lemma (merge): if lo_a <= hi_b and lo_b <= hi_a, the union is [min(lo_a, lo_b), max(hi_a, hi_b)), even if one of the two
is empty: if a is, lo_b <= hi_a <= lo_a <= hi_b, so the hull is b.
Lemma (gaps): for lo_1 <= ... <= lo_r and hi_1 <= ... <= hi_r the masked rows are [0, lo_1), [hi_i, lo_{i+1}), [hi_r, nq),
even if some intervals are empty: a row outside all of them lies in [hi_i, lo_{i+1}) for the last i with lo_i <= row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from maskc.ir.bounds import Bound, extremum, forms, le, stripped
from maskc.ir.facts import Context
from maskc.ir.linear import ZERO, Lin
from maskc.ir.nodes import Row

GAPS = 2  # what the boundary vectors hold


@dataclass(frozen=True, slots=True)
class Gap:
    """Masked rows [lo, hi) at the top, in the middle or at the bottom of the column; `all` if nothing is visible."""

    lo: Bound
    hi: Bound
    place: Literal["top", "middle", "bottom", "all"]


@dataclass(frozen=True, slots=True)
class Sorted:
    intervals: tuple[tuple[Bound, Bound], ...]
    gaps: tuple[Gap, ...]


Pair = tuple[Bound, Bound]


def arrange(
    context: Context, intervals: Sequence[tuple[tuple[Lin, ...], tuple[Lin, ...]]], nq: Lin, diagonal: Lin | None
) -> Sorted | Lin | None:
    """At most two gaps, or a form whose sign must be decided first, or None if neither.

    intervals: (lows, highs), rows max(0, lows) <= q < min(nq, highs). diagonal: k where the free triangle masks the
    rows above it.
    """
    pairs: list[Pair] = []
    for lows, highs in intervals:
        lows, highs = (*lows, ZERO), (*highs, nq)
        if not _empty(context, lows, highs):
            pairs.append((extremum(context, "max", lows), extremum(context, "min", highs)))
    pairs = _merged(context, _uncovered(context, pairs), nq)
    order = _order(context, pairs)
    gaps = None if order is None else _gaps(context, order, nq, diagonal)
    if order is not None and gaps is not None and len(gaps) <= GAPS:
        return Sorted(tuple(order), gaps)
    return next((f for f in _questions(pairs, nq, diagonal) if _open(context, f)), None)


def _empty(context: Context, lows: tuple[Lin, ...], highs: tuple[Lin, ...]) -> bool:
    q = context.table.space.lin(Row())
    return context.contradicts(*(q - x for x in lows), *(y - q - 1 for y in highs))


def _uncovered(context: Context, pairs: list[Pair]) -> list[Pair]:
    """Without intervals that lie inside others."""
    out: list[Pair] = []
    for i, (lo, hi) in enumerate(pairs):
        others = out + pairs[i + 1 :]
        if not any(le(context, a, lo) and le(context, hi, b) for a, b in others):
            out.append((lo, hi))
    return out


def _at_most(context: Context, lo: Bound, hi: Bound, nq: Lin) -> bool:
    """Whether no row of the problem lies in [hi, lo): lo <= hi, with or without the limits 0 and nq of the two."""
    return le(context, lo, hi) or le(context, stripped(lo, ZERO, nq), stripped(hi, ZERO, nq))


def _merged(context: Context, pairs: list[Pair], nq: Lin) -> list[Pair]:
    """Touching intervals joined."""
    for i, (a_lo, a_hi) in enumerate(pairs):
        for j in range(i + 1, len(pairs)):
            b_lo, b_hi = pairs[j]
            if _at_most(context, a_lo, b_hi, nq) and _at_most(context, b_lo, a_hi, nq):
                hull = (extremum(context, "min", (a_lo, b_lo)), extremum(context, "max", (a_hi, b_hi)))
                return _merged(context, [*pairs[:i], hull, *pairs[i + 1 : j], *pairs[j + 1 :]], nq)
    return pairs


def _order(context: Context, pairs: list[Pair]) -> list[Pair] | None:
    left, out = list(pairs), []
    while left:
        first = next((p for p in left if all(p is o or _before(context, p, o) for o in left)), None)
        if first is None:
            return None
        left.remove(first)
        out.append(first)
    return out


def _before(context: Context, a: Pair, b: Pair) -> bool:
    return le(context, a[0], b[0]) and le(context, a[1], b[1])


def _gaps(context: Context, order: list[Pair], nq: Lin, diagonal: Lin | None) -> tuple[Gap, ...]:
    """The gaps that are not provably empty, and not masked by the triangle."""
    if not order:
        return (Gap(ZERO, nq, "all"),)
    gaps = []
    if not le(context, order[0][0], ZERO if diagonal is None else diagonal):
        gaps.append(Gap(ZERO, order[0][0], "top"))
    for (_, hi), (lo, _) in pairwise(order):
        if not _at_most(context, lo, hi, nq):
            gaps.append(Gap(hi, lo, "middle"))
    if not le(context, nq, order[-1][1]):
        gaps.append(Gap(order[-1][1], nq, "bottom"))
    return tuple(gaps)


def _questions(pairs: list[Pair], nq: Lin, diagonal: Lin | None) -> Iterator[Lin]:
    """Forms whose sign may help, in the order: emptiness, touch, order, ends."""
    for lo, hi in pairs:
        yield from (y - x - 1 for x in forms(lo) for y in forms(hi))
    others = [(a, b) for i, a in enumerate(pairs) for b in pairs[i + 1 :]]
    for a, b in others:
        for lo, hi in ((a[0], b[1]), (b[0], a[1])):
            yield from (y - x for x in forms(lo) for y in forms(hi))
    for a, b in others:
        for side in (0, 1):
            yield from (y - x for x in forms(a[side]) for y in forms(b[side]))
    for lo, hi in pairs:
        yield from ((ZERO if diagonal is None else diagonal) - x for x in forms(lo))
        yield from (y - nq for y in forms(hi))


def _open(context: Context, form: Lin) -> bool:
    return not form.is_const and not context.entails(form) and not context.entails(-form - 1)
