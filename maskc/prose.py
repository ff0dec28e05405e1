"""Expressions, predicates and lowered programs in words, for people: `end of its doc`, `prefix of its doc`.

Nothing reads these texts back; the exact text forms are those of `maskc.ir.printer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from maskc.ir.intervals import Branch, Interval, Leaf, Tree
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Col,
    Compare,
    Const,
    Edge,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    Head,
    IfElse,
    InEdge,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Pred,
    Row,
    Same,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)


@dataclass(frozen=True, slots=True)
class Prose:
    """Words for the terms of one mask; the declarations say what a name belongs to."""

    fn: MaskFn

    def expr(self, e: Expr) -> str:
        """An integer expression, without brackets around it."""
        match e:
            case Const(value):
                return str(value)
            case Size(name) | Scalar(name):
                return name
            case Row():
                return "q"
            case Col():
                return "k"
            case Head():
                return "h"
            case Item(of):
                return f"the {of}"
            case Field(name, index):
                return self._field(name, index)
            case SegAttr(of, attr, index):
                noun = {"start": "start of", "end": "end of", "len": "length of", "pos": "position in", "ordinal": "number of"}
                return f"{noun[attr]} {self._owner(of, index)}"
            case Add(terms):
                return self._sum(terms)
            case Mul(a, b):
                return f"{self._factor(a)} * {self._factor(b)}"
            case FloorDiv(a, b):
                return f"{self._factor(a)} // {self._factor(b)}"
            case Mod(a, b):
                return f"{self._factor(a)} % {self._factor(b)}"
            case Min(terms):
                return f"min({', '.join(map(self.expr, terms))})"
            case Max(terms):
                return f"max({', '.join(map(self.expr, terms))})"
            case IfElse(cond, then, orelse):
                return f"({self.expr(then)} if {self.pred(cond)}, else {self.expr(orelse)})"
            case StartOf(of, ordinal):
                return self._start_of(of, ordinal)
            case SetEnd(of):
                return f"end of the last {of}"
            case EdgeStart(of, edge, index):
                return f"start of {self._edge(of, edge, index)}"
            case EdgeEnd(of, edge, index):
                return f"end of {self._edge(of, edge, index)}"
            case FirstRow(name, value):
                return f"first row with {name} >= {self.expr(value)}"
            case _:
                assert_never(e)

    def pred(self, p: Pred) -> str:
        """A condition."""
        match p:
            case BoolConst(value):
                return "always" if value else "never"
            case BoolField(name, index):
                return f"{name}[{self.expr(index)}]"
            case Compare(op, a, b):
                return f"{self.expr(a)} {op} {self.expr(b)}"
            case Same(of):
                return f"q and k lie in one {of}"
            case InSet(of, index):
                return f"{self.expr(index)} lies in {_a(of)}"
            case InEdge(of, edge, index):
                return f"{self.expr(index)} lies in {self._edge(of, edge, index)}"
            case Not(InSet(of, index)):
                return f"{self.expr(index)} lies outside every {of}"
            case Not(InEdge(of, edge, index)):
                return f"{self.expr(index)} lies outside {self._edge(of, edge, index)}"
            case Not(term):
                return f"not {self._clause(term)}"
            case And(terms):
                return " and ".join(self._clause(t) for t in terms)
            case Or(terms):
                return " or ".join(self._clause(t) for t in terms)
            case _:
                assert_never(p)

    def rows(self, intervals: tuple[Interval, ...]) -> str:
        """Rows of a union of half-open intervals: `rows k .. end of its doc`."""
        return " and ".join(self._rows(i) for i in intervals) if intervals else "no row"

    def cases(self, tree: Tree, indent: str = "") -> list[str]:
        """Lines that say which rows see key k."""
        match tree:
            case Leaf(visible=visible):
                return [indent + self.rows(visible)]
            case Branch(guard, then, orelse):
                return self._branch(f"if {self.pred(guard)}:", then, indent) + self._otherwise(orelse, indent)
            case _:
                assert_never(tree)

    def _otherwise(self, tree: Tree, indent: str) -> list[str]:
        if isinstance(tree, Branch):
            chained = self._branch(f"otherwise, if {self.pred(tree.guard)}:", tree.then, indent)
            return chained + self._otherwise(tree.orelse, indent)
        return self._branch("otherwise:", tree, indent)

    def _branch(self, head: str, tree: Tree, indent: str) -> list[str]:
        if isinstance(tree, Leaf):
            return [f"{indent}{head} {self.rows(tree.visible)}"]
        return [indent + head, *self.cases(tree, indent + "  ")]

    def _rows(self, interval: Interval) -> str:
        match interval:
            case Interval(Const(0), Size("nq")):
                return "every row"
            case Interval(lo, Size("nq")):
                return f"rows {self.expr(lo)} to the last"
            case Interval(lo, hi):
                return f"rows {self.expr(lo)} .. {self.expr(hi)}"

    def _field(self, name: str, index: Expr) -> str:
        per = self.fn.input(name).per
        return f"{name}[{self.expr(index)}]" if per in (None, "key", "row", "head") else f"{name} of {self._owner(per, index)}"

    def _owner(self, of: str, index: Expr) -> str:
        match index:
            case Col():
                return f"its {of}"
            case Item():
                return f"the {of}"
            case _:
                return f"the {of} of {self.expr(index)}"

    def _edge(self, of: str, edge: Edge, index: Expr) -> str:
        parent = self.fn.input(of).within
        return f"the {edge} {of} of {self._owner(parent, index)}" if parent is not None else f"the {edge} {of}"

    def _start_of(self, of: str, ordinal: Expr) -> str:
        match ordinal:
            case SegAttr(other, "ordinal", Col()) if other == of:
                return f"start of its {of}"
            case Add((SegAttr(other, "ordinal", Col()), Const(1))) | Add((Const(1), SegAttr(other, "ordinal", Col()))) if (
                other == of
            ):
                return f"start of the {of} after its own"
            case _:
                return f"start of {of} number {self._factor(ordinal)}"

    def _sum(self, terms: tuple[Expr, ...]) -> str:
        # constants last, negative terms after a positive one where there is any
        ordered = sorted(terms, key=lambda t: (isinstance(t, Const), _sign(t) < 0))
        out = ""
        for term in ordered:
            sign, text = _sign(term), self.expr(_magnitude(term))
            out += (f" {'-' if sign < 0 else '+'} " if out else "-" if sign < 0 else "") + text
        return out

    def _factor(self, e: Expr) -> str:
        text = self.expr(e)
        return f"({text})" if isinstance(e, Add | FloorDiv | Mod) else text

    def _clause(self, p: Pred) -> str:
        text = self.pred(p)
        return f"({text})" if isinstance(p, And | Or) else text


def _sign(e: Expr) -> int:
    match e:
        case Const(value) | Mul(Const(value), _) | Mul(_, Const(value)) if value < 0:
            return -1
        case _:
            return 1


def _magnitude(e: Expr) -> Expr:
    """`e` without its sign."""
    match e:
        case Const(value):
            return Const(abs(value))
        case Mul(Const(-1), other) | Mul(other, Const(-1)):
            return other
        case Mul(Const(value), other) | Mul(other, Const(value)):
            return Mul(Const(abs(value)), other)
        case _:
            return e


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
