"""The transport between GPUs (and, over shared memory, CPUs) of one host: a `Transport` of one call over a `Link`.

A rank's memory holds words for the pieces of its key buffers, the buffers, and after them per reader a region of staging
and the words that tell of what lies there. Keys are given by their owner, out of its own tensors, by copy engines, which
write to another GPU faster than they read from one; gradients are given by their reader's kernel, or pushed by such an
engine. Each region belongs to one pair of ranks for good, so that the words of the pair are all that orders its use, whatever
plans come after each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from maskc.runtime import comm
from maskc.runtime.copies import Copy, copies_of, copy
from maskc.runtime.layout import Layout
from maskc.runtime.link import Link, Room, aligned
from maskc.runtime.merge import accumulator
from maskc.runtime.overlap_plan import Cut, OverlapPlan
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.protocol import Turn, Word
from maskc.runtime.remember import derived
from maskc.runtime.transport import KeyShape, Pair, Prepared, by_chunk, padded


class Symmetric:
    """keys: the key layout. plan: of this rank. shape: of K and V. which: of their buffers the ranks use in these calls.

    The link has the room of `room_of`. This looks at the link's memory as it is now, so it goes when that grows.
    """

    joins = one_engine = True
    pulls = None

    def __init__(self, link: Link, plan: OverlapPlan, keys: Layout, shape: KeyShape, which: int = 0) -> None:
        self.link, self.keys, self.shape, self.rank, self.which = link, keys, shape, plan.rank, which
        self._lent = dict(plan.lends)
        self._gifts: dict[tuple[object, ...], Prepared] = {}
        self._pushes: dict[tuple[object, ...], Prepared] = {}
        self._taken = {o: tuple(sorted(c for s in plan.pulls if s.source == o for c in s.chunks)) for o in plan.sources}

    @property
    def gives(self) -> Symmetric:
        return self

    @property
    def takes(self) -> Symmetric:
        return self

    def begin(self, owners: Iterable[int] = (), tag: int = 0) -> Turn:
        return self.link.begin(owners, tag)

    def address(self, word: Word) -> int:
        return self.link.address(word)

    # ---- keys

    def flags(self, rank: int) -> Tensor:
        """int32, a word per piece of a rank's buffer."""
        return self.link.flags(rank, self.which)

    def buffer(self, rank: int, rows: int) -> Pair:
        """The key buffer of a rank, as a view: its rows lie as those of keys do, [B, rows, Hk, D]."""
        shape, at = self.shape, self.link.room.buffer_at(self.which)
        k, v = (
            _cut(self.link.memory[rank], at + where, (shape.batch, rows, shape.heads, d), shape.dtype).permute(2, 1, 0, 3)
            for where, d in ((0, shape.dim_k), (_bytes(rows, shape, shape.dim_k, shape.dtype), shape.dim_v))
        )
        return k, v

    def give(self, reader: int, cut: Cut, piece: int, own: Pair, by_kernel: bool = False) -> None:
        """Enqueue on torch's current stream: own keys [B, rows, Hk, D] to a piece of a reader's buffer, which `cut` cuts.

        by_kernel: by multiprocessors.
        """
        if by_kernel or own[0].device.type != "cuda":
            for there, mine in zip(*self._ends(reader, cut, piece, own), strict=True):
                there.copy_(mine)
        else:
            _enqueued(self.given(reader, cut, piece, own), own)
        comm.count_sent("kv", reader, self._bytes_of(cut, piece))

    def given(self, reader: int, cut: Cut, piece: int, own: Pair) -> Prepared:
        """Made once."""
        key = reader, cut, piece, own[0].stride(), own[1].stride()
        made = self._gifts.get(key)
        if made is None:
            ends = zip(*self._ends(reader, cut, piece, own), strict=True)
            copies = (
                (i, c._replace(source=c.source - own[i].data_ptr())) for i, (to, t) in enumerate(ends) for c in copies_of(to, t)
            )
            made = self._gifts[key] = Prepared(tuple(copies), self._bytes_of(cut, piece))
        return made

    def _bytes_of(self, cut: Cut, piece: int) -> int:
        shape = self.shape
        row = shape.batch * cut.group_heads * (shape.dim_k + shape.dim_v) * shape.dtype.itemsize
        return cut.plan.slot_of(piece).rows * row

    def _ends(self, reader: int, cut: Cut, piece: int, own: Pair) -> tuple[list[Tensor], list[Tensor]]:
        """(there, here) of K and of V [B, rows, heads, D]."""
        at, heads = cut.plan.slot_of(piece), cut.heads_of(piece)
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(self.rank) if c < at.chunk)
        buffer = self.buffer(reader, cut.plan.rows)
        there = [t[heads, at.start : at.start + at.rows].permute(2, 1, 0, 3) for t in buffer]
        return there, [t[:, start : start + at.rows, heads] for t in own]

    # ---- gradients

    def place(self, owner: int, chunk: int) -> Pair:
        return self._places(owner, chunk, slice(None), padded(self.keys.size_of(chunk)))

    def told(self, owner: int, reader: int) -> Tensor:
        return self.link.told(owner, reader)

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        if grads[0].device.type != "cuda":
            rows = grads[0].shape[2]
            for there, mine in zip(self._places(owner, chunk, heads, rows), grads, strict=True):
                copy(there, mine)
            comm.count_sent("grad", owner, self._bytes_pushed(chunk, heads, rows))
            return
        self._pushed(self.pushed(owner, chunk, heads, None, grads), owner, grads)

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        if grads[0].device.type != "cuda":
            self.push(owner, chunk, heads, (grads[0][:, heads, rows], grads[1][:, heads, rows]))
            return
        self._pushed(self.pushed(owner, chunk, heads, rows, grads), owner, grads)

    def _pushed(self, made: Prepared, owner: int, grads: Pair) -> None:
        _enqueued(made, grads)
        comm.count_sent("grad", owner, made.bytes)

    def staged(self, reader: int, chunk: int) -> Pair:
        dk, dv = (t[:, :, self._rows(self._lent[reader], chunk)] for t in self._region(self.rank, reader, self._lent[reader]))
        return dk, dv

    def release(self, epoch: int) -> None:
        self.link.release(epoch)

    def pushed(self, owner: int, chunk: int, heads: slice, rows: slice | None, grads: Pair) -> Prepared:
        """Made once."""
        key = owner, chunk, heads.start, heads.stop, rows and rows.start, rows and rows.stop, *(t.shape for t in grads)
        made = self._pushes.get(key)
        if made is None:
            parts = grads if rows is None else (grads[0][:, heads, rows], grads[1][:, heads, rows])
            made = self._pushes[key] = Prepared(
                tuple(self._copies(owner, chunk, heads, parts, grads)), self._bytes_pushed(chunk, heads, parts[0].shape[2])
            )
        return made

    def _copies(self, owner: int, chunk: int, heads: slice, parts: Pair, of: Pair) -> Iterator[tuple[int, Copy]]:
        """(of dK or dV, a copy whose source counts from the first byte of that in `of`)."""
        there = self._places(owner, chunk, heads, parts[0].shape[2])
        for which, (to, part, whole) in enumerate(zip(there, parts, of, strict=True)):
            for made in copies_of(to, part):
                yield which, made._replace(source=made.source - whole.data_ptr())

    def _places(self, owner: int, chunk: int, heads: slice, rows: int) -> Pair:
        """Where heads of so many padded rows from a chunk on go."""
        start = self._rows(self._taken[owner], chunk).start
        dk, dv = (t[:, heads, start : start + rows] for t in self._region(owner, self.rank, self._taken[owner]))
        return dk, dv

    def _rows(self, chunks: Sequence[int], chunk: int) -> slice:
        """Those of a chunk in a region."""
        start = sum(padded(self.keys.size_of(c)) for c in chunks if c < chunk)
        return slice(start, start + padded(self.keys.size_of(chunk)))

    def _region(self, owner: int, reader: int, chunks: Sequence[int]) -> Pair:
        """(dK, dV) [B, Hk, rows, D] of all chunks that the pair shares, in their order, each padded."""
        shape, acc = self.shape, accumulator(self.shape.dtype)
        rows = sum(padded(self.keys.size_of(c)) for c in chunks)
        at = self.link.room.region_at(reader)
        dk, dv = (
            _cut(self.link.memory[owner], at + where, (shape.batch, shape.heads, rows, d), acc)
            for where, d in ((0, shape.dim_k), (_bytes(rows, shape, shape.dim_k, acc), shape.dim_v))
        )
        return dk, dv

    def _bytes_pushed(self, chunk: int, heads: slice, rows: int) -> int:
        """Of gradients of so many padded rows from a chunk on."""
        heads_sent: int = heads.stop - heads.start
        return sum(self.keys.size_of(c) for c, _ in by_chunk(self.keys, chunk, rows)) * heads_sent * self.shape.gradient_bytes


def _enqueued(made: Prepared, of: Pair) -> None:
    """On torch's current stream."""
    bases = [t.data_ptr() for t in of]
    stream = torch.cuda.current_stream(of[0].device).cuda_stream
    for which, one in made.copies:
        one.enqueue(stream, bases[which])


@derived
def most_rows(plan: AttentionPlan) -> int:
    """Of the key buffers of all ranks, under whichever mask of the plan."""
    every = product(range(plan.world), range(len(plan.parts)))
    needed = (plan.needed(r, part) if plan.prune else range(plan.keys.chunk_count) for r, part in every)
    return max(sum(map(plan.keys.size_of, chunks)) for chunks in needed)


def room_of(keys: Layout, rows: int, shape: KeyShape) -> Room:
    """What calls over this layout need on every rank. rows: of the largest key buffer. A reader may see all of a rank's keys."""
    acc = accumulator(shape.dtype)
    held = max(sum(padded(keys.size_of(c)) for c in keys.chunks_of(r)) for r in range(keys.world))
    buffer = sum(_bytes(rows, shape, d, shape.dtype) for d in (shape.dim_k, shape.dim_v))
    region = sum(_bytes(held, shape, d, acc) for d in (shape.dim_k, shape.dim_v))
    return Room(aligned(buffer), aligned(region))


def _bytes(rows: int, shape: KeyShape, dim: int, dtype: torch.dtype) -> int:
    return rows * shape.batch * shape.heads * dim * dtype.itemsize


def _cut(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return memory[at : at + size].view(dtype).view(shape)
