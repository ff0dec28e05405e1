"""Source texts with «marks» around what errors must point at."""

from __future__ import annotations

import re
from collections.abc import Callable

from maskc.diagnostics import Diagnostic, MaskcError


def unmark(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the character range of every mark in order of its start; marks may nest."""
    text, opened, ranges = "", [], []
    for piece in re.split("([«»])", marked):
        if piece == "«":
            opened.append(len(ranges))
            ranges.append((len(text), len(text)))
        elif piece == "»":
            i = opened.pop()
            ranges[i] = (ranges[i][0], len(text))
        else:
            text += piece
    assert not opened
    return text, ranges


def errors_of(compile_text: Callable[[str], object], text: str) -> tuple[Diagnostic, ...]:
    try:
        compile_text(text)
    except MaskcError as e:
        return e.diagnostics
    return ()


def assert_errors(compile_text: Callable[[str], object], marked: str, codes: str, help_part: str = "") -> tuple[Diagnostic, ...]:
    """The text has exactly these errors, in order, each spanning exactly its mark; the first help contains help_part."""
    text, ranges = unmark(marked)
    found = errors_of(compile_text, text)
    got = [(d.code, d.span.start, d.span.end) if d.span else (d.code, -1, -1) for d in found]
    assert got == [(c, *r) for c, r in zip(codes.split(), ranges, strict=True)], "\n".join(d.render() for d in found)
    assert help_part in (found[0].help or ""), found[0].render()
    for d in found:
        line, col = d.span.source.line_col(d.span.start)  # type: ignore[union-attr]
        assert f":{line}:{col}\n" in d.render()
    return found
