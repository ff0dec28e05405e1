"""The torch operators `maskc::forward` and `maskc::backward`, and the three functions through which maskc calls them.

Masks travel as ordinary tensor arguments (the boundary vectors, the block table and what the backend's `schedule` made
of them), so nothing is registered by mask and any number of masks may be alive at once. The device of q chooses the
backend: CPU tensors run `maskc.runtime.cpu`, CUDA tensors `maskc.runtime.hopper`, imported on first use.

A plain eager call goes to the backend by an autograd function and not through the dispatcher, whose operators in Python
take the host longer than all of maskc. Whoever looks at operators (graphs, modes, tensor subclasses, transforms) gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import Diagnostic, error
from maskc.runtime.merge import accumulator

Schedule = tuple[Tensor, ...]
MODULES = {"cpu": "maskc.runtime.cpu", "hopper": "maskc.runtime.hopper", "flex": "maskc.runtime.flex"}
BY_DEVICE = {"cpu": "cpu", "cuda": "hopper"}


class Backend(Protocol):
    """What a backend module offers. `schedule` in the calls is what its own `schedule` returned, or None: make it."""

    def why_not(self, v: BoundaryVectors, q: Tensor, k: Tensor, val: Tensor) -> Diagnostic | None: ...

    def schedule(self, v: BoundaryVectors, head_dim: int) -> tuple[Tensor, ...]: ...

    def forward(
        self,
        v: BoundaryVectors,
        q: Tensor,
        k: Tensor,
        val: Tensor,
        scale: float,
        *,
        schedule: tuple[Tensor, ...] | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        v: BoundaryVectors,
        q: Tensor,
        k: Tensor,
        val: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        scale: float,
        deterministic: bool = False,
        *,
        schedule: tuple[Tensor, ...] | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@cache
def backend_module(name: str) -> Backend:
    """The module of a backend by its name in `MODULES`."""
    return cast(Backend, import_module(MODULES[name]))


def attention(
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
    schedule: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Differentiable (out, lse) of q [B, Sq, Hq, D], k [B, Sk, Hk, D], val [B, Sk, Hk, Dv]; see `maskc.runtime.cpu` for layouts.

    The vectors are on q's device; `schedule` is what the backend's `schedule` returned for them (empty: it makes it).
    """
    if looked_at(q, k, val):
        return cast(tuple[Tensor, Tensor], torch.ops.maskc.forward(q, k, val, *_flat(v, schedule), scale, deterministic))
    return Call(v, tuple(schedule), scale, deterministic)(q, k, val)


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def looked_at(*tensors: Tensor) -> bool:
    """Whether somebody wants to see the operators of a call on these tensors."""
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """`attention` under one mask for tensors at whose operators nobody looks; a backend may know better ways to run it."""

    v: BoundaryVectors
    schedule: Schedule
    scale: float
    deterministic: bool

    def __call__(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse), differentiable."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or val.requires_grad):
            return cast(tuple[Tensor, Tensor], _attention(q, k, val, self))
        return self.forward(q, k, val)

    def forward(self, q: Tensor, k: Tensor, val: Tensor) -> tuple[Tensor, Tensor]:
        """Outside autograd, as the next one."""
        return forward(self.v, q, k, val, self.scale, schedule=self.schedule or None)

    def backward(
        self, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        how = {"deterministic": self.deterministic, "schedule": self.schedule or None}
        return backward(self.v, q, k, val, out, lse, dout, dlse, self.scale, **how)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return type(None), ()  # kept with a mask for this process; a copy of the mask makes its own


def call_of(
    backend: str, v: BoundaryVectors, schedule: Schedule, scale: float, deterministic: bool, q: Tensor, k: Tensor
) -> Call:
    """A call that was checked, for tensors of these sizes."""
    if backend == "hopper" and q.numel() and k.numel():
        from maskc.runtime.prepared import Prepared

        return Prepared.of(v, schedule, scale, deterministic, q, k)
    return Call(v, schedule, scale, deterministic)


class _Attention(torch.autograd.Function):
    """The eager call; a backward that is to be differentiated itself goes through the operator, which refuses it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, val: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, val)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, val, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, val, out, lse = ctx.saved_tensors
        dout, call = torch.zeros_like(out) if dout is None else dout, ctx.call
        if torch.is_grad_enabled() or looked_at(q, k, val, dout):
            mask = *_flat(call.v, call.schedule), call.scale, call.deterministic
            return *torch.ops.maskc.backward(dout, dlse, q, k, val, out, lse, *mask), None
        return *call.backward(q, k, val, out, lse, dout, dlse), None


_attention: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what torch does in Python for defaults and for transforms, of which there are none here."""


def forward(
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    scale: float,
    *,
    backend: str = "auto",
    schedule: tuple[Tensor, ...] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) outside autograd; `out_dtype` fp32 gives a partial result that is not rounded to q's dtype."""
    with _as_written(q):
        return _chosen(backend, q).forward(v, q, k, val, scale, schedule=schedule, out_dtype=out_dtype)


def backward(
    v: BoundaryVectors,
    q: Tensor,
    k: Tensor,
    val: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    *,
    backend: str = "auto",
    deterministic: bool = False,
    schedule: tuple[Tensor, ...] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) outside autograd. `out` and `lse` may belong to more keys than `k` holds (a merged result)."""
    given = q, k, val, out, lse, dout, dlse, scale, deterministic
    with _as_written(q):
        return _chosen(backend, q).backward(v, *given, schedule=schedule, grad_dtype=grad_dtype)


def _chosen(backend: str, q: Tensor) -> Backend:
    return backend_module(BY_DEVICE[q.device.type] if backend == "auto" else backend)


def _as_written(q: Tensor) -> AbstractContextManager[object]:
    """`torch.autocast` would run sums in 16 bits that a backend writes in 32."""
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# ---------------------------------------------------------------- the operators

_MASK = (
    "Tensor? lts, Tensor? lte, Tensor? uts, Tensor? ute, Tensor? diag, Tensor? keep, Tensor[] schedule, "
    "SymInt[] geometry, bool causal, float scale, bool deterministic"
)
torch.library.define("maskc::forward", f"(Tensor q, Tensor k, Tensor val, {_MASK}) -> (Tensor, Tensor)")
torch.library.define(
    "maskc::backward",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor val, Tensor out, Tensor lse, {_MASK}) -> (Tensor, Tensor, Tensor)",
)


def _flat(v: BoundaryVectors, schedule: Sequence[Tensor]) -> tuple[object, ...]:
    """A mask as arguments of the operators, up to and with `causal`; `_mask` is the inverse."""
    blocks = v.blocks
    sizes = (0, 0) if blocks is None else (blocks.block_q, blocks.block_kv)
    geometry = [v.nq, v.nk, v.batch, v.heads, *sizes]
    return *v.tensors, None if blocks is None else blocks.keep, list(schedule), geometry, v.causal


def _mask(tensors: Sequence[Tensor | None], geometry: Sequence[int], causal: bool) -> BoundaryVectors:
    lts, lte, uts, ute, diag, keep = tensors
    nq, nk, batch, heads, block_q, block_kv = geometry
    blocks = None if keep is None else BlockTable(keep, block_q, block_kv)
    return BoundaryVectors(nq, nk, batch, heads, causal, lts, lte, uts, ute, diag, blocks)


def _forward(backend: str) -> Any:
    def run(q: Tensor, k: Tensor, val: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
        *vectors, schedule, geometry, causal, scale, _ = mask
        v = _mask(vectors, geometry, causal)
        return forward(v, q, k, val, scale, backend=backend, schedule=tuple(schedule) or None)

    return run


def _backward(backend: str) -> Any:
    def run(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, val, out, lse, *vectors, schedule, geometry, causal, scale, deterministic = rest
        how = {"backend": backend, "deterministic": deterministic, "schedule": tuple(schedule) or None}
        return backward(_mask(vectors, geometry, causal), q, k, val, out, lse, dout, dlse, scale, **how)

    return run


def _fake_forward(q: Tensor, k: Tensor, val: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, rows, heads, val.shape[3]), q.new_empty(batch, heads, rows, dtype=accumulator(q.dtype))


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, val: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), val.new_empty(val.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, val, *vectors, schedule, geometry, causal, scale, deterministic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, val, *output, *vectors, *schedule)
    ctx.plain = geometry, causal, scale, deterministic


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, val, out, lse, *tensors = ctx.saved_tensors
    vectors, schedule = tensors[:6], tensors[6:]
    nothing = (None,) * 6, [None] * len(schedule), (None,) * 4
    if dout is None and dlse is None:
        return None, None, None, *nothing[0], nothing[1], *nothing[2]
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.maskc.backward(dout, dlse, q, k, val, out, lse, *vectors, schedule, *ctx.plain)
    return *grads, *nothing[0], nothing[1], *nothing[2]


def refuse_twice(ctx: Any, *grads: Any) -> None:
    """The backward of a backward. Raises M509."""
    raise error("M509", "the gradient of attention cannot be differentiated again", None, "detach it, or use dense attention")


for _name, _key in (("cpu", "CPU"), ("hopper", "CUDA")):
    torch.library.impl("maskc::forward", _key, _forward(_name))
    torch.library.impl("maskc::backward", _key, _backward(_name))
torch.library.register_fake("maskc::forward", _fake_forward)
torch.library.register_fake("maskc::backward", _fake_backward)
torch.library.register_autograd("maskc::forward", _differentiate, setup_context=_save)
torch.library.register_autograd("maskc::backward", refuse_twice)
