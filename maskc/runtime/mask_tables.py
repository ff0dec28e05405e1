"""Tables of a mask batch, from which the forward tells what to visit: bounds of KV blocks, work and order of Q blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import repeat

import torch

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import schedule_source, schedule_spec
from maskc.codegen.nvrtc import Cubin, compile_cubin
from maskc.codegen.spec import VECTORS, KernelSpec, MaskForm
from maskc.runtime.driver_api import Arguments, Kernel, context_of, launch, load_kernel
from maskc.runtime.ready import Fresh, Launch, Ready, keeping


def mask_form(v: BoundaryVectors) -> MaskForm:
    """Which parts the mask of this batch has."""
    present = {name: getattr(v, name) is not None for name in VECTORS}
    return MaskForm(**present, causal=v.causal, blocks=v.blocks is not None)


class MaskTables(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("minmax", "unseen", "table")),
        *((name, ctypes.c_int64) for name in ("table_batch", "table_head")),
        *((name, ctypes.c_int32) for name in ("table_cols", "table_q_ratio", "table_kv_ratio")),
        *((name, ctypes.c_int32) for name in ("rows", "cols", "q_blocks", "kv_blocks", "masks", "mask_heads")),
    ]


class ScheduleParams(ctypes.Structure):
    _fields_ = [
        ("mask", MaskTables),
        ("vectors", ctypes.c_void_p * 5),
        ("batch_stride", ctypes.c_int64 * 5),
        ("head_stride", ctypes.c_int64 * 5),
        ("elsewhere", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("elsewhere_batch", "elsewhere_head")),
        *((name, ctypes.c_void_p) for name in ("minmax", "packs", "unseen", "work", "order", "giants", "runs", "run_counts")),
    ]


PARTS = ("minmax", "packs", "unseen", "work", "order", "giants", "runs", "run_counts")
_MINMAX, _UNSEEN = PARTS.index("minmax"), PARTS.index("unseen")


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of a mask batch. sizes: what the kernels are told of them; offsets: where they lie, in bytes, in one tensor."""

    sizes: dict[str, int]
    offsets: dict[str, int]
    bytes: int

    @classmethod
    def of(cls, spec: KernelSpec, v: BoundaryVectors) -> Tables:
        return tables_of(spec, v.nq, v.nk, v.batch, v.heads)

    def placed(self, spec: KernelSpec, v: BoundaryVectors, base: int) -> MaskTables:
        """The struct for tables at `base`."""
        out = MaskTables(base + self.offsets["minmax"], base + self.offsets["unseen"], **self.sizes)
        if v.blocks is not None:
            keep = v.blocks.keep
            out.table = keep.data_ptr()
            out.table_batch = keep.stride(0) if keep.shape[0] > 1 else 0
            out.table_head = keep.stride(1) if keep.shape[1] > 1 else 0
            out.table_cols = keep.shape[3]
            out.table_q_ratio = v.blocks.block_q // spec.block_q
            out.table_kv_ratio = v.blocks.block_kv // spec.block_kv
        return out


@lru_cache(maxsize=256)
def tables_of(spec: KernelSpec, nq: int, nk: int, batch: int, heads: int) -> Tables:
    masks, q_blocks, kv_blocks = batch * heads, -(-nq // spec.block_q), -(-nk // spec.block_kv)
    rows, columns = masks * q_blocks, masks * kv_blocks
    with_runs = rows if spec.queue == "schedule" else 0
    parts = (
        len(spec.form.vectors) * columns * 8,
        columns * spec.pack_bytes,
        columns,
        rows * 4,
        rows * 4,
        4,
        with_runs * spec.queue_runs * 8,
        with_runs * 4,
    )
    offsets, at = {}, 0
    for name, size in zip(PARTS, parts, strict=True):
        offsets[name] = at
        at += -(-size // 256) * 256
    sizes = {"rows": nq, "cols": nk, "q_blocks": q_blocks, "kv_blocks": kv_blocks, "masks": masks, "mask_heads": heads}
    return Tables(sizes, offsets, at)


def dense_table(v: BoundaryVectors) -> BoundaryVectors:
    """The same vectors with a contiguous block table."""
    if v.blocks is None or v.blocks.keep.is_contiguous():
        return v
    return replace(v, blocks=replace(v.blocks, keep=v.blocks.keep.contiguous()))


def schedule(v: BoundaryVectors, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Tables of one mask batch: bounds by KV block, work and order of Q blocks; () for a mask without data.

    Valid for every call on the same vectors and head dim, of whatever dtype and head count, on streams that wait for
    the current one.
    """
    return schedule_for(schedule_spec(mask_form(v), head_dim), v)


def schedule_for(spec: KernelSpec, v: BoundaryVectors) -> tuple[torch.Tensor, ...]:
    """`schedule` for one variant."""
    if not spec.packed:
        return ()
    vectors = [getattr(v, name) for name in spec.form.vectors]
    device = vectors[0].device if vectors or v.blocks is None else v.blocks.keep.device
    if v.blocks is not None or v.elsewhere is not None or not _whole(vectors, (v.batch, v.heads, v.nk)):
        return _made(spec, v, vectors, device, launch)
    key = spec, v.nq, v.nk, v.batch, v.heads, device
    if (again := _known.get(key)) is not None:
        return again.made(vectors, device)
    if key in _known:  # many sizes come once: what the second time launches is kept
        launches: list[Ready] = []
        words = ("mask.minmax", 2), ("vectors", len(vectors)), ("minmax", len(PARTS))
        storage = _made(spec, v, vectors, device, keeping(launches, repeat(words)))
        tables = Tables.of(spec, v)
        _known[key] = _Again(Fresh.of((tables.bytes,), torch.uint8), tuple(tables.offsets.values()), tuple(launches))
        return storage
    _known[key] = None
    if len(_known) > MOST_KNOWN:
        _known.pop(next(iter(_known)), None)
    return _made(spec, v, vectors, device, launch)


@dataclass(frozen=True, slots=True)
class _Again:
    """Tables of such sizes were made before."""

    memory: Fresh
    offsets: tuple[int, ...]
    launches: tuple[Ready, ...]

    def made(self, vectors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        storage = self.memory.on(device)
        base = storage.data_ptr()
        places = [base + offset for offset in self.offsets]
        words = (places[_MINMAX], places[_UNSEEN]), [t.data_ptr() for t in vectors], places
        with context_of(storage.get_device()):
            stream = current_handle(device)
            filled = self.launches[0].filled((), *words)
            for one in self.launches:
                one.launch(stream, filled)
        return (storage,)


_known: dict[tuple[object, ...], _Again | None] = {}
MOST_KNOWN = 256


def _whole(vectors: list[torch.Tensor], shape: tuple[int, ...]) -> bool:
    """Whether each has a value for every batch item and head, side by side."""
    return all([t.shape == shape and t.is_contiguous() for t in vectors])  # noqa: C419  (a list takes less)


def _made(
    spec: KernelSpec, v: BoundaryVectors, vectors: list[torch.Tensor], device: torch.device, start: Launch
) -> tuple[torch.Tensor, ...]:
    v = dense_table(v)
    tables = Tables.of(spec, v)
    storage = torch.empty(tables.bytes, dtype=torch.uint8, device=device)
    base = storage.data_ptr()
    given = zip(*map(_strided, vectors), strict=True) if vectors else [(), (), ()]
    places = [base + offset for offset in tables.offsets.values()]
    params = ScheduleParams(tables.placed(spec, v, base), *given, *_strided(v.elsewhere), *places)
    arguments = Arguments((), params)
    masks, q_blocks, kv_blocks = (tables.sizes[name] for name in ("masks", "q_blocks", "kv_blocks"))
    threads = -(-spec.block_kv // 32) * 32
    start(_schedule_kernel(spec, "kv_bounds"), (masks, kv_blocks, 1), threads, arguments, device=device)
    if spec.scheduler in ("lpt", "giants") or spec.queue == "schedule":
        start(_schedule_kernel(spec, "row_runs"), (masks, -(-q_blocks // 4), 1), 128, arguments, device=device)
        start(_schedule_kernel(spec, "row_order"), (masks, -(-q_blocks // 256), 1), 256, arguments, device=device)
    return (storage,)


def _strided(vector: torch.Tensor | None) -> tuple[int, int, int]:
    """Where a vector lies, and its strides by batch item and head: 0 where it has one."""
    if vector is None:
        return 0, 0, 0
    batch, heads, _ = vector.shape
    by_batch, by_head, _ = vector.stride()
    return vector.data_ptr(), by_batch if batch > 1 else 0, by_head if heads > 1 else 0


@cache
def _schedule_cubin(spec: KernelSpec) -> Cubin:
    return compile_cubin(schedule_source(spec))


@cache
def _schedule_kernel(spec: KernelSpec, name: str) -> Kernel:
    return load_kernel(_schedule_cubin(spec).image, name)
