"""The attention kernels that a mask's own vectors, causal flag and block table call for."""

from __future__ import annotations

from typing import get_args

from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.kernels import Kernel, Request
from maskc.codegen.spec import HEAD_DIMS, Dtype, MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.diagnostics import error


def forward_kernels(request: Request) -> tuple[Kernel, ...]:
    """The forward kernel, and before it the one that makes its schedule where the mask has data to schedule by."""
    spec = forward_spec(form(request), head_dim(request), dtype(request))
    forward = Kernel("fwd", spec.name, spec, forward_source(spec), spec.shared_bytes)
    if not spec.packed:
        return (forward,)
    planned = schedule_spec(form(request), head_dim(request))
    return Kernel("sched", "row_runs", planned, schedule_source(planned)), forward


def backward_kernels(request: Request) -> tuple[Kernel, ...]:
    """The backward kernel; its source also holds those that run before and after it."""
    spec = select_backward(form(request), head_dim(request), dtype(request), deterministic=request.deterministic)
    return (Kernel("bwd", "attn_bwd", spec, spec.source(), spec.shared_bytes),)


def form(request: Request) -> MaskForm:
    """What the proof left; all four vectors of a mask that only its data decide."""
    if request.program is None:
        return MaskForm(True, True, True, True, blocks=bool(request.fn.tables))
    present = dict.fromkeys(request.program.vectors, True)
    return MaskForm(**present, causal=request.program.causal, blocks=bool(request.fn.tables))


def head_dim(request: Request) -> int:
    if request.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise error("M611", f"no attention kernel has head dim {request.head_dim}", None, f"there are {known}")
    return request.head_dim


def dtype(request: Request) -> Dtype:
    for name in get_args(Dtype):
        if request.dtype == name:
            return name  # type: ignore[no-any-return]
    raise error("M611", f"no attention kernel has dtype {request.dtype}", None, f"there are {', '.join(get_args(Dtype))}")
