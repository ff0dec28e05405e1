"""One rank of benchmarks/overlap.py on a GPU, the others in pinned host memory: what is run and timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.overlap_bounds import Needs, needs_of
from benchmarks.overlap_cells import HEAD_DIM, LINK_RATE, Problem
from maskc.boundary import VECTOR_NAMES, BoundaryVectors
from maskc.runtime import hopper, ops
from maskc.runtime.driver_streams import StreamWord
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.merge import merge
from maskc.runtime.overlap import Overlapped
from maskc.runtime.overlap_grads import Gradients
from maskc.runtime.overlap_kernels import backward_block, forward_block
from maskc.runtime.overlap_plan import Cut, OverlapPlan
from maskc.runtime.protocol import Kind, Word
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair, head_major, write_word


class Link(Loopback):
    """Peers whose keys never change and whose gradients, on the GPU, come over the link that brings the keys."""

    def __init__(self, keys: Layout, order: OverlapPlan, shape: KeyShape, device: torch.device, slowness: int) -> None:
        super().__init__(keys, order.rank, order.sources, shape, device.type == "cuda", slowness, order.lends, halves=1)
        longest = max((keys.size_of(c) for c in range(keys.chunk_count)), default=0)
        self.left, self.theirs = (shape.gradients(longest, "cpu", self.pinned) for _ in range(2))
        self.here = {(r, c): shape.gradients(keys.size_of(c), device) for r, chunks in order.lends for c in chunks}
        for pair in (*self.here.values(), self.left, self.theirs):
            for t in pair:
                t.zero_()

    def staged(self, reader: int, chunk: int) -> Pair:
        return self.here[reader, chunk]

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        """One piece of memory for all of them: nobody reads it."""
        rows = grads[0].shape[2]
        if rows > self.left[0].shape[2]:
            self.left = self.shape.gradients(rows, "cpu", self.pinned)
        for there, mine in zip(self.left, grads, strict=True):
            self._copy(there[:, heads, :rows], mine)

    def receive(self) -> None:
        """The gradients of others, on torch's current stream."""
        for pair in self.here.values():
            for mine, their in zip(pair, self.theirs, strict=True):
                self._copy(mine, their[:, :, : mine.shape[2]])


class Beside(Overlapped):
    """A rank whose peers send their gradients once its own keys are there."""

    transport: Link
    receiving = False

    def attend_backward(self, *args: Any, **named: Any) -> Gradients:
        made = super().attend_backward(*args, **named)
        if self.receiving:
            with self.queues.on("copy"):
                self.transport.receive()
            words = (Word("sent", self.plan.rank, reader) for reader in self.transport.lends)
            value = self.epoch & 0xFFFFFFFF
            self.queues.words("copy", [StreamWord(False, self.transport.address(word), value) for word in words])
        return made


class Rank:
    """The rank of a problem with its buffers."""

    def __init__(self, made: Problem, order: OverlapPlan, device: torch.device) -> None:
        cell, p = made.cell, made.p
        self.order, self.p, self.device = order, p, device
        shape = KeyShape(1, cell.heads_kv, HEAD_DIM, HEAD_DIM, torch.bfloat16)
        self.link = Link(p.keys, order, shape, device, cell.link)
        self.queues = CudaQueues(device)
        self.rank = Beside(order, p.keys, shape, self.link, self.queues, device, rate=LINK_RATE / cell.link, timeout=1.0)
        self.vectors = replace(made.v, **{n: t.to(device) for n, t in _named(made.v)})  # type: ignore[arg-type]
        self.rows = p.rows.chunks_of(order.rank)
        self.local = localize(self.vectors, p.rows, self.rows, p.keys, order.columns, device)
        self._parts: dict[tuple[int, ...], tuple[BoundaryVectors, tuple[Tensor, ...]]] = {}
        self.scale = HEAD_DIM**-0.5
        self.q, self.dout = (torch.randn(1, self.local.nq, cell.heads, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        own = p.keys.local_length(order.rank)
        self.k, self.v = (torch.randn(1, own, cell.heads_kv, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        self._own = {
            "forward": self.rank.in_place(self.k, self.v, forward_block(self.local, self.q)),
            "backward": self.rank.in_place(self.k, self.v, backward_block(self.local, self.q, False)),
        }
        for peer in order.sources:
            self.link.post(peer, 1, partial(_fill, device, peer))
        self.result = self.forward("copy-then-attend")
        self.grads = self.attention_backward()

    def forward(self, executor: str) -> tuple[Tensor, Tensor]:
        self._let("ready", self.rank.epoch + 1)  # the keys of others never change
        return self.rank.forward(self.local, self.q, self.k, self.v, self.scale, executor)  # type: ignore[arg-type]

    def backward(self, executor: str) -> tuple[Tensor, Tensor, Tensor]:
        self._let("ready", self.rank.epoch + 1)
        self._let("free", self.rank.epoch)  # nobody reads what was pushed
        self.rank.receiving = True
        given = (self.q, self.k, self.v, *self.result, self.dout, self.scale)
        got = self.rank.backward(self.local, *given, executor)  # type: ignore[arg-type]
        self.rank.receiving = False
        return got

    def _let(self, kind: Kind, epoch: int) -> None:
        for source in self.order.sources:
            write_word(self.link.address(Word(kind, self.order.rank, source)), epoch)

    def attention(self, gated: bool = True, there: bool = True) -> tuple[Tensor, Tensor]:
        return self.rank.attend(self.local, self.q, self.scale, gated=gated, there=there, own=self._own["forward"])

    def attention_backward(self, gated: bool = True, there: bool = True) -> Gradients:
        given = (self.q, *self.result, self.dout, self.scale)
        return self.rank.attend_backward(self.local, *given, gated=gated, there=there, own=self._own["backward"])

    def copies(self, direction: str = "forward") -> None:
        """The planned copies of keys with their flags, and the compute stream behind them."""
        copy_keys(self.rank, self.rank.forward_cut if direction == "forward" else self.rank.backward_cut)
        self.queues.follow("compute", "copy")

    def exchange(self) -> None:
        """All that is copied for a backward call, both directions at once, and the sum."""
        cut = self.rank.backward_cut
        copy_keys(self.rank, cut)
        with self.queues.on("copy"):
            self.link.receive()
        self.sends()
        self.queues.follow("compute", "copy")
        self.sum()

    def sends(self) -> None:
        """The way of gradients to others alone."""
        send_gradients(self.rank, self.grads)

    def sum(self) -> None:
        """What follows the kernel: gradients of own keys, added up."""
        self.rank.add_up(self.grads, (torch.empty_like(self.k), torch.empty_like(self.v)))

    def needs(self, direction: str) -> Needs:
        """What of the work needs what of the copies."""
        return needs_of(self.rank, self.local, self.q, direction)

    def own_keys(self, direction: str) -> None:
        """The way of own keys to where the gated kernel reads them."""
        if self._own[direction] is None:
            self.rank.settle(self.k, self.v)

    def peer_by_peer(self) -> tuple[Tensor, Tensor]:
        """Chunks of one peer after another; each part is attended to when it is there, results are merged."""
        events, cut = [], self.rank.forward_cut
        parts = [tuple(s for s in cut.plan.slots if s.source == r) for r in (self.order.rank, *self.order.sources)]
        for part in parts[1:]:
            with self.queues.on("copy"):
                for piece in cut.pieces:
                    if cut.plan.slot_of(piece) in part:
                        self.rank.pull(cut, piece, 0)
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record()
        total = None
        for i, part in enumerate(parts):
            if i:
                torch.cuda.current_stream().wait_event(events[i - 1])
            if part:
                total = self._merged(total, part)
        assert total is not None
        return total[0].to(self.q.dtype), total[1]

    def _merged(self, total: Any, part: Any) -> Any:
        columns = tuple(c for s in reversed(part) for c in s.chunks)
        if columns not in self._parts:
            local = localize(self.vectors, self.p.rows, self.rows, self.p.keys, columns, self.device)
            self._parts[columns] = local, hopper.schedule(local, HEAD_DIM)
        local, tables = self._parts[columns]
        rows = slice(part[-1].start, part[0].start + part[0].rows)
        keys, values = (head_major(x[:, rows]) for x in (self.rank.keys, self.rank.values))
        new = ops.forward(local, self.q, keys, values, self.scale, schedule=tables, out_dtype=torch.float32)
        return new if total is None else merge(total, new)


def give_keys(over: Overlapped, cut: Cut, own: Pair) -> None:
    """What a rank gives in a call, with flags, after the compute stream, which goes on meanwhile.

    No kernel waits for these flags: those of a call, written without it, would go back.
    """
    giving = over.transport.gives
    assert giving is not None
    over.queues.follow("copy", "compute")
    for reader, piece in over.gifts[cut is over.backward_cut] or ():
        with over.queues.on("copy"):
            over.give(cut, reader, piece, own)
        over.queues.put("copy", giving.flags(reader)[-1:].data_ptr(), over.epoch)


def copy_keys(over: Overlapped, cut: Cut) -> None:
    """The pulls of a call with their flags alone, after the compute stream, which goes on meanwhile."""
    over.queues.follow("copy", "compute")
    for piece in cut.pieces:
        with over.queues.on("copy"):
            over.pull(cut, piece, 0)
        over.queues.put("copy", over.address(cut, Word("flag", over.plan.rank, piece)), over.epoch)


def send_gradients(over: Overlapped, made: Gradients) -> None:
    """The way of gradients to their owners alone, after the compute stream, which goes on after them."""
    queues = over.queues
    queues.follow("send", "compute")
    queues.follow("sum", "compute")
    with queues.on("send"):
        for departure in over.departures:
            over.push(departure.pieces, made)
    queues.follow("compute", "send")


def _fill(device: torch.device, peer: int, pair: Pair) -> None:
    g = torch.Generator(device).manual_seed(peer)
    for half in pair:
        half.copy_(torch.randn(half.shape, device=device, generator=g, dtype=half.dtype))


def _named(v: BoundaryVectors) -> list[tuple[str, Tensor]]:
    named = zip(VECTOR_NAMES, v.tensors, strict=True)
    return [(n, t) for n, t in named if t is not None]
