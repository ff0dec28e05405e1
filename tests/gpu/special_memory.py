"""Forward kernel, memory: guarded borders, what surrounds the operands, and memcheck where the tool is installed."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.kernels import variant
from maskc.codegen.forward import forward_spec
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import HEAD_DIMS
from maskc.runtime import hopper, mask_tables
from tests.gpu.forward import operands, verify
from tests.gpu.inputs import random_vectors

FORMS = ("causal+lts", "lts+lte+uts+ute", "blocks", "empty_rows")


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [("memory/guards", _guards), ("memory/compute-sanitizer", _sanitizer)]


def sources() -> Iterator[CudaSource]:
    for form in FORMS:
        mask = hopper.mask_form(random_vectors(form, 64, 64, 1, 1, 0, "cpu"))
        for head_dim in HEAD_DIMS:
            yield from variant(forward_spec(mask, head_dim, "bf16"))


class _Guarded:
    """torch, except that `empty` carves tensors out of larger ones with a known border."""

    border = 4096

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, sizes: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((2 * self.border + -(-size // 256) * 256,), 0x5A, dtype=torch.uint8, device=device)
        self.made.append(whole)
        whole[self.border : self.border + size] = 0xFF  # NaN in every floating type
        return whole[self.border : self.border + size].view(dtype).view(shape)

    def touched(self) -> bool:
        return any((w[: self.border] != 0x5A).any() or (w[-self.border :] != 0x5A).any() for w in self.made)


def _inside_nan(shape: tuple[int, ...]) -> torch.Tensor:
    """A strided tensor whose surroundings, between its rows too, are NaN."""
    b, s, h, d = shape
    whole = torch.full((b + 2, s + 2, h + 2, 2 * d), math.nan, device="cuda", dtype=torch.bfloat16)
    whole[1:-1, 1:-1, 1:-1, :d] = torch.randn(shape, device="cuda")
    return whole[1:-1, 1:-1, 1:-1, :d]


def _guards() -> str:
    """Nothing is read outside the tensors and nothing written outside the results."""
    for form in FORMS:
        for nq, nk, dim in ((1, 1, 64), (130, 257, 128), (193, 65, 256), (1000, 1111, 64)):
            v = random_vectors(form, nq, nk, 2, 1, nq, "cuda")
            qkv = _inside_nan((2, nq, 6, dim)), _inside_nan((2, nk, 2, dim)), _inside_nan((2, nk, 2, dim))
            guarded = _Guarded()
            mask_tables._known.clear()  # what was made before allocates otherwise
            hopper.torch = mask_tables.torch = guarded  # type: ignore[assignment]
            try:
                out, lse = hopper.forward(v, *qkv, dim**-0.5)
            finally:
                hopper.torch = mask_tables.torch = torch
            if guarded.touched():
                return f"{form} {nq}x{nk} head dim {dim}: wrote outside its tensors"
            if problem := verify(v, qkv, out, lse):
                return f"{form} {nq}x{nk} head dim {dim}: {problem}"
    return ""


def _sanitizer() -> str:
    """memcheck over `main` below; importing torch under the tool takes most of the time.

    API errors are not memory errors: the driver bindings ask for entry points that an older driver does not have.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return "skip: compute-sanitizer is not installed"
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
    command = [tool, *options, sys.executable, "-m", "tests.gpu.special_memory"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=85, check=False)
    except subprocess.TimeoutExpired:
        return "skip: not finished within 85 s"
    return "" if done.returncode == 0 else done.stdout[-600:] + done.stderr[-300:]


def main() -> None:
    """A few small calls that touch every role and every ragged edge."""
    for form, nq, nk, dim in (("causal+lts", 130, 257, 128), ("lts+lte+uts+ute", 200, 65, 64), ("empty_rows", 70, 300, 256)):
        v = random_vectors(form, nq, nk, 1, 1, 1, "cuda")
        hopper.forward(v, *operands(1, nq, nk, 2, 1, dim), dim**-0.5)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
