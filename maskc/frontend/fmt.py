"""The formatter behind `maskc fmt`: blanks, indentation and alignment; tokens, comments and line breaks stay.

Every declaration starts a line, further lines of it are indented, runs of blank lines become one, and the `:` or `=` of
neighbouring declarations of a kind stand below each other. Formatting twice changes nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from maskc.diagnostics import MaskcError, SourceFile
from maskc.frontend.parser import lark_parser, parse
from maskc.frontend.words import DECLARATIONS, KEYWORDS

_OPEN, _CLOSE = ("(", "["), (")", "]")
_WORDS_BEFORE_OPERANDS = KEYWORDS - {"true", "false"}  # after one of them, a sign is unary
_STEP = 2  # columns a continuation line is indented
_OPERAND = 3  # and this much more for its operands, so that they stand below those behind `or `


@dataclass(slots=True)
class _Line:
    """One line of tokens; `depth` is the number of brackets that are open where it starts."""

    words: list[str] = field(default_factory=list)
    comment: str = ""
    blank_before: bool = False
    depth: int = 0
    text: str = ""

    @property
    def opens(self) -> str | None:
        """The declaration keyword that the line starts with."""
        return self.words[0] if self.words and self.words[0] in DECLARATIONS else None


def format_text(text: str, name: str = "<text>") -> str:
    """The text in its canonical layout; the same syntax tree. Raises MaskcError if it does not parse."""
    parsed = parse(SourceFile(name, text))
    if parsed.errors:
        raise MaskcError(parsed.errors)
    lines = list(_lines(text))
    previous = ""
    for line in lines:
        line.text = _spaced(line.words, previous if line.opens is None else "")
        previous = line.words[-1] if line.words else previous
    _align(lines)
    out: list[str] = []
    for line, indent in zip(lines, _indents(lines), strict=True):
        if line.blank_before and out:
            out.append("")
        code = " " * indent + line.text
        out.append(f"{code}  {line.comment}" if line.words and line.comment else f"{code}{line.comment}")
    return "".join(f"{line}\n" for line in out)


def _lines(text: str) -> Iterator[_Line]:
    """The tokens by line: as the user broke them, and a new line for every declaration."""
    line, depth = _Line(), 0
    for token in lark_parser().lex(text, dont_ignore=True):
        word = str(token)
        if token.type == "WS":
            breaks = word.count("\n")
            if breaks and (line.words or line.comment):
                yield line
                line = _Line(depth=depth)
            line.blank_before |= breaks > 1
        elif token.type == "COMMENT":
            line.comment = word.rstrip()
        else:
            if word in DECLARATIONS:
                depth = 0
                if line.words:
                    yield line
                    line = _Line()
            line.words.append(word)
            depth += (word in _OPEN) - (word in _CLOSE)
    if line.words or line.comment:
        yield line


def _spaced(words: list[str], previous: str) -> str:
    """One line of tokens with the blanks between them; `previous` is the token before the line."""
    out: list[str] = []
    unary = False
    for word in words:
        tight = not out or unary or previous in (*_OPEN, ".") or word in (*_CLOSE, ",", ".")
        if word in _OPEN and _is_operand(previous):
            tight = True  # a call, an index
        out.append(word if tight else f" {word}")
        unary = word in "+-" and not (_is_operand(previous) or previous in _CLOSE)
        previous = word
    return "".join(out)


def _is_operand(word: str) -> bool:
    return word[:1].isalnum() or word[:1] == "_" if word not in _WORDS_BEFORE_OPERANDS else False


def _indents(lines: list[_Line]) -> list[int]:
    """Declarations start at the margin; a comment line stands with the line it precedes."""
    out, indent = [], 0
    for line in reversed(lines):
        if line.words:
            indent = _indent(line)
        out.append(indent)
    return out[::-1]


def _indent(line: _Line) -> int:
    if line.opens:
        return 0
    first = line.words[0]
    depth = max(0, line.depth - (first in _CLOSE))
    operand = depth == 0 and (_is_operand(first) or first in ("(", "not", "if"))
    return _STEP * (1 + depth) + (_OPERAND if operand else 0)


def _align(lines: list[_Line]) -> None:
    """Pads the `:` or `=` of neighbouring declarations of one kind to one column."""
    group: list[tuple[_Line, str]] = []
    for line in [*lines, _Line()]:
        head = _head(line)
        if group and (head is None or line.blank_before or line.opens != group[-1][0].opens):
            width = max(len(h) for _, h in group)
            for member, h in group:
                member.text = h.ljust(width) + member.text[len(h) :]
            group = []
        if head is not None:
            group.append((line, head))


def _head(line: _Line) -> str | None:
    """What stands before the ` :` or ` =` of a declaration, if it is on this line."""
    mark = {"input": ":", "const": "=", "let": "=", "mask": "="}.get(line.opens or "")
    return line.text[: line.text.index(f" {mark}")] if mark in line.words else None
