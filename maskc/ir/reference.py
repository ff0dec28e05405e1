"""The oracle: what a mask means, element by element, on plain Python integers. Slow and obvious.

Negation is pushed inward while evaluating: `holds(p, positive=False)` asks for `not p`. A comparison that reads an
attribute of an outside token, or a vector out of range, is false in both polarities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    InputDecl,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Op,
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
from maskc.ir.traverse import walk


@dataclass(frozen=True)
class Env:
    """The data of one batch item.

    scalars: int inputs. vectors: int and bool vectors, one value per key, row, head or segment. sets: half-open
    (start, end) per ordinal, in order. tables: bool rows per query block.
    """

    nq: int
    nk: int
    scalars: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, Sequence[int | bool]] = field(default_factory=dict)
    sets: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Sequence[bool]]] = field(default_factory=dict)

    def segment(self, name: str, token: int) -> int | None:
        """Ordinal of the segment that holds the token, None outside."""
        return next((i for i, (s, e) in enumerate(self.sets[name]) if s <= token < e), None)


class Outside(Exception):
    """A read of an outside token or out of range: the comparison around it is false."""


@dataclass(frozen=True)
class Point:
    """Where an expression is evaluated; `items` are the ordinals that `Item` stands for."""

    q: int
    k: int
    h: int = 0
    items: Mapping[str, int] = field(default_factory=dict)


def visible(fn: MaskFn, env: Env, q: int, k: int, h: int = 0) -> bool:
    """Whether row q of mask head h may see key k."""
    for name in fn.tables:
        block = fn.input(name).block
        assert block is not None
        if not env.tables[name][q // block[0]][k // block[1]]:
            return False
    return holds(fn, env, fn.body, Point(q, k, h))


def holds(fn: MaskFn, env: Env, p: Pred, at: Point, positive: bool = True) -> bool:
    """The truth of `p`, or of its inward-pushed negation."""
    match p:
        case BoolConst(value):
            return value == positive
        case Not(term):
            return holds(fn, env, term, at, not positive)
        case And(terms):
            results = (holds(fn, env, t, at, positive) for t in terms)
            return all(results) if positive else any(results)
        case Or(terms):
            results = (holds(fn, env, t, at, positive) for t in terms)
            return any(results) if positive else all(results)
        case Compare(op, a, b):
            try:
                return compare(op, value_of(fn, env, a, at), value_of(fn, env, b, at)) == positive
            except Outside:
                return False
        case Same(of):
            seg = env.segment(of, at.q)
            return (seg is not None and seg == env.segment(of, at.k)) == positive
        case InSet(of, index):
            return (_segment_or_none(fn, env, of, index, at) is not None) == positive
        case InEdge(of, edge, index):
            try:
                token = value_of(fn, env, index, at)
                start, end = edge_of(fn, env, of, edge, token)
                return (start <= token < end) == positive
            except Outside:
                return not positive
        case BoolField(name, index):
            try:
                return bool(read(fn, env, fn.input(name), index, at)) == positive
            except Outside:
                return not positive
        case _:
            assert_never(p)


def compare(op: Op, a: int, b: int) -> bool:
    match op:
        case "<=":
            return a <= b
        case "<":
            return a < b
        case "==":
            return a == b
        case "!=":
            return a != b
        case ">=":
            return a >= b
        case ">":
            return a > b
        case _:
            assert_never(op)


def value_of(fn: MaskFn, env: Env, e: Expr, at: Point) -> int:
    """The integer value; raises Outside."""

    def v(x: Expr) -> int:
        return value_of(fn, env, x, at)

    match e:
        case Const(value):
            return value
        case Size(name):
            return env.nq if name == "nq" else env.nk
        case Scalar(name):
            return env.scalars[name]
        case Row():
            return at.q
        case Col():
            return at.k
        case Head():
            return at.h
        case Item(of):
            return at.items[of]
        case Field(name, index):
            return int(read(fn, env, fn.input(name), index, at))
        case SegAttr(of, attr, index):
            ordinal = _segment_or_none(fn, env, of, index, at)
            if ordinal is None:
                raise Outside
            start, end = env.sets[of][ordinal]
            match attr:
                case "start":
                    return start
                case "end":
                    return end
                case "len":
                    return end - start
                case "pos":
                    return v(index) - start
                case "ordinal":
                    return ordinal
                case _:
                    assert_never(attr)
        case Add(terms):
            return sum(v(t) for t in terms)
        case Mul(a, b):
            return v(a) * v(b)
        case FloorDiv(a, b):
            return v(a) // max(1, v(b))  # whoever checks data asks before the check that a divisor is >= 1
        case Mod(a, b):
            return v(a) % max(1, v(b))
        case Min(terms):
            return min(v(t) for t in terms)
        case Max(terms):
            return max(v(t) for t in terms)
        case IfElse(cond, then, orelse):
            if holds(fn, env, cond, at):
                return v(then)
            if holds(fn, env, cond, at, positive=False):
                return v(orelse)
            raise Outside
        case StartOf(of, ordinal):
            table = env.sets[of]
            first = max(v(ordinal), 0)
            return table[first][0] if first < len(table) else set_end(env, of)
        case SetEnd(of):
            return set_end(env, of)
        case EdgeStart(of, edge, index):
            return edge_of(fn, env, of, edge, v(index))[0]
        case EdgeEnd(of, edge, index):
            return edge_of(fn, env, of, edge, v(index))[1]
        case FirstRow(name, value):
            vector, least = env.vectors[name], v(value)
            return next((i for i, x in enumerate(vector) if x >= least), len(vector))
        case _:
            assert_never(e)


def read(fn: MaskFn, env: Env, decl: InputDecl, index: Expr, at: Point) -> int | bool:
    """`name[index]`: per key, row and head by position, per segment by the segment that holds the token."""
    vector = env.vectors[decl.name]
    if decl.per in ("key", "row", "head"):
        i = value_of(fn, env, index, at)
        if decl.per == "head" and len(vector) == 1:
            i = 0
    else:
        assert decl.per is not None
        ordinal = _segment_or_none(fn, env, decl.per, index, at)
        i = -1 if ordinal is None else ordinal
    if not 0 <= i < len(vector):
        raise Outside
    return vector[i]


def set_end(env: Env, of: str) -> int:
    return max((end for _, end in env.sets[of]), default=0)


def edge_of(fn: MaskFn, env: Env, of: str, edge: str, token: int) -> tuple[int, int]:
    """The first/last non-empty segment of `of` in the parent of the token; raises Outside if there is no parent here."""
    parent = fn.input(of).within
    low, high = 0, max(env.nq, env.nk)
    if parent is not None:
        ordinal = env.segment(parent, token)
        if ordinal is None:
            raise Outside
        low, high = env.sets[parent][ordinal]
    inside = [(s, e) for s, e in env.sets[of] if low <= s < e <= high]
    if not inside:
        return (high, high) if parent is not None else (0, 0)
    return inside[0] if edge == "first" else inside[-1]


def _segment_or_none(fn: MaskFn, env: Env, of: str, index: Expr, at: Point) -> int | None:
    if isinstance(index, Item) and index.of == of:
        return at.items[of]
    try:
        return env.segment(of, value_of(fn, env, index, at))
    except Outside:
        return None


def dense(fn: MaskFn, env: Env, h: int = 0) -> list[list[bool]]:
    """visible[q][k] of one head."""
    return [[visible(fn, env, q, k, h) for k in range(env.nk)] for q in range(env.nq)]


def broken_fact(fn: MaskFn, env: Env) -> Pred | None:
    """The first `where` or `assume` that the data break. Facts about outside tokens are not checked there."""
    return next((p for p in facts_of(fn) if any(holds(fn, env, p, at, positive=False) for at in places(fn, env, p))), None)


def facts_of(fn: MaskFn) -> tuple[Pred, ...]:
    """Every `where` and every `assume`."""
    return (*(p for d in fn.inputs for p in d.where), *fn.assumes)


def places(fn: MaskFn, env: Env, fact: Pred) -> list[Point]:
    """Where a fact must hold: at every key, row, head or segment that it speaks of (of one kind, as the type checker sees to)."""
    for node in walk(fact):
        match node:
            case Col():
                return [Point(0, k) for k in range(env.nk)]
            case Row():
                return [Point(q, 0) for q in range(env.nq)]
            case Head():
                heads = max([1, *(len(env.vectors[d.name]) for d in fn.inputs if d.per == "head")])
                return [Point(0, 0, h) for h in range(heads)]
            case Item(of):
                return [Point(0, 0, 0, {of: i}) for i in range(len(env.sets[of]))]
            case _:
                pass
    return [Point(0, 0)]
