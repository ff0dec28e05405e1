"""A lowered mask evaluated on plain Python integers, one column at a time: what the tests compare with the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from maskc.ir.intervals import Branch, Interval, IntervalProgram, Leaf, Tree
from maskc.ir.lower import GuardedIntervals
from maskc.ir.nodes import MaskFn, Pred
from maskc.ir.reference import Env, Point, holds, value_of

Run = tuple[int, int]


def evaluate_column(fn: MaskFn, program: IntervalProgram, env: Env, k: int, h: int = 0) -> tuple[Run, Run]:
    """The masked rows of key k, ((lts, lte), (uts, ute)), clamped into [0, nq]; absent slots are (nq, nq) and (0, 0)."""
    leaf = leaf_of(fn, program.tree, env, k, h)
    lower = (env.nq, env.nq) if leaf.lower is None else clamped(fn, env, leaf.lower, k, h)
    upper = (0, 0) if leaf.upper is None else clamped(fn, env, leaf.upper, k, h)
    return lower, upper


def leaf_of(fn: MaskFn, tree: Tree, env: Env, k: int, h: int = 0) -> Leaf:
    while isinstance(tree, Branch):
        tree = tree.then if holds(fn, env, tree.guard, Point(0, k, h)) else tree.orelse
    return tree


def clamped(fn: MaskFn, env: Env, i: Interval, k: int, h: int = 0) -> Run:
    at = Point(0, k, h)
    lo, hi = (min(max(value_of(fn, env, e, at), 0), env.nq) for e in (i.lo, i.hi))
    return lo, hi


def masked_rows(program: IntervalProgram, env: Env, k: int, runs: tuple[Run, Run]) -> list[bool]:
    """The column that boundary values describe."""
    (lts, lte), (uts, ute) = runs
    return [lts <= q < lte or uts <= q < ute or (program.causal and q < k) for q in range(env.nq)]


def visible_runs(fn: MaskFn, cases: GuardedIntervals, env: Env, k: int, h: int = 0) -> list[Run]:
    """The visible rows of a column by the fold of `interval_cases`: sorted, disjoint, not touching."""
    at = Point(0, k, h)
    known: dict[int, bool] = {}  # by object: equal guards are one object

    def true(guard: Pred) -> bool:
        if id(guard) not in known:
            known[id(guard)] = holds(fn, env, guard, at)
        return known[id(guard)]

    found = [clamped(fn, env, i, k, h) for guards, i in cases if all(map(true, guards))]
    out: list[Run] = []
    for lo, hi in sorted(r for r in found if r[0] < r[1]):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return out


def masked_runs(visible: Sequence[Run], nq: int, start: int = 0) -> list[Run]:
    """The gaps in [start, nq)."""
    out, at = [], start
    for lo, hi in visible:
        if lo > at:
            out.append((at, lo))
        at = max(at, hi)
    if at < nq:
        out.append((at, nq))
    return out
