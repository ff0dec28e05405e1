"""The kernels of a mask form, rendered without a GPU, so that they are compiled side by side before they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product

from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import Dtype, KernelSpec, MaskForm, OutDtype
from maskc.codegen.spec_bwd import select_backward

BOTH = ("fwd", "bwd")


def compile_all(sources: Iterable[CudaSource]) -> None:
    """Fills the cache in threads; equal sources once. Raises M601, M602."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_cubin, dict.fromkeys(sources)))


def variant(spec: KernelSpec) -> Iterator[CudaSource]:
    """A forward variant, and what makes its schedule where it has one."""
    yield forward_source(spec)
    if spec.packed:
        yield schedule_source(spec)


@cache
def attention(
    form: MaskForm,
    head_dim: int,
    dtype: Dtype = "bf16",
    *,
    directions: tuple[str, ...] = BOTH,
    outs: tuple[OutDtype, ...] = ("input",),
    deterministic: tuple[bool, ...] = (False,),
    gated: tuple[bool, ...] = (False,),
) -> tuple[CudaSource, ...]:
    """The kernels of a mask form, as the backend chooses them; `gated`: also for the overlap of attention and copies."""
    made = []
    if "fwd" in directions:
        planned = schedule_spec(form, head_dim)
        made += [schedule_source(planned)] if planned.packed else []
        specs = [forward_spec(form, head_dim, dtype, out) for out in outs]
        made += [forward_source(replace(spec, gated=g)) for spec, g in product(specs, gated)]
    if "bwd" in directions:
        backward = [select_backward(form, head_dim, dtype, deterministic=mode) for mode in deterministic]
        made += [replace(spec, gated=g).source() for spec, g in product(backward, gated)]
    return tuple(made)
