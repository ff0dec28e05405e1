"""Copies by copy engines: pieces of memory evenly apart, so that no kernel is launched for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from maskc.runtime import driver_streams


class Copy(NamedTuple):
    """One operation of a copy engine: `pieces` pieces of `width` bytes each, which lie `pitches` apart (into, source)."""

    into: int
    source: int
    width: int
    pieces: int
    pitches: tuple[int, int]

    @classmethod
    def of(cls, into: Tensor, source: Tensor) -> Copy:
        """The copy of a tensor to another. Raises ValueError where one operation cannot do it."""
        made = copies_of(into, source)
        if len(made) != 1:
            raise ValueError(f"{len(made)} copies: {tuple(source.shape)} {source.dtype} into {tuple(into.shape)} {into.dtype}")
        return made[0]

    @classmethod
    def both(cls, k: Copy, v: Copy) -> tuple[Copy, ...]:
        """One operation for the two, where values lie as far behind keys as one can be told."""
        pitches = v.into - k.into, v.source - k.source
        if k.pieces == v.pieces == 1 and k.width == v.width and all(k.width <= p < 1 << 31 for p in pitches):
            return (cls(k.into, k.source, k.width, 2, pitches),)
        return k, v

    @property
    def bytes(self) -> int:
        return self.width * self.pieces

    def enqueue(self, stream: int, ahead: int = 0) -> None:
        """On a stream, by its handle; the source lies `ahead` bytes further on."""
        if self.pieces == 1:
            driver_streams.copy(self.into, self.source + ahead, self.width, stream)
        else:
            driver_streams.copy_pieces(self.into, self.source + ahead, self.width, self.pieces, self.pitches, stream)

    def ready(self) -> Callable[[int, int], None]:
        """`enqueue`, to be called again and again, by one thread at a time."""
        into, source, width, pieces, pitches = self
        if pieces == 1:
            return lambda stream, ahead: driver_streams.copy(into, source + ahead, width, stream)
        made = driver_streams.Copy2D(into, width, pieces, pitches)
        return lambda stream, ahead: made.enqueue(source + ahead, stream)


def copies_of(into: Tensor, source: Tensor) -> tuple[Copy, ...]:
    """Copies of one tensor to another, of any strides but one for the last dimension, by as few operations as may be."""
    if into.shape != source.shape or into.dtype != source.dtype:
        raise ValueError(f"no copy: {tuple(source.shape)} {source.dtype} into {tuple(into.shape)} {into.dtype}")
    if not into.numel():
        return ()
    width, dims = into.element_size(), list[tuple[int, int, int]]()
    for size, *strides in zip(into.shape, into.stride(), source.stride(), strict=True):
        if size > 1:
            to, of = (s * width for s in strides)
            if dims and dims[-1][1:] == (size * to, size * of):
                size *= dims.pop()[0]
            dims.append((size, to, of))
    if dims and dims[-1][1:] == (width, width):
        width *= dims.pop()[0]
    apart = [d for d in dims if min(d[1:]) >= width]  # pieces of one operation do not overlap
    pieces, *pitches = dims.pop(dims.index(max(apart))) if apart else (1, width, width)
    offsets = [(0, 0)]
    for size, to, of in dims:
        offsets = [(a + i * to, b + i * of) for a, b in offsets for i in range(size)]
    at = into.data_ptr(), source.data_ptr()
    return tuple(Copy(at[0] + a, at[1] + b, width, pieces, (pitches[0], pitches[1])) for a, b in offsets)


def copy(into: Tensor, source: Tensor) -> None:
    """Enqueue a copy on torch's current stream, for copy engines, by as few operations as may be: no kernel is launched."""
    if into.device.type != "cuda" and source.device.type != "cuda":
        into.copy_(source)
        return
    stream = torch.cuda.current_stream(into.device if into.device.type == "cuda" else source.device).cuda_stream
    for one in copies_of(into, source):
        one.enqueue(stream)
