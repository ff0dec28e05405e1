"""Small texts and judgements about expressions, for the messages of the type checker."""

from __future__ import annotations

from dataclasses import replace

from maskc.diagnostics import Span, shortened
from maskc.frontend import ast
from maskc.frontend.scope import Macro
from maskc.frontend.units import Kind
from maskc.frontend.values import Number, Ref, Truth, Value
from maskc.ir import nodes as ir


def seen_from(v: Value | Macro, span: Span) -> Value | Macro:
    """A constant or scalar input has the span of its use, so that errors point there; a `let` keeps its own."""
    if isinstance(v, Number) and isinstance(v.expr, (ir.Const, ir.Scalar)):
        return replace(v, expr=replace(v.expr, span=span))
    return v


def is_constant(v: Value | Macro | None) -> bool:
    """Unknown and bad names count: they are reported as such."""
    match v:
        case Number(expr):
            return isinstance(expr, ir.Const)
        case Truth(pred):
            return isinstance(pred, ir.BoolConst)
        case Ref() | Macro():
            return False
        case _:
            return True


def unit_hint(e: ast.Expr, own: Number, other: Number) -> str | None:
    """`doc[k]` beside a position was meant as `doc.start[k]`, beside a length as `doc.pos[k]`."""
    attr = {Kind.POSITION: "start", Kind.LENGTH: "pos"}.get(other.unit.kind)
    if own.unit.kind is Kind.ORDINAL and attr is not None and isinstance(e, ast.Index):
        return f"did you mean `{e.of.text}.{attr}[{short(e.args[0])}]`?"
    if own.unit.kind is Kind.LENGTH and other.unit.kind is Kind.POSITION and isinstance(e, ast.Attr) and e.index is not None:
        if e.attr.text == "len":
            return f"did you mean `{e.of.text}.end[{short(e.index)}]`?"
        return f"did you mean `{short(e.index)}`?"
    return None


ELSEWHERE = {
    **dict.fromkeys(("q_idx", "qidx", "row", "q_index", "query"), "the row is called `q`"),
    **dict.fromkeys(("k_idx", "kv_idx", "kidx", "kv", "col", "column", "key"), "the key is called `k`"),
    **dict.fromkeys(("head", "h_idx", "head_idx"), "the head is called `h`"),
    **dict.fromkeys(
        ("b", "b_idx", "batch"), "a mask is that of one batch item; items differ in the data that they are bound with"
    ),
}
"""What the coordinates are called elsewhere."""


def how_to_declare(name: str) -> str:
    return f"declare it, for example `input {name} : int`"


def count(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def short(e: ast.Expr) -> str:
    return short_span(e.span)


def short_span(span: Span) -> str:
    return shortened(" ".join(span.text.split()))
