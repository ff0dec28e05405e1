"""Masks that are legal and yet probably not meant."""

from __future__ import annotations

from maskc.diagnostics import Diagnostic
from maskc.frontend import build
from maskc.ir import nodes as ir


def one_sided_window(body: ir.Pred) -> Diagnostic | None:
    """`q - k <= window` alone: it bounds how far back a row sees, and leaves the whole future visible."""
    terms = body.terms if isinstance(body, ir.And) else (body,)
    relations = [t for t in terms if build.sides(t) >= {"q", "k"}]
    windows = [t for t in relations if isinstance(t, ir.Compare) and _only_bounds_the_past(t)]
    if not windows or len(windows) < len(relations):
        return None
    text = "every row sees all later keys: this only bounds how far back it sees"
    return Diagnostic("W102", text, windows[0].span, "add `and k <= q`, or bound both sides, as in `abs(q - k) <= window`")


def _only_bounds_the_past(c: ir.Compare) -> bool:
    """Whether the comparison says q - k < something without q and k."""
    a, b = _coefficients(c.a), _coefficients(c.b)
    if a is None or b is None:
        return False
    slope = (a[0] - b[0], a[1] - b[1])
    return (slope == (1, -1) and c.op in ("<", "<=")) or (slope == (-1, 1) and c.op in (">", ">="))


def _coefficients(e: ir.Expr) -> tuple[int, int] | None:
    """The factors of q and k in an expression that is linear in them, else None."""
    match e:
        case ir.Row():
            return 1, 0
        case ir.Col():
            return 0, 1
        case ir.Add(terms):
            parts = [_coefficients(t) for t in terms]
            known = [p for p in parts if p is not None]
            return (sum(p[0] for p in known), sum(p[1] for p in known)) if len(known) == len(parts) else None
        case ir.Mul(ir.Const(factor), b):
            inner = _coefficients(b)
            return None if inner is None else (factor * inner[0], factor * inner[1])
        case _:
            return None if build.sides(e) & {"q", "k"} else (0, 0)
