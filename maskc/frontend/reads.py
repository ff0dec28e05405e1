"""Reads of inputs at an index: `doc[k]`, `doc.start[k]`, `prefix[k]`, `streaming[h]`, `keep[q // 128, k // 128]`, `k in doc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from maskc.frontend import ast, build
from maskc.frontend.units import LENGTH, PLAIN, POSITION, Kind, ordinal
from maskc.frontend.values import BAD, Number, Truth, Value
from maskc.ir import nodes as ir

if TYPE_CHECKING:
    from maskc.diagnostics import Span
    from maskc.frontend.scope import Scope


class Reads:
    """Typing of one read expression; errors point at it or at its index."""

    def __init__(self, scope: Scope, e: ast.Expr) -> None:
        self._scope, self._e = scope, e

    def indexed(self, decl: ir.InputDecl, args: tuple[Number, ...], at: tuple[ast.Expr, ...]) -> Value:
        """`name[args]` of any input."""
        name, span = decl.name, self._e.span
        if decl.kind is ir.InputKind.BLOCKS:
            return self._table(decl, args)
        if len(args) > 1:
            return self._scope.report("M105", f"`{name}` takes one index, not {len(args)}", span)
        if decl.is_set:
            if not self._token(name, args[0], at[0]):
                return BAD
            return Number(ir.SegAttr(name, "ordinal", args[0].expr, span=span), ordinal(name))
        ok = self._head(name, args[0], at[0]) if decl.per == "head" else self._token(name, args[0], at[0])
        return self._read(decl, args[0].expr, span) if ok else BAD

    def attribute(self, decl: ir.InputDecl, attr: str, index: Number, at: ast.Expr) -> Value:
        """`doc.start[k]` and the like; `attr` is one of start, end, len, pos."""
        if not self._token(f"{decl.name}.{attr}", index, at):
            return BAD
        return self._attribute(decl, attr, index.expr)

    def item_attribute(self, decl: ir.InputDecl, attr: str) -> Value:
        """The bare `doc.len` of a `where`."""
        return self._attribute(decl, attr, ir.Item(decl.name, span=self._e.span))

    def element(self, decl: ir.InputDecl, span: Span) -> Value:
        """The bare vector of a `where`: the element that the fact is about."""
        index: ir.Expr
        match decl.per:
            case "key":
                index = ir.Col(span=span)
            case "row":
                index = ir.Row(span=span)
            case "head":
                index = ir.Head(span=span)
            case of:
                index = ir.Item(cast("str", of), span=span)
        return self._read(decl, index, span)

    def membership(self, decl: ir.InputDecl, edge: str | None, token: Number, at: ast.Expr) -> Value:
        """`k in doc`, `k in first(doc)`."""
        if not self._token(decl.name, token, at):
            return BAD
        if edge is None:
            return Truth(ir.InSet(decl.name, token.expr, span=self._e.span))
        return Truth(ir.InEdge(decl.name, cast("ir.Edge", edge), token.expr, span=self._e.span))

    # ---- helpers

    def _read(self, decl: ir.InputDecl, index: ir.Expr, span: Span) -> Value:
        if decl.kind is ir.InputKind.BOOL:
            return Truth(ir.BoolField(decl.name, index, span=span))
        return Number(ir.Field(decl.name, index, span=span), PLAIN)

    def _attribute(self, decl: ir.InputDecl, attr: str, index: ir.Expr) -> Number:
        unit = POSITION if attr in ("start", "end") else LENGTH
        return Number(ir.SegAttr(decl.name, cast("ir.Attr", attr), index, span=self._e.span), unit)

    def _token(self, what: str, index: Number, at: ast.Expr) -> bool:
        """Whether the index is a row or key position; reports anything else."""
        if "h" in build.sides(index.expr):
            self._scope.report("M105", f"`{what}` is read at a token; `{at.span.text}` is a head", at.span, "use `k` or `q`")
        elif index.unit.kind not in (Kind.POSITION, Kind.PLAIN):
            self._scope.report(
                "M105", f"`{what}` is read at a token; `{at.span.text}` is {index.unit}", at.span, "use `k` or `q`"
            )
        else:
            return True
        return False

    def _head(self, name: str, index: Number, at: ast.Expr) -> bool:
        if index.expr == ir.Head():  # the columns of one head never read another head's value
            return True
        text = f"`{name}` is declared `per head` and read at `h` alone, not at `{at.span.text}`"
        self._scope.report("M105", text, at.span, f"write `{name}[h]`")
        return False

    def _table(self, decl: ir.InputDecl, args: tuple[Number, ...]) -> Value:
        """Only `keep[q // a, k // b]` with the declared a and b: the table is ANDed into the tiles as it is."""
        assert decl.block is not None
        a, b = decl.block
        wanted = (build.floor_div(ir.Row(), ir.Const(a), self._e.span), build.floor_div(ir.Col(), ir.Const(b), self._e.span))
        if tuple(n.expr for n in args) != wanted:
            text = f"a `bool per block({a}, {b})` is read at its own tiles only"
            return self._scope.report("M120", text, self._e.span, f"write `{decl.name}[q // {a}, k // {b}]`")
        return Truth(ir.BoolConst(True, span=self._e.span), ((decl.name, self._e.span),))
