"""The backend "flex": the same mask through torch's FlexAttention, on any CUDA GPU that it runs on.

The element test reads the boundary vectors and the BlockMask is made from the tile classes, so nothing of size nq x nk is
built and a new mask compiles nothing. Layouts as in `maskc.runtime.cpu`. FlexAttention runs forward on a CPU as well,
dense and slow, which is what the tests use.

Guarantees as elsewhere: rows that see nothing are 0 with lse -inf, keys that no row of their head sees may hold NaN. But
a NaN in a key that some rows see reaches the other rows of its tile, and partial results of a context-parallel run are
rounded to q's dtype before they are merged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.convert.columns import visible_intervals
from maskc.convert.flex import block_mask_of, block_tables
from maskc.diagnostics import Diagnostic, MaskcWarning
from maskc.runtime.device import capability
from maskc.runtime.merge import accumulator
from maskc.runtime.remember import remembered

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECOMPILES = 64
"""Shapes, dtypes and mask forms that are compiled before a call is refused; torch's own limit of 8 is for loops."""


def why_not(v: BoundaryVectors, q: Tensor, k: Tensor, val: Tensor) -> Diagnostic | None:
    """The reason why this backend cannot run the call, or None."""
    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, val)):
            return Diagnostic(
                "M529", "FlexAttention has no backward on a CPU", help='backend "cpu" has one; or use torch.no_grad()'
            )
        return None
    if q.device.type != "cuda":
        return Diagnostic("M507", f'backend "flex" needs CUDA or CPU tensors, q is on `{q.device}`')
    if q.dtype not in DTYPES:
        return Diagnostic("M505", f'backend "flex" has no {q.dtype} on a GPU', help="cast to bfloat16, float16 or float32")
    if min(q.shape[3], val.shape[3]) < 16:
        return Diagnostic("M528", f"head dims are {q.shape[3]} and {val.shape[3]}; FlexAttention needs 16 or more on a GPU")
    return None


def needed(device: torch.device) -> bool:
    """Whether "auto" means this backend for tensors on `device`: a GPU that the Hopper kernels cannot run on."""
    return device.type == "cuda" and capability(device) != (9, 0)


needed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, without importing the compiler


@cache
def say_once(name: str) -> None:
    """Warn, once a process and kind of GPU, that "auto" took this backend."""
    warnings.warn(
        Diagnostic(
            "W520",
            f"the kernels of maskc need a Hopper GPU; on {name} masks run through FlexAttention",
            help='backend="flex" asks for it by name, without this warning',
        ).render(),
        MaskcWarning,
        stacklevel=4,
    )


def schedule(v: BoundaryVectors, head_dim: int) -> tuple[Tensor, ...]:
    """Nothing: the BlockMask is kept beside the vectors (see `_prepared`)."""
    return ()


def attention(v: BoundaryVectors, q: Tensor, k: Tensor, val: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Differentiable (out, lse): FlexAttention's own autograd. Its backward has no atomics, so it is deterministic."""
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        return _nothing(q, k, val)
    if not torch.is_grad_enabled():  # on a CPU FlexAttention refuses tensors that could have a gradient
        q, k, val = q.detach(), k.detach(), val.detach()
    made = (_prepare if torch.compiler.is_compiling() else _prepared)(
        v, q.shape[2], k.shape[2]
    )  # a graph holds no weak references
    block_mask, hidden = made.mask, made.hidden
    query, keys, values = (x.transpose(1, 2) for x in (q, k, val))
    if hidden is not None:
        keys, values = (x.masked_fill(hidden, 0.0) for x in (keys, values))
    out, lse = _flex(q.device.type)(query, keys, values, block_mask, scale, q.shape[2] != k.shape[2])
    return out.transpose(1, 2).masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0.0), lse


def forward(
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    scale: float,
    *,
    schedule: tuple[Tensor, ...] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) outside autograd, out in `out_dtype` or q's dtype."""
    with torch.no_grad():
        out, lse = attention(v, q, k, val, scale)
    return out.to(out_dtype or q.dtype), lse


def backward(
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    deterministic: bool = False,
    *,
    schedule: tuple[Tensor, ...] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), by a forward of these keys alone and the derivative of the merge that made `out` and `lse`.

    With weights w = exp(lse_here - lse) the whole is out = sum w out_here, so out_here receives w dout, and lse_here
    receives w (dout . (out_here - out) + dlse).
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, val)]
    with torch.enable_grad():
        here, lse_here = attention(v, leaves[0], leaves[1], leaves[2], scale)
    weight = torch.exp(lse_here.detach() - lse.masked_fill(lse == -torch.inf, torch.inf))
    rows = weight.transpose(1, 2)[..., None]
    shift = (dout.to(lse.dtype) * (here.detach().to(lse.dtype) - out.to(lse.dtype))).sum(-1).transpose(1, 2)
    dlse_here = weight * (shift if dlse is None else shift + dlse).masked_fill(weight == 0, 0.0)
    given = (rows * dout).masked_fill(rows == 0, 0.0).to(here.dtype), dlse_here
    dq, dk, dv = torch.autograd.grad((here, lse_here), leaves, given)
    dtypes = (grad_dtype or x.dtype for x in (q, k, val))
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv


# ---------------------------------------------------------------- parts


class _Prepared(NamedTuple):
    """mask: with its parts. hidden: keys [batch, kv heads, Sk, 1] that no row of their heads sees, None where there are none."""

    mask: BlockMask
    hidden: Tensor | None
    parts: tuple[Any, ...]


def _prepare(v: BoundaryVectors, heads: int, kv_heads: int) -> _Prepared:
    with torch.no_grad():
        mask = block_mask_of(v, block_tables(v, BLOCK, BLOCK), heads // v.heads, (BLOCK, BLOCK))
        return _Prepared(mask, _hidden(v, heads, kv_heads), mask.as_tuple())


_prepared = remembered(_prepare)
"""The layers of a batch share it."""


def _hidden(v: BoundaryVectors, heads: int, kv_heads: int) -> Tensor | None:
    if v.blocks is None and all(t is None for t in v.tensors):
        return None
    lows, highs = visible_intervals(replace(v, blocks=None))
    hidden = (lows >= highs).all(0)
    if v.blocks is not None:
        column = torch.arange(v.nk, device=v.device) // v.blocks.block_kv
        hidden = hidden | ~v.blocks.keep.any(2)[:, :, column]
    by_query_head = hidden.repeat_interleave(heads // hidden.shape[1], 1)
    return by_query_head.view(hidden.shape[0], kv_heads, -1, v.nk).all(2)[..., None]


def _nothing(q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
    """What rows give that have no key: 0 and -inf, with gradients that are 0."""
    batch, rows, heads, _ = q.shape
    zero = q.sum() * 0 + k.sum() * 0 + val.sum() * 0
    acc = accumulator(q.dtype)
    out = q.new_zeros(batch, rows, heads, val.shape[3]) + zero
    return out, torch.full((batch, heads, rows), -torch.inf, dtype=acc, device=q.device)


@cache
def _flex(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention with its log-sum-exp; compiled on a GPU."""
    from torch.nn.attention import flex_attention as module

    def plain(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, gqa: bool) -> tuple[Tensor, Tensor]:
        wanted = module.AuxRequest(lse=True)
        out, aux = module.flex_attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=gqa, return_aux=wanted)
        assert aux.lse is not None
        return out, aux.lse

    if device == "cpu":
        return plain
    compiled = torch.compile(plain, fullgraph=True)

    def call(*arguments: Any) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return plain(*arguments)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            return compiled(*arguments)

    return call
