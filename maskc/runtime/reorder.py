"""Keys in another order, for masks whose keys end at rows that have nothing to do with their positions (evicted keys).

Attention does not depend on the order of its keys once each key's bounds travel with it. Sorted by the row at which they
end, keys of one block end together: blocks become SKIP or UNMASKED that would all be PARTIAL. The causal triangle is by
position, so the new order holds it as data: key j is hidden from rows before its old position (`diag`).

K and V are copied into the new order, dK and dV back. Whether that is worth it follows from the mask file and from
sizes alone, so nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any, assert_never, cast

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask, Reordered
from maskc.boundary import BoundaryVectors
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.reorder import KEYS, THREADS, take_keys_source
from maskc.compiled import CompiledMask
from maskc.ir.intervals import Branch, Leaf, Tree
from maskc.ir.nodes import Col, Field, MaskFn
from maskc.ir.traverse import walk
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel
from maskc.runtime.remember import derived

LEAST_ROWS = 4096
"""Rows that read a key, over all query heads of its kv head, from which copies are worth it; and so many keys."""


def reordered(spec: BoundMask, v: BoundaryVectors, q: Tensor, k: Tensor) -> Reordered | None:
    """The mask with its keys in another order where that is faster, else None.

    Made once per bound mask and sizes. In a compiled graph what was made before it is used.
    """
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    if min(rows, k.shape[1]) < LEAST_ROWS or k.shape[2] % v.heads or v.blocks is not None or v.lts is None:
        return None
    if torch.compiler.is_compiling():
        return spec.reordered(v, None)
    return spec.reordered(v, by_end) if ends_by_data(spec.compiled) else None


@derived
def ends_by_data(compiled: CompiledMask) -> bool:
    """Whether the file gives each key a row of its own at which it ends, in no order."""
    return compiled.program is not None and _ends_by_data(compiled.fn, compiled.program.tree)


def _ends_by_data(fn: MaskFn, tree: Tree) -> bool:
    match tree:
        case Branch(then=then, orelse=orelse):
            return _ends_by_data(fn, then) or _ends_by_data(fn, orelse)
        case Leaf(lower=lower):
            nodes = () if lower is None else walk(lower.lo)
            reads = {node.name for node in nodes if isinstance(node, Field) and node.index == Col()}
            return any(fn.input(name).per == "key" and not fn.input(name).sorted for name in reads)
        case _:
            assert_never(tree)


# ---------------------------------------------------------------- the order


def by_end(v: BoundaryVectors) -> Reordered:
    """Keys by falling LTS, equal ones by position: those that are never masked from below stay in their order."""
    assert v.lts is not None
    position = torch.arange(v.nk, device=v.device)
    mask = torch.arange(v.batch * v.heads, device=v.device).view(v.batch, v.heads, 1)
    distinct = (mask * (v.nq + 1) + (v.nq - v.lts)) * v.nk + position  # one sort for all masks
    return in_order(v, (distinct.flatten().sort().values % max(1, v.nk)).view(v.batch, v.heads, v.nk))


def in_order(v: BoundaryVectors, index: Tensor) -> Reordered:
    """The mask whose key j is key index[b, h, j] of `v`, a permutation per mask head, int64 [batch, heads, nk].

    `v` has no block table: its blocks are of neighbours.
    """
    assert v.blocks is None
    inverse = torch.empty_like(index)
    inverse.scatter_(2, index, torch.arange(v.nk, device=index.device).expand_as(index))
    lts, lte, uts, ute, diag, elsewhere = (None if t is None else t.gather(2, index) for t in (*v.tensors, v.elsewhere))
    places = index.to(torch.int32)
    if v.causal:
        first = places.clamp(max=v.nq)
        diag = first if diag is None else torch.maximum(diag, first)
    moved = replace(v, causal=False, lts=lts, lte=lte, uts=uts, ute=ute, diag=diag, elsewhere=elsewhere)
    return Reordered(BoundMask.from_vectors(moved), moved, places, inverse.to(torch.int32))


# ---------------------------------------------------------------- moving keys


def take_keys(x: Tensor, order: Reordered) -> Tensor:
    """K or V [B, Sk, Hk, D] in the new order; its gradient goes back into the old one. Hk is a multiple of the mask heads."""
    return cast(Tensor, torch.ops.maskc.take_keys(x, order.old, order.new))


torch.library.define("maskc::take_keys", "(Tensor x, Tensor index, Tensor inverse) -> Tensor")


@torch.library.impl("maskc::take_keys", "CPU")
def _take_on_cpu(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    ratio = x.shape[2] // index.shape[1]
    wide = index.long().transpose(1, 2).repeat_interleave(ratio, 2)[..., None].expand(x.shape)
    return x.gather(1, wide)


@torch.library.impl("maskc::take_keys", "CUDA")
def _take_on_gpu(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    from maskc.runtime.hopper import addressable

    x = addressable(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, params = take_arguments(x, index, out)
    launch(_kernel(), (grid, 1, 1), THREADS, Arguments((), params), device=x.device)
    return out


def take_arguments(x: Tensor, index: Tensor, out: Tensor) -> tuple[int, ctypes.Structure]:
    """(CTAs, `Params`) of the kernel that fills the dense `out`."""
    batch, keys, heads, dim = x.shape
    width = x.element_size()
    params = _Params(
        x.data_ptr(),
        out.data_ptr(),
        index.data_ptr(),
        *(s * width for s in x.stride()[:3]),
        index.stride(0) if index.shape[0] > 1 else 0,
        keys,
        heads,
        heads // index.shape[1],
        (dim * width // 16).bit_length() - 1,
    )
    return batch * -(-keys // KEYS), params


def _fake_take(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _put_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index, inverse = ctx.saved_tensors
    return torch.ops.maskc.take_keys(grad, inverse, index), None, None


torch.library.register_fake("maskc::take_keys", _fake_take)
torch.library.register_autograd("maskc::take_keys", _put_back, setup_context=_save)


class _Params(ctypes.Structure):
    """`Params` of take_keys.cu.j2."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "target", "index")),
        *((name, ctypes.c_int64) for name in ("batch_stride", "key_stride", "head_stride", "index_batch_stride")),
        *((name, ctypes.c_int32) for name in ("keys", "heads", "ratio", "pieces_log2")),
    ]


@cache
def _kernel() -> Kernel:
    return load_kernel(compile_cubin(take_keys_source()).image, "take_keys")
