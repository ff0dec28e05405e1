"""Errors are data: a code, a place in a source text, what is wrong, what to do. Rendered in one place.

Nothing here knows about masks. Codes: M0xx syntax, M1xx names, types and units, M2xx form (cannot be lowered),
M3xx proof, M4xx bound data, M5xx API use, M6xx toolchain, M7xx distributed; W... are warnings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A text that spans point into. `path` is what the user typed, or a name such as `<text>`."""

    path: str
    text: str

    def line_col(self, offset: int) -> tuple[int, int]:
        """1-based line and column of a character offset."""
        offset = max(0, min(offset, len(self.text)))
        line = self.text.count("\n", 0, offset) + 1
        return line, offset - (self.text.rfind("\n", 0, offset) + 1) + 1

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its line end."""
        lines = self.text.split("\n")
        return lines[number - 1].rstrip("\r") if 1 <= number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) of a source text."""

    source: SourceFile
    start: int
    end: int

    def to(self, other: Span) -> Span:
        """The smallest span that covers both."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def where(self) -> str:
        line, col = self.source.line_col(self.start)
        return f"{self.source.path}:{line}:{col}"


_WIDEST = 160  # characters of a source line that are shown
_LONGEST = 60  # characters of a value or of an expression in a message


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error or warning. `notes` are (label, text) lines such as ("example", "kind = 0 1 0: ...")."""

    code: str
    message: str
    span: Span | None = None
    help: str | None = None
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def is_warning(self) -> bool:
        return self.code.startswith("W")

    def render(self) -> str:
        """Text for a terminal: headline, place, source line with carets, notes, help."""
        kind = "warning" if self.is_warning else "error"
        out = [f"{kind}[{self.code}]: {self.message}"]
        if self.span is not None:
            line, col = self.span.source.line_col(self.span.start)
            text, col = _around(self.span.source.line(line), col)
            width = max(1, min(self.span.end - self.span.start, len(text) - col + 1))
            gutter = " " * len(str(line))
            pad = "".join("\t" if c == "\t" else " " for c in text[: col - 1])
            out += [f"{gutter}--> {self.span.where()}", f"{gutter} |", f"{line} | {text}", f"{gutter} | {pad}{'^' * width}"]
        out += [f"   = {label}: {text}" for label, text in self.notes]
        if self.help is not None:
            out.append(f"   = help: {self.help}")
        return "\n".join(out)

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`."""
        place: dict[str, object] = {}
        if self.span is not None:
            line, col = self.span.source.line_col(self.span.start)
            end_line, end_col = self.span.source.line_col(self.span.end)
            place = {"file": self.span.source.path, "line": line, "col": col, "end_line": end_line, "end_col": end_col}
        return {"code": self.code, "message": self.message, **place, "notes": [list(n) for n in self.notes], "help": self.help}


def _around(line: str, col: int) -> tuple[str, int]:
    """What is shown of a line, and where its column `col` is in that: of a long line the part that holds the column."""
    if len(line) <= _WIDEST:
        return line, col
    first = max(0, min(col - 1 - _WIDEST // 2, len(line) - _WIDEST))
    head, tail = "..." if first else "", "..." if first + _WIDEST < len(line) else ""
    return head + line[first : first + _WIDEST] + tail, col - first + len(head)


def shortened(text: str) -> str:
    """A text as messages show it, of at most 60 characters."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class MaskcError(Exception):
    """Raised with every diagnostic that was found, never only the first."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...] | list[Diagnostic] | Diagnostic) -> None:
        if isinstance(diagnostics, Diagnostic):
            diagnostics = (diagnostics,)
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    @property
    def code(self) -> str:
        """The code of the first diagnostic."""
        return self.diagnostics[0].code

    def __reduce__(self) -> tuple[type[MaskcError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)


class MaskcTypeError(MaskcError, TypeError):
    """Misuse of a Python signature (an unknown keyword, a wrong argument type)."""


class MaskcWarning(UserWarning):
    """Category of warnings that maskc emits through `warnings.warn`."""


def error(code: str, message: str, span: Span | None = None, hint: str | None = None, *notes: tuple[str, str]) -> MaskcError:
    """Shorthand for an exception that carries one diagnostic."""
    return MaskcError(Diagnostic(code, message, span, hint, tuple(notes)))
