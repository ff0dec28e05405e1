"""Boundary vectors and block tables on the GPU by the preparation kernel of a mask: one launch, no synchronisation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import assert_never
from weakref import WeakKeyDictionary

import torch

from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.binding.columns import block_table
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen import nvrtc
from maskc.codegen.columns import Slot
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.prep import PrepSpec, Scalar, Segments, VectorData, arguments_type, inputs_type
from maskc.compiled import CompiledMask
from maskc.diagnostics import Diagnostic
from maskc.ir.intervals import VECTORS, IntervalProgram
from maskc.runtime.device import capability
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel
from maskc.tiles import BlockMinMax, Extremes


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """vectors: without a block table. extremes: their minima and maxima over blocks of `extremes.block_kv` keys."""

    vectors: BoundaryVectors
    extremes: BlockMinMax


@dataclass(frozen=True, eq=False, slots=True)
class _Ready:
    """A loaded kernel and what it was made from."""

    kernel: Kernel
    spec: PrepSpec


_ready: WeakKeyDictionary[CompiledMask, _Ready] = WeakKeyDictionary()


def why_not(compiled: CompiledMask, device: torch.device) -> Diagnostic | None:
    """Why the vectors of a mask cannot be made by its own kernel on this device, or None."""
    if device.type != "cuda":
        return Diagnostic("M606", f"preparation kernels run on CUDA devices, not on {device}")
    if capability(device)[0] != 9:
        return Diagnostic("M606", f"{torch.cuda.get_device_name(device)} is no Hopper GPU (sm_90)")
    if compiled.program is None:
        return Diagnostic("M610", f"`{compiled.name}` was not lowered, so no kernel can compute its vectors")
    if compiled.kernels is not None and all(k.name != "prep" for k in compiled.kernels.kernels):
        return Diagnostic("M612", f"{compiled.kernels.folder} holds no kernel `prep`")
    if compiled in _ready or compiled.kernels is not None:
        return None
    missing = nvrtc.missing()
    return None if missing is None else missing.diagnostics[0]


def vectors(compiled: CompiledMask, inputs: BoundInputs, nq: int, nk: int) -> BoundaryVectors:
    """The vectors of a bound mask, to be passed as `prepare` to `BoundMask.vectors` where `why_not` has nothing to say."""
    blocks = block_table(compiled.fn, inputs, nq, nk)
    made = prepare(compiled, inputs, nq, nk, blocks=blocks).vectors
    return made if blocks is None else replace(made, blocks=blocks)


def prepare(
    compiled: CompiledMask,
    inputs: BoundInputs,
    nq: int,
    nk: int,
    *,
    block_kv: int = 128,
    blocks: BlockTable | None = None,
) -> Prepared:
    """Vectors and tables of a batch from its bound inputs, which lie on one CUDA device.

    The data must be such that the program is exact for them (`IntervalProgram.hole_free`, `tiling`). `blocks` only adds
    its own batch and heads to those of the result. Runs on torch's current stream. Raises M601, M602, M604 to M606.
    """
    program = compiled.program
    assert program is not None, "why_not says so"
    shape = [] if blocks is None else [blocks.keep]
    if not program.vectors:
        return allocate(program, nq, nk, *_lead(shape), block_kv, inputs.device)
    ready = _load(compiled)
    prepared = allocate(program, nq, nk, *_lead(shape + _tensors(ready.spec, inputs)), block_kv, inputs.device)
    grid = prepared.vectors.batch * prepared.vectors.heads * -(-nk // block_kv)
    body = pack_arguments(ready.spec, inputs, prepared)
    launch(ready.kernel, (grid, 1, 1), ready.spec.threads, Arguments((), body), device=inputs.device)
    return prepared


def _tensors(spec: PrepSpec, inputs: BoundInputs) -> list[torch.Tensor]:
    """Every tensor that the kernel reads, its first dimensions being batch and heads."""
    out = []
    for name in (slot.name for slot in spec.slots):
        if name in inputs.sets:
            out.append(inputs.sets[name].starts[:, None])
        elif name in inputs.vectors:
            out.append(inputs.vectors[name])
        elif isinstance(scalar := inputs.scalars[name], torch.Tensor):
            out.append(scalar[:, None])
    return out


def _lead(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Batch and heads that cover all of them: 1 where nothing depends on them."""
    return max((t.shape[0] for t in tensors), default=1), max((t.shape[1] for t in tensors), default=1)


def allocate(program: IntervalProgram, nq: int, nk: int, batch: int, heads: int, block_kv: int, device: torch.device) -> Prepared:
    """Room for the vectors of a program and their tables."""
    names = [name for name in VECTORS if name in program.vectors]
    vectors = {name: torch.empty(batch, heads, nk, dtype=torch.int32, device=device) for name in names}
    tables = torch.empty(2 * len(names), batch, heads, -(-nk // block_kv), dtype=torch.int32, device=device).unbind()
    pairs = {name: Extremes(low, high) for name, low, high in zip(names, tables[::2], tables[1::2], strict=True)}
    lts, lte, uts, ute = map(vectors.get, VECTORS)
    of_lts, of_lte, of_uts, of_ute = map(pairs.get, VECTORS)
    made = BoundaryVectors(nq, nk, batch, heads, program.causal, lts, lte, uts, ute)
    return Prepared(made, BlockMinMax(block_kv, of_lts, of_lte, of_uts, of_ute, None))


def _load(compiled: CompiledMask) -> _Ready:
    """The kernel of a mask, rendered, compiled (or taken from the cache) and loaded once."""
    ready = _ready.get(compiled)
    if ready is None:
        (kernel,) = KERNELS["prep"](Request(compiled.fn, compiled.program))
        spec = kernel.spec
        assert isinstance(spec, PrepSpec)
        loaded = load_kernel(kernel.compile().image, kernel.entry)
        ready = _ready[compiled] = _Ready(loaded, spec)
    return ready


# ---------------------------------------------------------------- arguments


def pack_arguments(spec: PrepSpec, inputs: BoundInputs, out: Prepared) -> ctypes.Structure:
    """`struct PrepArgs`; all tensors must outlive the launch in stream order."""
    body = arguments_type(spec.slots, spec.vectors)()
    setattr(body, "in", pack_inputs(spec.slots, inputs, out.vectors.nq, out.vectors.nk))
    body.heads = out.vectors.heads
    body.block_kv = out.extremes.block_kv
    body.blocks = -(-out.vectors.nk // out.extremes.block_kv)
    for name in spec.vectors:
        vector, table = getattr(out.vectors, name), getattr(out.extremes, name)
        setattr(body, name, vector.data_ptr())
        setattr(body, f"{name}_low", table.low.data_ptr())
        setattr(body, f"{name}_high", table.high.data_ptr())
    return body


def pack_inputs(slots: tuple[Slot, ...], inputs: BoundInputs, nq: int, nk: int) -> ctypes.Structure:
    """`struct MaskInputs` for bound inputs."""
    packed = inputs_type(slots)(nq, nk)
    for slot in slots:
        setattr(packed, f"{slot.name}_", _pack(slot, inputs))
    return packed


def _pack(slot: Slot, inputs: BoundInputs) -> ctypes.Structure:
    match slot.type:
        case "Segments":
            return _segments(inputs.sets[slot.name])
        case "Vector" | "Flags":
            return _vector(inputs.vectors[slot.name])
        case "Scalar":
            return _scalar(inputs.scalars[slot.name])
        case _:
            assert_never(slot.type)


def _segments(table: SegmentTable) -> ctypes.Structure:
    starts, ends = table.starts, table.ends
    if starts.stride() != ends.stride() or not starts.is_contiguous():
        raise AssertionError("segment tables are contiguous")
    return Segments(starts.data_ptr(), ends.data_ptr(), _stride(starts, 0), starts.shape[1])


def _vector(vector: torch.Tensor) -> ctypes.Structure:
    if vector.stride(-1) != 1 and vector.shape[-1] != 1:
        raise AssertionError("vectors are contiguous along their tokens")
    return VectorData(vector.data_ptr(), _stride(vector, 0), _stride(vector, 1), vector.shape[-1])


def _scalar(value: int | torch.Tensor) -> ctypes.Structure:
    """A value, or where the values of the batch items lie."""
    return Scalar(None, 0, value) if isinstance(value, int) else Scalar(value.data_ptr(), _stride(value, 0), 0)


def _stride(tensor: torch.Tensor, dim: int) -> int:
    """0 where the dimension broadcasts."""
    return 0 if tensor.shape[dim] == 1 else tensor.stride(dim)
