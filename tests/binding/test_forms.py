"""Every form of `segments(...)` against a table written down by hand, for any lengths, gaps and batches."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from maskc import segments
from maskc.binding.checks import Checks
from maskc.binding.constructors import SetSource
from maskc.binding.sets import build_table
from maskc.ir.nodes import InputDecl, InputKind

DECL = InputDecl("doc", InputKind.SEGMENTS)
Ranges = list[tuple[int, int]]


def table_of(source: SetSource | list[SetSource]) -> tuple[list[Ranges], int | None]:
    """The segments of each batch item, without the padding of the table, and the number of tokens if it is known."""
    checks = Checks()
    table, tokens = build_table(DECL, source, checks, torch.device("cpu"))
    checks.finish()
    last = (table.counts[:, None].long() - 1).clamp(min=0)
    total = torch.where(table.counts[:, None] > 0, table.ends.gather(1, last), 0)
    past = torch.arange(table.size) >= table.counts[:, None]
    assert torch.all(torch.where(past, (table.starts == total) & (table.ends == total), True))
    assert torch.all(table.starts[:, 1:] >= table.ends[:, :-1])
    items = [list(zip(s, e, strict=True)) for s, e in zip(table.starts.tolist(), table.ends.tolist(), strict=True)]
    return [item[:n] for item, n in zip(items, table.counts.tolist(), strict=True)], tokens


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Ranges, int]:
    """Non-empty segments with gaps, and the number of tokens."""
    cuts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6))
    ranges, at = [], 0
    for gap, length in cuts:
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return ranges, at + draw(st.integers(0, 3))


def ids_of(ranges: Ranges, n: int, labels: list[int], pad: int) -> list[int]:
    ids = [pad] * n
    for label, (start, end) in zip(labels, ranges, strict=False):
        ids[start:end] = [label] * (end - start)
    return ids


@settings(max_examples=150, deadline=None)
@given(layouts(), st.permutations(range(10, 20)), st.sampled_from([-1, 0, 99]))
def test_ids_and_ranges(layout: tuple[Ranges, int], labels: list[int], pad: int) -> None:
    ranges, n = layout
    assert table_of(segments(ranges=ranges)) == ([ranges], None)
    assert table_of(segments(ids=ids_of(ranges, n, labels, pad), pad=pad)) == ([ranges], n)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6))
def test_lengths_and_offsets(lengths: list[int]) -> None:
    ends = list(accumulate(lengths))
    ranges = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    assert table_of(segments(lengths=lengths)) == ([ranges], None)
    assert table_of(segments(cu_seqlens=[0, *ends])) == ([ranges], None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans())
def test_positions_and_ends(lengths: list[int], finished: bool) -> None:
    ends = list(accumulate(lengths))
    ranges = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    assert table_of(segments(positions=[i for n in lengths for i in range(n)])) == ([ranges], ends[-1])
    eos = [i + 1 == n for n in lengths for i in range(n)]
    eos[-1] = finished
    assert table_of(segments(eos=eos)) == ([ranges], ends[-1])


@settings(max_examples=100, deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=4))
def test_batches(items: list[tuple[Ranges, int]]) -> None:
    """A list of constructors, one constructor with lists inside, and one with a rectangle say the same."""
    ranges, n = [r for r, _ in items], max(n for _, n in items)
    ids = [ids_of(r, n, [*range(7)], -1) for r in ranges]
    assert table_of([segments(ranges=r) for r in ranges]) == (ranges, None)
    assert table_of(segments(ranges=ranges)) == (ranges, None)
    assert table_of([segments(ids=row) for row in ids]) == (ranges, n)
    assert table_of(segments(ids=torch.tensor(ids).reshape(len(ids), n))) == (ranges, n)
    mixed = [segments(ranges=r) if i % 2 else segments(ids=ids[i]) for i, r in enumerate(ranges)]
    assert table_of(mixed) == (ranges, n)


@settings(max_examples=150, deadline=None)
@given(layouts(), layouts())
def test_nesting(child: tuple[Ranges, int], parent: tuple[Ranges, int]) -> None:
    mask = maskc.compile_text("input doc : segments\ninput part : spans within doc\nmask m = same(doc) and same(part)")
    data = {"doc": segments(ranges=parent[0]), "part": maskc.spans(ranges=child[0])}
    nested = all(any(low <= start and end <= high for low, high in parent[0]) for start, end in child[0])
    if nested:
        assert mask.bind(nk=40, **data).nk == 40
    else:
        with pytest.raises(maskc.MaskcError, match="M406"):
            mask.bind(nk=40, **data)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_holes(layout: tuple[Ranges, int]) -> None:
    mask = maskc.compile_text("input doc : segments\nmask m = doc[q] >= doc[k]")
    reached = [0, *(end for _, end in layout[0])]
    if all(start == before for (start, _), before in zip(layout[0], reached, strict=False)):
        assert mask.bind(nk=40, doc=segments(ranges=layout[0])).nk == 40
    else:
        with pytest.raises(maskc.MaskcError, match="M409"):
            mask.bind(nk=40, doc=segments(ranges=layout[0]))


@pytest.mark.parametrize(("shape", "items"), [((0,), 1), ((0, 2), 1), ((2, 0), 2), ((2, 0, 2), 2)])
def test_tensors_without_a_range(shape: tuple[int, ...], items: int) -> None:
    assert table_of(segments(ranges=torch.zeros(shape, dtype=torch.int64))) == ([[]] * items, None)
