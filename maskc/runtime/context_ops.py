"""The operators `maskc::context_forward` and `maskc::context_backward`: a context-parallel call inside a compiled graph.

Eager calls do not come through here. Masks and plans enter as handles, so a new batch does not recompile anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskc.binding.modes import lasting
from maskc.handles import held
from maskc.runtime import context_parallel, executor
from maskc.runtime.comm import Peer
from maskc.runtime.merge import accumulator
from maskc.runtime.plan import AttentionPlan

_REST = "Tensor spec, Tensor? plan, str group, str strategy, float scale, bool deterministic, str backend, bool recording"
torch.library.define("maskc::context_forward", f"(Tensor q, Tensor k, Tensor val, {_REST}) -> (Tensor, Tensor)")
torch.library.define(
    "maskc::context_backward",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor val, Tensor out, Tensor lse, {_REST}) -> (Tensor, Tensor, Tensor)",
)


def attention(
    spec: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    plan: AttentionPlan | None,
    strategy: str,
    scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as a graph sees them; the arguments of `context_parallel.run`, with the scale known."""
    recording = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    handle = None if plan is None else plan.handle
    out, lse = torch.ops.maskc.context_forward(
        q, k, v, spec.handle, handle, group.group_name, strategy, scale, deterministic, backend, recording
    )
    return out, lse


def _group(name: str) -> Any:
    """The process group of this name, as torch's own functional collectives find it."""
    from torch.distributed import distributed_c10d as c10d

    return getattr(c10d, "_resolve_process_group")(name)  # noqa: B009  (private, but the only way from a name)


def _call(q: Tensor, k: Tensor, v: Tensor, spec: Tensor, plan: Tensor | None, group: str, *rest: Any) -> executor.Call:
    peer = Peer.of(_group(group))
    mask = held(spec)
    made = context_parallel.contiguous_plan(mask, q, k, peer) if plan is None else held(plan)
    return context_parallel.agreed_call(mask, q, k, v, peer, made, *rest)


@lasting
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return executor.forward(_call(q, k, v, *rest), q, k, v)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return executor.backward(_call(q, k, v, *rest), q, k, v, out, lse, dout, dlse)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=accumulator(q.dtype))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, spec, plan, *rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, spec, plan)
    ctx.rest = rest


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, spec, plan = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    grads = torch.ops.maskc.context_backward(dout, dlse, q, k, v, out, lse, spec, plan, *ctx.rest)
    return *grads, None, None, *(None for _ in ctx.rest)


for _device in ("CPU", "CUDA"):
    torch.library.impl("maskc::context_forward", _device, _forward)
    torch.library.impl("maskc::context_backward", _device, _backward)
torch.library.register_fake("maskc::context_forward", _fake_forward)
torch.library.register_fake("maskc::context_backward", _fake_backward)
torch.library.register_autograd("maskc::context_forward", _differentiate, setup_context=_save)
