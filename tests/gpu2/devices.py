"""Two devices in one process: tensors on the second while the first is current, and both in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import maskc
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.render import CudaSource
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import hopper
from tests.gpu.inputs import suite_mask
from tests.gpu2 import place

MASKS = ("02_causal", "05_doc_full", "06_share_question", "14_sinks_window", "23_fixed_sparse")
HEAD_DIM = 64
Results = tuple[Tensor, ...]


def checks() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((f"devices/other device/{name}", partial(other_device, name)) for name in MASKS),
        *((f"devices/in turn/{name}", partial(in_turn, name)) for name in MASKS),
        ("devices/mixed", mixed),
    ]


def sources() -> Iterator[CudaSource]:
    for mask in MASKS:
        found = suite_mask(mask, 700, 700, random.Random(1))
        assert found is not None
        spec = maskc.compile(found[0]).bind(nq=700, nk=700, **found[1])
        for kernel in KERNELS["prep"](Request(spec.compiled.fn, spec.compiled.program)):
            yield kernel.source
        form = hopper.mask_form(spec.vectors(700, 700))
        planned = schedule_spec(form, HEAD_DIM)
        yield from [schedule_source(planned)] if planned.packed else []
        yield forward_source(forward_spec(form, HEAD_DIM, "bf16"))
        yield select_backward(form, HEAD_DIM, "bf16", deterministic=True).source()


def names() -> tuple[str, str]:
    return ("cuda:0", "cuda:1") if place.gpus() > 1 else ("cpu", "cpu")


def call(mask: str, device: str, seed: int, n: int = 700) -> Results:
    """(out, lse, dq, dk, dv) on the host; inputs of the mask lie where q does."""
    found = suite_mask(mask, n, n, random.Random(seed))
    assert found is not None
    path, inputs = found
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    spec = maskc.compile(path).bind(nq=n, nk=n, **moved)
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, n, h, HEAD_DIM, generator=g).bfloat16().to(device) for h in (4, 2, 2, 4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = maskc.run(spec, q, k, v, return_lse=True, deterministic=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return tuple(t.detach().cpu() for t in (out, lse, *grads))


def different(a: Results, b: Results) -> str:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), a, b, strict=True):
        if not torch.equal(x, y):
            return f"{name} differs between the devices by {(x.float() - y.float()).abs().max().item():.2e}"
    return "" if torch.isfinite(a[0]).all() else "NaN in the output"


def other_device(mask: str) -> str:
    """The second device's result, while the first is current, is the first's."""
    first, second = names()
    return different(call(mask, first, 1), call(mask, second, 1))


def in_turn(mask: str) -> str:
    """Calls go to one device after the other without a pause, as a pipeline of two stages does."""
    results = [call(mask, names()[i % 2], 2 + i // 2) for i in range(8)]
    return next((found for i in range(0, 8, 2) if (found := different(results[i], results[i + 1]))), "")


def mixed() -> str:
    """q on one device and k on another is refused before anything runs."""
    first, second = names()
    if first == second:
        return ""
    q, k = (torch.zeros(1, 128, 2, 64, device=d, dtype=torch.bfloat16) for d in (first, second))
    try:
        maskc.run("std:causal", q, k, k)
    except maskc.MaskcError as e:
        return "" if e.code == "M504" else str(e)
    return "no error"
