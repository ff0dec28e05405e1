"""Text -> ast.Module. Collects every syntax error of a file: after one it goes on at the next declaration keyword."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, cast

from maskc.diagnostics import Diagnostic, SourceFile, Span
from maskc.frontend import ast, slips
from maskc.frontend.words import CHECKS, DECLARATIONS, EDGES, did_you_mean, quoted

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

    Leaf = Token
    Branch = Tree[Token]

MAX_DEPTH = 100  # of nested expressions: far beyond any mask, and below what Python's stack can take


@dataclass(frozen=True, slots=True)
class Parsed:
    """What could be read of a file. `broken`: names whose declaration has a syntax error."""

    module: ast.Module
    errors: tuple[Diagnostic, ...]
    broken: frozenset[str]


@cache
def lark_parser() -> Lark:
    """The LALR parser of mask.lark, built on first use (30 ms). Conflict-freedom (`strict`) is a test."""
    from lark import Lark

    grammar = files("maskc.frontend").joinpath("mask.lark").read_text("utf-8")
    return Lark(
        grammar,
        parser="lalr",
        lexer="basic",
        propagate_positions=True,
        maybe_placeholders=False,
        start=["file", "declaration"],
    )


def parse(source: SourceFile) -> Parsed:
    """The syntax tree of a file, with the errors beside what could be read."""
    from lark import TextSlice
    from lark.exceptions import UnexpectedInput

    build = _Build(source)
    try:
        tree = lark_parser().parse(source.text, start="file")
        decls = [d for child in tree.children if (d := build.declaration(cast("Branch", child))) is not None]
        return Parsed(ast.Module(source, tuple(decls)), tuple(build.errors), frozenset(build.broken))
    except UnexpectedInput:
        pass
    decls = []
    skip_next = False
    for start, end in _chunks(source.text):
        if skip_next:
            skip_next = False
            continue
        try:
            tree = lark_parser().parse(TextSlice(source.text, start, end), start="declaration")
            decl = build.declaration(cast("Branch", tree.children[0]))
            decls += [decl] if decl is not None else []
        except UnexpectedInput as e:
            diagnostic, skip_next = slips.explain(source, start, end, e)
            build.errors.append(diagnostic)
            build.broken |= _declared_names(source.text[start:end])
    return Parsed(ast.Module(source, tuple(decls)), tuple(build.errors), frozenset(build.broken))


_SPLIT = re.compile(rf'"[^"\n]*"|#[^\n]*|\b({"|".join(DECLARATIONS)})\b')
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")


def _chunks(text: str) -> list[tuple[int, int]]:
    """Character ranges of the declarations; what stands before the first keyword is a chunk of its own."""
    cuts = [0] if (m := _BLANK.match(text)) and m.end() < len(text) else []
    for m in _SPLIT.finditer(text):
        if m.group(1) is None or m.start() == 0:
            continue
        before = text[cuts[-1] if cuts else 0 : m.start()]
        if cuts and before.strip() in DECLARATIONS and "\n" not in before:
            continue  # `input mask : ...`: a keyword where a name must stand; reported as such, not as a declaration
        if not cuts or _BLANK.fullmatch(before) is None:
            cuts.append(m.start())
        else:
            cuts[-1] = m.start()
    return list(zip(cuts, [*cuts[1:], len(text)], strict=True))


def _declared_names(chunk: str) -> set[str]:
    head = re.split(r"\bfrom\b" if chunk.startswith("use") else "=", re.sub(r"#[^\n]*", "", chunk))[0]
    words = re.findall(r"[A-Za-z_]\w*", head)
    return set(words[1:] if chunk.startswith("use") else words[1:2])


class _Refused(Exception):
    """A declaration that fits the grammar and still is none."""

    def __init__(self, code: str, message: str, span: Span, hint: str | None) -> None:
        self.diagnostic = Diagnostic(code, message, span, hint)


class _Build:
    """Lark trees -> ast nodes. Words that mask.lark leaves open (types, checks) are read here."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.errors: list[Diagnostic] = []
        self.broken: set[str] = set()
        self._depth = 0

    # ---- spans and leaves

    def _span(self, t: Branch | Leaf) -> Span:
        if hasattr(t, "meta"):
            return Span(self.source, t.meta.start_pos, t.meta.end_pos)
        start = t.start_pos
        assert start is not None
        return Span(self.source, start, start + len(t))

    def _name(self, t: Branch | Leaf) -> ast.Name:
        return ast.Name(str(t), span=self._span(t))

    # ---- declarations

    def declaration(self, t: Branch) -> ast.Decl | None:
        """The declaration, or None after reporting what is wrong with it."""
        self._depth = 0
        try:
            return self._declaration(t)
        except _Refused as e:
            self.errors.append(e.diagnostic)
            self.broken |= {str(c) for c in t.children if not hasattr(c, "data") and t.data != "check"}
            return None

    def _declaration(self, t: Branch) -> ast.Decl:
        kids, span = t.children, self._span(t)
        match str(t.data):
            case "use":
                *names, path = kids
                return ast.Use(tuple(self._name(n) for n in names), str(path)[1:-1], self._span(path), span=span)
            case "const":
                return ast.Const(self._name(kids[0]), self.expr(kids[1]), span=span)
            case "input":
                return self._input(kids, span)
            case "let":
                params = tuple(self._name(n) for n in cast("Branch", kids[1]).children) if len(kids) == 3 else ()
                return ast.Let(self._name(kids[0]), params, self.expr(kids[-1]), span=span)
            case "mask":
                return ast.Mask(self._name(kids[0]), self.expr(kids[1]), span=span)
            case "check":
                return self._check([self._name(n) for n in kids], span)
            case _:
                return ast.Assume(self.expr(kids[0]), span=span)

    def _input(self, kids: list[Branch | Leaf], span: Span) -> ast.Input:
        parts = {str(cast("Branch", c).data): cast("Branch", c) for c in kids[1:]}
        type_ = self._type(parts["type"])
        default = self.expr(parts["default"].children[0]) if "default" in parts else None
        where = tuple(self.expr(w) for w in parts["where"].children) if "where" in parts else ()
        return ast.Input(self._name(kids[0]), type_, default, where, span=span)

    def _type(self, t: Branch) -> ast.Type:
        words = [self._name(c) for c in t.children if not hasattr(c, "data")]
        parts = {str(c.data): c for c in cast("list[Branch]", t.children[len(words) :])}
        within = self._name(parts["within"].children[0]) if "within" in parts else None
        per_kids = parts["per"].children if "per" in parts else []
        per = self._name(per_kids[0]) if per_kids else None
        block = (self.expr(per_kids[1]), self.expr(per_kids[2])) if len(per_kids) == 3 else None

        sorted_ = words[0].text == "sorted" and len(words) > 1
        kind, *extra = words[1:] if sorted_ else words
        span = self._span(t)
        example = (
            "write `segments`, `spans`, `int`, `int per key`, `sorted int per row`, `bool per head`, `bool per block(128, 128)`"
        )
        if kind.text not in ("segments", "spans", "int", "bool"):
            hint = did_you_mean(kind.text, ("segments", "spans", "int", "bool", "sorted"), example)
            raise self._wrong(f"`{kind.text}` is not a type", kind.span, hint)
        if extra:
            hint = did_you_mean(extra[0].text, (*DECLARATIONS, "per", "within", "where"), example)
            raise self._wrong(f"unexpected `{extra[0].text}` after the type `{kind.text}`", extra[0].span, hint)
        is_set = kind.text in ("segments", "spans")
        if sorted_ and kind.text != "int":
            raise self._wrong(f"only ints can be `sorted`, not `{kind.text}`", words[0].span, "write `sorted int per row`")
        if within is not None and not is_set:
            raise self._wrong(f"`within` belongs to `segments` and `spans`, not to `{kind.text}`", within.span, example)
        if per is not None and is_set:
            raise self._wrong(f"`{kind.text}` are given once for the whole sequence, not `per {per.text}`", per.span, example)
        if kind.text == "bool" and per is None:
            raise self._wrong(
                "a `bool` input needs an axis", span, "write `bool per key`, `bool per head` or `bool per block(128, 128)`"
            )
        if sorted_ and per is None:
            raise self._wrong("a `sorted int` input needs an axis", span, "write `sorted int per row`")
        if block is not None and (kind.text != "bool" or (per is not None and per.text != "block")):
            raise self._wrong("only `bool per block(a, b)` takes sizes", span, "write `bool per block(128, 128)`")
        return ast.Type(cast("ast.Kind", kind.text), sorted_, within, per, block, span=span)

    def _check(self, words: list[ast.Name], span: Span) -> ast.Check:
        kind = words[0]
        usage = "write `check causal`, `check isolated by doc` or `check no_empty_row`"
        if kind.text not in CHECKS:
            raise self._wrong(f"there is no check `{kind.text}`", kind.span, did_you_mean(kind.text, CHECKS, usage))
        isolated = kind.text == "isolated"
        if isolated and (len(words) < 3 or words[1].text != "by"):
            raise self._wrong("`check isolated` needs `by` and the name of a set", span, usage)
        extra = words[3:] if isolated else words[1:]
        if extra:
            raise self._wrong(f"unexpected `{extra[0].text}` after `check {kind.text}`", extra[0].span, usage)
        return ast.Check(cast("ast.CheckKind", kind.text), words[2] if isolated else None, span=span)

    @staticmethod
    def _wrong(message: str, span: Span, hint: str | None) -> _Refused:
        return _Refused("M005", message, span, hint)

    # ---- expressions

    def expr(self, t: Branch | Leaf) -> ast.Expr:
        tree = cast("Branch", t)
        levels = len(tree.children) // 2 if tree.data in ("sum", "product") else 1  # a - b - c is ((a - b) - c)
        self._depth += levels
        if self._depth > MAX_DEPTH:
            text = f"this expression is nested more than {MAX_DEPTH} deep"
            raise _Refused("M007", text, self._span(tree), "name parts of it with `let`")
        made = self._expr(tree)
        self._depth -= levels
        return made

    def _expr(self, t: Branch) -> ast.Expr:
        kids, span = t.children, self._span(t)
        match str(t.data):
            case "int":
                return ast.Int(_int(str(kids[0])), span=span)
            case "true" | "false":
                return ast.Bool(t.data == "true", span=span)
            case "name":
                return ast.Name(str(kids[0]), span=span)
            case "index":
                return ast.Index(self._name(kids[0]), self._exprs(kids[1:]), span=span)
            case "attr":
                return ast.Attr(self._name(kids[0]), self._name(kids[1]), None, span=span)
            case "attr_index":
                return ast.Attr(self._name(kids[0]), self._name(kids[1]), self.expr(kids[2]), span=span)
            case "call":
                return ast.Call(self._name(kids[0]), self._exprs(kids[1:]), span=span)
            case "paren":
                return replace(self.expr(kids[0]), span=span)
            case "minus" if str(kids[0]) == "-":
                return ast.Minus(self.expr(kids[1]), span=span)
            case "minus":
                return replace(self.expr(kids[1]), span=span)  # a leading `+` says nothing
            case "sum" | "product":
                made = self.expr(kids[0])
                for op, term in zip(kids[1::2], kids[2::2], strict=True):
                    b = self.expr(term)
                    made = ast.Arith(cast("ast.ArithOp", str(op)), made, b, span=made.span.to(b.span))
                return made
            case "compare":
                ops = tuple(cast("ast.CompareOp", str(op)) for op in kids[1::2])
                return ast.Compare(ops, self._exprs(kids[0::2]), span=span)
            case "in_set":
                return ast.In(self.expr(kids[0]), self._name(kids[1]), None, span=span)
            case "in_edge":
                edge = self._name(kids[1])
                if edge.text not in EDGES:
                    hint = did_you_mean(edge.text, EDGES, f"after `in` stands a set, or {quoted(EDGES, 'or')} of a set")
                    raise self._wrong(f"`{edge.text}` is not a place a token can be in", edge.span, hint)
                return ast.In(self.expr(kids[0]), self._name(kids[2]), edge, span=span)
            case "negation":
                return ast.Not(self.expr(kids[0]), span=span)
            case "and":
                return ast.And(self._exprs(kids), span=span)
            case "or":
                return ast.Or(self._exprs(kids), span=span)
            case _:
                cond, then, orelse = self._exprs(kids)
                return ast.IfElse(cond, then, orelse, span=span)

    def _exprs(self, kids: list[Branch | Leaf]) -> tuple[ast.Expr, ...]:
        return tuple(self.expr(c) for c in kids)


def _int(digits: str) -> int:
    """Far too long numbers are cut: they are out of range all the same (and int() refuses beyond 4300 digits)."""
    return int(digits[:40])
