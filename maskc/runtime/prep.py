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
from maskc.ir.intervals import VECTORS, IntervalProgram, Vector
from maskc.runtime.device import capability
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel
from maskc.tiles import BlockMinMax, Extremes


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """vectors: without a block table. tables: the least and the greatest of each that exists, one after the other.

    int32 [2 x vectors, batch, heads, blocks], over blocks of `block_kv` keys.
    """

    vectors: BoundaryVectors
    tables: torch.Tensor
    block_kv: int

    @property
    def extremes(self) -> BlockMinMax:
        """The tables by name."""
        names = [name for name in VECTORS if getattr(self.vectors, name) is not None]
        found = {name: Extremes(self.tables[2 * i], self.tables[2 * i + 1]) for i, name in enumerate(names)}
        lts, lte, uts, ute = map(found.get, VECTORS)
        return BlockMinMax(self.block_kv, lts, lte, uts, ute, None)


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
    batch, heads = (1, 1) if blocks is None else blocks.keep.shape[:2]
    if not program.vectors:
        return allocate(program, nq, nk, batch, heads, block_kv, inputs.device)
    ready = _load(compiled)
    lead = [(batch, heads), *(_lead(slot.name, inputs) for slot in ready.spec.slots)]
    batch, heads = max(n for n, _ in lead), max(n for _, n in lead)
    prepared = allocate(program, nq, nk, batch, heads, block_kv, inputs.device)
    grid = batch * heads * -(-nk // block_kv)
    body = pack_arguments(ready.spec, inputs, prepared)
    launch(ready.kernel, (grid, 1, 1), ready.spec.threads, Arguments((), body), device=inputs.device)
    return prepared


def _lead(name: str, inputs: BoundInputs) -> tuple[int, int]:
    """Batch and heads of one input: 1 where it does not depend on them."""
    if name in inputs.sets:
        return inputs.sets[name].batch, 1
    if name in inputs.vectors:
        batch, heads, _ = inputs.vectors[name].shape
        return batch, heads
    scalar = inputs.scalars[name]
    return 1 if isinstance(scalar, int) else scalar.shape[0], 1


def allocate(program: IntervalProgram, nq: int, nk: int, batch: int, heads: int, block_kv: int, device: torch.device) -> Prepared:
    """Room for the vectors of a program and their tables."""

    def room(name: Vector) -> torch.Tensor | None:
        return torch.empty((batch, heads, nk), dtype=torch.int32, device=device) if name in program.vectors else None

    lts, lte, uts, ute = map(room, VECTORS)
    tables = torch.empty((2 * len(program.vectors), batch, heads, -(-nk // block_kv)), dtype=torch.int32, device=device)
    return Prepared(BoundaryVectors(nq, nk, batch, heads, program.causal, lts, lte, uts, ute), tables, block_kv)


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
    made, table = out.vectors, out.tables.data_ptr()
    blocks = out.tables.shape[3]
    size = 4 * made.batch * made.heads * blocks
    addresses = []
    for name in spec.vectors:
        addresses += [getattr(made, name).data_ptr(), table, table + size]
        table += 2 * size
    given = pack_inputs(spec.slots, inputs, made.nq, made.nk)
    return arguments_type(spec.slots, spec.vectors)(given, made.heads, out.block_kv, blocks, *addresses)


def pack_inputs(slots: tuple[Slot, ...], inputs: BoundInputs, nq: int, nk: int) -> ctypes.Structure:
    """`struct MaskInputs` for bound inputs."""
    return inputs_type(slots)(nq, nk, *(_pack(slot, inputs) for slot in slots))


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
    if not table.both.is_contiguous():
        raise AssertionError("segment tables are contiguous")
    (_, batch, size), starts = table.both.shape, table.both.data_ptr()
    return Segments(starts, starts + batch * size * table.both.element_size(), size if batch > 1 else 0, size)


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
