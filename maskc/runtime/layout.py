"""Layout: one axis of the sequence cut into chunks that move whole, and the rank that owns each chunk.

Pure integers: no tensors, no torch.distributed. A rank holds its chunks in ascending order; the last chunk may be short,
a rank may own nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral

from maskc.diagnostics import error

Range = tuple[int, int]
"""Positions [start, stop)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`bounds` are the N + 1 ascending chunk edges, the last one the length; `owner[i]` is the rank of chunk i."""

    world: int
    bounds: tuple[int, ...]
    owner: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.world < 1:
            raise error("M701", f"world_size is {self.world}; a plan needs at least one rank")
        if len(self.bounds) != len(self.owner) + 1 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise error("M702", "chunk edges must rise from 0 to the length, one owner per chunk")
        if any(not 0 <= r < self.world for r in self.owner):
            raise error("M702", f"chunk owners must be ranks 0 to {self.world - 1}, got {self.owner}")

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def chunk_count(self) -> int:
        return len(self.owner)

    @property
    def chunk(self) -> int | None:
        """The common chunk size when all but the last chunk have it, else None."""
        if self.chunk_count == 0:
            return None
        size = self.bounds[1]
        regular = all(b - a == size for a, b in pairwise(self.bounds[:-1])) and self.bounds[-1] - self.bounds[-2] <= size
        return size if regular else None

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Chunk numbers of a rank, ascending."""
        number: object = rank  # may be one of numpy
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) < self.world:
            raise error("M703", f"rank {rank!r} does not exist: the plan has ranks 0 to {self.world - 1}")
        return _chunks_by_rank(self)[int(number)]

    def range_of(self, chunk: int) -> Range:
        return self.bounds[chunk], self.bounds[chunk + 1]

    def size_of(self, chunk: int) -> int:
        return self.bounds[chunk + 1] - self.bounds[chunk]

    def ranges(self, chunks: tuple[int, ...]) -> tuple[Range, ...]:
        """Positions of the given chunks in the given order, neighbours joined."""
        out: list[Range] = []
        for c in chunks:
            start, stop = self.range_of(c)
            if out and out[-1][1] == start:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return tuple(out)

    def local_length(self, rank: int) -> int:
        return sum(self.size_of(c) for c in self.chunks_of(rank))


@lru_cache(maxsize=256)
def _chunks_by_rank(layout: Layout) -> tuple[tuple[int, ...], ...]:
    out: list[list[int]] = [[] for _ in range(layout.world)]
    for chunk, rank in enumerate(layout.owner):
        out[rank].append(chunk)
    return tuple(tuple(c) for c in out)


def even_bounds(length: int, chunk: int) -> tuple[int, ...]:
    """Edges of chunks of one size, the last one short."""
    if chunk < 1:
        raise error("M702", f"chunk is {chunk}; a chunk has at least one row")
    return (*range(0, length, chunk), length) if length else (0,)


def contiguous(length: int, world: int, granule: int | None = None) -> Layout:
    """ceil(length / world) rows per rank, the last rank short; ranks beyond the end own nothing.

    `granule` cuts a rank's block into chunks of that size, so that less than a block can travel.
    """
    size = max(1, -(-length // world))
    return _pieces([(start, i) for i, start in enumerate(range(0, length, size))], length, world, granule)


def zigzag(length: int, world: int, granule: int | None = None) -> Layout:
    """Rank r owns pieces r and 2 * world - 1 - r of 2 * world equal pieces."""
    size = max(1, -(-length // (2 * world)))
    return _pieces([(start, _fold(i, world)) for i, start in enumerate(range(0, length, size))], length, world, granule)


def zigzag_documents(documents: Sequence[Range], length: int, world: int, granule: int | None = None) -> Layout:
    """Zigzag inside every document and inside what no document covers; neighbouring pieces of one rank are joined."""
    pieces: list[tuple[int, int]] = []
    for start, stop in tiling(documents, length):
        step = max(1, -(-(stop - start) // (2 * world)))
        pieces += [(edge, _fold(i, world)) for i, edge in enumerate(range(start, stop, step))]
    return _pieces([p for i, p in enumerate(pieces) if i == 0 or pieces[i - 1][1] != p[1]], length, world, granule)


def usual_owners(chunks: int, world: int) -> dict[str, tuple[int, ...]]:
    """Contiguous and zigzag owners of equal chunks, where that gives no rank more than ceil(chunks / world)."""
    found = {
        "contiguous": tuple(i * world // chunks for i in range(chunks)),
        "zigzag": tuple(_fold(i * 2 * world // chunks, world) for i in range(chunks)),
    }
    most = -(-chunks // world)
    return {name: owner for name, owner in found.items() if max(map(owner.count, range(world)), default=0) <= most}


def tiling(documents: Sequence[Range], length: int) -> list[Range]:
    """Documents and the gaps between and after them, empty ones left out: they tile [0, length)."""
    out: list[Range] = []
    edge = 0
    for start, stop in sorted(documents):
        if start > edge:
            out.append((edge, start))
        if stop > start:
            out.append((start, stop))
        edge = max(edge, stop)
    if edge < length:
        out.append((edge, length))
    return out


def _pieces(pieces: list[tuple[int, int]], length: int, world: int, granule: int | None) -> Layout:
    """A layout from (start, rank) pieces, each cut into chunks of at most `granule` rows."""
    stops = [start for start, _ in pieces[1:]] + [length]
    cut = [
        (edge, rank)
        for (start, rank), stop in zip(pieces, stops, strict=False)
        for edge in range(start, stop, granule or stop - start)
    ]
    return Layout(world, (*(edge for edge, _ in cut), length) if cut else (0,), tuple(rank for _, rank in cut))


def _fold(piece: int, world: int) -> int:
    at = piece % (2 * world)
    return at if at < world else 2 * world - 1 - at
