"""What copy engines are asked for: the bytes of a tensor where torch would put them, by as few operations as may be."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maskc.runtime import driver_streams
from maskc.runtime.copies import Copy, copies_of
from maskc.runtime.transport import KeyShape


def run(one: Copy, ahead: int = 0) -> None:
    for i in range(one.pieces):
        ctypes.memmove(one.into + i * one.pitches[0], one.source + ahead + i * one.pitches[1], one.width)


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """(memory, a part of it, a source of its shape), both with strides of their own but for the last dimension."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))

    def view() -> tuple[Tensor, Tensor]:
        order = [*draw(st.permutations(range(len(shape) - 1))), len(shape) - 1]
        wide = [shape[d] + draw(st.integers(0, 2)) for d in order]
        memory = torch.zeros(wide, dtype=dtype)
        lead = memory[tuple(slice(0, shape[d]) for d in order)]
        return memory, lead.permute([order.index(d) for d in range(len(shape))])

    memory, into = view()
    _, source = view()
    source.copy_(torch.arange(1, source.numel() + 1).view(shape))
    return memory, into, source


@given(views())
def test_copies_bring_every_byte_and_no_other(given_views: tuple[Tensor, Tensor, Tensor]) -> None:
    memory, into, source = given_views
    made = copies_of(into, source)
    assert sum(c.bytes for c in made) == source.numel() * source.element_size()
    for one in made:
        run(one)
    assert torch.equal(into, source)
    assert memory.count_nonzero() == source.numel()


def test_lines_that_follow_each_other_are_one() -> None:
    whole = torch.zeros(3, 8, 4)
    assert [(c.width, c.pieces) for c in copies_of(whole, torch.ones_like(whole))] == [(3 * 8 * 4 * 4, 1)]
    assert [(c.width, c.pieces) for c in copies_of(whole[:, :5], torch.ones(3, 5, 4))] == [(5 * 4 * 4, 3)]
    assert [(c.width, c.pieces) for c in copies_of(whole[:, :5, :2], torch.ones(3, 5, 2))] == [(2 * 4, 5)] * 3
    assert copies_of(whole[:0], whole[:0]) == ()
    with pytest.raises(ValueError, match="no copy"):
        copies_of(whole, whole[:2])


def test_keys_and_values_are_one_operation_where_they_lie_so() -> None:
    """Pitches of an operation are positive, no less than a line, and of 31 bits."""
    k = Copy(1000, 5000, 64, 1, (64, 64))
    for v, joined in (
        (Copy(1100, 5200, 64, 1, (64, 64)), True),
        (Copy(1063, 5200, 64, 1, (64, 64)), False),
        (Copy(1100, 4900, 64, 1, (64, 64)), False),
        (Copy(1100, 5000 + (1 << 31), 64, 1, (64, 64)), False),
        (Copy(1100, 5200, 32, 1, (32, 32)), False),
        (Copy(1100, 5200, 64, 2, (64, 64)), False),
    ):
        made = Copy.both(k, v)
        assert made == ((Copy(1000, 5000, 64, 2, (100, 200)),) if joined else (k, v))


def test_one_piece_is_a_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(driver_streams, "copy", lambda *a: asked.append(("copy", *a)))
    monkeypatch.setattr(driver_streams, "copy_pieces", lambda *a: asked.append(("pieces", *a)))
    Copy(1, 20, 64, 1, (64, 64)).enqueue(9, 300)
    Copy(1, 20, 64, 2, (70, 80)).enqueue(9, 300)
    assert asked == [("copy", 1, 320, 64, 9), ("pieces", 1, 320, 64, 2, (70, 80), 9)]


@pytest.mark.parametrize(("heads", "dim_v", "operations"), [(1, 8, 1), (2, 8, 2), (1, 4, 2)])
def test_keys_and_values_of_a_piece_are_one_copy_where_they_can_be(heads: int, dim_v: int, operations: int) -> None:
    shape = KeyShape(1, 4, 8, dim_v, torch.bfloat16)
    into, source = shape.empty(12, "cpu"), shape.empty(20, "cpu")
    for t in source:
        t.normal_()
    pieces, theirs = (tuple(t[1 : 1 + heads, at : at + 5] for t in pair) for pair, at in ((into, 3), (source, 9)))
    copies = Copy.both(*map(Copy.of, pieces, theirs))
    assert len(copies) == operations
    for one in copies:
        run(one)
    for mine, their, whole in zip(pieces, theirs, into, strict=True):
        assert torch.equal(mine, their)
        assert whole.count_nonzero() == their.count_nonzero(), "and nothing else is written"


@pytest.mark.parametrize(
    ("shape", "order", "heads", "operations"),
    [
        ((1, 9, 4, 8), (0, 1, 2, 3), slice(0, 2), 1),  # as a projection leaves them: lines of two heads
        ((1, 9, 4, 8), (0, 1, 2, 3), slice(0, 4), 1),  # all heads: one piece
        ((3, 9, 4, 8), (0, 1, 2, 3), slice(0, 4), 1),  # an item of the batch each
        ((3, 9, 4, 8), (0, 1, 2, 3), slice(1, 3), 3),
        ((1, 4, 9, 8), (0, 2, 1, 3), slice(1, 3), 2),  # head-major: an operation for each head
        ((2, 1, 1, 8), (0, 1, 2, 3), slice(0, 1), 1),
    ],
)
def test_copies_between_strides_take_few_operations(
    shape: tuple[int, ...], order: tuple[int, ...], heads: slice, operations: int
) -> None:
    source = torch.randn(shape).permute(order)
    batch, rows, every, dim = source.shape
    whole = torch.zeros(batch, rows + 5, every, dim)
    part = slice(0, max(1, rows - 3))
    into, theirs = whole[:, 2 : 2 + part.stop, heads], source[:, part, heads]
    made = copies_of(into, theirs)
    assert len(made) == operations
    for one in made:
        run(one)
    assert torch.equal(into, theirs)
    assert whole.count_nonzero() == theirs.count_nonzero(), "and nothing else is written"


def test_one_item_that_stands_for_a_batch_is_copied_item_by_item() -> None:
    source, into = torch.randn(1, 5, 2, 8).expand(3, -1, -1, -1), torch.zeros(3, 5, 2, 8)
    made = copies_of(into, source)
    assert len(made) == 3
    for one in made:
        run(one)
    assert torch.equal(into, source)
