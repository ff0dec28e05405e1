"""mask_mod and BlockMask: read exactly, written from vectors and tile tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import maskc
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.convert import flex as flex_module
from maskc.convert import from_block_mask, from_magi, from_mask_mod, to_block_mask, to_dense, to_magi, to_mask_mod
from maskc.diagnostics import MaskcError
from tests.convert.strategies import equal, seen, vectors


@given(vectors(), st.sampled_from([1, 3]))
@settings(max_examples=20)
def test_mask_mod_says_what_the_vectors_say(v: BoundaryVectors, share: int) -> None:
    heads = v.heads * share
    made = create_mask(to_mask_mod(v, query_heads=heads), v.batch, heads, v.nq, v.nk, device="cpu")
    assert torch.equal(made, seen(v).repeat_interleave(share, 1))


@given(vectors(largest=40), st.sampled_from([(4, 4), (8, 4), (4, 16)]))
@settings(max_examples=30)
def test_block_mask_agrees_with_the_dense_one(v: BoundaryVectors, block: tuple[int, int]) -> None:
    made = to_block_mask(v, query_heads=v.heads, block=block)
    wanted = create_block_mask(to_mask_mod(v, query_heads=v.heads), v.batch, v.heads, v.nq, v.nk, "cpu", BLOCK_SIZE=block)
    assert made.shape == wanted.shape
    # tile classes promise what they skip and what they show in full, so they may only be more careful
    assert bool((made.to_dense() >= wanted.to_dense()).all())
    assert bool((made.full_kv_num_blocks <= wanted.full_kv_num_blocks).all())
    back = _back(made)
    assert back is None or equal(back.vectors(), v)


def _back(block_mask: Any) -> Any:
    try:
        return from_block_mask(block_mask)
    except MaskcError as e:
        assert e.code == "M450"  # noqa: PT017
        return None


def test_native_masks_of_flex_users() -> None:
    doc = torch.tensor([0] * 5 + [1] * 9 + [2] * 6)

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (doc[q] == doc[k]) & (q >= k)

    wanted = maskc.compile("std:doc_causal").bind(doc=maskc.segments(ids=doc))
    assert equal(from_mask_mod(documents, 20, 20).vectors(), wanted.vectors())
    block_mask = create_block_mask(documents, None, None, 20, 20, "cpu", BLOCK_SIZE=4)
    assert equal(from_block_mask(block_mask).vectors(), wanted.vectors())


@pytest.mark.parametrize(("nq", "nk"), [(0, 0), (0, 3), (3, 0)])
def test_masks_without_elements(nq: int, nk: int) -> None:
    """A mask_mod that reads vectors of no key cannot be asked for one."""
    spec = maskc.compile_text("input e : int per key\nmask m = k <= q < e[k]").bind(e=[7] * nk, nq=nq)
    assert from_mask_mod(to_mask_mod(spec), nq, nk).vectors().masked().shape == (1, 1, nq, nk)


def test_slabs_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_SLAB", 64)
    window = maskc.compile("std:sliding_window").bind(window=7).vectors(33, 33)
    assert equal(from_mask_mod(to_mask_mod(window), 33, 33).vectors(), window)
    assert equal(from_block_mask(to_block_mask(window, block=8)).vectors(), window)


def test_block_tables_go_along() -> None:
    keep = torch.rand(1, 2, 3, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    v = replace(BoundaryVectors(24, 16, 1, 2, True), blocks=BlockTable(keep, 8, 8))
    assert torch.equal(create_mask(to_mask_mod(v, query_heads=4), 1, 4, 24, 16, device="cpu"), seen(v).repeat_interleave(2, 1))
    assert to_block_mask(v, query_heads=2, block=8).shape == (1, 2, 24, 16)


def test_per_head_masks_need_the_number_of_query_heads() -> None:
    v = BoundaryVectors(8, 8, 1, 2, True, torch.full((1, 2, 8), 8, dtype=torch.int32))
    with pytest.raises(MaskcError, match="M453"):
        to_block_mask(v)
    with pytest.raises(MaskcError, match="M453"):
        to_mask_mod(v, query_heads=3)


def test_what_is_refused() -> None:
    with pytest.raises(MaskcError, match=r"M450.*key 0 of the mask_mod needs 4 masked runs"):
        from_mask_mod(lambda b, h, q, k: (q - k) % 2 == 0, 8, 8)
    with pytest.raises(MaskcError, match=r"needs 20 masked runs[^|]*: 1 \| 3 \| 5 \| 7 \| 9 \| 11 \| \.\.\. 14 more\n"):
        from_mask_mod(lambda b, h, q, k: (q - k) % 2 == 0, 40, 40)
    with pytest.raises(MaskcError, match=r"M451.*not bool"):
        from_mask_mod(lambda b, h, q, k: q - k, 8, 8)
    with pytest.raises(MaskcError, match="M452"):
        from_mask_mod(lambda b, h, q, k: q >= k, 1 << 20, 1 << 20)
    with pytest.raises(MaskcError, match=r"M452.*the mask_mod has 1 x 1 x 9 x 9 elements, more than limit = 80"):
        from_mask_mod(lambda b, h, q, k: q >= k, 9, 9, limit=80)
    with pytest.raises(MaskcError, match=r"M452.*the BlockMask has"):
        from_block_mask(to_block_mask(maskc.compile("std:causal").bind(), 300, 300), limit=80)


def test_a_mask_without_sizes_is_written_for_those_that_are_named() -> None:
    causal = maskc.compile("std:causal").bind()
    assert to_block_mask(causal, 300, 300).shape == (1, 1, 300, 300)
    assert equal(from_mask_mod(to_mask_mod(causal, 20, 20), 20, 20, device="cpu").vectors(), causal.vectors(20, 20))
    out = to_magi(causal, 20, 20)
    assert equal(from_magi(out.q_ranges, out.k_ranges, out.types, nq=20, nk=20).vectors(), causal.vectors(20, 20))
    for call in (to_block_mask, to_mask_mod, to_magi):
        with pytest.raises(MaskcError, match="M415"):
            call(causal)


def test_per_batch_and_per_head_mask_mods() -> None:
    spec = from_mask_mod(lambda b, h, q, k: q - k >= b + 2 * h, 9, 9, batch=2, heads=2)
    q, k = torch.arange(9)[:, None], torch.arange(9)[None]
    wanted = torch.stack([torch.stack([q - k >= b + 2 * h for h in range(2)]) for b in range(2)])
    assert torch.equal(to_dense(spec), wanted)
