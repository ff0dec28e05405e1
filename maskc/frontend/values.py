"""What an expression means while it is typed: a number, a condition, or the name of an input (a macro's argument)."""

from __future__ import annotations

from dataclasses import dataclass

from maskc.diagnostics import Span
from maskc.frontend.units import Unit
from maskc.ir.nodes import Expr, InputDecl, Pred


@dataclass(frozen=True, slots=True)
class Number:
    expr: Expr
    unit: Unit


@dataclass(frozen=True, slots=True)
class Truth:
    """`tables`: block tables that stand beside `pred` as conjuncts, with the place of each read."""

    pred: Pred
    tables: tuple[tuple[str, Span], ...] = ()


@dataclass(frozen=True, slots=True)
class Ref:
    """An input that is not one number: a set, a vector or a table, as passed to a `let` with parameters."""

    decl: InputDecl


@dataclass(frozen=True, slots=True)
class Bad:
    """An expression with an error that was reported; whatever reads it stays silent."""


BAD = Bad()
Value = Number | Truth | Ref | Bad


def describe(v: Value) -> str:
    match v:
        case Number():
            return str(v.unit)
        case Truth():
            return "a condition"
        case Ref():
            return f"the input `{v.decl.name}`"
        case Bad():
            return "nothing"
