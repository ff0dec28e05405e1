"""Two branches of a tree as one leaf, where one formula is right in both; minima and maxima included."""

from __future__ import annotations

from collections.abc import Iterator

from maskc.ir.bounds import Bound, Extremum, bound_expr, bound_of, le
from maskc.ir.facts import Context, compare_facts
from maskc.ir.intervals import Branch, Interval, Leaf, Tree
from maskc.ir.linear import ZERO, Lin
from maskc.ir.nodes import Compare, Pred, Size
from maskc.ir.normalize import definedness


def merge_branches(pred: Pred, then: Tree, orelse: Tree, yes: Context, no: Context) -> Tree:
    """`Branch(pred, then, orelse)`, or one leaf that is right under both contexts."""
    if then == orelse:
        return then
    if isinstance(then, Leaf) and isinstance(orelse, Leaf) and len(then.visible) == len(orelse.visible):
        merged = _merge_leaves(then, orelse, yes, no)
        if merged is not None:
            return merged
    return Branch(pred, then, orelse)


def _merge_leaves(a: Leaf, b: Leaf, yes: Context, no: Context) -> Leaf | None:
    merged: list[Interval | None] = []
    for x, y in ((a.lower, b.lower), (a.upper, b.upper), *zip(a.visible, b.visible, strict=True)):
        both = None if x is None and y is None else _merge(x, y, yes, no)
        if both is None and (x is not None or y is not None):
            return None
        merged.append(both)
    lower, upper, *visible = merged
    return Leaf(tuple(i for i in visible if i is not None), lower, upper)


def _readable(i: Interval, context: Context) -> bool:
    """Whether all reads of the interval are inside: where they are not, a bound may be right and yet have no value."""
    fn, space = context.table.fn, context.table.space
    for read in (*definedness(fn, i.lo), *definedness(fn, i.hi)):
        if isinstance(read, Compare):
            if not all(context.entails(f.form) for f in compare_facts(space, read)):
                return False
        elif context.known.get(context.table.space.boolean(read)) is not True:
            return False
    return True


def _merge(a: Interval | None, b: Interval | None, yes: Context, no: Context) -> Interval | None:
    """One interval that equals `a` in the first context and `b` in the second, up to clamping and empty intervals."""
    merged = _equal_in_both(a, b, yes, no)
    return merged if merged is not None and _readable(merged, yes) and _readable(merged, no) else None


def _equal_in_both(a: Interval | None, b: Interval | None, yes: Context, no: Context) -> Interval | None:
    if a is None or b is None:
        whole = a if b is None else b
        assert whole is not None
        return whole if _empty(whole, no if b is None else yes) else None
    if a == b:
        return a
    lo, hi = _merge_bound(a, b, "lo", yes, no), _merge_bound(a, b, "hi", yes, no)
    space = yes.table.space
    if lo is not None and hi is not None:
        return Interval(bound_expr(space, lo), bound_expr(space, hi))
    return None


def _merge_bound(a: Interval, b: Interval, side: str, yes: Context, no: Context) -> Bound | None:
    space = yes.table.space
    x, y = bound_of(space, getattr(a, side)), bound_of(space, getattr(b, side))
    for c in _candidates(x, y):
        if _equal(c, x, yes) and _equal(c, y, no):
            return c
    return None


def _candidates(x: Bound, y: Bound) -> Iterator[Bound]:
    yield x
    yield y
    if isinstance(x, Lin) and isinstance(y, Lin):
        yield Extremum("min", (x, y))
        yield Extremum("max", (x, y))


def _equal(a: Bound, b: Bound, context: Context) -> bool:
    if a == b:
        return True
    nq = context.table.space.lin(Size("nq"))
    if le(context, a, b) and le(context, b, a):
        return True
    both_low = le(context, a, ZERO) and le(context, b, ZERO)
    return both_low or (le(context, nq, a) and le(context, nq, b))


def _empty(i: Interval, context: Context) -> bool:
    space = context.table.space
    lo, hi = bound_of(space, i.lo), bound_of(space, i.hi)
    return le(context, hi, lo) or le(context, hi, ZERO) or le(context, space.lin(Size("nq")), lo)
