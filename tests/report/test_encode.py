from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.report.encode import DIGITS, ranks, runs
from tests.report.javascript import evaluate, needs_node


def decoded(text: str) -> list[int]:
    out: list[int] = []
    for token in text.split():
        first, times, last = token.partition("x")
        start, to, end = token.partition("..")
        out += [int(first)] * int(last) if times else list(range(int(start), int(end) + 1)) if to else [int(token)]
    return out


stretches = st.lists(st.tuples(st.integers(-3, 60), st.integers(1, 6), st.integers(0, 1)), max_size=12)


@given(stretches)
def test_runs_read_back(parts: list[tuple[int, int, int]]) -> None:
    values = [first + i * step for first, count, step in parts for i in range(count)]
    text = runs(torch.tensor(values, dtype=torch.int32))
    assert text is not None
    assert decoded(text) == values
    assert len(text.split()) <= max(1, len(values))


def test_runs_are_short() -> None:
    assert runs([7, 7, 7, 4, 5, 6, 7, 9]) == "7x3 4..7 9"
    assert runs([1, 2]) == "1 2"
    assert runs([]) == ""
    assert runs([True, True, False]) == "1x2 0"
    assert runs(range(0, 100, 2), limit=20) is None


def test_ranks_are_one_character_each() -> None:
    assert ranks([0, 9, 10, 61]) == "09aZ"
    assert len(set(DIGITS)) == 62


@needs_node
@settings(max_examples=3)
@given(st.lists(stretches, min_size=40, max_size=40))
def test_the_page_reads_them_too(many: list[list[tuple[int, int, int]]]) -> None:
    vectors = [[first + i * step for first, count, step in parts for i in range(count)] for parts in many]
    assert evaluate("return data.map((t) => Array.from(decodeRuns(t)));", [runs(v) for v in vectors]) == vectors
