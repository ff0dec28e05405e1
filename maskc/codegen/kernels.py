"""The kernels that maskc can generate for a mask: a table of name -> how to render them, and the step to a cubin.

Adding a kernel is adding a line to `KERNELS`. A name may stand for several translation units that run one after the
other, or for fewer where a mask does not need them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from maskc.codegen.nvrtc import OPTIONS, Cubin, compile_cubin
from maskc.codegen.render import CudaSource
from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import MaskFn


class KernelSpec(Protocol):
    """Every number that a template uses, as data."""

    def text(self) -> str:
        """One `name = value` a line: the `--emit spec` form."""

    def as_json(self) -> dict[str, object]:
        """The same as plain data."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to specialise a kernel to. `program` is None for a mask that only its data decide (W301)."""

    fn: MaskFn
    program: IntervalProgram | None
    head_dim: int = 128
    dtype: str = "bf16"
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rendered kernel: `entry` is its function in `source`, `dynamic_shared` the bytes that a launch asks for."""

    name: str
    entry: str
    spec: KernelSpec
    source: CudaSource
    dynamic_shared: int = 0
    options: tuple[str, ...] = OPTIONS

    def compile(self) -> Cubin:
        """Through NVRTC and the cache. Raises M601, M602."""
        return compile_cubin(self.source, options=self.options)


Renderer = Callable[[Request], tuple[Kernel, ...]]


def _in(module: str, function: str) -> Renderer:
    """A renderer that is imported when it is first used, so that one kernel does not load the others' modules."""

    def render(request: Request) -> tuple[Kernel, ...]:
        return cast(Renderer, getattr(import_module(module), function))(request)

    return render


KERNELS: Mapping[str, Renderer] = {
    "prep": _in("maskc.codegen.prep", "prep_kernels"),
    "fwd": _in("maskc.codegen.attention", "forward_kernels"),
    "bwd": _in("maskc.codegen.attention", "backward_kernels"),
}


def compile_all(kernels: Sequence[Kernel]) -> tuple[Cubin, ...]:
    """The cubins of several kernels, compiled side by side (NVRTC lets other threads run). Raises M601, M602."""
    if len(kernels) < 2:
        return tuple(kernel.compile() for kernel in kernels)
    with ThreadPoolExecutor(max_workers=min(len(kernels), os.cpu_count() or 1)) as pool:
        return tuple(pool.map(Kernel.compile, kernels))
