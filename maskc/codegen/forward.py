"""The forward kernel: which KernelSpec a mask form gets by default, and its CUDA source."""

from __future__ import annotations

from functools import cache

from maskc.codegen.render import CudaSource, render
from maskc.codegen.roles import forward_barriers, forward_named, forward_roles
from maskc.codegen.spec import STATES, TAGS, Dtype, KernelSpec, MaskForm, OutDtype


@cache
def forward_spec(form: MaskForm, head_dim: int, dtype: Dtype, out_dtype: OutDtype = "input") -> KernelSpec:
    """The variant that runs a mask of this form; docs/tuning.md holds the measurements behind the choices."""
    headroom = 8 if dtype == "bf16" else 4  # what float16 has no bits for would be lost
    if head_dim == 256:  # what fits shared memory
        return KernelSpec(head_dim, dtype, out_dtype, form, block_kv=64, q_slots=1, headroom_log2=headroom)
    if form.blocks:  # block tables come in blocks of 128 rows, which 192 does not divide
        return KernelSpec(head_dim, dtype, out_dtype, form, ping_pong=head_dim == 64, chain=True, headroom_log2=headroom)
    row_groups = 1 if form.closed else 3  # masks with data have short runs and edges
    if head_dim == 64:
        return KernelSpec(head_dim, dtype, out_dtype, form, 192, 128, 3, row_groups, headroom_log2=headroom)
    block_kv = 80 if form.closed else 64
    return KernelSpec(
        head_dim, dtype, out_dtype, form, 192, block_kv, 3, row_groups, k_slots=3, v_slots=3, headroom_log2=headroom
    )


def schedule_spec(form: MaskForm, head_dim: int) -> KernelSpec:
    """The variant whose schedule serves every dtype of this form and head dim."""
    return forward_spec(form, head_dim, "bf16")


def forward_source(spec: KernelSpec) -> CudaSource:
    """attn_fwd.cu.j2 for this spec: one kernel named `spec.name`."""
    named = {b.name: b.index for b in forward_named(spec)}
    return render(
        "attn_fwd.cu.j2",
        spec=spec,
        tags=TAGS,
        states=STATES,
        roles=forward_roles(spec),
        barriers=forward_barriers(spec),
        named=forward_named(spec),
        turn=named.get("turn", 0),
        group_bar=named["group"],
    )


def schedule_source(spec: KernelSpec) -> CudaSource:
    """schedule.cu.j2 for this spec: kernels kv_bounds, row_runs and row_order."""
    return render("schedule.cu.j2", spec=spec, tags=TAGS)
