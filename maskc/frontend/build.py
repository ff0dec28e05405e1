"""Constructors of mask IR that fold constants and flatten sums and conjunctions; what their results depend on, and how large."""

from __future__ import annotations

import operator
from collections.abc import Callable

from maskc.diagnostics import Span
from maskc.ir import nodes as ir
from maskc.ir.traverse import Node, children, walk

_COMPARE: dict[ir.Op, Callable[[int, int], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def add(a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
    """A + b, sums flattened and constants gathered into one last term."""
    terms: list[ir.Expr] = []
    constant = 0
    for term in (*(a.terms if isinstance(a, ir.Add) else (a,)), *(b.terms if isinstance(b, ir.Add) else (b,))):
        if isinstance(term, ir.Const):
            constant += term.value
        else:
            terms.append(term)
    if not terms:
        return ir.Const(constant, span=span)
    if constant:
        terms.append(ir.Const(constant, span=span))
    return terms[0] if len(terms) == 1 else ir.Add(tuple(terms), span=span)


def negate(a: ir.Expr, span: Span) -> ir.Expr:
    """-a, pushed into sums."""
    match a:
        case ir.Const(value):
            return ir.Const(-value, span=span)
        case ir.Add(terms):
            return ir.Add(tuple(negate(t, span) for t in terms), span=span)
        case ir.Mul(ir.Const(-1), b):
            return b
        case ir.Mul(ir.Const(value), b):
            return ir.Mul(ir.Const(-value, span=span), b, span=span)
        case _:
            return ir.Mul(ir.Const(-1, span=span), a, span=span)


def subtract(a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
    return add(a, negate(b, span), span)


def multiply(a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
    """A * b with a constant factor first; a factor 1 vanishes (0 stays: what is beside it may read an outside token)."""
    if isinstance(b, ir.Const):
        a, b = b, a
    match a, b:
        case ir.Const(x), ir.Const(y):
            return ir.Const(x * y, span=span)
        case ir.Const(1), _:
            return b
        case _:
            return ir.Mul(a, b, span=span)


def floor_div(a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
    """The caller has checked that the divisor is not zero."""
    match a, b:
        case ir.Const(x), ir.Const(y):
            return ir.Const(x // y, span=span)
        case _, ir.Const(1):
            return a
        case _:
            return ir.FloorDiv(a, b, span=span)


def modulo(a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
    """The caller has checked that the divisor is not zero."""
    match a, b:
        case ir.Const(x), ir.Const(y):
            return ir.Const(x % y, span=span)
        case _:
            return ir.Mod(a, b, span=span)


def extremum(name: str, terms: tuple[ir.Expr, ...], span: Span) -> ir.Expr:
    """min(terms) or max(terms)."""
    if all(isinstance(t, ir.Const) for t in terms):
        values = [t.value for t in terms if isinstance(t, ir.Const)]
        return ir.Const(min(values) if name == "min" else max(values), span=span)
    return ir.Min(terms, span=span) if name == "min" else ir.Max(terms, span=span)


def absolute(a: ir.Expr, span: Span) -> ir.Expr:
    return extremum("max", (a, negate(a, span)), span)


def choose(cond: ir.Pred, then: ir.Expr, orelse: ir.Expr, span: Span) -> ir.Expr:
    if isinstance(cond, ir.BoolConst):
        return then if cond.value else orelse
    return ir.IfElse(cond, then, orelse, span=span)


def compare(op: ir.Op, a: ir.Expr, b: ir.Expr, span: Span) -> ir.Pred:
    match a, b:
        case ir.Const(x), ir.Const(y):
            return ir.BoolConst(_COMPARE[op](x, y), span=span)
        case _:
            return ir.Compare(op, a, b, span=span)


def conjunction(terms: list[ir.Pred], span: Span) -> ir.Pred:
    flat: list[ir.Pred] = []
    for t in terms:
        flat += t.terms if isinstance(t, ir.And) else (t,)
    kept = [t for t in flat if not (isinstance(t, ir.BoolConst) and t.value)]
    if any(isinstance(t, ir.BoolConst) for t in kept):
        return ir.BoolConst(False, span=span)
    return ir.BoolConst(True, span=span) if not kept else kept[0] if len(kept) == 1 else ir.And(tuple(kept), span=span)


def disjunction(terms: list[ir.Pred], span: Span) -> ir.Pred:
    flat: list[ir.Pred] = []
    for t in terms:
        flat += t.terms if isinstance(t, ir.Or) else (t,)
    kept = [t for t in flat if not (isinstance(t, ir.BoolConst) and not t.value)]
    if any(isinstance(t, ir.BoolConst) for t in kept):
        return ir.BoolConst(True, span=span)
    return ir.BoolConst(False, span=span) if not kept else kept[0] if len(kept) == 1 else ir.Or(tuple(kept), span=span)


def negation(term: ir.Pred, span: Span) -> ir.Pred:
    match term:
        case ir.BoolConst(value):
            return ir.BoolConst(not value, span=span)
        case ir.Not(inner):
            return inner
        case _:
            return ir.Not(term, span=span)


def choice(cond: ir.Pred, then: ir.Pred, orelse: ir.Pred, span: Span) -> ir.Pred:
    """If cond then then else orelse, among conditions."""
    if isinstance(cond, ir.BoolConst):
        return then if cond.value else orelse
    return disjunction([conjunction([cond, then], span), conjunction([negation(cond, span), orelse], span)], span)


# ---------------------------------------------------------------- what was made


def sides(node: Node) -> frozenset[str]:
    """Which of "q", "k", "h" and "item" a node depends on; `same(S)` depends on q and k."""
    found: set[str] = set()
    for n in walk(node):
        match n:
            case ir.Row():
                found.add("q")
            case ir.Col():
                found.add("k")
            case ir.Head():
                found.add("h")
            case ir.Item():
                found.add("item")
            case ir.Same():
                found |= {"q", "k"}
            case _:
                pass
    return frozenset(found)


class Measure:
    """Sizes of IR seen as trees (shared parts counted every time), each node visited once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, int, int]] = {}

    def of(self, node: Node) -> tuple[int, int]:
        """(number of nodes, depth)."""
        known = self._known.get(id(node))
        if known is None:
            below = [self.of(p) for p in children(node)]
            size, depth = 1 + sum(s for s, _ in below), 1 + max((d for _, d in below), default=0)
            known = self._known[id(node)] = (node, size, depth)
        return known[1], known[2]
