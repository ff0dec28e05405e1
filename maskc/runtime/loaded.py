"""Masks that were loaded with their kernels (`maskc.load`): calls that need any other kernel are refused."""

from __future__ import annotations

import torch

from maskc.boundary import BoundaryVectors
from maskc.codegen.bundle import Bundle
from maskc.codegen.forward import forward_spec, schedule_spec
from maskc.codegen.kernels import KernelSpec
from maskc.codegen.spec_bwd import select_backward
from maskc.diagnostics import error
from maskc.runtime.hopper import DTYPES, mask_form


def check_kernels(bundle: Bundle, v: BoundaryVectors, q: torch.Tensor, *, gradients: bool, deterministic: bool) -> None:
    """Raise M612 unless the bundle holds the kernels of this call on a Hopper GPU; `gradients`: of its backward too."""
    form, head_dim, dtype = mask_form(v), q.shape[3], DTYPES[q.dtype]
    forward = forward_spec(form, head_dim, dtype)
    wanted: list[tuple[str, KernelSpec]] = [("fwd", forward)]
    if forward.packed:
        wanted.append(("sched", schedule_spec(form, head_dim)))
    if gradients:
        wanted.append(("bwd", select_backward(form, head_dim, dtype, deterministic=deterministic)))
    for name, spec in wanted:
        if not bundle.holds(name, spec):
            held = ", ".join(
                f"{k.name} {k.spec.get('form', '')} head dim {k.spec['head_dim']} {k.spec['dtype']}"
                for k in bundle.kernels
                if "head_dim" in k.spec
            )
            kind = "deterministic " if name == "bwd" and deterministic else ""
            raise error(
                "M612",
                f"{bundle.folder} holds no {kind}kernel `{name}` for head dim {head_dim}, {dtype}, mask form {form}",
                None,
                "build it: maskc compile FILE -o DIR --head-dim D --dtype T, or maskc.compile(FILE), which compiles as it needs",
                ("holds", held or "no attention kernel"),
            )


def refuse_group(bundle: Bundle) -> None:
    """Raise M612: the parts of a mask that ranks work on have forms of their own."""
    hint = "use maskc.compile(FILE) here: it compiles the kernels that the plan needs"
    raise error("M612", f"{bundle.folder} holds kernels for one GPU, not for a group of ranks", None, hint)
