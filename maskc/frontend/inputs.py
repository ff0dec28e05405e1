"""ast.Input -> InputDecl: axes, parents, block sizes, defaults and facts of the inputs of one file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from maskc.frontend import ast, facts
from maskc.frontend.expressions import Typer
from maskc.frontend.units import PLAIN
from maskc.frontend.values import Number, Truth
from maskc.frontend.words import AXES, did_you_mean
from maskc.ir import nodes as ir

if TYPE_CHECKING:
    from maskc.frontend.typecheck import Checker

_KINDS = {"segments": ir.InputKind.SEGMENTS, "spans": ir.InputKind.SPANS, "int": ir.InputKind.INT, "bool": ir.InputKind.BOOL}


def declare(d: ast.Input, checker: Checker, sets: dict[str, ast.Input]) -> ir.InputDecl | None:
    """The declaration without default and facts, which may mention other inputs."""
    t, name = d.type, d.name.text
    kind = _KINDS[t.kind]
    block: tuple[int, int] | None = None
    if t.block is not None:
        sizes = [Typer(checker, constant=True).number(e) for e in t.block]
        values = [n.expr.value for n in sizes if isinstance(n, Number) and isinstance(n.expr, ir.Const)]
        if len(values) < 2:
            return None
        for e, v in zip(t.block, values, strict=True):
            if v < 1:
                checker.report("M112", f"a block size is at least 1, not {v}", e.span)
                return None
        kind, block = ir.InputKind.BLOCKS, (values[0], values[1])
    per = None if t.per is None or block is not None else _axis(t.per, checker, sets)
    within = None if t.within is None else _parent(t.within, name, checker, sets)
    if (t.per is not None and block is None and per is None) or (t.within is not None and within is None):
        return None
    return ir.InputDecl(name, kind, per, t.sorted, within, block, span=d.name.span)


def _axis(per: ast.Name, checker: Checker, sets: dict[str, ast.Input]) -> str | None:
    if per.text in AXES or per.text in sets:
        return per.text
    if checker.is_declared(per.text):
        text = f"`per {per.text}`: `{per.text}` is neither `row`, `key`, `head` nor a set"
        checker.report("M116", text, per.span, did_you_mean(per.text, sets, "declare it `segments` or `spans`"))
    elif per.text == "block":
        checker.report("M101", "`per block` needs its two sizes", per.span, "write `bool per block(128, 128)`")
    else:
        hint = did_you_mean(per.text, [*AXES, *sets], "an axis is `row`, `key`, `head` or a declared set")
        checker.report("M101", f"unknown axis `{per.text}`", per.span, hint)
    return None


def _parent(within: ast.Name, name: str, checker: Checker, sets: dict[str, ast.Input]) -> str | None:
    """The parent set; a set that lies in itself, over any number of steps, is an error."""
    if within.text not in sets:
        if checker.is_declared(within.text):
            checker.report("M116", f"`within` needs segments or spans; `{within.text}` is no set", within.span)
        else:
            checker.report("M101", f"unknown name `{within.text}`", within.span, did_you_mean(within.text, sets))
        return None
    seen, step = [name], within.text
    while step not in seen:
        seen.append(step)
        parent = sets[step].type.within if step in sets else None
        if parent is None:
            return within.text
        step = parent.text
    if step != name:
        return within.text  # a circle further up, reported there
    checker.report("M111", f"`{name}` lies within itself: {' within '.join([*seen, step])}", within.span)
    return None


def complete(d: ast.Input, decl: ir.InputDecl, checker: Checker) -> ir.InputDecl:
    """Adds the facts and the default."""
    typer = Typer(checker, item=decl)
    where: list[ir.Pred] = []
    for e in d.where:
        t = typer.plain_truth(e)
        if isinstance(t, Truth) and facts.check_elementwise(t.pred, e.span, checker.session):
            where.append(t.pred)
    return replace(decl, where=tuple(where), default=None if d.default is None else _default(d, decl, checker))


def _default(d: ast.Input, decl: ir.InputDecl, checker: Checker) -> int | None:
    assert d.default is not None
    if decl.kind is not ir.InputKind.INT or decl.per is not None:
        checker.report("M123", "only a single `int` input can have a default", d.default.span)
        return None
    n = Typer(checker, constant=True).number(d.default)
    if not isinstance(n, Number) or not isinstance(n.expr, ir.Const):
        return None
    with checker.session.muted():
        bound = Typer(checker, {decl.name: Number(n.expr, PLAIN)}, item=decl)
        verdicts = [(e, bound.plain_truth(e)) for e in d.where]
    for e, t in verdicts:
        if isinstance(t, Truth) and t.pred == ir.BoolConst(False):
            text = f"the default {n.expr.value} of `{decl.name}` breaks its own fact `{' '.join(e.span.text.split())}`"
            checker.report("M123", text, d.default.span)
    return n.expr.value


def parents_first(decls: list[ir.InputDecl]) -> tuple[ir.InputDecl, ...]:
    """Every set before the sets and vectors that are declared over it; otherwise in the order of the file."""
    by_name = {d.name: d for d in decls}
    ordered: dict[str, ir.InputDecl] = {}

    for d in decls:
        chain = [d]
        while (above := chain[-1].within or chain[-1].per) in by_name and by_name[above].is_set:  # an input may be called `key`
            chain.append(by_name[above])
        for x in reversed(chain):
            ordered.setdefault(x.name, x)
    return tuple(ordered.values())


def joined(own: ir.InputDecl, other: ir.InputDecl) -> ir.InputDecl | None:
    """One input declared in two files: the facts of both, the default of the first; None if the types differ."""
    if replace(own, where=(), default=None) != replace(other, where=(), default=None):
        return None
    where = (*own.where, *(w for w in other.where if w not in own.where))
    return replace(own, where=where, default=other.default if own.default is None else own.default)
