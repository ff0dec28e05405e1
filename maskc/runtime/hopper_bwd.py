"""The Hopper backward: three launches on torch's current stream (row constants, main kernel, dQ out of its accumulators).

Nothing here synchronises with the host, and all memory comes from torch, so a call may be captured into a CUDA graph
once the kernel has run on that device. Formulas (P = exp(scale Q K^T - lse)): dV = P^T dO, dS = P * (dO V^T -
rowsum(dO * O) + dlse), dQ = scale * dS K, dK = scale * dS^T Q.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import e, gcd, log2

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.spec import Dtype, MaskForm
from maskc.codegen.spec_bwd import TILE_INTS, BackwardSpec, select_backward
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel, tensor_map

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "f16"}
_ALIGN = 256  # bytes; parts of the workspace
_WAVES = 2  # work items per multiprocessor below which the query heads of a kv head are dealt to several CTAs
_FEW = 16  # work items per multiprocessor below which it matters that the last ones are short
_NEAR = 64 << 20  # bytes of Q, dO and dQ accumulators that CTAs which run together may spread over


def form_of(v: BoundaryVectors) -> MaskForm:
    """Which parts the mask has."""
    lts, lte, uts, ute, diag = (t is not None for t in v.tensors)
    return MaskForm(lts, lte, uts, ute, diag, v.causal, v.blocks is not None)


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
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in `grad_dtype` (fp32 or q's dtype, the default); layouts as in `maskc.runtime.cpu`.

    out is q's dtype or fp32; lse, dlse [B, Hq, Sq] fp32. `out` and `lse` may belong to more keys than `k` holds.
    """
    spec = select_backward(form_of(v), q.shape[3], DTYPES[q.dtype], deterministic=deterministic)
    shape = _Shape.of(spec, v, q, k)
    dtype = grad_dtype or q.dtype
    q, k, val, dout = (_addressable(t) for t in (q, k, val, dout.to(q.dtype)))
    out = _addressable(out)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    dq = q.new_empty(q.shape, dtype=dtype)
    # dK and dV go straight to the result, or as one fp32 part per split to be summed in order.
    parts = (shape.splits, *k.shape) if shape.splits > 1 else k.shape
    grads_f32 = shape.splits > 1 or dtype == torch.float32
    dk, dv = (k.new_empty(parts, dtype=torch.float32 if grads_f32 else dtype) for _ in range(2))
    space = _Workspace.of(spec, shape, q.device)
    kernels = _kernels(spec)
    masks = _Masks.of(v)
    items = shape.batch * shape.hk * shape.splits * shape.kv_blocks
    few = items < _FEW * _multiprocessors(q.device)
    # Without data the work falls from tile to tile already; in deterministic mode tiles must be dealt as they lie.
    sorted_tiles = few and bool(spec.form.vectors) and not deterministic

    pre = _Pre(
        out=out.data_ptr(),
        dout=dout.data_ptr(),
        lse=lse.data_ptr(),
        dlse=0 if dlse is None else dlse.data_ptr(),
        lse2=space.lse2,
        dpsum=space.dpsum,
        dead_rows=space.dead_rows,
        dq=space.dq,
        turns=space.turns,
        ticket=space.ticket,
        tiles=space.tiles,
        order=space.order,
        **masks.vectors,
        **masks.blocks,
        **{f"out_{name}": out.stride(i) for i, name in enumerate(("batch", "row", "head"))},
        **{f"dout_{name}": dout.stride(i) for i, name in enumerate(("batch", "row", "head"))},
        nq=shape.nq,
        nk=shape.nk,
        hq=shape.hq,
        batch=shape.batch,
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        mask_tiles=shape.mask_tiles,
        mask_heads=v.heads,
        out_is_f32=out.dtype == torch.float32,
    )
    main = _Main(
        dq=space.dq,
        lse2=space.lse2,
        dpsum=space.dpsum,
        dead_rows=space.dead_rows,
        tiles=space.tiles,
        order=space.order if sorted_tiles else 0,
        **masks.vectors,
        **masks.blocks,
        turns=space.turns,
        ticket=space.ticket,
        dk=dk.data_ptr(),
        dv=dv.data_ptr(),
        nq=shape.nq,
        nk=shape.nk,
        hq=shape.hq,
        hk=shape.hk,
        batch=shape.batch,
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        splits=shape.splits,
        heads=shape.heads,
        grads_f32=grads_f32,
        mask_batch=v.batch,
        mask_heads=v.heads,
        group=heads_together(shape.nq * spec.head_dim) if few else 1,
        scale=scale,
        scale_log2=scale * log2(e),
    )
    post = _Post(
        acc=space.dq,
        dq=dq.data_ptr(),
        nq=shape.nq,
        hq=shape.hq,
        q_blocks=shape.q_blocks,
        dq_is_f32=dtype == torch.float32,
        scale=scale,
    )
    row_blocks = shape.batch * shape.hq * shape.q_blocks
    loads = [_map(t, rows) for t, rows in ((q, spec.block_q), (dout, spec.block_q), (k, spec.block_kv), (val, spec.block_kv))]
    # Without 16-bit results the two store maps are never used; any valid map will do.
    stores = [loads[2], loads[3]] if grads_f32 else [_map(t, 64) for t in (dk, dv)]
    launch(kernels.pre, (row_blocks + -(-shape.mask_tiles // 4), 1, 1), 128, Arguments([], pre), device=q.device)
    if kernels.order is not None and sorted_tiles:
        grid = (-(-shape.kv_blocks // 256), shape.mask_tiles // shape.kv_blocks, 1)
        launch(kernels.order, grid, 256, Arguments([], pre), device=q.device)
    launch(
        kernels.main, (items, 1, 1), spec.threads, Arguments([*loads, *stores], main), shared=spec.shared_bytes, device=q.device
    )
    launch(kernels.post, (row_blocks, 1, 1), 256, Arguments([], post), device=q.device)
    if shape.splits > 1:
        dk, dv = (t.sum(0).to(dtype) for t in (dk, dv))
    return dq, dk, dv


# ---------------------------------------------------------------- sizes, workspace


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a call. The query heads of a kv head are `splits` groups of `heads`, one CTA per key tile and group."""

    batch: int
    nq: int
    nk: int
    hq: int
    hk: int
    q_blocks: int
    kv_blocks: int
    mask_tiles: int
    splits: int
    heads: int

    @classmethod
    def of(cls, spec: BackwardSpec, v: BoundaryVectors, q: Tensor, k: Tensor) -> _Shape:
        batch, nq, hq, _ = q.shape
        nk, hk = k.shape[1], k.shape[2]
        q_blocks, kv_blocks = -(-nq // spec.block_q), -(-nk // spec.block_kv)
        heads = heads_per_cta(hq // hk, hq // v.heads, batch * hk * kv_blocks, _multiprocessors(q.device))
        splits = hq // hk // heads
        return cls(batch, nq, nk, hq, hk, q_blocks, kv_blocks, v.batch * v.heads * kv_blocks, splits, heads)


def heads_per_cta(ratio: int, heads_per_mask: int, tiles: int, multiprocessors: int) -> int:
    """How many query heads one CTA walks: the most that still fill the GPU, of those that share a kv and a mask head.

    ratio: query heads per kv head. heads_per_mask: query heads per mask head. tiles: key tiles of all kv heads.
    """
    common = gcd(ratio, heads_per_mask)
    fitting = [d for d in range(1, common + 1) if common % d == 0 and tiles * (ratio // d) >= _WAVES * multiprocessors]
    return max(fitting, default=1)


def heads_together(elements: int) -> int:
    """How many heads are dealt tile by tile, so that short tiles come last: those of `elements` each that L2 can serve."""
    return max(1, _NEAR // (8 * elements))  # Q and dO of 2 bytes, dQ of 4


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Device addresses in one buffer, which `keep` holds until the launches are enqueued (torch frees in stream order)."""

    keep: Tensor
    dq: int
    lse2: int
    dpsum: int
    dead_rows: int
    turns: int
    ticket: int
    tiles: int
    order: int

    @classmethod
    def of(cls, spec: BackwardSpec, shape: _Shape, device: torch.device) -> _Workspace:
        row_blocks = shape.batch * shape.hq * shape.q_blocks
        rows = row_blocks * spec.block_q
        sizes = (
            rows * spec.head_dim * 4,
            rows * 4,
            rows * 4,
            row_blocks * 4,
            row_blocks * 4 if spec.deterministic else 0,
            4,
            shape.mask_tiles * TILE_INTS * 4,
            shape.mask_tiles * 4,
        )
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGN) * _ALIGN
        keep = torch.empty(total, dtype=torch.uint8, device=device)
        return cls(keep, *(keep.data_ptr() + start for start in starts))


def _addressable(t: Tensor) -> Tensor:
    """`t`, or a dense copy where a bulk copy cannot address it (expanded, unaligned, last dimension not contiguous)."""
    step = 16 // t.element_size()
    strides = [s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
    if t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(s > 0 and s % step == 0 for s in strides):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _map(t: Tensor, rows: int) -> bytes:
    """Tensor map of [B, S, H, D] in tiles of `rows` positions and 64 columns."""
    batch, positions, heads, dim = t.shape
    by_batch, by_position, by_head, _ = t.stride()
    return tensor_map(
        t.data_ptr(), t.dtype, (dim, positions, heads, batch), (1, by_position, by_head, by_batch), (64, rows, 1, 1)
    )


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---------------------------------------------------------------- masks


@dataclass(frozen=True, slots=True)
class _Masks:
    """Fields of the parameter structs that describe the mask."""

    vectors: dict[str, int]
    blocks: dict[str, int]

    @classmethod
    def of(cls, v: BoundaryVectors) -> _Masks:
        names = ("lts", "lte", "uts", "ute", "diag")
        vectors = {name: 0 if t is None else t.data_ptr() for name, t in zip(names, v.tensors, strict=True)}
        if v.blocks is None:
            return cls(vectors, {})
        keep = v.blocks.keep
        batch, heads, rows, cols = keep.shape
        blocks = {
            "keep": keep.data_ptr(),
            "keep_batch": batch,
            "keep_heads": heads,
            "keep_rows": rows,
            "keep_cols": cols,
            "keep_block_q": v.blocks.block_q,
            "keep_block_kv": v.blocks.block_kv,
        }
        return cls(vectors, blocks)


# ---------------------------------------------------------------- kernels and their parameters


@dataclass(frozen=True, slots=True)
class _Kernels:
    pre: Kernel
    main: Kernel
    post: Kernel
    order: Kernel | None


@lru_cache(maxsize=256)
def _kernels(spec: BackwardSpec) -> _Kernels:
    image = compile_cubin(spec.source()).image
    pre, main, post = (load_kernel(image, name) for name in ("attn_bwd_pre", "attn_bwd", "attn_bwd_post"))
    return _Kernels(pre, main, post, None if spec.deterministic else load_kernel(image, "attn_bwd_order"))


_POINTER, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_KEEP = [(f"keep_{name}", _INT) for name in ("batch", "heads", "rows", "cols", "block_q", "block_kv")]
_VECTORS = [(name, _POINTER) for name in ("lts", "lte", "uts", "ute", "diag")]


class _Pre(ctypes.Structure):
    """`pre::Params` of bwd/pre.cuh.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("out", "dout", "lse", "dlse", "lse2", "dpsum")),
        *((name, _POINTER) for name in ("dead_rows", "dq", "turns", "ticket", "tiles", "order")),
        *_VECTORS,
        ("keep", _POINTER),
        *((f"{t}_{d}", _I64) for t in ("out", "dout") for d in ("batch", "row", "head")),
        *((name, _INT) for name in ("nq", "nk", "hq", "batch", "q_blocks", "kv_blocks", "mask_tiles", "mask_heads")),
        *_KEEP,
        ("out_is_f32", _INT),
    ]


class _Main(ctypes.Structure):
    """`Params` of bwd/shared.cuh.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("dq", "lse2", "dpsum", "dead_rows", "tiles", "order")),
        *_VECTORS,
        *((name, _POINTER) for name in ("keep", "turns", "ticket", "dk", "dv")),
        *((name, _INT) for name in ("nq", "nk", "hq", "hk", "batch", "q_blocks", "kv_blocks")),
        *((name, _INT) for name in ("splits", "heads", "grads_f32", "mask_batch", "mask_heads")),
        *_KEEP,
        ("group", _INT),
        ("scale", _FLOAT),
        ("scale_log2", _FLOAT),
    ]


class _Post(ctypes.Structure):
    """`post::Params` of bwd/post.cuh.j2."""

    _fields_ = [
        ("acc", _POINTER),
        ("dq", _POINTER),
        *((name, _INT) for name in ("nq", "hq", "q_blocks", "dq_is_f32")),
        ("scale", _FLOAT),
    ]
