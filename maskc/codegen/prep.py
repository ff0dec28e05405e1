"""The preparation kernel of a mask: bound inputs -> boundary vectors and their block minima and maxima, in one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from maskc.codegen.columns import ColumnCode, Slot, SlotType, column_code
from maskc.codegen.kernels import Kernel, Request
from maskc.codegen.render import CudaSource, render
from maskc.diagnostics import error
from maskc.ir.intervals import Vector
from maskc.ir.nodes import MaskFn

THREADS = 128


class Segments(ctypes.Structure):
    """As in device/columns.cuh, like the three below."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("batch_stride", ctypes.c_longlong),
        ("count", ctypes.c_int),
    )


class VectorData(ctypes.Structure):
    """`Vector` and `Flags`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("length", ctypes.c_int),
    )


class Scalar(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("batch_stride", ctypes.c_int), ("value", ctypes.c_int))


_SLOT_TYPES: dict[SlotType, type[ctypes.Structure]] = {
    "Segments": Segments,
    "Vector": VectorData,
    "Flags": VectorData,
    "Scalar": Scalar,
}


@dataclass(frozen=True, slots=True)
class PrepSpec:
    """Everything that the template and the launch depend on."""

    mask: str
    slots: tuple[Slot, ...]
    vectors: tuple[Vector, ...]
    causal: bool
    threads: int = THREADS

    def as_json(self) -> dict[str, object]:
        return {
            "kernel": "prep",
            "mask": self.mask,
            "inputs": {s.name: s.type for s in self.slots},
            "vectors": list(self.vectors),
            "causal": self.causal,
            "threads": self.threads,
        }

    def text(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.type}" for s in self.slots) or "none"
        vectors = ", ".join(self.vectors) or "none"
        lines = ("kernel = prep", f"mask = {self.mask}", f"inputs = {inputs}", f"vectors = {vectors}")
        return "\n".join((*lines, f"causal = {str(self.causal).lower()}", f"threads = {self.threads}", ""))


def prep_spec(fn: MaskFn, code: ColumnCode) -> PrepSpec:
    return PrepSpec(fn.name, code.slots, code.vectors, code.causal)


def prep_kernels(request: Request) -> tuple[Kernel, ...]:
    """The rendered kernel. Raises M609 for arithmetic beyond 64 bits, M610 for a mask without an interval program."""
    if request.program is None:
        hint = "it runs all the same: its vectors are folded from the data when they are bound"
        raise error("M610", f"`{request.fn.name}` was not lowered, so no kernel can compute its vectors", request.fn.span, hint)
    code = column_code(request.fn, request.program)
    return (Kernel("prep", "prep", prep_spec(request.fn, code), prep_source(code)),)


def prep_source(code: ColumnCode) -> CudaSource:
    size = ctypes.sizeof(arguments_type(code.slots, code.vectors))
    return render("prep.cu.j2", columns=code.text, vectors=code.vectors, threads=THREADS, bytes=size)


@cache
def inputs_type(slots: tuple[Slot, ...]) -> type[ctypes.Structure]:
    """`struct MaskInputs`: nq, nk, then the slots as `{name}_`."""
    members = [("nq", ctypes.c_int), ("nk", ctypes.c_int), *((f"{s.name}_", _SLOT_TYPES[s.type]) for s in slots)]
    return type("MaskInputs", (ctypes.Structure,), {"_fields_": members})


@cache
def arguments_type(slots: tuple[Slot, ...], vectors: tuple[Vector, ...]) -> type[ctypes.Structure]:
    """`struct PrepArgs`: `in`, heads, block_kv, blocks, then three pointers a vector: itself, `_low`, `_high`."""
    sizes = [(name, ctypes.c_int) for name in ("heads", "block_kv", "blocks")]
    outputs = [(f"{v}{end}", ctypes.c_void_p) for v in vectors for end in ("", "_low", "_high")]
    return type("PrepArgs", (ctypes.Structure,), {"_fields_": [("in", inputs_type(slots)), *sizes, *outputs]})
