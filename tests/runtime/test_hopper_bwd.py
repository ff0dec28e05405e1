"""Decisions of the Hopper backward that need no GPU."""

from __future__ import annotations

import pytest
import torch

from maskc.boundary import BoundaryVectors
from maskc.codegen.spec import MaskForm
from maskc.runtime.hopper_bwd import _addressable, form_of, heads_per_cta, heads_together


@pytest.mark.parametrize(
    ("ratio", "heads_per_mask", "tiles", "expected"),
    [
        (1, 1, 10, 1),
        (4, 32, 10_000, 4),  # enough tiles: all query heads of a kv head in one CTA
        (4, 32, 100, 1),  # 400 CTAs at most: as many as there can be
        (4, 32, 200, 2),
        (14, 14, 10_000, 14),
        (14, 1, 10_000, 1),  # a mask of its own for every query head
        (6, 2, 10_000, 2),
        (7, 7, 40, 1),
    ],
)
def test_heads_of_a_cta(ratio: int, heads_per_mask: int, tiles: int, expected: int) -> None:
    heads = heads_per_cta(ratio, heads_per_mask, tiles, 132)
    assert heads == expected
    assert ratio % heads == heads_per_mask % heads == 0


def test_heads_together_fit_the_cache() -> None:
    assert heads_together(8192 * 128) == 8
    assert heads_together(1 << 30) == 1


def test_what_a_bulk_copy_can_address() -> None:
    plain = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)
    strided = torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert _addressable(plain) is plain
    assert _addressable(strided) is strided
    expanded = plain[:, :1].expand(2, 8, 4, 64)
    late = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 8, 1, 64)  # 2 bytes off
    wide = torch.zeros(2, 8, 4, 65, dtype=torch.bfloat16)[..., :64]
    backwards = plain.transpose(2, 3)
    for t in (expanded, late, wide, backwards):
        copy = _addressable(t)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, t)


def test_form_of_a_mask() -> None:
    one = torch.zeros(1, 1, 4, dtype=torch.int32)
    assert form_of(BoundaryVectors(4, 4, 1, 1, True, lts=one)) == MaskForm(lts=True, causal=True)
    assert form_of(BoundaryVectors(4, 4, 1, 1, False, lts=one, ute=one, diag=one)) == MaskForm(lts=True, ute=True, diag=True)
