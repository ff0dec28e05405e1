"""Row bounds as minima and maxima of linear forms, and their order under what a context knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from maskc.ir.facts import Context
from maskc.ir.linear import Lin, Space
from maskc.ir.nodes import Expr, Max, Min

Kind = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Extremum:
    kind: Kind
    parts: tuple[Bound, ...]


Bound = Lin | Extremum


def le(context: Context, a: Bound, b: Bound) -> bool:
    """Whether a <= b is known. Incomplete for a minimum on the left and a maximum on the right (a split decides those)."""
    if isinstance(a, Extremum) and a.kind == "max":
        return all(le(context, p, b) for p in a.parts)
    if isinstance(b, Extremum) and b.kind == "min":
        return all(le(context, a, p) for p in b.parts)
    if isinstance(a, Extremum):
        return any(le(context, p, b) for p in a.parts)
    if isinstance(b, Extremum):
        return any(le(context, a, p) for p in b.parts)
    return context.le(a, b)


def extremum(context: Context, kind: Kind, parts: Iterable[Bound]) -> Bound:
    """The minimum or maximum, without parts that never decide it."""
    flat: list[Bound] = []
    for p in parts:
        flat += p.parts if isinstance(p, Extremum) and p.kind == kind else (p,)
    kept: list[Bound] = []
    for i, x in enumerate(flat):
        others = kept + flat[i + 1 :]
        beaten = any((le(context, y, x) if kind == "min" else le(context, x, y)) for y in others)
        if not beaten:
            kept.append(x)
    return kept[0] if len(kept) == 1 else Extremum(kind, tuple(kept))


def forms(b: Bound) -> Iterator[Lin]:
    """The linear forms of a bound."""
    if isinstance(b, Lin):
        yield b
    else:
        for p in b.parts:
            yield from forms(p)


def stripped(b: Bound, zero: Lin, nq: Lin) -> Bound:
    """The bound without the limits 0 and nq that evaluation clamps to anyway."""
    if isinstance(b, Extremum) and b.kind == "max" and zero in b.parts:
        return stripped(_less(b, zero), zero, nq)
    if isinstance(b, Extremum) and b.kind == "min" and nq in b.parts:
        return stripped(_less(b, nq), zero, nq)
    return b


def _less(b: Extremum, part: Lin) -> Bound:
    rest = tuple(p for p in b.parts if p != part)
    return rest[0] if len(rest) == 1 else Extremum(b.kind, rest)


def bound_expr(space: Space, b: Bound) -> Expr:
    if isinstance(b, Lin):
        return space.expr(b)
    return (Min if b.kind == "min" else Max)(tuple(bound_expr(space, p) for p in b.parts))


def bound_of(space: Space, e: Expr) -> Bound:
    """The bound that `bound_expr` wrote."""
    if isinstance(e, Min | Max):
        return Extremum("min" if isinstance(e, Min) else "max", tuple(bound_of(space, t) for t in e.terms))
    return space.lin(e)
