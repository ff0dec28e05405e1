"""The Hopper backward: its launches on torch's current stream.

Row constants and key tiles, the main kernel, dQ out of its accumulators. Each kernel may start while the one before it ends.

Nothing here synchronises with the host, and all memory comes from torch, so a call may be captured into a CUDA graph
once the kernel has run on that device. Formulas (P = exp(scale Q K^T - lse)): dV = P^T dO, dS = P * (dO V^T -
rowsum(dO * O) + dlse), dQ = scale * dS K, dK = scale * dS^T Q.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import e, gcd, log2

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.spec import VECTORS
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel
from maskc.runtime.hopper import DTYPES, addressable, mapped, mask_form, multiprocessors, tile_map, work_counter
from maskc.runtime.ready import Launch

_ALIGN = 256  # bytes; parts of the workspace
_WAVES = 2  # work items per multiprocessor below which the query heads of a kv head are dealt to several CTAs
_EVEN_WAVES = 16  # the same while more than about _EVEN_HEADS stay together: ranks of 256 and 384 key tiles of 64 heads over one
_EVEN_HEADS = 4  # are 8 % faster by 4 than by 8
FEW = 16  # work items per multiprocessor below which it matters that the last ones are short
_NEAR = 32 << 20  # bytes of Q, dO and dQ accumulators that CTAs which run together may spread over


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
    spec = select_backward(mask_form(v), q.shape[3], DTYPES[q.dtype], deterministic=deterministic)
    return backward_with(spec, v, q, k, val, out, lse, dout, dlse, scale, grad_dtype or q.dtype)


def backward_with(
    spec: BackwardSpec,
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    dealing: Dealing | None = None,
    *,
    parts: bool = False,
    rows: int | None = None,
    gate: GateTables | None = None,
    own: tuple[Tensor, Tensor] | None = None,
    whole: tuple[Tensor, Tensor] | None = None,
    leave: int = 0,
    sizes: Sizes | None = None,
    mask: MaskFields | None = None,
    by: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` by one variant, its key tiles dealt as told (None: as the number of work items calls for).

    parts: dK and dV as the kernel leaves them, fp32 [splits, B, Hk, rows, D], to be summed over the splits. gate: for
    `spec.gated`, which takes `parts`: what to wait for and to report, and where the gradients of so many `rows` go; its memory
    outlives the kernel. rows: of keys, where not for all of them. own: K and V
    [B, rows, Hk, D] of the key tiles from `gate.own_tile` on. whole: where their dK and dV go that leave as whole gradients
    (`gate.whole`), of q's dtype. leave: multiprocessors that the main kernel does not use. sizes, mask: what those of the
    tensors settle (without `dealing` and `parts`) and the fields of `v`, where they are known. by: what launches the kernels.
    """
    assert spec.gated == (gate is not None) <= parts
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape, dtype=dtype), k.new_zeros(k.shape, dtype=dtype), val.new_zeros(val.shape, dtype=dtype)
    device = q.device
    processors = multiprocessors(device)
    q, q_map = mapped(q, spec.block_q)
    dout, dout_map = mapped(dout if dout.dtype == q.dtype else dout.to(q.dtype), spec.block_q)
    k, k_map = mapped(k, spec.block_kv)
    val, val_map = mapped(val, spec.block_kv)
    out, lse = addressable(out), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    sizes = sizes or Sizes.of(spec, v, q, k, dtype, dealing, parts, rows)
    shape = sizes.shape
    dq = torch.empty(q.shape, dtype=dtype, device=device)
    dk = torch.empty(sizes.stored, dtype=sizes.stored_dtype, device=device)
    dv = torch.empty(sizes.stored, dtype=sizes.stored_dtype, device=device)
    space = torch.empty(sizes.bytes, dtype=torch.uint8, device=device)
    base = space.data_ptr()
    at = {name: base + offset for name, offset in sizes.offsets.items()}
    order, mask = at.pop("order"), mask or MaskFields.of(v)
    done = work_counter(device) if sizes.falling and gate is None else None
    pre = _Pre(
        out=out.data_ptr(),
        dout=dout.data_ptr(),
        lse=lse.data_ptr(),
        dlse=0 if dlse is None else dlse.data_ptr(),
        order=order,
        done=0 if done is None else done.data_ptr(),
        **at,
        **mask.fields,
        **sizes.pre,
        out_is_f32=out.dtype == torch.float32,
    )
    pre.out_batch, pre.out_row, pre.out_head, _ = out.stride()
    pre.dout_batch, pre.dout_row, pre.dout_head, _ = dout.stride()
    post = _Post(acc=at["dq"], dq=dq.data_ptr(), **sizes.post, scale=scale)
    main = (_Main if gate is None else _GatedMain)(
        **at,
        **mask.fields,
        order=order if sizes.falling else 0,
        dk=dk.data_ptr(),
        dv=dv.data_ptr(),
        **sizes.main,
        scale=scale,
        scale_log2=scale * log2(e),
    )
    if gate is not None:
        main.gate = gate
    # Without 16-bit results the two store maps are never used; any valid map will do.
    results = whole or (None if sizes.grads_f32 else (dk, dv))
    stores = [tile_map(t, 64) for t in results] if results else [k_map, val_map]
    kernels, start = _kernels(spec), by or launch
    start(kernels.pre, (shape.row_blocks + -(-shape.mask_tiles // 4), 1, 1), 128, Arguments([], pre), device=device)
    enqueue = partial(start, device=device, overlap_previous=True)
    mine = [tile_map(t, spec.block_kv) for t in own or (k, val)] if spec.gated else []
    arguments = Arguments([q_map, dout_map, k_map, val_map, *stores, *mine], main)
    ctas = min(shape.items, max(1, processors - leave))
    enqueue(kernels.main, (ctas, 1, 1), spec.threads, arguments, shared=spec.shared_bytes)
    # Waiting on the multiprocessors that a gated kernel leaves free, it would keep out what copies keys there.
    enqueue(kernels.post, (shape.row_blocks, 1, 1), 256, Arguments([], post), overlap_previous=gate is None)
    if shape.splits > 1 and not parts:
        dk, dv = (t.sum(0).to(dtype) for t in (dk, dv))
    return dq, dk, dv


# ---------------------------------------------------------------- sizes, workspace


@dataclass(frozen=True, slots=True)
class Dealing:
    """The order of work items: tiles of `heads` units (head, split) in turn, as they lie or by falling work."""

    heads: int = 1
    falling: bool = False


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
        return _shape_of(spec, v.batch, v.heads, q.shape, k.shape, multiprocessors(q.device))

    @property
    def row_blocks(self) -> int:
        return self.batch * self.hq * self.q_blocks

    @property
    def units(self) -> int:
        return self.batch * self.hk * self.splits

    @property
    def items(self) -> int:
        return self.units * self.kv_blocks

    def sizes(self, *names: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}

    def dealing(self, spec: BackwardSpec, processors: int) -> Dealing:
        """Where items are few, short ones last; else a head at a time, whose Q and dO then stay in L2.

        Without data the work falls from tile to tile already; in deterministic mode tiles must be dealt as they lie. Where rows
        see a key again behind those that do not (global keys of a window), a tile that all see may take longer than the last
        heads together: then twice as many heads at a time, so that it begins sooner.
        """
        if self.items >= FEW * processors:
            return Dealing()
        near = heads_together(self.nq * spec.head_dim) * (2 if spec.form.uts else 1)
        return Dealing(min(near, self.units), bool(spec.form.vectors) and not spec.deterministic)

    def ahead(self, dealing: Dealing, processors: int) -> int:
        """How many units before its own a unit's accumulators are zeroed: those of a group, with an item for each processor."""
        return min(self.units, dealing.heads * -(-processors // (dealing.heads * self.kv_blocks)))


@lru_cache(maxsize=256)
def _shape_of(spec: BackwardSpec, mask_batch: int, mask_heads: int, q: torch.Size, k: torch.Size, processors: int) -> _Shape:
    (batch, nq, hq, _), (_, nk, hk, _) = q, k
    q_blocks, kv_blocks = -(-nq // spec.block_q), -(-nk // spec.block_kv)
    near = heads_together(nq * spec.head_dim)
    heads = heads_per_cta(hq // hk, hq // mask_heads, batch * hk * kv_blocks, processors, near)
    splits = hq // hk // heads
    return _Shape(batch, nq, nk, hq, hk, q_blocks, kv_blocks, mask_batch * mask_heads * kv_blocks, splits, heads)


def split_heads(spec: BackwardSpec, v: BoundaryVectors, q: Tensor, k: Tensor) -> tuple[int, int]:
    """(splits, heads): the query heads of a kv head are `splits` groups of `heads`, each a work item per key tile."""
    shape = _Shape.of(spec, v, q, k)
    return shape.splits, shape.heads


def heads_per_cta(ratio: int, heads_per_mask: int, tiles: int, multiprocessors: int, near: int) -> int:
    """How many query heads one CTA walks: the most that still fill the GPU evenly, of those that share a kv and a mask head.

    More than about _EVEN_HEADS only as long as L2 holds them all: CTAs with short key tiles run ahead of those with long ones
    until the end of the item, and what one has read is gone when the other comes to it.

    ratio: query heads per kv head. heads_per_mask: query heads per mask head. tiles: key tiles of all kv heads. near: as
    `heads_together` says.
    """
    common = gcd(ratio, heads_per_mask)

    def fitting(waves: int) -> list[int]:
        divisors = (d for d in range(1, common + 1) if common % d == 0)
        return [d for d in divisors if tiles * (ratio // d) >= waves * multiprocessors]

    short = min(fitting(_WAVES), key=lambda d: max(d / _EVEN_HEADS, _EVEN_HEADS / d), default=1)
    return max([short, *(d for d in fitting(_EVEN_WAVES) if d <= max(near, _EVEN_HEADS))])


def heads_together(elements: int) -> int:
    """How many heads are dealt tile by tile, so that short tiles come last: those of `elements` each that L2 can serve."""
    return max(1, _NEAR // (8 * elements))  # Q and dO of 2 bytes, dQ of 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the sizes of a call settle.

    falling: see `Dealing`. stored: shape and dtype of dK and dV as the kernel leaves them. offsets: where the parts of a
    workspace lie, and its size, in bytes. pre, main, post: what the three kernels are told of it all.
    """

    shape: _Shape
    falling: bool
    grads_f32: bool
    stored: tuple[int, ...]
    stored_dtype: torch.dtype
    offsets: dict[str, int]
    bytes: int
    pre: dict[str, int]
    main: dict[str, int]
    post: dict[str, int]

    @property
    def parts(self) -> tuple[int, ...]:
        """Offsets of what `pre::Params` points to in a workspace, in its order from `lse2` on."""
        names = ("lse2", "dpsum", "dead_rows", "dq", "turns", "ticket", "zeroed", "tiles", "order")
        return tuple([self.offsets[name] for name in names])

    @classmethod
    def of(
        cls,
        spec: BackwardSpec,
        v: BoundaryVectors,
        q: Tensor,
        k: Tensor,
        dtype: torch.dtype,
        dealing: Dealing | None = None,
        parts: bool = False,
        rows: int | None = None,
    ) -> Sizes:
        return _sizes(spec, v.batch, v.heads, q.shape, k.shape, dtype, dealing, parts, rows, multiprocessors(q.device))


@lru_cache(maxsize=256)
def _sizes(
    spec: BackwardSpec,
    mask_batch: int,
    mask_heads: int,
    q: torch.Size,
    k: torch.Size,
    dtype: torch.dtype,
    dealing: Dealing | None,
    parts: bool,
    rows: int | None,
    processors: int,
) -> Sizes:
    shape = _shape_of(spec, mask_batch, mask_heads, q, k, processors)
    dealing = dealing or shape.dealing(spec, processors)
    ahead = shape.ahead(dealing, processors) if spec.zeroes_ahead else shape.units
    # dK and dV go straight to the result, or as one fp32 part per split to be summed in order.
    grads_f32 = parts or shape.splits > 1 or dtype == torch.float32
    batch, keys, heads, dim = k
    if parts:
        stored: tuple[int, ...] = (shape.splits, batch, heads, keys if rows is None else rows, dim)
    else:
        stored = (shape.splits, *k) if shape.splits > 1 else tuple(k)
    strides = torch.empty(stored, device="meta").stride()
    by_batch, by_head, by_row = (strides[d] for d in ((1, 2, 3) if parts else (-4, -2, -3)))
    sizes = partial(shape.sizes, "nq", "hq", "q_blocks")
    common = sizes("nk", "batch", "kv_blocks", "heads") | {"ahead": ahead, "mask_heads": mask_heads}
    main = sizes("hk", "splits") | common | {"grads_f32": grads_f32, "mask_batch": mask_batch, "group": dealing.heads}
    main |= {"grad_batch": by_batch, "grad_head": by_head, "grad_row": by_row}
    pre, post = sizes("mask_tiles") | common, sizes() | {"dq_is_f32": dtype == torch.float32}
    offsets, total = _offsets(spec, shape)
    stored_dtype = torch.float32 if grads_f32 else dtype
    return Sizes(shape, dealing.falling, grads_f32, stored, stored_dtype, offsets, total, pre, main, post)


def _offsets(spec: BackwardSpec, shape: _Shape) -> tuple[dict[str, int], int]:
    """Where the parts of a workspace lie, and its size, in bytes."""
    rows = shape.row_blocks * spec.block_q
    sizes = {
        "dq": rows * spec.head_dim * 4,
        "lse2": rows * 4,
        "dpsum": rows * 4,
        "dead_rows": shape.row_blocks * 4,
        "turns": shape.row_blocks * 4 if spec.deterministic else 0,
        "ticket": 4,
        "zeroed": shape.units * 4,
        "tiles": shape.mask_tiles * spec.tile_ints * 4,
        "order": shape.mask_tiles * 4,
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // _ALIGN) * _ALIGN
    return offsets, total


@dataclass(frozen=True, slots=True)
class MaskFields:
    """Fields of the parameter structs that describe the mask. `keep` holds the tensors that they point into."""

    keep: tuple[Tensor, ...]
    fields: dict[str, int]

    @classmethod
    def of(cls, v: BoundaryVectors) -> MaskFields:
        held = [(name, t) for name in VECTORS if (t := getattr(v, name)) is not None]
        full = v.batch, v.heads, v.nk
        dense = {name: (t if t.shape == full else t.expand(full)).contiguous() for name, t in held}
        fields = {name: t.data_ptr() for name, t in dense.items()}
        if v.blocks is None:
            return cls(tuple(dense.values()), fields)
        table = v.blocks.keep.contiguous()
        batch, heads, rows, cols = table.shape
        sizes = (batch, heads, rows, cols, v.blocks.block_q, v.blocks.block_kv)
        named = {name: size for (name, _), size in zip(_KEEP, sizes, strict=True)}
        return cls((*dense.values(), table), {**fields, **named, "keep": table.data_ptr()})


# ---------------------------------------------------------------- kernels and their parameters


@dataclass(frozen=True, slots=True)
class _Kernels:
    pre: Kernel
    main: Kernel
    post: Kernel


@cache
def _kernels(spec: BackwardSpec) -> _Kernels:
    image = compile_cubin(spec.source()).image
    pre, main, post = (load_kernel(image, name) for name in ("attn_bwd_pre", "attn_bwd", "attn_bwd_post"))
    return _Kernels(pre, main, post)


_POINTER, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_KEEP = [(f"keep_{name}", _INT) for name in ("batch", "heads", "rows", "cols", "block_q", "block_kv")]
_VECTORS = [(name, _POINTER) for name in VECTORS]


class _Pre(ctypes.Structure):
    """`pre::Params` of bwd/pre.cuh.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("out", "dout", "lse", "dlse", "lse2", "dpsum")),
        *((name, _POINTER) for name in ("dead_rows", "dq", "turns", "ticket", "zeroed", "tiles", "order", "done")),
        *_VECTORS,
        ("keep", _POINTER),
        *((f"{t}_{d}", _I64) for t in ("out", "dout") for d in ("batch", "row", "head")),
        *(
            (name, _INT)
            for name in ("nq", "nk", "hq", "batch", "q_blocks", "kv_blocks", "heads", "ahead", "mask_tiles", "mask_heads")
        ),
        *_KEEP,
        ("out_is_f32", _INT),
    ]


class _Main(ctypes.Structure):
    """`Params` of bwd/shared.cuh.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("dq", "lse2", "dpsum", "dead_rows", "tiles", "order")),
        *_VECTORS,
        *((name, _POINTER) for name in ("keep", "turns", "ticket", "zeroed", "dk", "dv")),
        *((name, _INT) for name in ("nq", "nk", "hq", "hk", "batch", "q_blocks", "kv_blocks")),
        *((name, _INT) for name in ("splits", "heads", "grads_f32", "mask_batch", "mask_heads")),
        *_KEEP,
        *((f"grad_{name}", _I64) for name in ("batch", "head", "row")),
        ("group", _INT),
        ("ahead", _INT),
        ("scale", _FLOAT),
        ("scale_log2", _FLOAT),
    ]


class GateTables(ctypes.Structure):
    """`GateTables` of bwd/shared.cuh.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("items", "blocks", "tiles", "flags", "counts")),
        *((name, _POINTER) for name in ("reports", "places", "first_place", "failed", "lost")),
        *((name, ctypes.c_uint32) for name in ("timeout", "epoch", "own", "foreign", "slots", "group_heads")),
        *((name, _INT) for name in ("own_tile", "gives", "whole")),
        *((name, _POINTER) for name in ("lent", "others", "added")),
    ]


class _GatedMain(ctypes.Structure):
    _fields_ = [*_Main._fields_, ("gate", GateTables)]


class _Post(ctypes.Structure):
    """`post::Params` of bwd/post.cuh.j2."""

    _fields_ = [
        ("acc", _POINTER),
        ("dq", _POINTER),
        *((name, _INT) for name in ("nq", "hq", "q_blocks", "dq_is_f32")),
        ("scale", _FLOAT),
    ]
