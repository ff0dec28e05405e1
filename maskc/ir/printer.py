"""The text form of every IR type: what `--emit` shows, what golden files hold, and what `reader` reads back exactly.

Precedence is mostly explicit: a sum, a product, `and`, `or` and a choice stand in parentheses unless they are the whole
term, a side of a comparison or (products) a term of a sum. `@doc` is the segment that a `where` is about;
`doc.ordinal[k]` is the number of a segment.
"""

from __future__ import annotations

from typing import assert_never

from maskc.ir.intervals import Branch, Interval, IntervalProgram, Tree
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Check,
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
    InputKind,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Row,
    Same,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)
from maskc.ir.traverse import Node
from maskc.ir.verdict import Certificate, Proven, Refuted, Unknown, Verdict


def print_term(node: Node) -> str:
    """An expression or a predicate on one line."""
    text = _term(node)
    return text[1:-1] if isinstance(node, Add | Mul | FloorDiv | Mod | And | Or | IfElse) else text


def _term(n: Node) -> str:
    match n:
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
            return f"@{of}"
        case Field(name, index) | BoolField(name, index):
            return f"{name}[{print_term(index)}]"
        case SegAttr(of, attr, index):
            return f"{of}.{attr}[{print_term(index)}]"
        case Add(terms):
            return f"({_product(terms[0])}{''.join(_signed(t) for t in terms[1:])})"
        case Mul(a, b):
            return f"({_term(a)} * {_term(b)})"
        case FloorDiv(a, b):
            return f"({_term(a)} // {_term(b)})"
        case Mod(a, b):
            return f"({_term(a)} % {_term(b)})"
        case Min(terms):
            return f"min({', '.join(print_term(t) for t in terms)})"
        case Max(terms):
            return f"max({', '.join(print_term(t) for t in terms)})"
        case IfElse(cond, then, orelse):
            return f"(if {print_term(cond)} then {_term(then)} else {_term(orelse)})"
        case StartOf(of, ordinal):
            return f"start_of({of}, {print_term(ordinal)})"
        case SetEnd(of):
            return f"set_end({of})"
        case EdgeStart(of, edge, index):
            return f"edge_start({edge} {of}, {print_term(index)})"
        case EdgeEnd(of, edge, index):
            return f"edge_end({edge} {of}, {print_term(index)})"
        case FirstRow(name, value):
            return f"first_row({name}, {print_term(value)})"
        case BoolConst(value):
            return "true" if value else "false"
        case Compare(op, a, b):
            return f"{_operand(a)} {op} {_operand(b)}"
        case Same(of):
            return f"same({of})"
        case InSet(of, index):
            return f"{_operand(index)} in {of}"
        case InEdge(of, edge, index):
            return f"{_operand(index)} in {edge}({of})"
        case And(terms):
            return f"({' and '.join(_term(t) for t in terms)})"
        case Or(terms):
            return f"({' or '.join(_term(t) for t in terms)})"
        case Not(term):
            return f"not {_term(term)}"
        case _:
            assert_never(n)


def _operand(e: Expr) -> str:
    """A side of a comparison: sums and products need no parentheses there."""
    return print_term(e) if isinstance(e, Add | Mul | FloorDiv | Mod) else _term(e)


def _product(e: Expr) -> str:
    """A term of a sum: products need no parentheses there."""
    return print_term(e) if isinstance(e, Mul | FloorDiv | Mod) else _term(e)


def _signed(e: Expr) -> str:
    """A later term of a sum, with its sign."""
    match e:
        case Const(value) if value < 0:
            return f" - {-value}"
        case Mul(Const(-1), b) if not isinstance(b, Const | Mul):
            return f" - {_product(b)}"
        case Mul(Const(c), b) if c < -1:
            return f" - {-c} * {_term(b)}"
        case Mul(Const(c), b) if c > 1:
            return f" + {c} * {_term(b)}"
        case _:
            return f" + {_product(e)}"


# ---------------------------------------------------------------- masks


def print_fn(fn: MaskFn) -> str:
    """A whole mask, several lines, read back by `read_fn`."""
    lines = [f"mask {fn.name}{' square' if fn.square else ''}"]
    lines += [_input(d) for d in fn.inputs]
    lines += [f"assume {print_term(p)}" for p in fn.assumes]
    lines += [f"table {name}" for name in fn.tables]
    lines += [print_check(c) for c in fn.checks]
    lines.append(f"visible {print_term(fn.body)}")
    return "\n".join(lines) + "\n"


def print_check(c: Check) -> str:
    return f"check {c.kind} by {c.of}" if c.of is not None else f"check {c.kind}"


def _input(d: InputDecl) -> str:
    text = f"input {d.name} : {'sorted ' if d.sorted else ''}{_kind(d)}"
    if d.default is not None:
        text += f" = {d.default}"
    if d.where:
        text += f" where {', '.join(print_term(p) for p in d.where)}"
    return text


def _kind(d: InputDecl) -> str:
    match d.kind:
        case InputKind.SEGMENTS | InputKind.SPANS:
            return d.kind.value if d.within is None else f"{d.kind.value} within {d.within}"
        case InputKind.INT | InputKind.BOOL:
            return d.kind.value if d.per is None else f"{d.kind.value} per {d.per}"
        case InputKind.BLOCKS:
            assert d.block is not None
            return f"bool per block({d.block[0]}, {d.block[1]})"
        case _:
            assert_never(d.kind)


# ---------------------------------------------------------------- programs


def print_program(p: IntervalProgram) -> str:
    """A lowered mask as a tree of `if`s over k, read back by `read_program`."""
    vectors = "".join(f" {v}" for v in p.vectors) or " none"
    head = f"program {'causal ' if p.causal else ''}vectors{vectors}"
    needs = [f"  needs {what} {' '.join(names)}" for what, names in (("hole_free", p.hole_free), ("tiling", p.tiling)) if names]
    return "\n".join([head, *needs, *_tree(p.tree, "  ")]) + "\n"


def _tree(t: Tree, pad: str) -> list[str]:
    if isinstance(t, Branch):
        return [
            f"{pad}if {print_term(t.guard)}",
            *_tree(t.then, pad + "  "),
            f"{pad}else",
            *_tree(t.orelse, pad + "  "),
        ]
    visible = "".join(f" {_interval(i)}" for i in t.visible) or " none"
    lines = [f"{pad}visible{visible}"]
    for name, slot in (("lower", t.lower), ("upper", t.upper)):
        if slot is not None:
            lines.append(f"{pad}{name} {_interval(slot)}")
    return lines


def _interval(i: Interval) -> str:
    return f"[{print_term(i.lo)}, {print_term(i.hi)})"


# ---------------------------------------------------------------- verdicts


def print_verdict(v: Verdict) -> str:
    """A verdict with its program and certificates, for `--emit proof`."""
    match v:
        case Proven(program, certificates, queries, splits):
            head = f"proven: {queries} entailments asked, {splits} case splits, {len(certificates)} certificates\n"
            return head + print_program(program) + "".join(print_certificate(c) for c in certificates)
        case Refuted(counterexample):
            return f"refuted: {counterexample.text}\n"
        case Unknown(reason):
            return f"unknown: {reason}\n"
        case _:
            assert_never(v)


def print_certificate(c: Certificate) -> str:
    """The goal, the cuts and the combination of rows that is a negative constant."""
    lines = [f"certificate {c.goal}"]
    for cut in c.cuts:
        lines.append(f"  cut {cut.row} >= 0 from {cut.divisor} * it <=")
        lines += [f"    {m} * ({row})" for m, row in cut.combination]
    lines += [f"  {m} * ({row})" for m, row in c.combination]
    return "\n".join(lines) + "\n"
