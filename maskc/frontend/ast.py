"""The untyped syntax tree of a `.mask` file, one node per phrase of mask.lark, and its text form (`--emit ast`).

Spans never take part in equality, so two texts that differ in blanks, comments or redundant parentheses give equal
trees. A parenthesised expression has the span of its parentheses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, assert_never

from maskc.diagnostics import SourceFile, Span

ArithOp = Literal["+", "-", "*", "//", "%"]
CompareOp = Literal["<=", "<", "==", "!=", ">=", ">"]
Kind = Literal["segments", "spans", "int", "bool"]
CheckKind = Literal["causal", "isolated", "no_empty_row"]


@dataclass(frozen=True, slots=True)
class Node:
    span: Span = field(compare=False, repr=False, kw_only=True)


# ---------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class Int(Node):
    value: int


@dataclass(frozen=True, slots=True)
class Bool(Node):
    value: bool


@dataclass(frozen=True, slots=True)
class Name(Node):
    text: str


@dataclass(frozen=True, slots=True)
class Attr(Node):
    """`of.attr[index]`, or the bare `of.attr` where `index` is None."""

    of: Name
    attr: Name
    index: Expr | None


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`of[index, ...]`."""

    of: Name
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`same(S)`, `abs`, `min`, `max`, or a `let` with parameters."""

    of: Name
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Minus(Node):
    term: Expr


@dataclass(frozen=True, slots=True)
class Arith(Node):
    op: ArithOp
    a: Expr
    b: Expr


@dataclass(frozen=True, slots=True)
class Compare(Node):
    """`terms[0] ops[0] terms[1] ops[1] terms[2] ...`: a chain is the `and` of its neighbours."""

    ops: tuple[CompareOp, ...]
    terms: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class In(Node):
    """`token in of`, or `token in edge(of)` with edge `first` or `last`."""

    token: Expr
    of: Name
    edge: Name | None


@dataclass(frozen=True, slots=True)
class Not(Node):
    term: Expr


@dataclass(frozen=True, slots=True)
class And(Node):
    terms: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Or(Node):
    terms: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class IfElse(Node):
    cond: Expr
    then: Expr
    orelse: Expr


Expr = Int | Bool | Name | Attr | Index | Call | Minus | Arith | Compare | In | Not | And | Or | IfElse


# ---------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True)
class Use(Node):
    names: tuple[Name, ...]
    path: str
    path_span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Const(Node):
    name: Name
    value: Expr


@dataclass(frozen=True, slots=True)
class Type(Node):
    """`kind` with its qualifiers; `block` holds the two tile sizes of `bool per block(a, b)`."""

    kind: Kind
    sorted: bool
    within: Name | None
    per: Name | None
    block: tuple[Expr, Expr] | None


@dataclass(frozen=True, slots=True)
class Input(Node):
    name: Name
    type: Type
    default: Expr | None
    where: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Let(Node):
    name: Name
    params: tuple[Name, ...]
    body: Expr


@dataclass(frozen=True, slots=True)
class Mask(Node):
    name: Name
    body: Expr


@dataclass(frozen=True, slots=True)
class Check(Node):
    kind: CheckKind
    of: Name | None


@dataclass(frozen=True, slots=True)
class Assume(Node):
    fact: Expr


Decl = Use | Const | Input | Let | Mask | Check | Assume


@dataclass(frozen=True, slots=True)
class Module:
    source: SourceFile = field(compare=False, repr=False)
    decls: tuple[Decl, ...]


# ---------------------------------------------------------------- walking and printing


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions, names of sets and macros excluded."""
    match e:
        case Int() | Bool() | Name():
            return ()
        case Attr():
            return () if e.index is None else (e.index,)
        case Index() | Call():
            return e.args
        case Minus() | Not():
            return (e.term,)
        case Arith():
            return (e.a, e.b)
        case Compare() | And() | Or():
            return e.terms
        case In():
            return (e.token,)
        case IfElse():
            return (e.cond, e.then, e.orelse)
        case _:
            assert_never(e)


def names(e: Expr) -> Iterator[Name]:
    """Every name that an expression mentions, in source order as far as nesting allows."""
    stack: list[Expr] = [e]
    while stack:
        match stack.pop():
            case Name() as n:
                yield n
            case (Attr() | Index() | Call() | In()) as n:
                yield n.of
                stack += reversed(children(n))
            case other:
                stack += reversed(children(other))


def print_module(module: Module) -> str:
    """The text form: one parenthesised line per declaration, prefix operators, no positions."""
    return "".join(f"{_decl(d)}\n" for d in module.decls)


def _decl(d: Decl) -> str:
    match d:
        case Use():
            return f'(use {" ".join(n.text for n in d.names)} from "{d.path}")'
        case Const():
            return f"(const {d.name.text} {text(d.value)})"
        case Input():
            default = "" if d.default is None else f" (default {text(d.default)})"
            where = "".join(f" (where {text(w)})" for w in d.where)
            return f"(input {d.name.text} {_type(d.type)}{default}{where})"
        case Let():
            head = f"({' '.join(n.text for n in (d.name, *d.params))})" if d.params else d.name.text
            return f"(let {head} {text(d.body)})"
        case Mask():
            return f"(mask {d.name.text} {text(d.body)})"
        case Check():
            return f"(check {d.kind}{f' {d.of.text}' if d.of else ''})"
        case Assume():
            return f"(assume {text(d.fact)})"
        case _:
            assert_never(d)


def _type(t: Type) -> str:
    words: list[str] = ["sorted"] if t.sorted else []
    words.append(t.kind)
    if t.within is not None:
        words += ["within", t.within.text]
    if t.per is not None:
        words += ["per", t.per.text]
    if t.block is not None:
        words += [text(t.block[0]), text(t.block[1])]
    return f"({' '.join(words)})"


def text(e: Expr) -> str:
    """One expression in prefix form, for example `(and (same doc) (<= k q))`."""
    match e:
        case Int():
            return str(e.value)
        case Bool():
            return "true" if e.value else "false"
        case Name():
            return e.text
        case Attr():
            index = "" if e.index is None else f" {text(e.index)}"
            return f"(. {e.of.text} {e.attr.text}{index})"
        case Index():
            return f"([] {e.of.text} {_row(e.args)})"
        case Call():
            return f"({e.of.text} {_row(e.args)})"
        case Minus():
            return f"(- {text(e.term)})"
        case Arith():
            return f"({e.op} {text(e.a)} {text(e.b)})"
        case Compare():
            rest = " ".join(f"{op} {text(t)}" for op, t in zip(e.ops, e.terms[1:], strict=True))
            return f"(cmp {text(e.terms[0])} {rest})"
        case In():
            place = e.of.text if e.edge is None else f"({e.edge.text} {e.of.text})"
            return f"(in {text(e.token)} {place})"
        case Not():
            return f"(not {text(e.term)})"
        case And():
            return f"(and {_row(e.terms)})"
        case Or():
            return f"(or {_row(e.terms)})"
        case IfElse():
            return f"(if {text(e.cond)} {text(e.then)} {text(e.orelse)})"
        case _:
            assert_never(e)


def _row(terms: tuple[Expr, ...]) -> str:
    return " ".join(text(t) for t in terms)
