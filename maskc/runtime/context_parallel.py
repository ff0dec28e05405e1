"""Attention over a sequence that is spread over ranks: exactly the single-device result, whatever the mask and lengths.

`run` checks the call, agrees with the other ranks at first use, and hands a schedule of the plan to the executor.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import MaskcError, error
from maskc.runtime import comm, executor
from maskc.runtime.comm import Peer
from maskc.runtime.executor import Call
from maskc.runtime.localize import equal_on_host, on_host
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.ops import refuse_twice
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.plan import plan as make_plan
from maskc.runtime.plan_arguments import Spec
from maskc.runtime.plan_specs import vectors_of
from maskc.runtime.remember import derived
from maskc.runtime.run import backend_for, check_backend, check_tensors, scale_of, vectors_on
from maskc.runtime.schedule import DIRECT, STRATEGIES, check_strategy

LOG = logging.getLogger("maskc")
GATHER_LIMIT = 2 << 30
"""Bytes of gathered K and V per rank above which "auto" takes the ring, which holds one neighbour's chunks at a time."""
STAGE_SHARE = 0.2
"""Communication over compute, by the model of `machine`, above which "auto" exchanges in stages."""
DIRECT_SHARE = 0.02
"""The same, above which "auto" lets GPUs give each other keys beside the kernel, where that can be done. Where it
is less, a new plan at every step may cost the host more than there is to hide (`benchmarks.train --gpus 2`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy and why it was taken."""

    strategy: str
    reason: str


def run(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    *,
    plan: AttentionPlan | None = None,
    strategy: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """This rank's part of attention over the whole sequence; every rank of the group makes the same call.

    Args:
        q, k, v: this rank's rows [B, rows, H, D] in the plan's order. Without a plan they are the contiguous equal split,
            the last rank short.
        strategy: "all-gather", "staged", "ring", "gated", "copy-then-attend", "sm-copy", or "auto" (see `choose`).

    Returns:
        out [B, rows, Hq, Dv] in q's dtype, and with `return_lse` lse [B, Hq, rows]; both differentiable. Gradients are
        those of the sum over the ranks of what each computes from its part.

    Raises:
        MaskcError: on every rank when one rank's call is wrong or differs (M708), before anything else is sent; M709 on
            the survivors when a peer is lost, within the timeout of the group.
    """
    if torch.compiler.is_compiling():
        from maskc.runtime import context_ops

        out, lse = context_ops.attention(spec, q, k, v, group, plan, strategy, scale_of(q, scale), deterministic, backend)
        return (out, lse) if return_lse else out
    peer = Peer.of(group)
    plan = plan if plan is not None else contiguous_plan(spec, q, k, peer)
    recording = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v))
    call = agreed_call(spec, q, k, v, peer, plan, strategy, scale, deterministic, backend, recording)
    out, lse = _ContextAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def choose(plan: AttentionPlan, part: int, q: Tensor, k: Tensor, v: Tensor, direct: bool = True) -> Choice:
    """What "auto" takes: equal on all ranks, because it looks at the plan, global sizes and the device type only.

    direct: whether the ranks may be able to reach each other's memory, and have the kernels for it.
    """
    row_bytes = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return _choose(plan, part, row_bytes, q.shape[0] * q.shape[2] * q.shape[3], q.device.type, direct)


@derived
def _choose(plan: AttentionPlan, part: int, row_bytes: int, row_elements: int, device: str, direct: bool) -> Choice:
    """`row_bytes`: K and V of one row. `row_elements`: batch times query heads times head dimension."""
    gathered = max(sum(plan.keys.size_of(c) for c in plan.needed(r, part)) for r in range(plan.world)) * row_bytes
    if gathered > GATHER_LIMIT:
        return Choice("ring", f"gathered K and V would take {gathered >> 20} MiB on a rank")
    if not plan.overlap:
        return Choice("all-gather", "one exchange and one local call; overlap is off")
    if device == "cpu":
        return Choice("all-gather", "one exchange and one local call; on a CPU nothing is gained by stages")
    m = DEFAULT_MACHINE
    compute = m.compute_seconds(max(plan.part_workloads(part)), plan.costs, plan.tile, 1, row_elements)
    share = max(plan.received(part)) * row_bytes / (m.inter if plan.nodes > 1 else m.intra) / max(compute, 1e-9)
    if direct and plan.nodes == 1 and share > DIRECT_SHARE:
        return Choice("gated", f"the exchange would take {share:.1%} of the compute time; copy engines hide it")
    if share > STAGE_SHARE:
        return Choice("staged", f"the exchange would take {share:.0%} of the compute time; stages hide it")
    return Choice("all-gather", f"the exchange takes {share:.0%} of the compute time; one local call is faster than stages")


# ---------------------------------------------------------------- before the first byte


def agreed_call(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peer: Peer,
    plan: AttentionPlan,
    strategy: str,
    scale: float | None,
    deterministic: bool,
    backend: str,
    recording: bool,
) -> Call:
    """The call, checked here and compared with the other ranks the first time it is made in this group.

    What is wrong on this rank, whatever it is, is raised only once the others know, so that they raise too instead of waiting.
    """
    call: Call | None = None
    failure: Exception | None = None
    seen = _agreed.setdefault(comm.process_group(peer), {})
    asked = _asked(spec, (q, k, v), peer, plan, strategy, scale, deterministic, backend, recording)
    if asked is not None and (found := _settled.get(spec, _NOTHING).get(asked)) is not None and found[0] in seen:
        return _reaching(found[1].by(peer), strategy, q, k, v)
    try:
        call = _call(spec, q, k, v, peer, plan, strategy, scale, deterministic, backend)
        key = (
            plan.digest,
            call.part,
            call.schedule.strategy,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            call.scale,
            call.backend,
            deterministic,
            recording,
        )
        if asked is not None:
            _settle(spec, asked, key, call)
        if key in seen:
            return _reaching(call, strategy, q, k, v)
        fields = _fields(call, q, k, v, recording)
        _check_local_calls(call, q, k, v)
    except Exception as e:
        failure = e
        fields = dict.fromkeys(FIELDS, 0)
    try:
        comm.agree(peer, fields, failure is not None, peer.home(q))
    except MaskcError as disagreement:
        raise failure or disagreement from None
    assert call is not None
    seen[key] = None
    if len(seen) > AGREED_LIMIT:
        seen.pop(next(iter(seen)))
    return _reaching(call, strategy, q, k, v)


def _asked(spec: Spec, tensors: tuple[Tensor, Tensor, Tensor], peer: Peer, plan: AttentionPlan, *how: object) -> Asked | None:
    """All that `_call` looks at but the spec, where it will find nothing new in a call that asks the same; else None.

    On one stream, which has waited for the vectors of the mask before.
    """
    q, k, v = tensors
    plain = type(q) is type(k) is type(v) is Tensor and not (q.is_nested or k.is_nested or v.is_nested)
    if not (plain and isinstance(spec, BoundMask) and isinstance(plan, AttentionPlan)):
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    stream = current_handle(q.device) if q.is_cuda else 0
    of_tensors = [(t.shape, t.dtype, t.device, t.layout) for t in tensors]
    asked = plan.digest, peer.rank, peer.world, stream, *of_tensors, *how, *[type(x) for x in how]
    try:
        hash(asked)
    except TypeError:
        return None
    return asked


def _settle(spec: Spec, asked: Asked, key: Asked, call: Call) -> None:
    found = _settled.setdefault(spec, {})
    found[asked] = key, call.by(Peer(None, call.peer.rank, call.peer.world))  # a group goes when its user lets go of it
    if len(found) > SETTLED_LIMIT:
        found.pop(next(iter(found)))


Asked: TypeAlias = tuple[object, ...]
SETTLED_LIMIT = 16
"""Calls of a mask that are not looked at again."""
_settled: WeakKeyDictionary[Spec, dict[Asked, tuple[Asked, Call]]] = WeakKeyDictionary()
"""By mask and by what was asked: what the ranks agree on, and the call."""
_NOTHING: dict[Asked, tuple[Asked, Call]] = {}


def _reaching(call: Call, asked: str, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The call with the way to the memory of other ranks that its strategy needs; "auto" goes without where there is none.

    The ranks have agreed on the call, so all of them find this out together.
    """
    name = call.schedule.strategy
    if name in DIRECT:
        import maskc.runtime.gated as gated  # takes less than `from`

        way = gated.direct(call.peer, call.plan, name, k, v)
        if isinstance(way, str):
            if asked != "auto":
                raise error("M723", way, None, 'strategy="auto" goes without')
            choice = choose(call.plan, call.part, q, k, v, direct=False)
            _say_once(call.peer, f"{choice.strategy}, for {way}")
            return replace(call, schedule=call.plan.schedule(choice.strategy, call.part))
        call = call.by(call.peer, way)
    _say_once(call.peer, name)
    return call


def _say_once(peer: Peer, text: str) -> None:
    said = _said.setdefault(comm.process_group(peer), set())
    if text not in said:
        said.add(text)
        LOG.info("ranks exchange keys by: %s", text)


_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _call(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    peer: Peer,
    plan: AttentionPlan,
    strategy: str,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> Call:
    check_tensors(q, k, v)
    if not peer.speaks(q.device):
        raise error("M504", f"q is on `{q.device}`, from where this group cannot send", None, "move q, k and v, or the group")
    check_plan(plan, peer.world, peer.rank, q, k)
    check_strategy(strategy)
    number, name = scale_of(q, scale), backend_for(q, backend)
    if strategy in DIRECT and plan.hierarchical and plan.nodes > 1:
        raise error("M722", "chunks would be passed on between nodes", None, "make the plan with hierarchical=False")
    if strategy in DIRECT and name == "flex":
        hint = f"{', '.join(STRATEGIES)}, or auto"
        raise error("M722", f'strategy "{strategy}" is a kernel of maskc, which backend "flex" does not run', None, hint)
    part = plan.part(spec)
    if strategy == "auto":
        choice = choose(plan, part, q, k, v, direct=name != "flex")
        LOG.debug("strategy %s: %s", choice.strategy, choice.reason)
        strategy = choice.strategy
    vectors = _on_device(spec, plan, q)
    return Call(plan, part, plan.schedule(strategy, part), vectors, peer, q.device, number, deterministic, name)


def check_plan(plan: AttentionPlan, world: int, rank: int, q: Tensor, k: Tensor) -> None:
    """Raise unless it is a plan for so many ranks (M511, M707) in which this rank holds the rows of q and k (M710)."""
    if not isinstance(plan, AttentionPlan):
        raise error("M511", f"plan is {type(plan).__name__}, not what maskc.plan returns")
    if plan.world != world:
        raise error("M707", f"the plan is for {plan.world} ranks, the group has {world}")
    for name, x, axis in (("q", q, plan.rows), ("k", k, plan.keys)):
        held = axis.length if world == 1 else axis.local_length(rank)
        if x.shape[1] != held:
            raise error(
                "M710",
                f"{name} has {x.shape[1]} rows; in this plan rank {rank} holds {held} of {axis.length}",
                None,
                "cut tensors with plan.shard(x, rank); without a plan, ranks hold ceil(n / ranks) rows, the last one fewer",
            )


def _on_device(spec: Spec, plan: AttentionPlan, q: Tensor) -> BoundaryVectors:
    """The vectors of the whole sequence where q lives."""
    sizes = plan.rows.length, plan.keys.length
    v = spec if isinstance(spec, BoundaryVectors) else vectors_on(spec, *sizes, q.device)
    if v.device != q.device and any(t is not None for t in v.tensors):
        raise error("M504", f"the vectors are on `{v.device}`, q is on `{q.device}`")
    if v.batch not in (1, q.shape[0]):
        raise error("M503", f"the mask was bound for {v.batch} batch items, q has {q.shape[0]}")
    equal_on_host(v, on_host(vectors_of(spec, *sizes)))
    return v


def _check_local_calls(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise the backend's own refusal of any local call of the schedule."""
    for step in call.schedule.steps:
        if call.columns(step) and call.row_chunks:
            local = call.local(step)
            keys, values = (x.new_empty(x.shape[0], local.nk, *x.shape[2:]) for x in (k, v))
            check_backend(call.backend, local, q, keys, values, call.scale)


def _fields(call: Call, q: Tensor, k: Tensor, v: Tensor, recording: bool) -> dict[str, object]:
    """What all ranks must have in common."""
    plan = call.plan
    values: tuple[object, ...] = (
        plan.rows.length,
        plan.keys.length,
        plan.parts[call.part].digest,
        plan.version,
        (plan.rows, plan.keys),
        plan.digest,
        call.schedule.strategy,
        q.shape[0],
        q.shape[2],
        k.shape[2],
        k.shape[3],
        v.shape[3],
        str(k.dtype),
        call.scale,
        call.backend,
        call.deterministic,
        recording,
    )
    return dict(zip(FIELDS, values, strict=True))


FIELDS = (
    "the number of rows",
    "the number of keys",
    "the mask or its data",
    "the version of maskc",
    "the assignment of chunks",
    "the plan",
    "the strategy",
    "the batch size",
    "the query heads",
    "the key heads",
    "the head dimension",
    "the value dimension",
    "the dtype",
    "the scale",
    "the backend",
    "deterministic",
    "whether gradients are recorded",
)
AGREED_LIMIT = 4096
_agreed: WeakKeyDictionary[Any, dict[tuple[object, ...], None]] = WeakKeyDictionary()


def contiguous_plan(spec: Spec, q: Tensor, k: Tensor, peer: Peer) -> AttentionPlan:
    """The plan of the contiguous equal split.

    Where the mask does not know its size, the ranks add up their rows, every time: a rank cannot tell from its own rows
    that the sum has changed (29 and 30 rows on two ranks give 15 to the first either way).
    """
    nq, nk = spec.nq, spec.nk
    if nq is None or nk is None:
        mine = [x.shape[1] if isinstance(x, Tensor) and x.dim() == 4 else -1 for x in (q, k)]
        everyone = comm.gather_numbers(peer, mine, peer.home(q), "the sum of the rows")
        if min(mine) < 0:
            check_tensors(q, k, k)
        comm.check_refusals([min(row) < 0 for row in everyone])
        rows, keys = (sum(column) for column in zip(*everyone, strict=True))
        nq, nk = rows if nq is None else nq, keys if nk is None else nk
    return _contiguous(spec, peer.world, nq, nk)


@derived
def _contiguous(spec: Spec, world: int, nq: int, nk: int) -> AttentionPlan:
    return make_plan(spec, world_size=world, order="contiguous", nq=nq, nk=nk)


class _ContextAttention(torch.autograd.Function):
    """The executor as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = executor.forward(call, q, k, v)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        with torch.no_grad():
            grads = executor.backward(ctx.call, q, k, v, out, lse, dout, dlse)
        if torch.is_grad_enabled():  # create_graph=True: they depend on the tensors and would not show it
            grads = _Once.apply(q, k, v, dout, *grads)  # type: ignore[no-untyped-call]
        return *grads, None


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated, whatever the gradient of the output depends on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    backward = staticmethod(refuse_twice)
