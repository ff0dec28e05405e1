"""The Hopper backend: chooses a kernel variant, builds its schedule, launches. Layouts as in `maskc.runtime.cpu`.

Nothing here synchronises with the host or allocates outside torch. After one call in the open a call may be captured
into a CUDA graph; a mask batch whose vectors are computed inside the graph is scheduled anew at every replay.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_source, forward_spec
from maskc.codegen.nvrtc import Cubin, compile_cubin
from maskc.codegen.spec import HEAD_DIMS, Dtype, KernelSpec
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.runtime.device import capability
from maskc.runtime.driver_api import Arguments, Kernel, context_of, launch, load_kernel, tensor_map
from maskc.runtime.mask_tables import MaskTables, Tables, dense_table, tables_of
from maskc.runtime.mask_tables import mask_form as mask_form
from maskc.runtime.mask_tables import schedule as schedule
from maskc.runtime.mask_tables import schedule_for as schedule_for
from maskc.runtime.ready import Launch

DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "f16"}
L2_BYTES = 32 << 20  # K and V of the heads that are worked on together stay in about half of the 60 MB of L2
FEW_ITEMS = 8  # work items a multiprocessor, below which the longest rows of all heads had better come first


# ---------------------------------------------------------------- what can run


def why_not(v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor, val: torch.Tensor) -> Diagnostic | None:
    """The reason why this backend cannot run the call, or None. Shapes are taken to agree with each other."""
    if q.device.type != "cuda":
        return Diagnostic(
            "M520", f'backend "hopper" needs CUDA tensors, q is on `{q.device}`', help='backend "auto" follows the tensors'
        )
    if (elsewhere := _device_diagnostic(v, q.device)) is not None:
        return elsewhere
    if capability(q.device) != (9, 0):
        name = torch.cuda.get_device_name(q.device)
        return Diagnostic(
            "M521", f"the kernels are built for sm_90a (H100, H200), this GPU is {name}", help='backend="flex" runs on it'
        )
    if q.dtype not in DTYPES or k.dtype != q.dtype or val.dtype != q.dtype:
        kinds = ", ".join(str(t.dtype) for t in (q, k, val))
        return Diagnostic(
            "M522", f"the kernels take q, k and v in bfloat16 or float16 alike, not {kinds}", help="cast to torch.bfloat16"
        )
    if q.shape[3] not in HEAD_DIMS or val.shape[3] != q.shape[3]:
        return _head_dim_diagnostic(q.shape[3], val.shape[3])
    return _block_table_diagnostic(v, q.shape[3])


def _device_diagnostic(v: BoundaryVectors, device: torch.device) -> Diagnostic | None:
    """The kernels read the vectors by address: one on another device would be a fault in the middle of a kernel."""
    held = (*v.tensors, v.elsewhere, v.blocks.keep if v.blocks else None)
    stray = next((t.device for t in held if t is not None and t.device != device), None)
    if stray is None:
        return None
    return Diagnostic(
        "M520", f"the vectors of the mask are on `{stray}`, q is on `{device}`", help="bind(...).vectors(nq, nk, q.device)"
    )


def _head_dim_diagnostic(head_dim: int, value_dim: int) -> Diagnostic:
    sizes = f"head dim {head_dim}" + (f" with value dim {value_dim}" if value_dim != head_dim else "")
    wanted = max(head_dim, value_dim)
    nearest = next((d for d in HEAD_DIMS if d >= wanted), None)
    hint = f"pad both to {nearest} with zeros (and keep the scale)" if nearest else f"the largest is {HEAD_DIMS[-1]}"
    return Diagnostic(
        "M523", f"no kernel for {sizes}; there are {', '.join(map(str, HEAD_DIMS))} with equal value dims", help=hint
    )


def _block_table_diagnostic(v: BoundaryVectors, head_dim: int) -> Diagnostic | None:
    if v.blocks is None:
        return None
    spec = forward_spec(mask_form(v), head_dim, "bf16")
    if v.blocks.block_q % spec.block_q == 0 and v.blocks.block_kv % spec.block_kv == 0:
        return None
    given, tile = f"({v.blocks.block_q}, {v.blocks.block_kv})", f"({spec.block_q}, {spec.block_kv})"
    return Diagnostic(
        "M524", f"block table of {given} blocks: sizes must be multiples of the tile {tile}", help=f"declare `per block{tile}`"
    )


# ---------------------------------------------------------------- arguments, as the templates declare them


class _ForwardParams(ctypes.Structure):
    _fields_ = [
        ("mask", MaskTables),
        *(
            (name, ctypes.c_void_p)
            for name in ("packs", "runs", "run_counts", "order", "giants", "counter", "record", "trace", "out", "lse")
        ),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_ratio", "mask_ratio", "masked_batches", "items", "group_heads")),
    ]


class GateTables(ctypes.Structure):
    """What a gated variant waits for, see templates/fwd/shared.cuh.j2; `maskc.runtime.overlap` fills it in."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("items", "blocks", "flags", "failed")),
        *((name, ctypes.c_uint32) for name in ("timeout", "epoch")),
        *((name, ctypes.c_int32) for name in ("own", "slots", "group_heads", "own_block")),
    ]


class _GatedParams(ctypes.Structure):
    _fields_ = [*_ForwardParams._fields_, ("gate", GateTables)]


# ---------------------------------------------------------------- forward


def forward(
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    scale: float,
    *,
    schedule: tuple[torch.Tensor, ...] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out [B, Sq, Hq, D] in q's dtype or fp32, lse [B, Hq, Sq] fp32, natural log, -inf for empty rows.

    schedule: what `schedule` returned for these vectors; None builds it. Raises M525 for a scale that is not positive
    and what `why_not` says.
    """
    reason = why_not(v, q, k, val)
    if reason is not None:
        raise MaskcError(reason)
    out_dtype = out_dtype or q.dtype
    if out_dtype not in (q.dtype, torch.float32):
        raise error("M522", f"out_dtype is q's dtype ({q.dtype}) or float32, not {out_dtype}")
    spec = forward_spec(mask_form(v), q.shape[3], DTYPES[q.dtype], "input" if out_dtype == q.dtype else "f32")
    return forward_with(spec, v, q, k, val, scale, schedule)


def forward_with(
    spec: KernelSpec,
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    scale: float,
    schedule: tuple[torch.Tensor, ...] | None = None,
    record: torch.Tensor | None = None,
    trace: torch.Tensor | None = None,
    gate: GateTables | None = None,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
    leave: int = 0,
    sizes: Sizes | None = None,
    by: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` by one variant.

    record: for `spec.record_queue`, int32 [B, Hq, Q blocks, 1 + KV blocks]: the length of each queue, then its entries
    (KV block << spec.tag_bits | tags) as the loader consumed them. trace: for `spec.trace`, int64 [CTAs, roles, events, 2], see
    `maskc.runtime.trace`. gate: for `spec.gated`, what to wait for; its memory outlives the kernel. own: K and V
    [B, rows, Hk, D] of the KV blocks from `gate.own_block` on. leave: multiprocessors that the kernel does not use. sizes:
    what those of the tensors settle, where it is known. by: what launches the kernel.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise error("M525", f"scale is {scale}; the kernels need a positive, finite scale", None, "fold a sign into q")
    device, (batch, rows, heads, _) = q.device, q.shape
    out = torch.empty(q.shape, dtype=torch.float32 if spec.out_dtype == "f32" else q.dtype, device=device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=device)
    if out.numel() == 0 or k.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    sizes = sizes or Sizes.of(spec, v, q, k)
    q, q_map = mapped(q, spec.block_q)
    k, k_map = mapped(k, spec.block_kv)
    val, val_map = mapped(val, spec.block_kv)
    v = dense_table(v)
    schedule, tables = schedule or schedule_for(spec, v), sizes.tables
    if schedule and schedule[0].numel() != tables.bytes:
        raise error("M526", f"the schedule of another mask or head dim: {schedule[0].numel()} bytes, not {tables.bytes}")
    base, counter = schedule[0].data_ptr() if schedule else 0, work_counter(device)
    params = (_ForwardParams if gate is None else _GatedParams)(
        tables.placed(spec, v, base),
        **{name: base + tables.offsets[name] for name in ("packs", "runs", "run_counts", "order", "giants")},
        counter=counter.data_ptr(),
        record=0 if record is None else record.data_ptr(),
        trace=0 if trace is None else trace.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        scale=scale,
        scale_log2=scale * math.log2(math.e),
        **sizes.fields,
    )
    if gate is not None:
        params.gate = gate
    maps = [q_map, k_map, val_map, tile_map(out, spec.block_q) if spec.out_dtype == "input" else q_map]
    if spec.gated:
        maps += [tile_map(t, spec.block_kv) for t in own or (k, val)]
    grid = min(max(1, multiprocessors(device) - leave), sizes.fields["items"])
    arguments, start = Arguments(maps, params), by or launch
    start(_forward_kernel(spec), (grid, 1, 1), spec.threads, arguments, device=device, shared=spec.shared_bytes)
    return out, lse


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the sizes of a call settle. fields: of `_ForwardParams`."""

    tables: Tables
    fields: dict[str, int]

    @classmethod
    def of(cls, spec: KernelSpec, v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor) -> Sizes:
        return _sizes(spec, v.nq, v.nk, v.batch, v.heads, q.shape, k.shape, multiprocessors(q.device))


@lru_cache(maxsize=256)
def _sizes(
    spec: KernelSpec, nq: int, nk: int, mask_batch: int, mask_heads: int, q: torch.Size, k: torch.Size, processors: int
) -> Sizes:
    tables = tables_of(spec, nq, nk, mask_batch, mask_heads)
    (batch, _, heads, _), (_, keys, kv_heads, _) = q, k
    items = batch * heads * tables.sizes["q_blocks"]
    few = items < FEW_ITEMS * processors
    fields = {
        "heads": heads,
        "kv_ratio": heads // kv_heads,
        "mask_ratio": heads // mask_heads,
        "masked_batches": mask_batch > 1,
        "items": items,
        "group_heads": _group_heads(spec, keys, heads // kv_heads, batch * heads, few),
    }
    return Sizes(tables, fields)


def _group_heads(spec: KernelSpec, keys: int, ratio: int, all_heads: int, few: bool) -> int:
    """Query heads that are worked on together: every row of a full mask costs the same, so there a K/V head at a time.

    few: there are few work items. A group that starts when the one before ends would then end long after the others.
    """
    if spec.form.closed == "full":
        return min(all_heads, ratio)
    size = keys * 2 * spec.head_dim * 2
    if few and all_heads // ratio * size <= 2 * L2_BYTES:
        return all_heads
    return min(all_heads, max(1, L2_BYTES // size) * ratio)


@cache
def _forward_cubin(spec: KernelSpec) -> Cubin:
    return compile_cubin(forward_source(spec))


@cache
def _forward_kernel(spec: KernelSpec) -> Kernel:
    return load_kernel(_forward_cubin(spec).image, spec.name)


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---------------------------------------------------------------- shared with the backward


def addressable(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a contiguous copy where a tensor map cannot hold its strides (expanded, misaligned, not dense in the last)."""
    if t.data_ptr() % 16 == 0 and _fit(t.shape, t.stride(), t.element_size()):
        return t
    return t.contiguous() if not t.is_contiguous() else t.clone()


@lru_cache(maxsize=256)
def _fit(shape: torch.Size, strides: tuple[int, ...], width: int) -> bool:
    outer = [stride * width for n, stride in zip(shape[:3], strides[:3], strict=True) if n > 1]
    return strides[3] == 1 and all(step % 16 == 0 and 0 < step < 1 << 40 for step in outer)


def mapped(t: torch.Tensor, rows: int) -> tuple[torch.Tensor, bytes]:
    """`t` [B, S, H, D] as it is `addressable`, and its `tile_map`."""
    made = _tile_map(t.data_ptr(), t.dtype, t.shape, t.stride(), rows, t.get_device())
    if made is not None:
        return t, made
    t = addressable(t)
    return t, tile_map(t, rows)


def tile_map(t: torch.Tensor, rows: int) -> bytes:
    """Tensor map of [B, S, H, D] as boxes of [rows][64 elements]. Raises M607 for what is not `addressable`."""
    made = _tile_map(t.data_ptr(), t.dtype, t.shape, t.stride(), rows, t.get_device())
    if made is None:
        raise error("M607", f"no tensor map of strides {t.stride()} at address {t.data_ptr():#x}")
    return made


@lru_cache(maxsize=1024)
def _tile_map(
    pointer: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int, device: int
) -> bytes | None:
    """None where there is none. It depends on nothing but the arguments, so that one which is kept is never stale."""
    if pointer % 16 or not _fit(shape, strides, dtype.itemsize):
        return None
    batch, length, heads, dim = shape
    by_batch, by_row, by_head, _ = strides
    with context_of(device) if device >= 0 else nullcontext():
        return tensor_map(pointer, dtype, (dim, length, heads, batch), (1, by_row, by_head, by_batch), (64, rows, 1, 1))


_counters: dict[tuple[int | None, int], torch.Tensor] = {}


def work_counter(device: torch.device) -> torch.Tensor:
    """Two zero words for a kernel that deals out work and leaves them zero.

    One pair per stream serves all its launches, which follow each other. A captured launch may be replayed on any
    stream, so a graph gets its own pair, zeroed at each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, current_handle(device))
    counter = _counters.get(key)
    if counter is None:
        counter = _counters.setdefault(key, torch.zeros(2, dtype=torch.int32, device=device))
    return counter


def backward(
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    deterministic: bool = False,
    *,
    schedule: tuple[torch.Tensor, ...] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv); see `maskc.runtime.hopper_bwd`."""
    from maskc.runtime import hopper_bwd

    return hopper_bwd.backward(v, q, k, val, out, lse, dout, dlse, scale, deterministic, grad_dtype=grad_dtype)
