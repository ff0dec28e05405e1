"""The kernels that the suite runs, rendered without a GPU, so that they are compiled side by side before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache

import torch

import maskc
from benchmarks.kernels import BOTH, attention
from benchmarks.masks import mask_case
from maskc.binding.bound import BoundMask
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.render import CudaSource
from maskc.codegen.reorder import take_keys_source
from maskc.codegen.spec import MaskForm
from maskc.runtime import reorder
from maskc.runtime.hopper import DTYPES, mask_form
from tests.gpu import check
from tests.gpu.cases import Case
from tests.gpu.inputs import random_vectors, suite_mask


def preparation(mask: maskc.CompiledMask) -> Iterator[CudaSource]:
    """The kernel that makes the vectors of a mask on the GPU; none where nothing or only the data decide."""
    if mask.program is not None and mask.program.vectors:
        yield from (kernel.source for kernel in KERNELS["prep"](Request(mask.fn, mask.program)))


def built(mask: maskc.CompiledMask, head_dim: int = 128, *, deterministic: bool = False) -> Iterator[CudaSource]:
    """All kernels that `maskc compile` makes of a mask."""
    request = Request(mask.fn, mask.program, head_dim=head_dim, deterministic=deterministic)
    for render in KERNELS.values():
        yield from (kernel.source for kernel in render(request))


# ---------------------------------------------------------------- the cover


def sources(case: Case) -> Iterator[CudaSource]:
    """Kernels of a case; none where the mask cannot have the shape."""
    made = _form(replace(case, direction="fwd", deterministic=False))
    if made is None:
        return
    form, moved = made
    directions = BOTH if case.direction == "bwd" else ("fwd",)
    dtype = DTYPES[check.DTYPES[case.dtype]]
    yield from attention(form, case.head_dim, dtype, directions=directions, deterministic=(case.deterministic,))
    if moved:
        yield take_keys_source()


@lru_cache(maxsize=1)
def _form(case: Case) -> tuple[MaskForm, bool] | None:
    """What the case's kernels get, by vectors of the same or a smaller size; whether its keys are moved."""
    rng = random.Random(case.seed)
    kind, name = case.mask.split(":")
    if kind == "form":
        return mask_form(random_vectors(name, min(case.nq, 300), min(case.nk, 300), 1, 1, case.seed, "cpu")), False
    if kind == "suite":
        made = suite_mask(name, case.nq, case.nk, rng)
        return None if made is None else _moved(_bound(str(made[0]), made[1], case), case)
    if case.nq < 8:
        return None
    bench = mask_case(name, case.nq, heads=case.mask_heads)
    return _moved(_bound(bench.mask, dict(bench.inputs), case), case)


def _bound(mask: str, inputs: dict[str, object], case: Case) -> BoundMask:
    return _compiled(mask).bind(nq=case.nq, nk=case.nk, **inputs)


_compiled = cache(maskc.compile)


def _moved(spec: BoundMask, case: Case) -> tuple[MaskForm, bool]:
    """As `maskc.run` has it: of keys in another order where that pays."""
    vectors = spec.vectors()
    q, k = (torch.empty(1, n, h, 1, device="meta") for n, h in ((case.nq, case.heads), (case.nk, case.kv_heads)))
    order = reorder.reordered(spec, vectors, q, k)
    return (mask_form(vectors), False) if order is None else (mask_form(order.vectors), True)
