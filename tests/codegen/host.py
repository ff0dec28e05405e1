"""Generated text compiled as host C++, and that of mask columns run on tensors of the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.codegen.columns import ColumnCode
from maskc.codegen.prep import THREADS
from maskc.codegen.render import CudaSource
from maskc.ir.nodes import InputKind, MaskFn
from maskc.ir.reference import Env
from maskc.runtime.prep import pack_inputs

CUDA = Path(__file__).with_name("cuda_on_host.h").read_text()
"""As much of CUDA as whole kernels use, on threads of the CPU."""
ONE_THREAD = """
#include <algorithm>
#include <cstdint>
using std::max;
using std::min;
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct Index { u32 x; };
[[maybe_unused]] static Index threadIdx, blockIdx, gridDim;
#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
"""
"""As much of CUDA as parts of kernels use that a test calls thread by thread."""
_COLUMNS = """
namespace {name} {{
{text}
}}
extern "C" void columns_{name}(const {name}::MaskInputs* in, int batch, int heads, int* out) {{
  for (int b = 0; b < batch; ++b)
    for (int h = 0; h < heads; ++h)
      for (int k = 0; k < in->nk; ++k) {{
        const Bounds c = {name}::mask_column(*in, b, h, k);
        *out++ = c.lts, *out++ = c.lte, *out++ = c.uts, *out++ = c.ute;
      }}
}}
"""
_KERNEL = """
namespace {name} {{
{text}
}}
extern "C" void launch_{name}(const {name}::PrepArgs* args, int blocks, int threads) {{
  run_blocks({name}::prep, *args, blocks, threads);
}}
"""


@dataclass(frozen=True)
class HostColumns:
    """Compiled columns by name."""

    library: ctypes.CDLL
    codes: Mapping[str, ColumnCode]

    def __call__(self, name: str, inputs: BoundInputs, nq: int, nk: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
        """int32 [4, batch, heads, nk]: lts, lte, uts, ute."""
        packed = pack_inputs(self.codes[name].slots, inputs, nq, nk)
        out = torch.full((batch, heads, nk, 4), -1, dtype=torch.int32)
        getattr(self.library, f"columns_{name}")(ctypes.byref(packed), batch, heads, ctypes.c_void_p(out.data_ptr()))
        return out.permute(3, 0, 1, 2)


def compile_columns(codes: Mapping[str, ColumnCode], folder: Path) -> HostColumns:
    """The columns of many masks in one translation unit."""
    text = "".join(_COLUMNS.format(name=name, text=code.text) for name, code in codes.items())
    return HostColumns(compile_on_host(_header() + text, folder), codes)


def compile_kernels(sources: Mapping[str, CudaSource], folder: Path) -> Callable[[str, ctypes.Structure, int], None]:
    """Whole preparation kernels, their threads being threads of the CPU: (name, arguments, blocks) runs one."""
    parts = [CUDA, _header()]
    for name, source in sources.items():
        parts.append(_KERNEL.format(name=name, text=in_one_text(source.text)))
    library = compile_on_host("\n".join(parts), folder)

    def run(name: str, arguments: ctypes.Structure, blocks: int) -> None:
        getattr(library, f"launch_{name}")(ctypes.byref(arguments), blocks, THREADS)

    return run


def _header() -> str:
    return in_one_text(files("maskc").joinpath("templates/device/columns.cuh").read_text())


def in_one_text(*headers: str) -> str:
    """Headers and kernels one after the other, without pragmas, includes of each other, and linkage of kernels."""
    lines = [line for text in headers for line in text.splitlines() if not line.lstrip().startswith(('#include "', "#pragma"))]
    return "\n".join(lines).replace('extern "C" __global__', "__global__")


def compile_on_host(text: str, folder: Path) -> ctypes.CDLL:
    """As a shared library; warnings and undefined behaviour are errors. Skips, loudly, without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NO C++ COMPILER: generated text is not run on the host here")
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(text)
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-parameter", "-Wno-tautological-compare"]
    checks = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    flags = ["-std=c++20", "-O0", *warnings, *checks, "-shared", "-fPIC", "-pthread"]
    done = subprocess.run([compiler, *flags, "-o", library, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def bound_inputs(fn: MaskFn, items: Sequence[Sequence[Env]]) -> BoundInputs:
    """`items[b][h]` as one batch: tables padded with empty segments, scalars per item where they differ."""
    out = BoundInputs(torch.device("cpu"))
    for decl in fn.inputs:
        name = decl.name
        match decl.kind:
            case InputKind.SEGMENTS | InputKind.SPANS:
                out.sets[name] = _table([heads[0].sets[name] for heads in items])
            case InputKind.INT if decl.per is None:
                values = [heads[0].scalars[name] for heads in items]
                same = all(v == values[0] for v in values)
                out.scalars[name] = values[0] if same else torch.tensor(values, dtype=torch.int32)
            case InputKind.INT | InputKind.BOOL:
                dtype = torch.bool if decl.kind is InputKind.BOOL else torch.int32
                if decl.per == "head":
                    rows = [[[heads[h].vectors[name][h]] for h in range(len(heads))] for heads in items]
                else:
                    rows = [[list(env.vectors[name]) for env in heads] for heads in items]
                longest = max(len(r) for item in rows for r in item)
                padded = [[r + [r[-1] if r else 0] * (longest - len(r)) for r in item] for item in rows]
                out.vectors[name] = torch.tensor(padded, dtype=dtype).reshape(len(items), len(items[0]), longest)
            case InputKind.BLOCKS:
                raise AssertionError("no block tables here")
    return out


def _table(sets: Sequence[Sequence[tuple[int, int]]]) -> SegmentTable:
    size = max(1, *(len(s) for s in sets)) if len(sets) > 1 else max(1, len(sets[0]))
    rows = [[*s, *[(s[-1][1] if s else 0,) * 2] * (size - len(s))] for s in sets]
    both = torch.tensor(rows, dtype=torch.int32).movedim(2, 0).contiguous()
    return SegmentTable(both, torch.tensor([len(s) for s in sets], dtype=torch.int32))
