"""Units: what a number counts. They catch an offset given for a length and an id given for a mask.

Plain integers and int inputs carry no unit and fit anywhere.

    position +- length, plain   = position        length +- length, plain = length
    position - position         = length          length // n             = length
    position // n               = block           block  +- count, plain  = block     block - block     = count
    number of a segment         = ordinal         ordinal +- count, plain = ordinal   ordinal - ordinal = count
    anything % n                = plain           n * length              = length    n * anything else = plain

Numbers compare, and stand together in min, max and if/then/else, when their units are equal or one is plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from maskc.frontend.ast import ArithOp


class Kind(Enum):
    POSITION = "a position"
    LENGTH = "a length"
    ORDINAL = "an ordinal"
    BLOCK = "a block number"
    COUNT = "a count"
    PLAIN = "a plain number"


@dataclass(frozen=True, slots=True)
class Unit:
    """`of`: the set that an ordinal numbers."""

    kind: Kind
    of: str | None = None

    def __str__(self) -> str:
        return f"a `{self.of}` number" if self.kind is Kind.ORDINAL else self.kind.value


POSITION, LENGTH, BLOCK, COUNT, PLAIN = (Unit(k) for k in (Kind.POSITION, Kind.LENGTH, Kind.BLOCK, Kind.COUNT, Kind.PLAIN))


def ordinal(of: str) -> Unit:
    return Unit(Kind.ORDINAL, of)


def join(a: Unit, b: Unit) -> Unit | None:
    """The common unit of numbers that are compared or stand side by side; None if they do not fit."""
    if a == PLAIN or b == PLAIN:
        return b if a == PLAIN else a
    return a if a == b else None


_STEP = {Kind.POSITION: LENGTH, Kind.LENGTH: LENGTH, Kind.ORDINAL: COUNT, Kind.BLOCK: COUNT, Kind.COUNT: COUNT}


def combine(op: ArithOp, a: Unit, b: Unit) -> Unit | None:
    """The unit of `a op b`; None if it has no meaning."""
    match op:
        case "%":
            return PLAIN
        case "//":
            return {Kind.POSITION: BLOCK, Kind.LENGTH: LENGTH, Kind.BLOCK: BLOCK}.get(a.kind, PLAIN)
        case "*":
            return LENGTH if {a, b} == {LENGTH, PLAIN} else PLAIN
        case "-" if a == b and a != PLAIN:
            return _STEP[a.kind]
        case "-" if a == PLAIN:
            return LENGTH if b == LENGTH else COUNT if b == COUNT else PLAIN
        case _:
            if op == "+" and a == PLAIN:
                a, b = b, a
            if b == PLAIN:
                return a
            if b == _STEP[a.kind]:
                return a
            if op == "+" and a == _STEP[b.kind]:
                return b
            return None
