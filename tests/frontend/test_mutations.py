"""Whatever is typed gives coded errors with places in the text, or a typed file; never a traceback."""

from __future__ import annotations

import random

import pytest

from maskc.frontend import parse_text
from maskc.frontend.codes import CODES
from maskc.frontend.fmt import format_text
from tests.frontend.marked import errors_of
from tests.frontend.test_files import SUITE

WORDS = """and or not in if then else per where within from use const input let mask check assume segments spans int bool
sorted block key row head q k h nq nk doc same first last abs min max start len pos true false causal isolated by"""
SIGNS = "0 7 99999999999 + - * // % <= < == != >= > = : , . ( ) [ ] & | ! # \" ' \\ é ≤"
PIECES = (*WORDS.split(), *SIGNS.split(), "\t", "\0", "\r")


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        i = rng.randint(0, len(text))
        j = min(len(text), i + rng.randint(1, 8))
        match rng.randint(0, 4):
            case 0:
                text = text[:i] + text[j:]
            case 1:
                text = text[:i] + rng.choice(PIECES) + text[i:]
            case 2:
                text = text[:i] + f" {rng.choice(PIECES)} " + text[j:]
            case 3:
                a = rng.randint(0, len(text))
                text = text[:i] + text[a : a + rng.randint(1, 20)] + text[i:]
            case _:
                text = text[:i]
    return text


def check(text: str) -> None:
    for d in errors_of(parse_text, text):
        assert d.code in CODES
        assert d.span is not None
        assert 0 <= d.span.start <= d.span.end <= len(d.span.source.text)
        d.render()
    refused = errors_of(format_text, text)
    assert all(d.code.startswith("M0") for d in refused)
    if not refused:
        once = format_text(text)
        assert format_text(once) == once


@pytest.mark.parametrize("path", SUITE, ids=lambda p: p.stem)
def test_mutations(path: object) -> None:
    text, rng = path.read_text(), random.Random(path.stem)  # type: ignore[attr-defined]
    for _ in range(20):
        check(mutate(text, rng))


@pytest.mark.fuzz
def test_many_mutations() -> None:
    texts, rng = [p.read_text() for p in SUITE], random.Random(1)
    for _ in range(20_000):
        check(mutate(rng.choice(texts) + rng.choice(["", *texts]), rng))
