"""What an expression may ask of the file it stands in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from maskc.diagnostics import Span
from maskc.frontend.values import Bad, Value


@dataclass(frozen=True, slots=True)
class Macro:
    """A `let` with parameters."""

    name: str
    params: tuple[str, ...]


class Scope(Protocol):
    """What an expression may ask of the file it stands in."""

    def report(self, code: str, message: str, span: Span, hint: str | None = None) -> Bad: ...

    def lookup(self, name: str) -> Value | Macro | None:
        """A constant, input, value `let` or mask as a value; a `let` with parameters; None if unknown."""

    def expand(self, name: str, args: tuple[Value, ...], span: Span) -> Value: ...

    def known_names(self) -> list[str]: ...

    def sets(self) -> list[str]:
        """Names of sets, and names whose declaration is broken and may have been one."""

    def divisor(self, name: str, span: Span) -> None:
        """Note that the scalar input `name` must be known to be >= 1."""
