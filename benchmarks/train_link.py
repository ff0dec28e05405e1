"""Other ranks as memory elsewhere, for whole training steps of one simulated rank: a `maskc.runtime.transport.Transport`.

The keys of all ranks lie there one rank after another and never change, so the other ranks are always ready. Links inside a
node are `inside` times faster than those between nodes:

    host   pinned host memory, about as far away as another node. Of what stays inside a node only that part is copied; the
           rest lies in the buffer from the first time.
    peer   the memory of a second GPU, as near as one of the same node. What crosses nodes is copied so many times.

Gradients leave in the same way, and what other ranks send counts as there when what this rank sends has left, for all of
them do the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from benchmarks.octets import from_octets
from maskc.runtime import driver_streams
from maskc.runtime.copies import copy
from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import Cut, OverlapPlan, plan_visits
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.protocol import Epochs, Turn, Word
from maskc.runtime.transport import KeyShape, Pair, by_chunk

Kind: TypeAlias = Literal["host", "peer"]
READY = 1 << 30
"""A value that no epoch reaches: who waits for such a word never waits."""


@dataclass(frozen=True)
class Part:
    """What a simulated rank copies.

    plan: every chunk straight from its owner, as the executors want it. across: chunks that this rank gets from another
    node. carried: chunks that it brings in, and whose gradients it takes out, for its neighbours alone.
    """

    plan: OverlapPlan
    across: frozenset[int]
    carried: tuple[int, ...]


def part_of(p: AttentionPlan, rank: int) -> Part:
    """The part of a rank: with routing over nodes what enters a node enters it once, else at every rank that needs it.

    Chunks that neighbours pass on come at the rate inside a node, and count as there when they are asked for.
    """
    everything = frozenset(range(p.keys.chunk_count))
    needed = [p.needed(r) if p.prune else everything for r in range(p.world)]
    size = p.node_size
    order = plan_visits(p.keys, needed, rank, size if p.hierarchical else p.world)
    slots = tuple(replace(s, source=p.keys.owner[s.chunk], across=False) for s in order.slots)
    foreign = [s for s in order.pulls if p.keys.owner[s.chunk] // size != rank // size]
    across = frozenset(s.chunk for s in foreign if not p.hierarchical or s.source == p.keys.owner[s.chunk])
    lends = _once_per_node(order.lends, rank, size) if p.hierarchical else order.lends
    return Part(replace(order, slots=slots, carried=(), lends=lends), across, order.carried)


def _once_per_node(lends: Iterable[tuple[int, tuple[int, ...]]], rank: int, size: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Gradients of another node come added up, from the rank in this one's place there."""
    found: dict[int, set[int]] = {}
    for reader, chunks in lends:
        sender = reader if reader // size == rank // size else reader // size * size + rank % size
        found.setdefault(sender, set()).update(chunks)
    return tuple((reader, tuple(sorted(found[reader]))) for reader in sorted(found))


class Memory:
    """Keys, values and gradients of `rows` rows, shared by every plan of a run. One batch item.

    Rows lie rank by rank, chunks ascending (`starts`). keys: (K, V) [Hk, rows, 1, D] far away. left: (dK, dV)
    [1, Hk, rows, D] that a rank pushed, likewise. came: what every other rank has of them, [1, Hk, rows, D] on the device.
    """

    def __init__(self, rows: int, shape: KeyShape, device: torch.device, link: Kind = "host") -> None:
        pinned = device.type == "cuda"
        generator = torch.Generator(device).manual_seed(0)
        self.shape, self.device, self.pinned, self.link = shape, device, pinned, link
        far = torch.device("cpu") if link == "host" else torch.device("cuda", 1 - (device.index or 0))
        self.keys = shape.empty(rows, far, pinned and link == "host")
        self.left, self.came = shape.gradients(rows, far, pinned and link == "host"), shape.gradients(rows, device)
        if link == "peer":
            torch.zeros(1, device=device).copy_(torch.zeros(1, device=far))  # torch lets them reach each other
            torch.cuda.synchronize(far)
        for k, g in zip(self.keys, self.came, strict=True):
            k.copy_(torch.randn(k.shape, generator=generator, device=device, dtype=torch.float32))
            g.copy_(1e-3 * torch.randn(g.shape, generator=generator, device=device, dtype=torch.float32))


def starts(keys: Layout) -> dict[int, int]:
    """Where each chunk begins in `Memory`."""
    chunks = [c for r in range(keys.world) for c in keys.chunks_of(r)]
    return dict(zip(chunks, accumulate((keys.size_of(c) for c in chunks), initial=0), strict=False))


class Link:
    """The transport of one simulated rank."""

    joins = True
    one_engine = False
    gives = takes = None

    def __init__(self, part: Part, keys: Layout, memory: Memory, inside: int) -> None:
        self.part, self.keys, self.memory, self.inside = part, keys, memory, inside
        self._complete: set[tuple[int, int]] = set()  # first chunks and heads of copies that lie in the key buffer
        self._starts = starts(keys)
        self._last_pulls: set[tuple[int, int, int, int]] = set()  # see `carry_behind`
        self._last_push = -1
        pulls = part.plan.pulls
        self._last_owner = pulls[-1].source if pulls else None
        words = torch.tensor([READY, 0, 0 if pulls else READY], dtype=torch.int32)
        self._words = words.pin_memory() if memory.pinned else words
        self._epochs = Epochs()
        most = max((keys.size_of(c) for c in part.carried), default=0)
        self._passing, self._outgoing = memory.shape.empty(most, memory.device), memory.shape.gradients(most, memory.device)
        self._staged: dict[int, Pair] = {}

    def carry_behind(self, forward: Cut, backward: Cut) -> None:
        """What is carried for neighbours goes after everything that the executor copies in these pieces."""
        if not forward.plan.pulls:
            return
        for cut in (forward, backward):
            last = cut.pieces[-1]
            self._last_pulls.add(_piece(cut.plan.slot_of(last).chunk, cut.heads_of(last), cut.plan.slot_of(last).rows))
        self._last_push = backward.plan.slots[-1].chunks[-1]

    @property
    def pulls(self) -> Link:
        return self

    def begin(self, owners: Iterable[int] = (), tag: int = 0) -> Turn:
        return self._epochs.begin(owners)

    def address(self, word: Word) -> int:
        """Of three words: one that is always there, one for what nobody reads, one for gradients that have left."""
        mine = word.holder == self.part.plan.rank
        if word.kind == "sent" and (mine or word.holder == self._last_owner):
            return self._words.data_ptr() + 8
        return self._words.data_ptr() + (0 if mine else 4)

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        piece, rows = (chunk, heads.start), into[0].shape[1]
        self._copied(chunk, into, self.readable(rank, half, chunk, heads, rows), whole=piece not in self._complete)
        self._complete.add(piece)
        if _piece(chunk, heads, rows) in self._last_pulls:
            for c in self.part.carried:
                source = self.readable(rank, half, c, slice(None), self.keys.size_of(c))
                self._copied(c, [t[:, : self.keys.size_of(c)] for t in self._passing], source)

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        start = self._starts[chunk]
        k, v = (t[heads, start : start + rows] for t in self.memory.keys)
        return k, v

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        pushed = dict(by_chunk(self.keys, chunk, grads[0].shape[2]))
        for c, rows in pushed.items():
            self._copied(c, self._left(c, heads), [t[0, :, rows][:, : self.keys.size_of(c)] for t in grads])
        if self._last_push in pushed and heads.stop == self.memory.shape.heads:
            for c in self.part.carried:
                self._copied(c, self._left(c, slice(None)), [t[0, :, : self.keys.size_of(c)] for t in self._outgoing])

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        self.push(owner, chunk, heads, (grads[0][:, heads, rows], grads[1][:, heads, rows]))

    def staged(self, reader: int, chunk: int) -> Pair:
        """The same for every reader."""
        if chunk not in self._staged:
            start, size = self._starts[chunk], self.keys.size_of(chunk)
            self._staged[chunk] = self.memory.shape.gradients(size, self.memory.device)
            for t, came in zip(self._staged[chunk], self.memory.came, strict=True):
                t[:, :, :size] = came[:, :, start : start + size]
        return self._staged[chunk]

    def row_by_row(self) -> None:
        """What was staged in octets, as executors take it that know of none: the same gradients."""
        for pair in self._staged.values():
            for t in pair:
                t.copy_(from_octets(t))

    def release(self, epoch: int) -> None:
        """Nothing waits for a word."""

    def _left(self, chunk: int, heads: slice) -> Pair:
        start = self._starts[chunk]
        k, v = (t[0, heads, start : start + self.keys.size_of(chunk)] for t in self.memory.left)
        return k, v

    def _copied(self, chunk: int, into: Iterable[Tensor], source: Iterable[Tensor], whole: bool = False) -> None:
        """Tensors [heads, rows, ...], for as long as the link takes that the chunk comes by; `whole`: all of them at least."""
        far = chunk in self.part.across or chunk in self.part.carried
        for a, b in zip(into, source, strict=True):
            part = self.memory.link == "host" and not far and not whole
            rows = -(-a.shape[1] // self.inside) if part else a.shape[1]
            if self.memory.link == "host":
                copy(a[:, :rows], b[:, :rows])
                continue
            for _ in range(self.inside if far else 1):
                _between_gpus(a, b, self.memory.device)


def _piece(chunk: int, heads: slice, rows: int) -> tuple[int, int, int, int]:
    return chunk, heads.start, heads.stop, rows


def _between_gpus(into: Tensor, source: Tensor, device: torch.device) -> None:
    """Enqueue a copy of [heads, ...] on the current stream of `device`, wherever the tensors are."""
    width = into[0].numel() * into.element_size()
    pitches = into.stride(0) * into.element_size(), source.stride(0) * source.element_size()
    stream = torch.cuda.current_stream(device).cuda_stream
    driver_streams.copy_pieces(into.data_ptr(), source.data_ptr(), width, into.shape[0], pitches, stream)
