"""The preparation kernel on a GPU: the vectors and block tables that torch makes of the same inputs, bit by bit.

And a mask that was loaded with its kernels, where NVRTC is out of reach.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

import maskc
from maskc.binding.streams import Kept
from maskc.boundary import BoundaryVectors
from maskc.codegen.bundle import write_bundle
from maskc.codegen.kernels import KERNELS, Request, compile_all
from maskc.codegen.render import CudaSource
from maskc.runtime import prep
from maskc.tiles import BlockMinMax, block_minmax
from tests.gpu import warm
from tests.gpu.inputs import NAMES, suite_mask

T = TypeVar("T")


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((f"prep/{name}", partial(_suite, name)) for name in NAMES),
        ("prep/block-tables", _tables),
        ("prep/graph-capture", _capture),
        ("load/without-nvrtc", _loaded),
    ]


def sources() -> Iterator[CudaSource]:
    for name in NAMES:
        made = suite_mask(name, 300, 300, random.Random(name))
        if made is not None:
            yield from warm.preparation(maskc.compile(str(made[0])))
    yield from warm.built(maskc.compile("std:doc_prefix"), deterministic=True)


def _suite(name: str) -> str:
    rng = random.Random(name)
    for nq, nk in ((1, 1), (129, 129), (300, 300), (257, 513), (4098, 4098)):
        made = suite_mask(name, nq, nk, rng)
        if made is None:
            continue
        bound = maskc.compile(str(made[0])).bind(nq=nq, nk=nk, **made[1])
        on_gpu = replace(bound, inputs=to_gpu(bound.inputs), _vectors=Kept(), _schedules=Kept())
        got = on_gpu.vectors(nq, nk, prepare=prep.vectors)
        if problem := differences(got, bound.vectors(nq, nk)):
            return f"{nq} x {nk}: {problem}"
    return ""


def _tables() -> str:
    bound, n = _documents()
    inputs = to_gpu(bound.inputs)
    for block_kv in (16, 64, 128, 192, 1000):
        made = prep.prepare(bound.compiled, inputs, n, n, block_kv=block_kv)
        want = block_minmax(made.vectors, block_kv)
        if problem := differences(made.vectors, bound.vectors(n, n)) or differences(made.extremes, want):
            return f"block_kv {block_kv}: {problem}"
    return ""


def _capture() -> str:
    """A captured launch reads the inputs anew at every replay."""
    bound, n = _documents()
    inputs = to_gpu(bound.inputs)
    prep.prepare(bound.compiled, inputs, n, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = prep.prepare(bound.compiled, inputs, n, n)
    other, _ = _documents(seed=2)
    for name, table in inputs.sets.items():
        for side in ("starts", "ends"):
            getattr(table, side).copy_(getattr(other.inputs.sets[name], side))
    inputs.vectors["prefix"].copy_(other.inputs.vectors["prefix"])
    graph.replay()
    return differences(made.vectors, other.vectors(n, n))


_CHILD = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
import torch, maskc
from tests.gpu.special_prep import attend
torch.save(attend(maskc.load(sys.argv[1])), sys.argv[2])
"""


def _loaded() -> str:
    """Kernels of a folder give, without NVRTC and with an empty cache, the bits that compiling them gives."""
    mask = maskc.compile("std:doc_prefix")
    request = Request(mask.fn, mask.program, deterministic=True)
    with tempfile.TemporaryDirectory() as folder:
        kernels = [kernel for render in KERNELS.values() for kernel in render(request)]
        built = list(zip(kernels, compile_all(kernels), strict=True))
        write_bundle(Path(folder), mask.fn, mask.program, built, maskc.__version__)
        result = Path(folder, "result.pt")
        environment = {**os.environ, "MASKC_CACHE_DIR": str(Path(folder, "cache"))}
        command = [sys.executable, "-c", _CHILD, folder, str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr[-300:]
        found = torch.load(result)
    for name, wanted in attend(mask).items():
        if not torch.equal(found[name], wanted):
            return f"{name} differs"
    return ""


def attend(mask: maskc.CompiledMask) -> dict[str, torch.Tensor]:
    """Output and gradients of one call whose inputs, and so whose vectors, are made on the GPU."""
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1000, 4, 128, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    lengths = torch.tensor([300, 1, 699], device="cuda")
    bound = mask.bind(doc=maskc.segments(lengths=lengths), prefix=torch.tensor([10, 0, 200], device="cuda"))
    out = maskc.run(bound, q, k, v, deterministic=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "dq", "dk", "dv"), (x.detach().cpu() for x in (out, *grads)), strict=True))


def _documents(seed: int = 1) -> tuple[maskc.BoundMask, int]:
    """131001 keys in 1000 documents with prefixes."""
    n, rng = 131_001, random.Random(seed)
    marks = [0, *sorted(rng.sample(range(1, n), 999)), n]
    lengths = [b - a for a, b in pairwise(marks)]
    prefix = [rng.randint(0, length) for length in lengths]
    return maskc.compile("std:doc_prefix").bind(doc=maskc.segments(lengths=lengths), prefix=prefix), n


def to_gpu(value: T) -> T:
    """A copy whose tensors, and `device`, are on the GPU."""

    def moved(x: Any) -> Any:
        match x:
            case torch.Tensor():
                return x.cuda()
            case torch.device():
                return torch.device("cuda", torch.cuda.current_device())
            case dict():
                return {k: moved(v) for k, v in x.items()}
            case _ if is_dataclass(x):
                return replace(x, **{f.name: moved(getattr(x, f.name)) for f in fields(x)})
            case _:
                return x

    return moved(value)


def differences(got: BoundaryVectors | BlockMinMax, want: BoundaryVectors | BlockMinMax, at: str = "") -> str:
    """The first field, and the first index in it, at which two results differ."""
    for f in fields(want):
        a, b = getattr(got, f.name), getattr(want, f.name)
        if is_dataclass(a) and is_dataclass(b):
            if problem := differences(a, b, f"{at}{f.name}."):
                return problem
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{at}{f.name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
            wrong = (a.cpu() != b.cpu()).nonzero()
            if len(wrong):
                i = tuple(wrong[0].tolist())
                return f"{at}{f.name}{list(i)} is {a[i].item()}, not {b[i].item()} ({len(wrong)} differ)"
        elif a != b:
            return f"{at}{f.name} is {a}, not {b}"
    return ""
