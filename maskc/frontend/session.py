"""What all files of one compilation share: the diagnostics found so far and the budget for expanding macros."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from maskc.diagnostics import Diagnostic, Span
from maskc.frontend.build import Measure
from maskc.ir.traverse import Node

MAX_EXPANSIONS = 2_000
MAX_NODES = 20_000
MAX_DEPTH = 150


class Session:
    """Collects diagnostics once each; inside a macro expansion they carry a note that says where it was used."""

    def __init__(self) -> None:
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self.spent = False  # an expansion went too far and was reported: expand nothing more
        self._seen: set[tuple[str, str, Span | None]] = set()
        self._uses: list[Span] = []
        self._muted = 0
        self._expansions = 0
        self._measure = Measure()

    def report(self, d: Diagnostic) -> None:
        key = (d.code, d.message, d.span)
        if self._muted or key in self._seen:
            return
        self._seen.add(key)
        if self._uses:
            use = self._uses[-1]
            d = replace(d, notes=(*d.notes, ("used by", f"`{' '.join(use.text.split())}` at {use.where()}")))
        (self.warnings if d.is_warning else self.errors).append(d)

    @property
    def expands(self) -> bool:
        """Whether a macro is being expanded."""
        return bool(self._uses)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Reports nothing inside."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def expanding(self, use: Span) -> Iterator[bool]:
        """Around the expansion of a macro used at `use`; yields False once the budget is spent."""
        self._expansions += 1
        self._uses.append(use)
        try:
            yield not self.spent and self._expansions <= MAX_EXPANSIONS
        finally:
            self._uses.pop()

    def too_big(self, node: Node) -> bool:
        """Whether an expression, seen as a tree, is too large or too deep for what follows."""
        size, depth = self._measure.of(node)
        return size > MAX_NODES or depth > MAX_DEPTH
