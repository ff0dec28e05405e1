"""The CPU backend against dense fp64 attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.runtime import cpu
from tests.binding.strategies import boundary_vectors
from tests.runtime.dense import attend, reference

SCALE = 0.3


def operands(
    nq: int,
    nk: int,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, val, dout, dlse."""
    generator = torch.Generator().manual_seed(nq * 1009 + nk)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        make(batch, nq, heads, dim),
        make(batch, nk, kv_heads, dim),
        make(batch, nk, kv_heads, value_dim),
        make(batch, nq, heads, value_dim),
        make(batch, heads, nq).to(lse_dtype),
    )


def assert_right(v: BoundaryVectors, tensors: tuple[torch.Tensor, ...]) -> None:
    q, k, val, dout, dlse = tensors
    out, lse, grads = reference(v, q, k, val, SCALE, dout, dlse)
    mine, my_lse = cpu.forward(v, q, k, val, SCALE)
    assert torch.equal(my_lse == -torch.inf, lse == -torch.inf)
    torch.testing.assert_close(mine, out)
    torch.testing.assert_close(my_lse, lse)
    my_grads = cpu.backward(v, q, k, val, mine, my_lse, dout, dlse, SCALE)
    for got, want in zip(my_grads, grads, strict=True):
        torch.testing.assert_close(got, want)


@settings(max_examples=60, deadline=None)
@given(boundary_vectors(), st.sampled_from([(6, 6), (6, 2), (12, 4), (6, 1)]))
def test_any_vectors(v: BoundaryVectors, heads: tuple[int, int]) -> None:
    batch = v.batch if v.batch > 1 else 2
    assert_right(v, operands(v.nq, v.nk, batch, *heads) if v.heads != 4 else operands(v.nq, v.nk, batch, 4, 2))


@settings(max_examples=12, deadline=None)
@given(boundary_vectors(sizes=(300, 270), blocks=False))
def test_several_tiles(v: BoundaryVectors) -> None:
    assert_right(v, operands(300, 270, max(v.batch, 2), 6, 2, 4, 12))


@pytest.mark.parametrize(("heads", "kv_heads", "mask_heads"), [(14, 1, 1), (6, 2, 2), (6, 2, 6), (6, 2, 3), (4, 4, 4)])
def test_heads_share_keys_and_masks(heads: int, kv_heads: int, mask_heads: int) -> None:
    generator = torch.Generator().manual_seed(7)
    lts = torch.randint(0, 41, (1, mask_heads, 33), generator=generator, dtype=torch.int32)
    assert_right(BoundaryVectors(40, 33, 1, mask_heads, False, lts=lts), operands(40, 33, 3, heads, kv_heads))


@pytest.mark.parametrize("shape", [(1, 1), (1, 400), (400, 1), (3, 0), (0, 3), (129, 127), (1025, 1025)])
def test_sizes(shape: tuple[int, int]) -> None:
    nq, nk = shape
    v = BoundaryVectors(nq, nk, 1, 1, True)
    q, k, val, dout, dlse = operands(nq, nk, 1, 2, 1, 4)
    if min(shape) == 0:
        out, lse = cpu.forward(v, q, k, val, SCALE)
        assert not out.any()
        assert torch.all(lse == -torch.inf)
        assert all(not g.any() for g in cpu.backward(v, q, k, val, out, lse, dout, dlse, SCALE))
    else:
        assert_right(v, (q, k, val, dout, dlse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_worse_than_dense_attention_of_the_same_precision(dtype: torch.dtype) -> None:
    n = 320
    v = BoundaryVectors(n, n, 1, 1, True, lts=torch.arange(n, dtype=torch.int32).add(150).clamp(max=n)[None, None])
    q, k, val, dout, dlse = operands(n, n, 2, 4, 2, 32, 32, dtype)
    exact = reference(v, q, k, val, SCALE, dout, dlse)
    plain = reference(v, q, k, val, SCALE, dout, dlse, dtype)
    out, lse = cpu.forward(v, q, k, val, SCALE)
    grads = cpu.backward(v, q, k, val, out, lse, dout, dlse, SCALE)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for got, low, want in zip((out, lse, *grads), (*plain[:2], *plain[2]), (*exact[:2], *exact[2]), strict=True):
        assert (got - want).norm() <= 1.1 * (low - want).norm()


def test_unrounded_results_on_request() -> None:
    v = BoundaryVectors(40, 40, 1, 1, True)
    q, k, val, dout, _ = operands(40, 40, dtype=torch.bfloat16)
    out, lse = cpu.forward(v, q, k, val, SCALE, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert torch.equal(out.bfloat16(), cpu.forward(v, q, k, val, SCALE)[0])
    grads = cpu.backward(v, q, k, val, out, lse, dout, None, SCALE, grad_dtype=torch.float32)
    assert {g.dtype for g in grads} == {torch.float32}


def test_a_share_of_a_merged_result() -> None:
    """out and lse over all keys, keys and values of one half only: the gradients are that half of the whole."""
    v = BoundaryVectors(40, 40, 1, 1, False, lts=torch.arange(2, 42, dtype=torch.int32).clamp(max=40)[None, None])
    q, k, val, dout, dlse = operands(40, 40)
    out, lse = cpu.forward(v, q, k, val, SCALE)
    whole = cpu.backward(v, q, k, val, out, lse, dout, dlse, SCALE)
    halves = []
    for cols in (slice(0, 17), slice(17, 40)):
        assert v.lts is not None
        part = replace(v, nk=cols.stop - cols.start, lts=v.lts[..., cols].contiguous())
        halves.append(cpu.backward(part, q, k[:, cols], val[:, cols], out, lse, dout, dlse, SCALE))
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([h[i] for h in halves], 1), whole[i])


# ---------------------------------------------------------------- rows and keys that nobody uses

BOTH_SIDES = BoundaryVectors(
    300,
    300,
    1,
    1,
    False,
    lts=torch.tensor([150] * 140 + [0] * 20 + [290] * 140, dtype=torch.int32)[None, None],
    ute=torch.tensor([10] * 140 + [300] * 20 + [150] * 140, dtype=torch.int32)[None, None],
)
"""Rows 0-9 and 290-299 see nothing, keys 140-159 are seen by nobody."""


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_nobody_sees_never_leaks(poison: float) -> None:
    v = BOTH_SIDES
    q, k, val, dout, dlse = operands(300, 300)
    clean_out, clean_lse = cpu.forward(v, q, k, val, SCALE)
    clean = cpu.backward(v, q, k, val, clean_out, clean_lse, dout, dlse, SCALE)
    rows, keys = [*range(10), *range(290, 300)], slice(140, 160)
    for x in (k, val):
        x[:, keys] = poison
    q[:, rows], dout[:, rows], dlse[:, :, rows] = poison, poison, poison
    out, lse = cpu.forward(v, q, k, val, SCALE)
    grads = cpu.backward(v, q, k, val, out, lse, dout, dlse, SCALE)
    assert torch.equal(out, clean_out)
    assert torch.equal(lse, clean_lse)
    for got, want in zip(grads, clean, strict=True):
        assert torch.equal(got, want)
    assert not out[:, rows].any()
    assert torch.all(lse[:, :, rows] == -torch.inf)
    assert not grads[0][:, rows].any()
    assert not grads[1][:, keys].any()
    assert not grads[2][:, keys].any()


def test_a_key_that_one_head_of_a_group_sees_is_not_hidden() -> None:
    lts = torch.tensor([[[0, 4], [4, 4]]], dtype=torch.int32)
    v = BoundaryVectors(4, 2, 1, 2, False, lts=lts)
    assert_right(v, operands(4, 2, 1, 2, 1))


def test_nan_reaches_those_who_see_it() -> None:
    v = BoundaryVectors(4, 4, 1, 1, True)
    q, k, val, *_ = operands(4, 4, 1, 1, 1)
    k[0, 3] = torch.nan
    out, lse = cpu.forward(v, q, k, val, SCALE)
    assert out[0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()


def test_large_scores_do_not_overflow() -> None:
    v = BoundaryVectors(200, 200, 1, 1, True)
    q, k, val, *_ = operands(200, 200, 1, 1, 1)
    want = attend(v.masked(), q * 1e3, k, val, SCALE)
    torch.testing.assert_close(cpu.forward(v, q * 1e3, k, val, SCALE), want)
