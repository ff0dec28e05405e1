"""Whether two masks show the same cells for every input that obeys the facts of both: proved, or not known.

Both are lowered to guarded intervals over one space of terms. Guards are split on as in `maskc.ir.symbolic`; where none
is left, a visible interval of the one mask is covered by the other if no choice of one violated bound in each of the
other's intervals agrees with the facts. That is complete for linear facts, and never says "equal" wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from maskc.diagnostics import MaskcError, error
from maskc.ir.facts import Context, FactTable, Ledger
from maskc.ir.linear import Space
from maskc.ir.lower import Case, Guard, lower
from maskc.ir.nodes import BoolConst, InputDecl, MaskFn, Row, Size
from maskc.ir.symbolic import DEPTH, NODE_BUDGET, Stuck, settle

CHOICES = 256
"""Combinations of violated bounds that are tried for one interval."""


def joined(a: MaskFn, b: MaskFn) -> MaskFn:
    """The inputs and facts of both, without a body. Raises M550 where an input is declared in two ways."""
    inputs = {d.name: d for d in a.inputs}
    for d in b.inputs:
        inputs[d.name] = _merged(inputs[d.name], d, a, b) if d.name in inputs else d
    assumes = tuple(dict.fromkeys((*a.assumes, *b.assumes)))
    return MaskFn(f"{a.name} and {b.name}", tuple(inputs.values()), BoolConst(True), assumes, square=a.square or b.square)


def _merged(d: InputDecl, e: InputDecl, a: MaskFn, b: MaskFn) -> InputDecl:
    if (d.kind, d.per, d.within, d.block) != (e.kind, e.per, e.within, e.block):
        text = f"input `{d.name}` is declared in one way for `{a.name}` and in another for `{b.name}`"
        raise error("M550", text, e.span, "masks are compared on the same inputs; rename one of them")
    return replace(d, sorted=d.sorted or e.sorted, where=tuple(dict.fromkeys((*d.where, *e.where))))


def proved_equal(a: MaskFn, b: MaskFn) -> bool:
    """Whether the proof succeeds. Block tables are compared by name alone. Raises M550."""
    both = joined(a, b)
    if sorted(a.tables) != sorted(b.tables):
        return False
    space = Space()
    try:
        mine, other = (lower(replace(both, body=fn.body), space=space) for fn in (a, b))
    except MaskcError:  # M201, M302: one has no form
        return False
    ledger = Ledger()
    table = FactTable(both, space, mine.hole_free | other.hole_free, frozenset())
    try:
        return _Equality(Context(table, ledger, table.always())).holds(mine.cases, other.cases)
    except Stuck:
        return False


class _Equality:
    def __init__(self, root: Context) -> None:
        self.root = root
        self.nodes = 0

    def holds(self, a: tuple[Case, ...], b: tuple[Case, ...]) -> bool:
        return self._solve(self.root, a, b, 0)

    def _solve(self, context: Context, a: tuple[Case, ...], b: tuple[Case, ...], depth: int) -> bool:
        self.nodes += 1
        if self.nodes > NODE_BUDGET:
            raise Stuck(f"the proof needs more than {NODE_BUDGET} case splits")
        a, b = (tuple(c for c in (settle(context, x) for x in cases) if c is not None) for cases in (a, b))
        waiting = next((c for c in (*a, *b) if c.guards), None)
        if waiting is None:
            return all(_covered(context, c, b) for c in a) and all(_covered(context, c, a) for c in b)
        if depth >= DEPTH:
            raise Stuck(f"the proof needs more than {DEPTH} nested case splits")
        sides = _sides(context, waiting.guards[0])
        return all(side.contradicts() or self._solve(side, a, b, depth + 1) for side in sides)


def _sides(context: Context, guard: Guard) -> tuple[Context, Context]:
    if isinstance(guard, tuple):
        return context.assume_bool(guard[0], True), context.assume_bool(guard[0], False)
    return context.assume(guard), context.assume(-guard - 1)


def _covered(context: Context, case: Case, others: tuple[Case, ...]) -> bool:
    """Whether every row of an unguarded case is a row of one of the other unguarded cases."""
    space = context.table.space
    q = space.lin(Row())
    inside = [q, space.lin(Size("nq")) - q - 1, *(q - x for x in case.lows), *(y - q - 1 for y in case.highs)]
    violated = [[x - q - 1 for x in c.lows] + [q - y for y in c.highs] for c in others]
    choices = 1
    for bounds in violated:
        choices *= len(bounds)
    if choices > CHOICES:
        return False
    return all(context.contradicts(*inside, *outside) for outside in product(*violated))
