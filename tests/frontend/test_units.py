"""The algebra of units."""

from __future__ import annotations

import itertools

import pytest

from maskc.frontend.ast import ArithOp
from maskc.frontend.units import BLOCK, COUNT, LENGTH, PLAIN, POSITION, Unit, combine, join, ordinal

DOC, IMAGE = ordinal("doc"), ordinal("image")
UNITS = (POSITION, LENGTH, DOC, IMAGE, BLOCK, COUNT, PLAIN)


@pytest.mark.parametrize(
    ("op", "a", "b", "result"),
    [
        ("-", POSITION, POSITION, LENGTH),
        ("-", DOC, DOC, COUNT),
        ("-", BLOCK, BLOCK, COUNT),
        ("-", LENGTH, LENGTH, LENGTH),
        ("+", POSITION, LENGTH, POSITION),
        ("+", LENGTH, POSITION, POSITION),
        ("-", POSITION, LENGTH, POSITION),
        ("+", DOC, COUNT, DOC),
        ("+", BLOCK, PLAIN, BLOCK),
        ("-", PLAIN, POSITION, PLAIN),
        ("//", POSITION, PLAIN, BLOCK),
        ("//", LENGTH, PLAIN, LENGTH),
        ("%", POSITION, PLAIN, PLAIN),
        ("*", PLAIN, LENGTH, LENGTH),
        ("*", BLOCK, PLAIN, PLAIN),
        ("+", POSITION, POSITION, None),
        ("+", DOC, DOC, None),
        ("-", DOC, IMAGE, None),
        ("+", DOC, POSITION, None),
        ("+", POSITION, DOC, None),
        ("+", POSITION, COUNT, None),
        ("-", LENGTH, POSITION, None),
        ("+", BLOCK, LENGTH, None),
    ],
)
def test_combine(op: ArithOp, a: Unit, b: Unit, result: Unit | None) -> None:
    assert combine(op, a, b) == result


def test_join_is_symmetric_and_plain_fits_anywhere() -> None:
    for a, b in itertools.product(UNITS, UNITS):
        assert join(a, b) == join(b, a)
        assert (join(a, b) is None) == (a != b and PLAIN not in (a, b))


def test_addition_is_symmetric() -> None:
    for a, b in itertools.product(UNITS, UNITS):
        assert combine("+", a, b) == combine("+", b, a)


def test_subtraction_undoes_addition() -> None:
    """(a + b) - b has the unit of a again, wherever a unit says something."""
    for a, b in itertools.product(UNITS, UNITS):
        total = combine("+", a, b)
        if total is not None and a != PLAIN:
            assert combine("-", total, b) == a
