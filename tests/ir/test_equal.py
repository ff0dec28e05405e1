"""Two masks proved equal are equal, and the usual ways to write one mask are proved to be one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from maskc.ir.equal import joined, proved_equal
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import And, MaskFn, Not, Or
from maskc.ir.reference import dense
from maskc.ir.samples import random_env
from maskc.ir.search import heads_of
from tests.ir.random_masks import random_mask

DOC = "input doc : segments\n"
PREFIX = DOC + "input prefix : int per doc where 0 <= prefix <= doc.len\n"
WINDOW = "input w : int where w >= 1\n"


def _mask(text: str) -> MaskFn:
    return parse_text(text).pick(None)


@pytest.mark.parametrize(
    ("inputs", "a", "b"),
    [
        ("", "k <= q", "not (q < k)"),
        ("", "q // 4 >= k // 4", "k <= q or k // 4 == q // 4"),
        (WINDOW, "k <= q < k + w", "k <= q and q - k <= w - 1"),
        (DOC, "same(doc) and k <= q", "k <= q < doc.end[k]"),
        (DOC, "same(doc) and k <= q", "doc.start[q] <= k <= q"),
        (DOC, "same(doc) and k <= q", "doc[q] == doc[k] and k <= q"),
        (DOC, "same(doc) and q - k < 4", "same(doc) and not (doc.pos[q] - doc.pos[k] >= 4)"),
        (
            PREFIX,
            "same(doc) and (k <= q or doc.pos[k] < prefix[k])",
            "same(doc) and (doc.pos[k] <= doc.pos[q] or doc.pos[k] < prefix[q])",
        ),
    ],
)
def test_proved(inputs: str, a: str, b: str) -> None:
    assert proved_equal(_mask(f"{inputs}mask a = {a}"), _mask(f"{inputs}mask b = {b}"))


@pytest.mark.parametrize(
    ("inputs", "a", "b"),
    [
        (WINDOW, "k <= q < k + w", "k <= q <= k + w"),
        (DOC, "same(doc) and k <= q", "same(doc) and k < q"),
        (DOC, "not (doc.pos[k] < 3)", "not (doc.pos[k] < 3) or k < 0 or k >= nk - 1"),  # a tail outside reads as false both ways
    ],
)
def test_not_proved(inputs: str, a: str, b: str) -> None:
    assert not proved_equal(_mask(f"{inputs}mask a = {a}"), _mask(f"{inputs}mask b = {b}"))


def test_block_tables_go_by_name() -> None:
    a = _mask("input keep : bool per block(128, 128)\nmask a = k <= q and keep[q // 128, k // 128]")
    assert proved_equal(a, replace(a, name="b"))
    assert not proved_equal(a, _mask("mask b = k <= q"))


def test_facts_of_both_hold() -> None:
    """w >= 1 stands in one file only; with it both are the causal window of one key or more."""
    a, b = _mask("input w : int where w >= 1\nmask a = k <= q < k + w"), _mask("input w : int\nmask b = k <= q < k + max(w, 1)")
    assert proved_equal(a, b)


def test_one_name_two_declarations() -> None:
    with pytest.raises(MaskcError, match="M550"):
        proved_equal(_mask("input x : int\nmask a = k < x"), _mask("input x : int per key\nmask b = q < x[k]"))


def test_what_is_proved_is_so() -> None:
    """Random masks against themselves, widened or narrowed: some of these are equal, and only such may be proved."""
    rng, proved, compared = random.Random(0), 0, 0
    for seed in range(40):
        a, c = random_mask(seed), random_mask(seed + 1000)
        body = rng.choice((Or((a.body, And((a.body, c.body)))), Or((a.body, c.body)), And((a.body, c.body)), Not(Not(a.body))))
        b = replace(joined(a, c), name="b", body=body)
        if not proved_equal(a, b):
            continue
        proved += 1
        both = joined(a, b)
        needed = needs_hole_free(a) | needs_hole_free(b)
        for n in range(2, 8):
            env = random_env(both, rng, n, n, needed)
            if env is not None:
                compared += 1
                for h in heads_of(both):
                    assert dense(replace(both, body=a.body), env, h) == dense(replace(both, body=b.body), env, h), (a, b, env)
    assert proved > 3
    assert compared > 12
