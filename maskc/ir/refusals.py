"""Error M201: why an atom of a mask has no column form, in the user's terms, with an example and a way out."""

from __future__ import annotations

from dataclasses import dataclass

from maskc.diagnostics import Diagnostic, MaskcError, Span
from maskc.ir.nodes import (
    BoolField,
    Expr,
    Field,
    FloorDiv,
    InEdge,
    InputKind,
    InSet,
    MaskFn,
    Mod,
    Mul,
    Pred,
    Row,
    SegAttr,
)
from maskc.ir.traverse import Node, reads_row, walk


@dataclass(frozen=True, slots=True)
class Refusal:
    """The terms of a literal that vary with the row, with their coefficients, as canonical atoms."""

    culprits: tuple[tuple[Node, int], ...]


def refuse(fn: MaskFn, literal: Pred, why: Refusal) -> MaskcError:
    """M201 for a literal of the mask; the caret stands under the guilty sub-expression."""
    node = _guilty(literal, why)
    message, hint = _explain(fn, node)
    notes: tuple[tuple[str, str], ...] = ()
    from maskc.ir.search import scattered_example

    example = scattered_example(fn)
    if example is not None:
        notes = (("example", example),)
    return MaskcError(Diagnostic("M201", message, getattr(node, "span", None) or literal.span or fn.span, hint, notes))


def _guilty(literal: Pred, why: Refusal) -> Node:
    """The sub-expression of the literal to point at, as the user wrote it."""
    rows = [n for n in walk(literal) if reads_row(n) and n is not literal]
    for kind in (Mod, Field, BoolField, InEdge, InSet):
        found = next((n for n in rows if isinstance(n, kind)), None)
        if found is not None:
            return found
    attr = next((n for n in rows if isinstance(n, SegAttr)), None)
    if attr is not None:
        return attr
    scaled = next((n for n in rows if isinstance(n, Mul)), None)
    if scaled is not None:
        return scaled
    culprit: Expr | Pred = why.culprits[0][0] if why.culprits else literal
    return next((n for n in rows if n == culprit), literal)


def _text(node: Node) -> str:
    span: Span | None = getattr(node, "span", None)
    if span is not None:
        return " ".join(span.text.split())
    from maskc.ir.printer import print_term

    return print_term(node)


def _explain(fn: MaskFn, node: Node) -> tuple[str, str]:
    text = _text(node)
    match node:
        case Mod():
            return (
                f"`{text}` starts over again and again as the row grows, so the rows that see a key are scattered",
                "a remainder of the row is fine beside an equality of blocks (`q // B == k // B`), "
                "or of a position beside `same(S)`; a dilated pattern has no column form",
            )
        case Field(name, _) | BoolField(name, _):
            return _vector(fn, name, text)
        case InSet(of, _):
            return (
                f"`{text}` opens and closes with every span, so the rows that see a key can be scattered",
                f"beside `same({of})` it is fine; if `{of}` has no gaps, declare it `segments`",
            )
        case InEdge(of, _, _):
            parent = fn.input(of).within
            return (
                f"`{text}` selects rows in every `{parent}`, so the rows that see a key can be scattered",
                f"fix the parent: `same({parent}) and {text}`",
            )
        case SegAttr(of, attr, _):
            return _attribute(fn, of, attr, text)
        case Mul() | FloorDiv() | Row():
            return (
                f"`{text}` has the row with a coefficient other than 1 or -1, which is not a row bound",
                "compare `q` itself (or `q // B`) with a value of the key",
            )
        case _:
            return (
                f"`{text}` combines several values that vary with the row, so the rows that see a key can be scattered",
                "compare one value of the row (`q`, `q // B`, `doc[q]`, a sorted vector) with values of the key",
            )


def _vector(fn: MaskFn, name: str, text: str) -> tuple[str, str]:
    decl = fn.input(name)
    message = f"`{text}` varies with the row and has no order, so the rows that see a key can be scattered"
    if decl.kind is InputKind.BOOL:
        return message, f"declare the rows as `input {name} : spans` and use `same({name})`, or read it at the key: `{name}[k]`"
    if decl.per not in ("key", "row", "head", None):
        if decl.sorted:
            return message, f"`{decl.per}` are spans and may leave gaps: declare them `segments`, or add `same({decl.per})`"
        return message, f"beside `same({decl.per})` it is the key's own value; never decreasing? `sorted int per {decl.per}`"
    return message, f"equal neighbours? declare `input {name} : segments`. never decreasing? `sorted int per {decl.per}`"


def _attribute(fn: MaskFn, of: str, attr: str, text: str) -> tuple[str, str]:
    if attr in ("pos", "len"):
        reason = "starts over in every" if attr == "pos" else "has no order over the"
        return (
            f"`{text}` {reason} segment of `{of}`, so the rows that see a key can be scattered",
            f"add `same({of})`: then `{text}` is measured in the key's own segment",
        )
    if fn.input(of).kind is InputKind.SPANS:
        return (
            f"`{text}` is undefined in the gaps between the spans of `{of}`, so the rows that see a key can be scattered",
            f"add `same({of})`, or declare `{of}` as `segments` if it has no gaps",
        )
    return (
        f"`{text}` stands beside other values that vary with the row, so the rows that see a key can be scattered",
        f"compare `{text}` with values of the key, or add `same({of})`",
    )
