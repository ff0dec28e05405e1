"""The transport between GPUs (and, over shared memory, CPUs) of one host: a `Transport` of one call over a `Link`.

A rank's memory holds its keys in two halves, and after them a region of staging per reader. Keys are pulled by their
reader, gradients pushed by theirs, both by copy engines; each region belongs to one pair of ranks for good, so that the
words of the pair are all that orders its use, whatever plans come after each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from maskc.runtime import comm
from maskc.runtime.layout import Layout
from maskc.runtime.link import Link, Room, aligned
from maskc.runtime.merge import accumulator
from maskc.runtime.overlap_plan import OverlapPlan
from maskc.runtime.protocol import HALVES, Turn, Word
from maskc.runtime.transport import Copy, KeyShape, Pair, Pulls, copy


class Symmetric:
    """keys: the key layout. plan: of this rank. shape: of K and V. The link has the room of `room_of`.

    It looks at the link's memory as it is now, so it goes when that grows.
    """

    joins = True
    one_engine = True
    by_parts = near = True

    def __init__(self, link: Link, plan: OverlapPlan, keys: Layout, shape: KeyShape) -> None:
        self.link, self.keys, self.shape, self.rank = link, keys, shape, plan.rank
        self._lent = dict(plan.lends)
        self._pulls = Pulls(self)
        self._pushes: dict[tuple[int, ...], tuple[tuple[int, Copy], ...]] = {}
        self._taken = {o: tuple(sorted(c for s in plan.pulls if s.source == o for c in s.chunks)) for o in plan.sources}

    def begin(self, readers: Iterable[int] | None, owners: Iterable[int] = ()) -> Turn:
        return self.link.epochs.begin(readers, owners)

    def address(self, word: Word) -> int:
        return self.link.address(word)

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        if into[0].device.type != "cuda":
            for mine, theirs in zip(into, self.readable(rank, half, chunk, heads, into[0].shape[1]), strict=True):
                copy(mine, theirs)
                comm.count_pulled("kv", rank, mine.numel() * mine.element_size())
            return
        stream = torch.cuda.current_stream(into[0].device).cuda_stream
        for one in self._pulls.of(rank, half, chunk, heads, into):
            one.enqueue(stream)
            comm.count_pulled("kv", rank, one.bytes)

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(rank) if c < chunk)
        k, v = (t[heads, start : start + rows] for t in self._half(rank, half))
        return k, v

    def own(self, half: int) -> Pair | None:
        return self._half(self.rank, half) if self._lent else None

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        for there, mine in zip(self._places(owner, chunk, heads, grads[0].shape[2]), grads, strict=True):
            for to, part in zip(there, mine, strict=True):
                copy(to, part)
            comm.count_sent("grad", owner, mine.numel() * mine.element_size())

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        if grads[0].device.type != "cuda":
            self.push(owner, chunk, heads, (grads[0][:, heads, rows], grads[1][:, heads, rows]))
            return
        key = owner, chunk, heads.start, heads.stop, rows.start, *grads[0].shape, *grads[1].shape
        copies = self._pushes.get(key)
        if copies is None:
            copies = self._pushes[key] = tuple(self._copies(owner, chunk, heads, rows, grads))
        bases = [t.data_ptr() for t in grads]
        stream = torch.cuda.current_stream(grads[0].device).cuda_stream
        for which, one in copies:
            one.enqueue(stream, bases[which])
            comm.count_sent("grad", owner, one.bytes)

    def staged(self, reader: int, chunk: int) -> Pair:
        taken = self._lent[reader]
        start = sum(self.keys.size_of(c) for c in taken if c < chunk)
        dk, dv = (t[:, :, start : start + self.keys.size_of(chunk)] for t in self._region(self.rank, reader, taken))
        return dk, dv

    def release(self, epoch: int) -> None:
        self.link.release(epoch)

    def _copies(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> Iterator[tuple[int, Copy]]:
        """(of dK or dV, a copy whose source counts from its first element)."""
        for which, (there, whole) in enumerate(
            zip(self._places(owner, chunk, heads, rows.stop - rows.start), grads, strict=True)
        ):
            mine = whole[:, heads, rows]
            even = heads == slice(0, self.shape.heads)  # the heads of all batch items lie evenly
            for to, part in [(there.flatten(0, 1), mine.flatten(0, 1))] if even else zip(there, mine, strict=True):
                made = Copy.of(to, part)
                yield which, made._replace(source=made.source - whole.data_ptr())

    def _places(self, owner: int, chunk: int, heads: slice, rows: int) -> Pair:
        """Where heads of so many rows from a chunk on go."""
        taken = self._taken[owner]
        start = sum(self.keys.size_of(c) for c in taken if c < chunk)
        dk, dv = (t[:, heads, start : start + rows] for t in self._region(owner, self.rank, taken))
        return dk, dv

    def _half(self, rank: int, half: int) -> Pair:
        rows, shape = self.keys.local_length(rank), self.shape
        at = half * self.link.room.half
        k, v = (
            _cut(self.link.memory[rank], at + where, (shape.heads, rows, shape.batch, d), shape.dtype)
            for where, d in ((0, shape.dim_k), (_bytes(rows, shape, shape.dim_k, shape.dtype), shape.dim_v))
        )
        return k, v

    def _region(self, owner: int, reader: int, chunks: Sequence[int]) -> Pair:
        """(dK, dV) [B, Hk, rows, D] of all chunks that the pair shares, in their order."""
        shape, acc = self.shape, accumulator(self.shape.dtype)
        rows = sum(self.keys.size_of(c) for c in chunks)
        at = HALVES * self.link.room.half + reader * self.link.room.region
        dk, dv = (
            _cut(self.link.memory[owner], at + where, (shape.batch, shape.heads, rows, d), acc)
            for where, d in ((0, shape.dim_k), (_bytes(rows, shape, shape.dim_k, acc), shape.dim_v))
        )
        return dk, dv


def room_of(keys: Layout, shape: KeyShape) -> Room:
    """What calls over this layout need on every rank, whatever the mask: any reader may need all that a rank holds."""
    acc = accumulator(shape.dtype)
    held = max(keys.local_length(r) for r in range(keys.world))
    half = sum(_bytes(held, shape, d, shape.dtype) for d in (shape.dim_k, shape.dim_v))
    region = sum(_bytes(held, shape, d, acc) for d in (shape.dim_k, shape.dim_v))
    return Room(aligned(half), aligned(region))


def _bytes(rows: int, shape: KeyShape, dim: int, dtype: torch.dtype) -> int:
    return rows * shape.batch * shape.heads * dim * dtype.itemsize


def _cut(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return memory[at : at + size].view(dtype).view(shape)
