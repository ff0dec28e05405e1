"""A mask as guarded row intervals: for each conjunction of its normal form, guards over k and one interval of rows.

Every atom that reads the row becomes a half-line or an interval by one rule, `first index with X >= t` for a monotone
X. Inside a conjunction `same(S)` is processed first: then attributes of the row's segment are those of the column's
segment. So is an equality of blocks `q // B == t`: then `q // B` is `t`, and `q % B` is `q - B * t`.

An atom without such a form is error M201. The union of the intervals whose guards hold is exactly the visible rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from maskc.ir.intervals import Interval
from maskc.ir.linear import ZERO, Lin, Space
from maskc.ir.nodes import (
    Add,
    BoolField,
    Col,
    Compare,
    Const,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    InEdge,
    InputKind,
    InSet,
    MaskFn,
    Max,
    Min,
    Mul,
    Not,
    Pred,
    Row,
    Same,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)
from maskc.ir.normalize import Literals, ancestry, check_cap, dnf
from maskc.ir.refusals import Refusal, refuse
from maskc.ir.traverse import TRUE, Node, reads_row, rewrite

GuardedIntervals = tuple[tuple[tuple[Pred, ...], Interval], ...]
Guard = Lin | tuple[Pred, bool]  # a form >= 0, or a truth atom with its value


@dataclass(frozen=True, slots=True)
class Case:
    """Where all guards hold, rows max(0, lows) <= q < min(nq, highs) see the key."""

    guards: tuple[Guard, ...] = ()
    lows: tuple[Lin, ...] = ()
    highs: tuple[Lin, ...] = ()

    def __and__(self, other: Case) -> Case:
        return Case(
            self.guards + tuple(g for g in other.guards if g not in self.guards),
            self.lows + tuple(x for x in other.lows if x not in self.lows),
            self.highs + tuple(x for x in other.highs if x not in self.highs),
        )


@dataclass(frozen=True, slots=True)
class Lowered:
    """hole_free: segment inputs that must not have holes, because rows are found by their order."""

    cases: tuple[Case, ...]
    space: Space
    hole_free: frozenset[str]


def lower(fn: MaskFn, space: Space | None = None) -> Lowered:
    """The cases of the mask. Raises M201 or M302."""
    return lower_cases(fn, dnf(fn, fn.body), space or Space())


def lower_cases(fn: MaskFn, conjunctions: Iterable[Literals], space: Space) -> Lowered:
    cases: list[Case] = []
    hole_free: set[str] = set()
    for literals in conjunctions:
        lowering = _Conjunction(fn, space, literals)
        cases += [c for c in lowering.cases() if c not in cases]
        hole_free |= lowering.hole_free
    return Lowered(tuple(cases), space, frozenset(hole_free))


def needs_hole_free(fn: MaskFn) -> frozenset[str]:
    """Segment inputs that binding must refuse if they have padding before or between segments."""
    return lower(fn).hole_free


def interval_cases(fn: MaskFn) -> GuardedIntervals:
    """The visible rows of a column as a union: ((guards over k, all of which must hold), rows lo <= q < hi), ...

    Unsorted and possibly overlapping; bounds may lie outside [0, nq]. This is what binding folds for a mask whose
    verdict is Unknown. Guards stand in an order in which each is defined if all before it hold: read them lazily, or
    read anything for an outside token.
    """
    lowered = lower(fn)
    shared: dict[Pred, Pred] = {}  # equal guards of several cases are one object
    cases = (case_exprs(lowered.space, c) for c in lowered.cases)
    return tuple((tuple(shared.setdefault(g, g) for g in guards), interval) for guards, interval in cases)


def case_exprs(space: Space, c: Case) -> tuple[tuple[Pred, ...], Interval]:
    lo = [space.expr(x) for x in c.lows] or [Const(0)]
    hi = [space.expr(x) for x in c.highs] or [Size("nq")]
    return (
        tuple(guard_pred(space, g) for g in c.guards),
        Interval(lo[0] if len(lo) == 1 else Max(tuple(lo)), hi[0] if len(hi) == 1 else Min(tuple(hi))),
    )


def guard_pred(space: Space, g: Guard) -> Pred:
    """A guard as a predicate over k."""
    if isinstance(g, tuple):
        return g[0] if g[1] else Not(g[0])
    return nonneg_pred(space, g)


def nonneg_pred(space: Space, form: Lin) -> Pred:
    """Form >= 0, written with positive terms on both sides."""
    left = Lin(0, tuple((a, c) for a, c in form.terms if c > 0))
    right = Lin(0, tuple((a, -c) for a, c in form.terms if c < 0))
    if form.const == -1:
        return Compare("<", space.expr(right), space.expr(left))
    if form.const >= 0:
        left += form.const
    else:
        right += -form.const
    return Compare("<=", space.expr(right), space.expr(left))


class _Conjunction:
    """Lowers one conjunction of literals."""

    def __init__(self, fn: MaskFn, space: Space, literals: Literals) -> None:
        self.fn = fn
        self.space = space
        self.literals = literals
        self.hole_free: set[str] = set()
        # sets whose segment the row shares with the column
        self.shared = {s for p in literals if isinstance(p, Same) for s in ancestry(fn, p.of)}
        self.blocks: dict[int, Lin] = {}  # a floor of the row that equals a form over k

    def cases(self) -> list[Case]:
        """One case, or several where a literal splits (`!=`, `not same`, the first row of a segment)."""
        comparisons = [(c, self._form(c)) for c in self.literals if isinstance(c, Compare)]
        for c, form in comparisons:
            if c.op == "==":
                self._learn_block(form)
        # truth atoms first, then in order: literals that say that reads are inside precede the comparisons that read
        parts = [self._truth(p) for p in self.literals if not isinstance(p, Compare)]
        parts += [self._comparison(c, form) for c, form in comparisons]
        out = [Case()]
        for part in parts:
            out = [both for a in out for b in part if not _impossible(both := a & b)]
            check_cap(len(out), self.fn.span)
        return list(dict.fromkeys(out))

    # ------------------------------------------------------------ context

    def _share(self, n: Node) -> Node | None:
        """Attributes of the row's segment as the column's, for segments that both share."""
        match n:
            case SegAttr(of, "pos", Row()) if of in self.shared:
                return Add((Row(), Mul(Const(-1), SegAttr(of, "start", Col()))), span=n.span)
            case SegAttr(of, attr, Row()) if of in self.shared:
                return SegAttr(of, attr, Col(), span=n.span)
            case Field(name, Row()) if self.fn.input(name).per in self.shared:
                return Field(name, Col(), span=n.span)
            case BoolField(name, Row()) if self.fn.input(name).per in self.shared:
                return BoolField(name, Col(), span=n.span)
            case InSet(of, Row()) if of in self.shared:
                return TRUE
            case InEdge(of, edge, Row()) if of in self.shared:
                return InEdge(of, edge, Col(), span=n.span)
            case _:
                return None

    def _form(self, c: Compare) -> Lin:
        """The form that the literal says to be >= 0, == 0 or != 0."""
        c = rewrite(c, self._share)
        d = self.space.lin(c.b) - self.space.lin(c.a)
        match c.op:
            case "<":
                return d - 1
            case ">=":
                return -d
            case ">":
                return -d - 1
            case _:
                return d

    def _learn_block(self, form: Lin) -> None:
        rows = self._row_terms(form)
        if len(rows) == 1 and abs(rows[0][1]) == 1 and isinstance(self.space.atoms[rows[0][0]], FloorDiv):
            atom, c = rows[0]
            self.blocks[atom] = (form - self.space.of(atom) * c) * -c

    def _in_blocks(self, form: Lin) -> Lin:
        for atom, value in self.blocks.items():
            c = form.coef(atom)
            if c:
                form = form + (value - self.space.of(atom)) * c
            for product_atom, n in form.terms:  # B * floor(q / B) for a B that is an input
                factors = self.space.factors[product_atom]
                if len(factors) > 1 and atom in factors:
                    rest = list(factors)
                    rest.remove(atom)
                    whole = value
                    for f in rest:
                        whole = self.space.times(whole, self.space.of(f))
                    form = form + (whole - self.space.of(product_atom)) * n
        return form

    def _row_terms(self, form: Lin) -> list[tuple[int, int]]:
        return [(a, c) for a, c in form.terms if self.space.reads_row(a)]

    # ------------------------------------------------------------ comparisons

    def _comparison(self, c: Compare, form: Lin) -> list[Case]:
        rows = self._row_terms(form)
        if not (c.op == "==" and len(rows) == 1 and rows[0][0] in self.blocks):
            form = self._in_blocks(form)
        match c.op:
            case "==":
                if not self._row_terms(form):
                    return [Case(guards=(form, -form))]
                return [a & b for a in self._nonneg(c, form) for b in self._nonneg(c, -form)]
            case "!=":
                return self._nonneg(c, form - 1) + self._nonneg(c, -form - 1)
            case _:
                return self._nonneg(c, form)

    def _nonneg(self, c: Compare, form: Lin) -> list[Case]:
        """Rows with form >= 0."""
        rows = self._row_terms(form)
        if not rows:
            return [Case(guards=(form,))]
        if len(rows) > 1 or abs(rows[0][1]) != 1:
            raise refuse(self.fn, c, self._blame(rows))
        atom, sign = rows[0]
        rest = form - self.space.of(atom) * sign
        x = self.space.atoms[atom]
        if isinstance(x, Row):
            return [Case(lows=(-rest,))] if sign > 0 else [Case(highs=(rest + 1,))]
        if isinstance(x, FloorDiv) and not reads_row(x.b):
            y, d = self.space.lin(x.a), self.space.lin(x.b)
            if sign > 0:  # floor(y / d) >= -rest iff y >= -rest * d
                return self._nonneg(c, y + self.space.times(d, rest))
            return self._nonneg(c, self.space.times(d, rest + 1) - y - 1)
        least = -rest if sign > 0 else rest + 1  # X >= least, or X < least
        out = []
        for case, first in self._first(c, x, least):
            out.append(case & (Case(lows=(first,)) if sign > 0 else Case(highs=(first,))))
        return out

    def _first(self, c: Compare, x: Expr, least: Lin) -> list[tuple[Case, Lin]]:
        """The first row with x >= least, by cases over k, for a monotone read x of the row."""
        space = self.space
        match x:
            case SegAttr(of, attr, index) if self.fn.input(of).kind is InputKind.SEGMENTS and attr in ("ordinal", "start", "end"):
                shift = self._shift(c, index)
                self.hole_free.add(of)
                if attr == "ordinal":
                    return [(Case(), self._start_of(of, least) - shift)]
                before, end = least - 1, space.lin(SetEnd(of))
                token = space.expr(before)
                there = space.lin(SegAttr(of, "end" if attr == "start" else "start", token))
                return [
                    (Case(guards=(-least,)), -shift),
                    (Case(guards=(before, (InSet(of, token), True))), there - shift),
                    (Case(guards=(before - end,)), end - shift),
                ]
            case Field(name, index):
                decl = self.fn.input(name)
                if decl.sorted and decl.per in ("row", "key"):
                    return [(Case(), space.lin(FirstRow(name, space.expr(least))) - self._shift(c, index))]
                if decl.sorted and decl.per is not None and self.fn.input(decl.per).kind is InputKind.SEGMENTS:
                    self.hole_free.add(decl.per)
                    first = space.lin(FirstRow(name, space.expr(least)))
                    return [(Case(), self._start_of(decl.per, first) - self._shift(c, index))]
            case _:
                pass
        raise refuse(self.fn, c, self._blame([(space.atom(x), 1)]))

    def _start_of(self, of: str, ordinal: Lin) -> Lin:
        """Start of the first segment numbered >= ordinal; for a token's own number, or the next, its start or end."""
        for atom, c in ordinal.terms:
            e = self.space.atoms[atom]
            if c == 1 and isinstance(e, SegAttr) and e.of == of and e.attr == "ordinal":
                offset = ordinal - self.space.of(atom)
                if offset in (ZERO, Lin(1)):
                    return self.space.lin(SegAttr(of, "start" if offset == ZERO else "end", e.index))
        return self.space.lin(StartOf(of, self.space.expr(ordinal)))

    def _shift(self, c: Compare, index: Expr) -> Lin:
        """C for an index q + c."""
        form = self.space.lin(index)
        row = self.space.atom(Row())
        rows = self._row_terms(form)
        if rows != [(row, 1)]:
            raise refuse(self.fn, c, self._blame(rows))
        return form - self.space.of(row)

    def _blame(self, rows: list[tuple[int, int]]) -> Refusal:
        return Refusal(tuple((self.space.atoms[a], c) for a, c in rows))

    # ------------------------------------------------------------ truth atoms

    def _truth(self, p: Pred) -> list[Case]:
        positive = not isinstance(p, Not)
        atom = rewrite(p.term if isinstance(p, Not) else p, self._share)
        if atom == TRUE:
            return [Case()] if positive else []
        if isinstance(atom, Same):
            return self._same(atom, positive)
        if not reads_row(atom):
            return [Case(guards=((self.space.boolean(atom), positive),))]
        match atom:
            case InSet(of, index) if self.fn.input(of).kind is InputKind.SEGMENTS:
                self.hole_free.add(of)
                return self._rows_of(atom, index, ZERO, self.space.lin(SetEnd(of)), positive)
            case InEdge(of, edge, Row()):
                parent = self.fn.input(of).within
                if parent is None or parent in self.shared:
                    token: Expr = Const(0) if parent is None else Col()
                    lo, hi = EdgeStart(of, edge, token), EdgeEnd(of, edge, token)
                    return _within(self.space.lin(lo), self.space.lin(hi), positive)
            case _:
                pass
        raise refuse(self.fn, p, Refusal(((atom, 1),)))

    def _rows_of(self, p: Pred, index: Expr, lo: Lin, hi: Lin, positive: bool) -> list[Case]:
        form = self.space.lin(index)
        row = self.space.atom(Row())
        if self._row_terms(form) != [(row, 1)]:
            raise refuse(self.fn, p, Refusal(((p, 1),)))
        shift = form - self.space.of(row)
        return _within(lo - shift, hi - shift, positive)

    def _same(self, atom: Same, positive: bool) -> list[Case]:
        k_in = InSet(atom.of, Col())
        start, end = (self.space.lin(SegAttr(atom.of, a, Col())) for a in ("start", "end"))
        if positive:
            return [Case(guards=((k_in, True),), lows=(start,), highs=(end,))]
        inside = Case(guards=((k_in, True),))
        return [Case(guards=((k_in, False),)), *(inside & c for c in _within(start, end, False))]


def _within(lo: Lin, hi: Lin, positive: bool) -> list[Case]:
    return [Case(lows=(lo,), highs=(hi,))] if positive else [Case(highs=(lo,)), Case(lows=(hi,))]


def _impossible(c: Case) -> bool:
    """Whether the guards contradict one another at first sight."""
    return any(
        (isinstance(g, Lin) and g.is_const and g.const < 0) or (isinstance(g, tuple) and (g[0], not g[1]) in c.guards)
        for g in c.guards
    )
