"""Executes a schedule: exchange key chunks, attend to them with the ordinary backend on localized vectors, merge.

The backward pass walks the same schedule, then sends the gradients of keys and values back along its moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.runtime import ops
from maskc.runtime.comm import Exchange, Pair, Peer, Template
from maskc.runtime.localize import localized
from maskc.runtime.merge import Partial, accumulator, empty, merge
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.remember import remembered
from maskc.runtime.schedule import Route, Schedule, Step, routes

if TYPE_CHECKING:
    from maskc.runtime.gated import Direct


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Everything but the tensors of one attention call on one rank. `vectors` are those of the whole sequence.

    direct: the way to the memory of the other ranks, where nothing is sent.
    """

    plan: AttentionPlan
    part: int
    schedule: Schedule
    vectors: BoundaryVectors
    peer: Peer
    device: torch.device
    scale: float
    deterministic: bool
    backend: str
    direct: Direct | None = None

    def by(self, peer: Peer, direct: Direct | None = None) -> Call:
        """The same call of another group's rank, over this way (`replace` takes the host several times as long)."""
        how = self.scale, self.deterministic, self.backend
        return Call(self.plan, self.part, self.schedule, self.vectors, peer, self.device, *how, direct)

    @property
    def row_chunks(self) -> tuple[int, ...]:
        return self.plan.rows.chunks_of(self.peer.rank)

    @property
    def routes(self) -> tuple[tuple[Route, ...], ...]:
        """What this rank sends and receives, per step and phase."""
        return routes(self.schedule, self.peer.rank)

    def columns(self, step: Step) -> tuple[int, ...]:
        return step.columns[self.peer.rank]

    def local(self, step: Step) -> BoundaryVectors:
        """The mask of this rank's rows against the step's keys."""
        return localized(self.vectors, self.plan.rows, self.row_chunks, self.plan.keys, self.columns(step), self.device)


class _Keys:
    """K and V chunks on this rank, and the exchanges that bring in those of others, step by step.

    With overlap, the first exchange of the next step is posted before the current step is computed.
    """

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self.call, self.k, self.v = call, k, v
        self.template = Template(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device)
        self.own: dict[int, Pair] = {}
        at = 0
        for c in call.plan.keys.chunks_of(call.peer.rank):
            n = call.plan.keys.size_of(c)
            self.own[c] = k[:, at : at + n], v[:, at : at + n]
            at += n
        self.arrived: dict[int, Pair] = {}

    def steps(self) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Each step with the K and V of its columns, ascending."""
        steps, overlap = self.call.schedule.steps, self.call.plan.overlap
        last = len(steps) - 1
        posted = self._post(0) if steps else None
        for i, step in enumerate(steps):
            self.arrived = self._finish(i, posted)
            if overlap and i < last:
                posted = self._post(i + 1)
            yield step, *self._columns(step)
            if not overlap and i < last:
                posted = self._post(i + 1)

    def _post(self, step: int) -> Exchange | None:
        phases = self.call.routes[step]
        return self._exchange(phases[0], self.arrived) if phases else None

    def _exchange(self, route: Route, passing: Mapping[int, Pair]) -> Exchange:
        """Send own chunks, and those passed on for others."""
        call = self.call
        what = "the exchange of keys and values"
        return Exchange(call.peer, route, call.plan.keys, self.template, lambda c: self.own.get(c) or passing[c], "kv", what)

    def _finish(self, step: int, posted: Exchange | None) -> dict[int, Pair]:
        """Wait for the posted phase, then run the others, which pass on what just came in."""
        fresh: dict[int, Pair] = {}
        for i, route in enumerate(self.call.routes[step]):
            exchange = posted if i == 0 and posted is not None else self._exchange(route, fresh)
            fresh |= {chunk: pair for (_, chunk), pair in exchange.wait().items()}
        return fresh

    def _columns(self, step: Step) -> Pair:
        columns = self.call.columns(step)
        if columns == tuple(self.own):
            return self.k, self.v
        pairs = [self.own.get(c) or self.arrived[c] for c in columns]
        if not pairs:
            return self.k[:, :0], self.v[:, :0]
        if len(pairs) == 1:
            return pairs[0]
        return torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """(out in q's dtype, lse): partial results are unrounded and merged as the steps end."""
    if call.direct is not None:
        import maskc.runtime.gated as gated  # takes less than `from`

        return gated.forward(call, q, k, v)
    acc = accumulator(q.dtype)
    total: Partial | None = None
    single = sum(bool(call.columns(s)) for s in call.schedule.steps) == 1
    for step, keys, values in _Keys(call, k, v).steps():
        if not call.columns(step) or q.shape[1] == 0:
            continue
        local = call.local(step)
        part = ops.forward(
            local,
            q,
            keys,
            values,
            call.scale,
            backend=call.backend,
            schedule=_kernel_schedule(local, call.backend, q.shape[3]),
            out_dtype=None if single else acc,
        )
        total = part if total is None else merge(total, part)
    if total is None:
        total = empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3], acc, q.device)
    return total[0].to(q.dtype), total[1]


@remembered
def _kernel_schedule(local: BoundaryVectors, backend: str, head_dim: int) -> tuple[Tensor, ...]:
    """The tables a backend makes of a mask, shared by the layers of a batch like the localized vectors themselves."""
    return ops.backend_module(backend).schedule(local, head_dim)


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each rounded once: contributions are fp32 and added in a fixed order, own first, then by step and rank."""
    if call.direct is not None:
        import maskc.runtime.gated as gated  # takes less than `from`

        return gated.backward(call, q, k, v, out, lse, dout, dlse)
    acc = accumulator(q.dtype)
    keys_in = _Keys(call, k, v)
    sums = _Gradients(call, replace(keys_in.template, dtype=acc))
    dq = torch.zeros(q.shape, dtype=acc, device=q.device)
    for i, (step, keys, values) in enumerate(keys_in.steps()):
        if call.columns(step) and q.shape[1]:
            local = call.local(step)
            step_dq, dk, dv = ops.backward(
                local,
                q,
                keys,
                values,
                out,
                lse,
                dout,
                dlse,
                call.scale,
                backend=call.backend,
                deterministic=call.deterministic,
                schedule=_kernel_schedule(local, call.backend, q.shape[3]),
                grad_dtype=acc,
            )
            dq += step_dq
            sums.keep(call.columns(step), dk, dv)
        sums.step_done(i)
    sums.collect()
    dk, dv = sums.own()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Gradients:
    """dK and dV per chunk: what this rank computed, sent back along the moves that brought the chunk.

    Where every chunk came straight from its owner, a step's gradients leave as soon as it is computed; else they wait
    for those that come back through this rank.
    """

    def __init__(self, call: Call, template: Template) -> None:
        self.call, self.template = call, template
        self.sums: dict[int, Pair] = {}
        self.early: list[Exchange] = []
        self.send_early = call.plan.overlap and call.schedule.direct

    def keep(self, columns: Sequence[int], dk: Tensor, dv: Tensor) -> None:
        sizes = [self.call.plan.keys.size_of(c) for c in columns]
        for c, pair in zip(columns, zip(torch.split(dk, sizes, 1), torch.split(dv, sizes, 1), strict=True), strict=True):
            self._add(c, pair)

    def step_done(self, step: int) -> None:
        if self.send_early:
            self.early += [self._send_back(route) for route in self.call.routes[step]]

    def collect(self) -> None:
        """Wait for, or do, all returns; last step first."""
        if self.send_early:
            for exchange in self.early:
                self._take(exchange)
            return
        for phases in reversed(self.call.routes):
            for route in reversed(phases):
                self._take(self._send_back(route))

    def own(self) -> Pair:
        """The sums of this rank's own chunks, joined."""
        keys = self.call.plan.keys
        pairs = [self.sums.get(c) or self.template.zeros(keys.size_of(c)) for c in keys.chunks_of(self.call.peer.rank)]
        if not pairs:
            return self.template.zeros(0)
        return torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)

    def _send_back(self, route: Route) -> Exchange:
        what = "the exchange of gradients"
        return Exchange(self.call.peer, route.back, self.call.plan.keys, self.template, self._outgoing, "grad", what)

    def _outgoing(self, chunk: int) -> Pair:
        return self.sums.get(chunk) or self.template.zeros(self.call.plan.keys.size_of(chunk))

    def _take(self, exchange: Exchange) -> None:
        for (_, chunk), pair in exchange.wait().items():
            self._add(chunk, pair)

    def _add(self, chunk: int, pair: Pair) -> None:
        held = self.sums.get(chunk)
        self.sums[chunk] = pair if held is None else (held[0] + pair[0], held[1] + pair[1])
