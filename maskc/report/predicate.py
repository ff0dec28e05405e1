"""The predicate of a mask as plain data, so that a page can say which of its parts hold at a cell.

A node is a list: its kind, its fields in the order of the dataclass. A condition is an object {"p": node, "t": words,
"at": [start, end] in the text of the file}; the terms of `and`, `or` and `not` are such objects again.
"""

from __future__ import annotations

from typing import assert_never

from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
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
from maskc.prose import Prose

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def predicate(fn: MaskFn) -> Json:
    """The body of the mask; block tables, which stand beside it, are not part of it."""
    return _Writer(fn).pred(fn.body)


class _Writer:
    def __init__(self, fn: MaskFn) -> None:
        self.fn, self.prose = fn, Prose(fn)

    def pred(self, p: Pred) -> Json:
        out: dict[str, Json] = {"p": self._pred(p)}
        if not isinstance(p, And | Or):
            out["t"] = self.prose.pred(p)
        if p.span is not None and self.fn.source is not None and p.span.source.text == self.fn.source.text:
            out["at"] = [p.span.start, p.span.end]
        return out

    def _pred(self, p: Pred) -> Json:
        match p:
            case BoolConst(value):
                return ["const", value]
            case BoolField(name, index):
                return ["flag", name, self._per(name), self.expr(index)]
            case Compare(op, a, b):
                return ["cmp", op, self.expr(a), self.expr(b)]
            case Same(of):
                return ["same", of]
            case InSet(of, index):
                return ["in", of, self.expr(index)]
            case InEdge(of, edge, index):
                return ["edge", of, self.fn.input(of).within, edge, self.expr(index)]
            case And(terms):
                return ["and", *map(self.pred, terms)]
            case Or(terms):
                return ["or", *map(self.pred, terms)]
            case Not(term):
                return ["not", self.pred(term)]
            case _:
                assert_never(p)

    def expr(self, e: Expr) -> Json:
        match e:
            case Const(value):
                return value
            case Size(name) | Scalar(name):
                return ["int", name]
            case Row():
                return "q"
            case Col():
                return "k"
            case Head():
                return "h"
            case Field(name, index):
                return ["field", name, self._per(name), self.expr(index)]
            case SegAttr(of, attr, index):
                return [attr, of, self.expr(index)]
            case Add(terms):
                return ["+", *map(self.expr, terms)]
            case Mul(a, b):
                return ["*", self.expr(a), self.expr(b)]
            case FloorDiv(a, b):
                return ["//", self.expr(a), self.expr(b)]
            case Mod(a, b):
                return ["%", self.expr(a), self.expr(b)]
            case Min(terms):
                return ["min", *map(self.expr, terms)]
            case Max(terms):
                return ["max", *map(self.expr, terms)]
            case IfElse(cond, then, orelse):
                return ["if", self.pred(cond), self.expr(then), self.expr(orelse)]
            case Item() | StartOf() | SetEnd() | EdgeStart() | EdgeEnd() | FirstRow():
                raise AssertionError(f"{type(e).__name__} stands in facts and lowered programs only")
            case _:
                assert_never(e)

    def _per(self, name: str) -> str | None:
        return self.fn.input(name).per
