"""What a syntax error means in the user's terms: the slips people make, and a plain "expected" for the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from maskc.diagnostics import Diagnostic, SourceFile, Span
from maskc.frontend.words import DECLARATIONS, KEYWORDS, closest, did_you_mean, quoted

if TYPE_CHECKING:
    from lark import Token
    from lark.exceptions import UnexpectedInput

# Longest first: text found at the place of the error (or one character before it) and what to write instead.
SLIPS: tuple[tuple[str, str], ...] = (
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("=<", "write `<=`"),
    ("=>", "write `>=`"),
    ("<>", "write `!=`"),
    ("==", "remove one `=`"),
    ("**", "powers are not part of the language; write the product"),
    (":=", "write `=`"),
    ("->", "there are no arrows; a mask is one condition over `q` and `k`"),
    ("&", "write `and`"),
    ("|", "write `or`"),
    ("!", "write `not`"),
    ("~", "write `not`"),
    ("^", "write `(a or b) and not (a and b)`"),
    ("/", "write `//` (it rounds down)"),
    ("≤", "write `<=`"),
    ("≥", "write `>=`"),
    ("≠", "write `!=`"),
    ("∧", "write `and`"),
    ("∨", "write `or`"),
    ("¬", "write `not`"),
    ("∈", "write `in`"),
    ("−", "write `-`"),
    ("×", "write `*`"),
    ("=", "write `==` to compare"),
    (".", "numbers are integers; attributes follow a name, as in `doc.start[k]`"),
    (";", "declarations need no separator"),
    ("\\", "leave it out: line ends mean nothing, so an expression goes on by itself"),
    ("'", "strings stand in double quotes"),
    ("{", "group with `(` and `)`"),
    ("}", "group with `(` and `)`"),
)

_TOKEN = re.compile(r'\s+|#[^\n]*|"[^"\n]*"|\w+|<=|>=|==|!=|//|.', re.DOTALL)
_PYTHON = ("def", "lambda", "return")
_EXPRESSION = "there are no functions: a mask is one condition, as in `mask causal = k <= q`"
_OPERANDS = {"INT", "NAME", "LPAR"}
_IN_EXPRESSIONS = {"if", "then", "else", "and", "or", "not", "in"}
_WORDS = {
    "NAME": "a name",
    "INT": "a number",
    "STRING": 'a path in double quotes, as in `"lib.mask"`',
    "COMPARE": "a comparison",
    "SIGN": "`+` or `-`",
    "TIMES": "`*`, `//` or `%`",
    "EQUAL": "`=`",
    "COLON": "`:`",
    "COMMA": "`,`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "DOT": "`.`",
}


def explain(source: SourceFile, start: int, end: int, e: UnexpectedInput) -> tuple[Diagnostic, bool]:
    """The diagnostic for a syntax error in text[start:end], and whether the next declaration is part of the error."""
    from lark.exceptions import UnexpectedToken

    if not isinstance(e, UnexpectedToken):
        return _bad_character(source, e.pos_in_stream or start), False
    expected = frozenset(e.accepts or e.expected)
    if e.token.type == "$END":
        return _early_end(source, start, end, expected)
    return _bad_token(source, start, e.token, expected), False


def _at(source: SourceFile, start: int, length: int) -> Span:
    return Span(source, start, start + length)


def _bad_character(source: SourceFile, pos: int) -> Diagnostic:
    char = source.text[pos]
    if char == '"':
        line_end = source.text.find("\n", pos)
        span = Span(source, pos, len(source.text) if line_end < 0 else line_end)
        return Diagnostic("M008", "this string is never closed", span, 'close it with `"` on the same line')
    for text, hint in SLIPS:
        if source.text.startswith(text, pos):
            return Diagnostic("M001", f"unexpected `{text}`", _at(source, pos, len(text)), hint)
    shown = f"`{char}`" if char.isprintable() else f"character U+{ord(char):04X}"
    hint = "write a plain space" if char.isspace() else "names are made of the letters a-z, digits and `_`"
    return Diagnostic("M001", f"unexpected {shown}", _at(source, pos, 1), hint)


def _early_end(source: SourceFile, start: int, end: int, expected: frozenset[str]) -> tuple[Diagnostic, bool]:
    """The declaration stops too soon: an open bracket, a keyword used as a name, or a missing right-hand side."""
    tokens = [m for m in _TOKEN.finditer(source.text, start, end) if not m.group()[0].isspace() and m.group()[0] != "#"]
    last = tokens[-1]
    last_span = _at(source, last.start(), len(last.group()))
    keyword = re.compile(r"\w+").match(source.text, end)
    if keyword and "\n" not in source.text[last.end() : end] and ("NAME" in expected or tokens[0] is last):
        return _reserved(_at(source, end, len(keyword.group()))), True
    if (bracket := _open_bracket(tokens)) is not None and not expected >= _OPERANDS:
        pair = {"(": ")", "[": "]"}[bracket.group()]
        text = f"`{bracket.group()}` is never closed"
        return Diagnostic("M003", text, _at(source, bracket.start(), 1), f"add the matching `{pair}`"), False
    if expected >= _OPERANDS:
        what = "a number or a condition" if last.group() != "=" else "an expression"
        return Diagnostic("M002", f"`{last.group()}` has no right-hand side", last_span, f"{what} must follow"), False
    return Diagnostic("M002", f"incomplete after `{last.group()}`: expected {_listed(expected)}", last_span), False


def _open_bracket(tokens: list[re.Match[str]]) -> re.Match[str] | None:
    stack: list[re.Match[str]] = []
    for t in tokens:
        if t.group() in "([":
            stack.append(t)
        elif t.group() in ")]" and stack:
            stack.pop()
    return stack[-1] if stack else None


def _reserved(span: Span) -> Diagnostic:
    hint = f"words of the language cannot be names; try `{span.text}_`"
    return Diagnostic("M004", f"`{span.text}` is a reserved word", span, hint)


def _bad_token(source: SourceFile, start: int, token: Token, expected: frozenset[str]) -> Diagnostic:
    pos = token.start_pos or 0
    word, span = str(token), _at(source, pos, len(token))
    before = source.text[start:pos].rstrip()
    if expected >= {"MASK", "INPUT"}:
        made_of = f"a file is made of {quoted(DECLARATIONS)} declarations"
        other = _EXPRESSION if word in _PYTHON else "comments begin with `#`" if word == "//" else None
        help_line = other or did_you_mean(word, DECLARATIONS, made_of)
        return Diagnostic("M006", f"unexpected `{word}`: expected a declaration", span, help_line)
    if word in KEYWORDS and "NAME" in expected and not ("INT" in expected and word in _IN_EXPRESSIONS):
        return _reserved(span)
    if word == "if" and "INT" in expected:
        text = "`if` inside an expression needs brackets"
        return Diagnostic("M001", text, span, "write `(if ... then ... else ...)`")
    if word in ")]":
        opened = _open_bracket(list(_TOKEN.finditer(source.text, start, pos)))
        if opened is None:
            return Diagnostic(
                "M003", f"`{word}` closes nothing", span, f"remove it, or add the matching `{'(' if word == ')' else '['}`"
            )
        if {"(": ")", "[": "]"}[opened.group()] != word:
            text = f"`{word}` does not close the `{opened.group()}` before it"
            return Diagnostic("M003", text, span, f"write `{')' if word == ']' else ']'}`")
    if word == "=" and (named := re.match(r"input\s+\w+$", before)):
        return Diagnostic(
            "M001", "unexpected `=`: expected `:`", span, f"the type comes first, as in `{named.group()} : int = ...`"
        )
    for text, hint in SLIPS:
        for at in (pos, pos - 1):
            inside = at >= start and source.text.startswith(text, at) and at + len(text) > pos
            if inside and (text != "=" or "COMPARE" in expected):
                return Diagnostic("M001", f"unexpected `{text}`", _at(source, at, len(text)), hint)
    if expected >= _OPERANDS:
        left = re.search(r"(\w+|[^\w\s]+)$", before)
        after = f" after `{left.group()}`" if left else ""
        return Diagnostic("M002", f"expected a number or a condition{after}, found `{word}`", span)
    if token.type == "NAME":
        line_start = source.text[source.text.rfind("\n", 0, pos) + 1 : pos].strip() == ""
        words = [t.lower() for t in expected if t.lower() in KEYWORDS] + (list(DECLARATIONS) if line_start else [])
        if (guess := closest(word, words)) is not None:
            return Diagnostic("M006", f"unexpected `{word}`", span, f"did you mean `{guess}`?")
    advice: str | None = None
    if word == "if":
        advice = "write `(if ... then ... else ...)`"
    elif re.search(r"\b(lambda|return)$", before):
        advice = _EXPRESSION
    elif word == ":" and re.match(r"(mask|let|const)\s+\w+$", before):
        advice = f"write `{before} = ...`"
    elif token.type == "COMPARE" and "WHERE" in expected:
        advice = "facts about an input follow `where`, as in `input window : int where window >= 1`"
    elif word == "(" and re.search(r"\.\s*\w+$", before):
        advice = "attributes are read with brackets, as in `doc.start[k]`"
    return Diagnostic("M001", f"unexpected `{word}`: expected {_listed(expected)}", span, advice)


def _listed(expected: frozenset[str]) -> str:
    """The expected terminals in words; inside an expression only what may continue or close it."""
    keywords = sorted(t for t in expected if t.lower() in KEYWORDS and t.lower() not in DECLARATIONS)
    words = [_WORDS[t] for t in _WORDS if t in expected] + [f"`{t.lower()}`" for t in keywords]
    if not words:
        return "the end of the declaration"
    if len(words) > 5:
        return "an operator or the next declaration"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
