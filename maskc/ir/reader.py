"""Reads back what `printer` writes: `read_fn(print_fn(fn)) == fn`, `read_program(print_program(p)) == p`.

Not the mask language: no spans, no `let`, no checks of types beyond the form of the text. A text that `printer` did not
write raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from maskc.ir.intervals import VECTORS, Branch, Interval, IntervalProgram, Leaf, Tree
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Check,
    Col,
    Compare,
    Const,
    Edge,
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

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(//|<=|>=|==|!=|[-+*%<>()\[\],.@]))")
_OPS = ("<=", "<", "==", "!=", ">=", ">")


@dataclass(frozen=True)
class _Read:
    """`name[index]`: an int or a bool read, which its surroundings tell."""

    name: str
    index: Expr


_Term = Expr | Pred | _Read


def read_expr(text: str) -> Expr:
    """The expression that `print_term` wrote."""
    p = _Parser(text)
    e = _expr(p.whole())
    p.end()
    return e


def read_pred(text: str) -> Pred:
    """The predicate that `print_term` wrote."""
    p = _Parser(text)
    e = _pred(p.whole())
    p.end()
    return e


def _expr(t: _Term) -> Expr:
    if isinstance(t, _Read):
        return Field(t.name, t.index)
    if isinstance(t, Pred):
        raise ValueError(f"an expression was expected, not {t}")
    return t


def _pred(t: _Term) -> Pred:
    if isinstance(t, _Read):
        return BoolField(t.name, t.index)
    if not isinstance(t, Pred):
        raise ValueError(f"a predicate was expected, not {t}")
    return t


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            m = _TOKEN.match(text, at)
            if m is None:
                raise ValueError(f"cannot read {text[at:]!r}")
            self.tokens.append(m.group().strip())
            at = m.end()
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if not token or (wanted and token not in wanted):
            raise ValueError(f"{' or '.join(wanted) or 'more'} expected, found {token or 'the end'!r} in {self.text!r}")
        self.at += 1
        return token

    def end(self) -> None:
        if self.peek():
            raise ValueError(f"{self.peek()!r} was not expected in {self.text!r}")

    def whole(self) -> _Term:
        """A term without its outer parentheses: a choice, a chain of `and` or `or`, a comparison, a sum."""
        if self.peek() == "if":
            return self._choice()
        first = self._relation()
        for word, kind in (("and", And), ("or", Or)):
            if self.peek() == word:
                terms = [_pred(first)]
                while self.peek() == word:
                    self.take()
                    terms.append(_pred(self._relation()))
                return kind(tuple(terms))
        return first

    def _choice(self) -> IfElse:
        self.take("if")
        cond = _pred(self.whole())
        self.take("then")
        then = _expr(self._factor())
        self.take("else")
        return IfElse(cond, then, _expr(self._factor()))

    def _relation(self) -> _Term:
        if self.peek() == "not":
            self.take()
            return Not(_pred(self._relation()))
        left = self._sum()
        if self.peek() in _OPS:
            op = cast(Op, self.take())
            return Compare(op, _expr(left), _expr(self._sum()))
        if self.peek() == "in":
            self.take()
            name = self.take()
            if name in ("first", "last") and self.peek() == "(":
                self.take()
                of = self.take()
                self.take(")")
                return InEdge(of, cast(Edge, name), _expr(left))
            return InSet(name, _expr(left))
        return left

    def _sum(self) -> _Term:
        first = self._product()
        if self.peek() not in ("+", "-"):
            return first
        terms = [_expr(first)]
        while self.peek() in ("+", "-"):
            negative = self.take() == "-"
            term = _expr(self._product())
            terms.append(_negated(term) if negative else term)
        return Add(tuple(terms))

    def _product(self) -> _Term:
        a = self._factor()
        if self.peek() not in ("*", "//", "%"):
            return a
        op = self.take()
        b = _expr(self._factor())
        match op:
            case "*":
                return Mul(_expr(a), b)
            case "//":
                return FloorDiv(_expr(a), b)
            case _:
                return Mod(_expr(a), b)

    def _factor(self) -> _Term:
        token = self.take()
        if token == "(":
            inner = self.whole()
            self.take(")")
            return inner
        if token == "-":
            return Const(-int(self.take()))
        if token.isdigit():
            return Const(int(token))
        if token == "@":
            return Item(self.take())
        if self.peek() == "(":
            return self._call(token)
        if self.peek() == "[":
            return _Read(token, self._index())
        if self.peek() == ".":
            self.take()
            attr = self.take("start", "end", "len", "pos", "ordinal")
            return SegAttr(token, attr, self._index())  # type: ignore[arg-type]
        return _NAMES.get(token) or Scalar(token)

    def _index(self) -> Expr:
        self.take("[")
        index = _expr(self.whole())
        self.take("]")
        return index

    def _call(self, name: str) -> _Term:
        self.take("(")
        result = self._arguments(name)
        self.take(")")
        return result

    def _arguments(self, name: str) -> _Term:
        match name:
            case "min" | "max":
                terms = [_expr(self.whole())]
                while self.peek() == ",":
                    self.take()
                    terms.append(_expr(self.whole()))
                return (Min if name == "min" else Max)(tuple(terms))
            case "same":
                return Same(self.take())
            case "set_end":
                return SetEnd(self.take())
            case "start_of" | "first_row":
                of = self.take()
                return (StartOf if name == "start_of" else FirstRow)(of, self._last())
            case "edge_start" | "edge_end":
                edge = cast(Edge, self.take("first", "last"))
                of = self.take()
                return (EdgeStart if name == "edge_start" else EdgeEnd)(of, edge, self._last())
            case _:
                raise ValueError(f"unknown function `{name}` in {self.text!r}")

    def _last(self) -> Expr:
        self.take(",")
        return _expr(self.whole())


_NAMES: dict[str, _Term] = {
    "q": Row(),
    "k": Col(),
    "h": Head(),
    "nq": Size("nq"),
    "nk": Size("nk"),
    "true": BoolConst(True),
    "false": BoolConst(False),
}


def _negated(e: Expr) -> Expr:
    match e:
        case Const(value):
            return Const(-value)
        case Mul(Const(c), b) if c > 1:
            return Mul(Const(-c), b)
        case _:
            return Mul(Const(-1), e)


# ---------------------------------------------------------------- masks

_INPUT = re.compile(
    r"input (?P<name>\w+) : (?P<sorted>sorted )?(?P<kind>segments|spans|int|bool)"
    r"(?: within (?P<within>\w+)| per block\((?P<rows>\d+), (?P<cols>\d+)\)| per (?P<per>\w+))?"
    r"(?: = (?P<default>-?\d+))?(?: where (?P<where>.*))?"
)


def read_fn(text: str) -> MaskFn:
    """The mask that `print_fn` wrote."""
    name, square, body = "", False, None
    inputs, assumes, tables, checks = [], [], [], []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "mask":
                name, _, flag = rest.partition(" ")
                square = flag == "square"
            case "input":
                inputs.append(_read_input(line))
            case "assume":
                assumes.append(read_pred(rest))
            case "table":
                tables.append(rest)
            case "check":
                kind, _, of = rest.partition(" by ")
                checks.append(Check(kind, of or None))  # type: ignore[arg-type]
            case "visible":
                body = read_pred(rest)
            case _:
                raise ValueError(f"cannot read the line {line!r}")
    if body is None:
        raise ValueError("a mask needs a `visible` line")
    return MaskFn(name, tuple(inputs), body, tuple(assumes), tuple(tables), tuple(checks), square)


def _read_input(line: str) -> InputDecl:
    m = _INPUT.fullmatch(line)
    if m is None:
        raise ValueError(f"cannot read the line {line!r}")
    block = (int(m["rows"]), int(m["cols"])) if m["rows"] else None
    return InputDecl(
        m["name"],
        InputKind.BLOCKS if block else InputKind(m["kind"]),
        m["per"],
        m["sorted"] is not None,
        m["within"],
        block,
        int(m["default"]) if m["default"] else None,
        tuple(read_pred(p) for p in _split(m["where"])) if m["where"] else (),
    )


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


# ---------------------------------------------------------------- programs


def read_program(text: str) -> IntervalProgram:
    """The program that `print_program` wrote."""
    head, *lines = text.splitlines()
    words = head.split()
    if words[:1] != ["program"]:
        raise ValueError(f"cannot read the line {head!r}")
    vectors = tuple(v for v in VECTORS if v in words)
    needs: dict[str, tuple[str, ...]] = {}
    while lines and lines[0].split()[0] == "needs":
        _, what, *names = lines.pop(0).split()
        needs[what] = tuple(names)
    tree, rest = _read_tree(lines, "  ")
    if rest:
        raise ValueError(f"cannot read the line {rest[0]!r}")
    return IntervalProgram(tree, "causal" in words, vectors, needs.get("hole_free", ()), needs.get("tiling", ()))


def _read_tree(lines: Sequence[str], pad: str) -> tuple[Tree, Sequence[str]]:
    if not lines or not lines[0].startswith(pad):
        raise ValueError("a tree ends too early")
    word, _, rest = lines[0][len(pad) :].partition(" ")
    if word == "if":
        guard = read_pred(rest)
        then, lines = _read_tree(lines[1:], pad + "  ")
        if not lines or lines[0] != f"{pad}else":
            raise ValueError("an `if` has no `else`")
        orelse, lines = _read_tree(lines[1:], pad + "  ")
        return Branch(guard, then, orelse), lines
    if word != "visible":
        raise ValueError(f"cannot read the line {lines[0]!r}")
    slots: dict[str, Interval] = {}
    visible = () if rest == "none" else _read_intervals(rest)
    lines = lines[1:]
    while lines and lines[0].startswith((f"{pad}lower [", f"{pad}upper [")):
        name, _, rest = lines[0][len(pad) :].partition(" ")
        (slots[name],) = _read_intervals(rest)
        lines = lines[1:]
    return Leaf(visible, slots.get("lower"), slots.get("upper")), lines


def _read_intervals(text: str) -> tuple[Interval, ...]:
    """`[lo, hi) [lo, hi)`: half-open brackets do not pair, so they are found at depth 0."""
    out, at = [], 0
    while at < len(text):
        depth, start, comma = 0, at + 1, -1
        at += 1
        while not (depth == 0 and text[at] == ")"):
            depth += (text[at] in "([") - (text[at] in ")]")
            if depth == 0 and text[at] == ",":
                comma = at
            at += 1
        out.append(Interval(read_expr(text[start:comma]), read_expr(text[comma + 1 : at])))
        at += 2
    return tuple(out)
