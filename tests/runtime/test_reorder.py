"""Keys in another order: the same attention, fewer tiles, chosen by the mask file alone."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from benchmarks.masks import NAMES, mask_case
from maskc.boundary import BoundaryVectors
from maskc.codegen.reorder import KEYS, THREADS, take_keys_source
from maskc.runtime import ops, reorder
from maskc.tiles import TileClass, classify
from tests.binding.strategies import boundary_vectors
from tests.codegen.host import CUDA, compile_on_host, in_one_text
from tests.runtime.dense import reference
from tests.runtime.test_cpu import SCALE, operands


def assert_same_attention(v: BoundaryVectors, order: maskc.binding.bound.Reordered) -> None:
    q, k, val, dout, dlse = operands(v.nq, v.nk, heads=v.heads * 2, kv_heads=v.heads)
    wanted_out, wanted_lse, wanted = reference(v, q, k, val, SCALE, dout, dlse)
    leaves = [x.requires_grad_() for x in (q, k, val)]
    moved = [reorder.take_keys(x, order) for x in leaves[1:]]
    out, lse = ops.attention(order.vectors, leaves[0], *moved, SCALE)
    torch.testing.assert_close(out, wanted_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)
    seen = torch.where(lse == -torch.inf, 0.0, dlse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, seen))
    for got, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10)


@settings(deadline=None)
@given(boundary_vectors(most=24, blocks=False), st.integers(0, 2**31))
def test_any_order_of_keys_gives_the_same_attention(v: BoundaryVectors, seed: int) -> None:
    noise = torch.rand(v.batch, v.heads, v.nk, generator=torch.Generator().manual_seed(seed))
    assert_same_attention(v, reorder.in_order(v, noise.argsort(-1)))


@settings(deadline=None)
@given(boundary_vectors(most=24, blocks=False))
def test_keys_go_by_falling_end_then_by_position(v: BoundaryVectors) -> None:
    if v.lts is None:
        return
    order = reorder.by_end(v)
    places, ends = order.old.long(), order.vectors.lts
    assert ends is not None
    assert torch.equal(places.sort(-1).values, torch.arange(v.nk).expand_as(places))
    assert torch.equal(places.gather(2, order.new.long()), torch.arange(v.nk).expand_as(places))
    later, tied = ends[..., 1:] < ends[..., :-1], ends[..., 1:] == ends[..., :-1]
    assert (later | tied & (places[..., 1:] > places[..., :-1])).all()
    assert not order.vectors.causal
    assert_same_attention(v, order)


def test_random_eviction_visits_fewer_tiles_and_tests_fewer_of_them() -> None:
    case = mask_case("random_eviction", 4096, heads=2)
    v = maskc.compile(case.mask).bind(nq=4096, nk=4096, **case.inputs).vectors()
    before, after = (classify(x, 128, 128) for x in (v, reorder.by_end(v).vectors))

    def count(tiles: torch.Tensor, kind: TileClass) -> int:
        return int((tiles == kind).sum())

    assert count(before, TileClass.SKIP) == 2 * 32 * 31 // 2
    assert count(after, TileClass.SKIP) > count(before, TileClass.SKIP) + 150  # of 1056 visited
    assert count(after, TileClass.PARTIAL) < count(before, TileClass.PARTIAL) / 2


# ---------------------------------------------------------------- the choice

DECLARED_SORTED = "input evict : sorted int per key where evict[k] > k\nmask m = k <= q < evict[k]\n"
BY_DOCUMENT = "input doc : segments\ninput keep : int per doc\nmask m = same(doc) and k <= q and q < k + keep[k]\n"
SHIFTED = "input end : int per key\nmask m = k <= q and q < end[k] + 8\n"
ON_ROWS = "input born : int per key\nmask m = q >= born[k] and k <= q\n"


@pytest.mark.parametrize("name", NAMES)
def test_of_the_twelve_masks_random_eviction_is_reordered(name: str) -> None:
    assert reorder.ends_by_data(maskc.compile(mask_case(name, 256).mask)) == (name == "random_eviction")


@pytest.mark.parametrize(("text", "wanted"), [(DECLARED_SORTED, False), (BY_DOCUMENT, False), (SHIFTED, True), (ON_ROWS, False)])
def test_keys_must_end_at_unsorted_rows_of_their_own(text: str, wanted: bool) -> None:
    assert reorder.ends_by_data(maskc.compile_text(text)) is wanted


def _case(heads: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(reorder, "LEAST_ROWS", 64)
    case = mask_case("random_eviction", 64, heads=heads)
    return maskc.compile(case.mask).bind(nq=64, nk=64, **case.inputs)


def test_an_order_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _case(2, monkeypatch)
    q = torch.zeros(1, 64, 4, 8)
    first = reorder.reordered(spec, spec.vectors(), q, q[:, :, :2])
    assert first is not None
    assert reorder.reordered(spec, spec.vectors(), q, q[:, :, :2]) is first


def test_kv_heads_that_serve_several_mask_heads_stay_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _case(2, monkeypatch)
    q = torch.zeros(1, 64, 4, 8)
    assert reorder.reordered(spec, spec.vectors(), q, q[:, :, :1]) is None


def test_short_sequences_stay_in_their_order() -> None:
    case = mask_case("random_eviction", 64, heads=2)
    spec = maskc.compile(case.mask).bind(nq=64, nk=64, **case.inputs)
    q = torch.zeros(1, 64, 2, 8)
    assert reorder.reordered(spec, spec.vectors(), q, q) is None


# ---------------------------------------------------------------- the kernel, on the host

_TYPES = """
#include <cstdint>
typedef unsigned char u8;
typedef long long i64;
struct uint4 { std::uint32_t x, y, z, w; };
"""


def test_the_kernel_takes_the_keys_that_the_cpu_takes(tmp_path: Path) -> None:
    run = 'extern "C" void run(const Params* p, int blocks, int threads) { run_blocks(take_keys, *p, blocks, threads); }\n'
    library = compile_on_host(f"{CUDA}\n{_TYPES}\n{in_one_text(take_keys_source().text)}\n{run}", tmp_path)
    generator = torch.Generator().manual_seed(0)
    for batch, keys, heads, mask_heads, dim, items in ((2, 19, 4, 2, 64, 2), (2, 8, 3, 1, 128, 1), (1, 5, 2, 2, 256, 1)):
        wide = torch.randn(batch, keys, heads, 2 * dim, generator=generator).to(torch.bfloat16)
        x = wide[..., dim:]
        index = torch.rand(items, mask_heads, keys, generator=generator).argsort(-1).to(torch.int32)
        out = torch.full((batch, keys, heads, dim), torch.nan, dtype=torch.bfloat16)
        grid, params = reorder.take_arguments(x, index, out)
        library.run(ctypes.byref(params), grid, THREADS)
        assert grid == batch * -(-keys // KEYS)
        assert torch.equal(out, torch.ops.maskc.take_keys(x, index, index))
