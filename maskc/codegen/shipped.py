"""The attention kernels that a recorded GPU run vouches for: every variant, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from maskc.codegen.exchange import exchange_source
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import OPTIONS
from maskc.codegen.render import CudaSource
from maskc.codegen.reorder import take_keys_source
from maskc.codegen.spec import HEAD_DIMS, Dtype, MaskForm, OutDtype
from maskc.codegen.spec_bwd import select_backward

FORMS: tuple[MaskForm, ...] = (
    MaskForm(),
    MaskForm(causal=True),
    MaskForm(causal=True, lts=True),
    MaskForm(causal=True, ute=True),
    MaskForm(causal=True, lts=True, uts=True, ute=True),
    MaskForm(lts=True),
    MaskForm(ute=True),
    MaskForm(lts=True, ute=True),
    MaskForm(lts=True, lte=True, ute=True),
    MaskForm(lts=True, uts=True, ute=True),
    MaskForm(lts=True, lte=True, uts=True, ute=True),
    MaskForm(lts=True, lte=True, uts=True, ute=True, diag=True),
    MaskForm(causal=True, lts=True, blocks=True),
    MaskForm(lts=True, diag=True),
)


def shipped() -> Iterator[tuple[str, CudaSource, tuple[str, ...]]]:
    """(name, rendered source, NVRTC options) of each variant of attention on one GPU."""
    yield "take_keys", take_keys_source(), OPTIONS
    for form, head_dim in product(FORMS, HEAD_DIMS):
        planned = schedule_spec(form, head_dim)
        if planned.packed:
            yield f"{planned}-schedule", schedule_source(planned), OPTIONS
    for form, head_dim, dtype in product(FORMS, HEAD_DIMS, get_args(Dtype)):
        for out in get_args(OutDtype):
            spec = forward_spec(form, head_dim, dtype, out)
            yield f"{spec}-{out}", forward_source(spec), OPTIONS
        for deterministic in (False, True):
            backward = select_backward(form, head_dim, dtype, deterministic=deterministic)
            yield str(backward), backward.source(), OPTIONS


def shipped_gated() -> Iterator[tuple[str, CudaSource, tuple[str, ...]]]:
    """The same of attention beside copies of its keys, and of the kernels around it."""
    yield "exchange", exchange_source(), OPTIONS
    for form, head_dim, dtype in product(FORMS, HEAD_DIMS, get_args(Dtype)):
        spec = replace(forward_spec(form, head_dim, dtype), gated=True)
        yield str(spec), forward_source(spec), OPTIONS
        for deterministic in (False, True):
            backward = replace(select_backward(form, head_dim, dtype, deterministic=deterministic), gated=True)
            yield str(backward), backward.source(), OPTIONS
