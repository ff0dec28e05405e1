"""Walking and rewriting of IR trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar, cast

from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Compare,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    IfElse,
    InEdge,
    InSet,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Pred,
    Row,
    Same,
    SegAttr,
    Size,
    StartOf,
)

Node = Expr | Pred
_N = TypeVar("_N", bound=Node)


def children(node: Node) -> tuple[Node, ...]:
    """Direct sub-terms, left to right."""
    match node:
        case Add(terms) | Min(terms) | Max(terms):
            return terms
        case And(terms) | Or(terms):
            return terms
        case Mul(a, b) | FloorDiv(a, b) | Mod(a, b):
            return (a, b)
        case Compare(_, a, b):
            return (a, b)
        case IfElse(cond, then, orelse):
            return (cond, then, orelse)
        case Not(term):
            return (term,)
        case Field(_, index) | BoolField(_, index) | InSet(_, index):
            return (index,)
        case SegAttr(_, _, index) | EdgeStart(_, _, index) | EdgeEnd(_, _, index) | InEdge(_, _, index):
            return (index,)
        case StartOf(_, value) | FirstRow(_, value):
            return (value,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and everything under it, parents first."""
    yield node
    for child in children(node):
        yield from walk(child)


def names_in(node: Node) -> set[str]:
    """The inputs that an expression reads."""
    found = set()
    for n in walk(node):
        name = getattr(n, "name", None) if not isinstance(n, Size) else None
        found |= {x for x in (name, getattr(n, "of", None)) if isinstance(x, str)}
    return found


def reads_row(node: Node) -> bool:
    """Whether the value varies with the query row (`Same` does)."""
    return any(isinstance(n, Row | Same) for n in walk(node))


def rewrite(node: _N, change: Callable[[Node], Node | None]) -> _N:
    """Bottom-up copy: `change` sees each node with its children already rewritten; None keeps it."""
    kids = tuple(rewrite(c, change) for c in children(node))
    new = rebuild(node, kids)
    changed = change(new)
    return new if changed is None else cast(_N, changed)


def rebuild(node: _N, kids: tuple[Node, ...]) -> _N:
    """The node with other children; the same object if they are the same."""
    old = children(node)
    if all(a is b for a, b in zip(old, kids, strict=True)):
        return node
    changes: dict[str, object]
    match node:
        case Add() | Min() | Max() | And() | Or():
            changes = {"terms": kids}
        case Mul() | FloorDiv() | Mod() | Compare():
            changes = {"a": kids[0], "b": kids[1]}
        case IfElse():
            changes = {"cond": kids[0], "then": kids[1], "orelse": kids[2]}
        case Not():
            changes = {"term": kids[0]}
        case StartOf():
            changes = {"ordinal": kids[0]}
        case FirstRow():
            changes = {"value": kids[0]}
        case _:
            changes = {"index": kids[0]}
    return replace(node, **changes)  # type: ignore[arg-type]


def substitute(node: _N, old: Node, new: Node) -> _N:
    """Every occurrence of `old` replaced by `new`."""
    return rewrite(node, lambda n: new if n == old else None)


TRUE = BoolConst(True)
FALSE = BoolConst(False)
