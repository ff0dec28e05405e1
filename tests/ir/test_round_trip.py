"""The text forms of masks and programs parse back to what they were printed from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import Expr, MaskFn, Pred
from maskc.ir.printer import print_fn, print_program, print_term
from maskc.ir.reader import read_expr, read_fn, read_pred, read_program
from tests.ir.strategies import exprs, masks, preds, programs


@settings(deadline=None)
@given(exprs)
def test_expressions(e: Expr) -> None:
    assert read_expr(print_term(e)) == e


@settings(deadline=None)
@given(preds)
def test_predicates(p: Pred) -> None:
    assert read_pred(print_term(p)) == p


@settings(deadline=None)
@given(masks())
def test_masks(fn: MaskFn) -> None:
    assert read_fn(print_fn(fn)) == fn


@settings(deadline=None)
@given(programs)
def test_programs(p: IntervalProgram) -> None:
    assert read_program(print_program(p)) == p


@pytest.mark.parametrize(
    "text", ["", "k <=", "k <= q q", "k + ", "f[k", "nope(k)", "(k", "k ? q", "k and q", "x.width[k]", "- 3 and"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_pred(text)


def test_readable() -> None:
    """Sums and signs read as people write them."""
    for text in (
        "k <= q and q < k + w",
        "2 * doc.start[q] - 3 * k - k // (w + 1) + q % 4 - w - 1 >= 0",
        "not same(doc) or k in last(doc)",
    ):
        assert print_term(read_pred(text)) == text
