"""The transport between GPUs (and, over shared memory, CPUs) of one host: a `Transport` of one call over a `Link`.

A rank's memory holds its keys in two halves, and after them a region of staging per reader. Keys are pulled by their
reader, gradients pushed by theirs, both by copy engines; each region belongs to one pair of ranks for good, so that the
words of the pair are all that orders its use, whatever plans come after each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from maskc.runtime import comm
from maskc.runtime.layout import Layout
from maskc.runtime.link import Link, Room, aligned
from maskc.runtime.merge import accumulator
from maskc.runtime.overlap_plan import OverlapPlan
from maskc.runtime.protocol import HALVES, Turn, Word
from maskc.runtime.transport import KeyShape, Pair, copy


class Symmetric:
    """keys: the key layout. plan: of this rank. shape: of K and V. The link has the room of `room_of`.

    It looks at the link's memory as it is now, so it goes when that grows.
    """

    joins = True

    def __init__(self, link: Link, plan: OverlapPlan, keys: Layout, shape: KeyShape) -> None:
        self.link, self.keys, self.shape, self.rank = link, keys, shape, plan.rank
        self._lent = dict(plan.lends)
        self._views: dict[tuple[int, ...], Pair] = {}
        self._taken = {o: tuple(sorted(s.chunk for s in plan.pulls if s.source == o)) for o in plan.sources}

    def begin(self, readers: Iterable[int] | None, owners: Iterable[int] = ()) -> Turn:
        return self.link.epochs.begin(readers, owners)

    def address(self, word: Word) -> int:
        return self.link.address(word)

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        for mine, theirs in zip(into, self.readable(rank, half, chunk, heads, into[0].shape[1]), strict=True):
            copy(mine, theirs)
            comm.count_pulled("kv", rank, mine.numel() * mine.element_size())

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        key = rank, half, chunk, heads.start, heads.stop, rows
        if (known := self._views.get(key)) is not None:
            return known
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(rank) if c < chunk)
        k, v = (t[heads, start : start + rows] for t in self._half(rank, half))
        self._views[key] = k, v
        return k, v

    def own(self, half: int) -> Pair | None:
        return self._half(self.rank, half) if self._lent else None

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        for there, mine in zip(self._region(owner, self.rank, self._taken[owner], chunk), grads, strict=True):
            for to, part in zip(there, mine, strict=True):
                copy(to[heads], part)
            comm.count_sent("grad", owner, mine.numel() * mine.element_size())

    def staged(self, reader: int, chunk: int) -> Pair:
        return self._region(self.rank, reader, self._lent[reader], chunk)

    def release(self, epoch: int) -> None:
        self.link.release(epoch)

    def _half(self, rank: int, half: int) -> Pair:
        rows, shape = self.keys.local_length(rank), self.shape
        at = half * self.link.room.half
        k, v = (
            _cut(self.link.memory[rank], at + where, (shape.heads, rows, shape.batch, d), shape.dtype)
            for where, d in ((0, shape.dim_k), (_bytes(rows, shape, shape.dim_k, shape.dtype), shape.dim_v))
        )
        return k, v

    def _region(self, owner: int, reader: int, chunks: Sequence[int], chunk: int) -> Pair:
        """(dK, dV) of a chunk among those that the pair shares, in their order."""
        shape, acc = self.shape, accumulator(self.shape.dtype)
        rows = self.keys.size_of(chunk)
        before = sum(self.keys.size_of(c) for c in chunks if c < chunk)
        at = HALVES * self.link.room.half + reader * self.link.room.region
        at += _bytes(before, shape, shape.dim_k, acc) + _bytes(before, shape, shape.dim_v, acc)
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
