"""Other ranks as pinned host memory, for whole training steps of one simulated rank: a `maskc.runtime.transport.Transport`.

The keys of all ranks lie there one rank after another and never change, so the other ranks are always ready. The link to
host memory has about the rate of one between nodes; inside a node it is `inside` times faster, so of a chunk that stays
inside, only that part is copied: the rest lies in the buffer from the first time. Gradients leave in the same way, and what
other ranks send counts as there when what this rank sends has left, for all of them do the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import OverlapPlan, visit_order
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.protocol import Epochs, Turn, Word
from maskc.runtime.transport import KeyShape, Pair, copy

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
    order = visit_order(p.keys, needed, rank, size if p.hierarchical else p.world)
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

    Rows lie rank by rank, chunks ascending (`starts`). keys: (K, V) [Hk, rows, 1, D] in host memory. left: (dK, dV)
    [1, Hk, rows, D] that a rank pushed, likewise. came: what every other rank has of them, [1, Hk, rows, D] on the device.
    """

    def __init__(self, rows: int, shape: KeyShape, device: torch.device) -> None:
        pinned = device.type == "cuda"
        generator = torch.Generator().manual_seed(0)
        self.shape, self.device, self.pinned = shape, device, pinned
        self.keys = shape.empty(rows, "cpu", pinned)
        self.left, self.came = shape.gradients(rows, "cpu", pinned), shape.gradients(rows, device)
        for k, g in zip(self.keys, self.came, strict=True):
            k.copy_(torch.randn(k.shape, generator=generator, dtype=torch.float32))
            g.copy_(1e-3 * torch.randn(g.shape, generator=generator, dtype=torch.float32))


def starts(keys: Layout) -> dict[int, int]:
    """Where each chunk begins in `Memory`."""
    chunks = [c for r in range(keys.world) for c in keys.chunks_of(r)]
    return dict(zip(chunks, accumulate((keys.size_of(c) for c in chunks), initial=0), strict=False))


class Link:
    """The transport of one simulated rank."""

    joins = True

    def __init__(self, part: Part, keys: Layout, memory: Memory, inside: int) -> None:
        self.part, self.keys, self.memory, self.inside = part, keys, memory, inside
        self._complete: set[tuple[int, int]] = set()  # first chunks and heads of copies that lie in the key buffer
        self._starts = starts(keys)
        self._last_pull = self._last_push = -1  # chunks, see `carry_behind`
        pulls = part.plan.pulls
        self._last_owner = pulls[-1].source if pulls else None
        words = torch.tensor([READY, 0, 0 if pulls else READY], dtype=torch.int32)
        self._words = words.pin_memory() if memory.pinned else words
        self._epochs = Epochs()
        most = max((keys.size_of(c) for c in part.carried), default=0)
        self._passing, self._outgoing = memory.shape.empty(most, memory.device), memory.shape.gradients(most, memory.device)
        self._staged: dict[int, Pair] = {}

    def carry_behind(self, plan: OverlapPlan) -> None:
        """What is carried for neighbours goes after everything that the executor's plan copies."""
        if plan.pulls:
            self._last_pull, self._last_push = plan.slots[-1].chunk, plan.slots[-1].chunks[-1]

    def begin(self, readers: Iterable[int] | None, owners: Iterable[int] = ()) -> Turn:
        return self._epochs.begin(readers, owners)

    def address(self, word: Word) -> int:
        """Of three words: one that is always there, one for what nobody reads, one for gradients that have left."""
        mine = word.holder == self.part.plan.rank
        if word.kind == "sent" and (mine or word.holder == self._last_owner):
            return self._words.data_ptr() + 8
        return self._words.data_ptr() + (0 if mine else 4)

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        piece, rows = (chunk, heads.start), into[0].shape[1]
        copied = self._part(chunk, rows) if piece in self._complete else rows
        self._complete.add(piece)
        _copied(copied, into, self.readable(rank, half, chunk, heads, rows))
        if chunk == self._last_pull and self._last_heads(heads):
            for c in self.part.carried:
                _copied(self.keys.size_of(c), self._passing, self.readable(rank, half, c, slice(None), self.keys.size_of(c)))

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        start = self._starts[chunk]
        k, v = (t[heads, start : start + rows] for t in self.memory.keys)
        return k, v

    def own(self, half: int) -> Pair | None:
        return None

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        _copied(self._part(chunk, self.keys.size_of(chunk)), self._left(chunk, heads), [t[0] for t in grads])
        if chunk == self._last_push and self._last_heads(heads):
            for c in self.part.carried:
                _copied(self.keys.size_of(c), self._left(c, slice(None)), [t[0] for t in self._outgoing])

    def staged(self, reader: int, chunk: int) -> Pair:
        """The same for every reader."""
        if chunk not in self._staged:
            start = self._starts[chunk]
            k, v = (t[:, :, start : start + self.keys.size_of(chunk)].contiguous() for t in self.memory.came)
            self._staged[chunk] = k, v
        return self._staged[chunk]

    def release(self, epoch: int) -> None:
        """Nothing waits for a word."""

    def _part(self, chunk: int, rows: int) -> int:
        """So many rows take as long over this link as `rows` over the link that the chunk comes by."""
        return rows if chunk in self.part.across else -(-rows // self.inside)

    def _last_heads(self, heads: slice) -> bool:
        return bool(heads.stop == self.memory.shape.heads)

    def _left(self, chunk: int, heads: slice) -> Pair:
        start = self._starts[chunk]
        k, v = (t[0, heads, start : start + self.keys.size_of(chunk)] for t in self.memory.left)
        return k, v


def _copied(rows: int, into: Iterable[Tensor], source: Iterable[Tensor]) -> None:
    """The first rows of every tensor [heads, rows, ...]."""
    for a, b in zip(into, source, strict=True):
        copy(a[:, :rows], b[:, :rows])
