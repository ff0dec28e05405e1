"""Masks whose bounds run straight, as those of windows and documents do, and masks with every part that vectors can have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.convert import dense, from_dense, from_flashmask, from_magi, to_block_mask, to_flashmask, to_magi, to_mask_mod
from maskc.diagnostics import MaskcError
from tests.binding.strategies import boundary_vectors
from tests.convert.strategies import seen
from tests.convert.test_formats import _magi


@st.composite
def straight(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """(visible cells [nq, nk], stretches): in each stretch the first row and the end of a key rise by 0 or 1 a key."""
    nq, stretches = draw(st.integers(1, 14)), draw(st.integers(1, 4))
    columns: list[torch.Tensor] = []
    row = torch.arange(nq)
    for _ in range(stretches):
        low, size = draw(st.integers(0, nq)), draw(st.integers(0, nq))
        rise, grow = draw(st.booleans()), draw(st.booleans())
        for k in range(draw(st.integers(1, 7))):
            lo, hi = low + k * rise, low + size + k * grow
            columns.append((row >= lo) & (row < hi))
    return torch.stack(columns, 1), stretches


@given(straight())
def test_slices_of_straight_bounds(given: tuple[torch.Tensor, int]) -> None:
    wanted, _ = given
    nq, nk = wanted.shape
    out = to_magi(from_dense(wanted))
    shown = [_magi([q], [k], [t], nq, nk) for q, k, t in zip(out.q_ranges, out.k_ranges, out.types, strict=True)]
    total = torch.stack(shown).sum(0) if shown else torch.zeros(nq, nk)
    assert torch.equal(total, wanted.to(total.dtype)), "each cell in one slice"
    assert all(a < b for a, b in (*out.q_ranges, *out.k_ranges)), "no slice is empty"
    back = from_magi(out.q_ranges, out.k_ranges, [int(t) for t in out.types], nq=nq, nk=nk)
    assert torch.equal(seen(back.vectors())[0, 0], wanted)


@pytest.mark.parametrize(("rise", "grow"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(1, 6), (2, 6), (6, 6), (7, 6), (9, 3)])
def test_a_stretch_is_few_slices(rise: int, grow: int, rows: int, keys: int) -> None:
    row, k = torch.arange(40)[:, None], torch.arange(keys)
    if rows + (grow - rise) * (keys - 1) < 1:
        keys = rows
        k = k[:keys]
    wanted = (row >= 5 + rise * k) & (row < 5 + rows + grow * k)
    assert len(to_magi(from_dense(wanted)).types) <= (1 if rise == grow == 0 else 2 if rise != grow else 3)


@given(straight())
def test_flashmask_of_straight_bounds(given: tuple[torch.Tensor, int]) -> None:
    wanted, _ = given
    nq, nk = wanted.shape
    made = to_flashmask(from_dense(wanted))
    back = from_flashmask(made.startend_row_indices, causal=made.causal, nq=nq, nk=nk)
    assert torch.equal(seen(back.vectors()).expand(1, 1, -1, -1)[0, 0], wanted)


@given(straight())
def test_vectors_have_no_part_that_says_nothing(given: tuple[torch.Tensor, int]) -> None:
    wanted, _ = given
    v = from_dense(wanted).vectors()
    assert torch.equal(seen(v)[0, 0], wanted)
    assert v.lte is None or bool((v.lte < v.nq).any())
    assert v.uts is None or bool((v.uts > 0).any())


def test_a_column_with_too_many_runs_is_named_whatever_slab_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_SLAB", 20)
    visible = torch.ones(10, 7, dtype=torch.bool)
    visible[[0, 2, 4, 5, 8], 5] = False
    with pytest.raises(MaskcError, match="M450") as caught:
        from_dense(visible)
    assert "key 5 of the dense mask needs 4 masked runs" in str(caught.value)
    assert "masked rows: 0 | 2 | 4-5 | 8" in str(caught.value)


# ---------------------------------------------------------------- FlexAttention


@given(boundary_vectors(most=24), st.sampled_from([1, 2, 3]), st.sampled_from([(8, 8), (16, 4), (5, 16)]))
def test_mask_mods_and_block_masks_show_the_same(v: BoundaryVectors, share: int, block: tuple[int, int]) -> None:
    wanted = seen(v).repeat_interleave(share, 1).expand(v.batch, -1, -1, -1)
    heads = v.heads * share
    b, h, q, k = (torch.arange(n) for n in (v.batch, heads, v.nq, v.nk))
    mod = to_mask_mod(v, query_heads=heads)
    shown = mod(b[:, None, None, None], h[:, None, None], q[:, None], k).expand(v.batch, heads, v.nq, v.nk)
    assert torch.equal(shown, wanted)
    made = to_block_mask(v, query_heads=heads, block=block)
    partial = _spread(made.kv_num_blocks, made.kv_indices, block, shown)
    full = _spread(made.full_kv_num_blocks, made.full_kv_indices, block, shown)
    assert not bool((partial & full).any())
    assert torch.equal(partial & shown | full, wanted)


def _spread(count: torch.Tensor | None, indices: torch.Tensor | None, block: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """The cells of the first `count` blocks of each row of blocks."""
    assert count is not None
    assert indices is not None
    table = torch.zeros_like(indices, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
        table[tuple(at)][indices[tuple(at)][: int(count[tuple(at)])].long()] = True
    cells = table.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, : like.shape[2], : like.shape[3]]
    return cells.expand(like.shape)


def test_heads_of_a_mask_divide_those_of_queries() -> None:
    v = BoundaryVectors(4, 4, 1, 2, False, lts=torch.zeros(1, 2, 4, dtype=torch.int32))
    for heads in (None, 3):
        with pytest.raises(MaskcError, match="M453"):
            to_mask_mod(v, query_heads=heads)
