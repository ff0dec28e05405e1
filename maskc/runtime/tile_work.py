"""What a plan reads off the tile table of a mask: the work of every row chunk and which key chunks it needs.

The table is the one the kernels use (`maskc.tiles.classify`), so kernel queues, workloads and transfers agree: a key
chunk that is not needed holds no tile that a kernel would load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskc.boundary import BoundaryVectors
from maskc.runtime.chunking import TILE
from maskc.runtime.layout import Layout
from maskc.tiles import TileClass, classify

TABLE_EDGE = 4096
"""Finest table: this many tiles per axis."""


@dataclass(frozen=True, slots=True)
class TileCosts:
    """Integer cost of a PARTIAL tile, an UNMASKED tile, and a row of tiles that has any; SKIP tiles cost nothing."""

    partial: int = 13
    unmasked: int = 10
    row: int = 0

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, int, float]], unit: int = 64) -> TileCosts:
        """From measured times: (partial, unmasked, non-empty tile rows, seconds) per sample, scaled to `unit` an UNMASKED tile.

        Times of forward and backward are fitted apart, or added first where one plan serves both. Raises ValueError when
        the times do not grow with the UNMASKED tiles.
        """
        _, a, b, c = fitted_seconds(samples)
        if not b > 0:
            raise ValueError(f"the fitted time of an UNMASKED tile is {b} s; more or other samples are needed")
        return cls(max(1, round(unit * a / b)), unit, max(0, round(unit * c / b)))


def fitted_seconds(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Seconds of a call and of each thing counted: T = c0 + c1 n1 + c2 n2 + ..., from samples (n1, n2, ..., seconds).

    Least squares of the relative errors, so that long calls weigh no more than short ones.
    """
    table = np.array([[1, *counts] for *counts, _ in samples], dtype=np.float64)
    seconds = np.array([t for *_, t in samples], dtype=np.float64)
    found = np.linalg.lstsq(table / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
    return tuple(found.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class TileWork:
    """Per row chunk: PARTIAL and UNMASKED tiles and non-empty tile rows, summed over batch items and mask heads (int64 [N]).

    need: bool [row chunks, key chunks], True where a tile is not SKIP in any batch item or mask head.
    tile: (rows, keys) of a tile.
    """

    partial: NDArray[np.int64]
    unmasked: NDArray[np.int64]
    rows: NDArray[np.int64]
    need: NDArray[np.bool_]
    tile: tuple[int, int]

    def cost(self, costs: TileCosts) -> NDArray[np.int64]:
        return self.partial * costs.partial + self.unmasked * costs.unmasked + self.rows * costs.row


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Per row of tiles: PARTIAL and UNMASKED tiles and whether it has any, summed over batch items and mask heads (int64).

    seen: bool [row tiles, key tiles], True where a tile is not SKIP in any of them. tile: (rows, keys) of a tile.
    """

    partial: NDArray[np.int64]
    unmasked: NDArray[np.int64]
    busy: NDArray[np.int64]
    seen: NDArray[np.bool_]
    tile: tuple[int, int]

    @property
    def _bits(self) -> NDArray[np.uint8]:
        """`seen`, eight key tiles a byte: rows of it are joined in an eighth of the time."""
        return np.packbits(self.seen, axis=1)

    def per_chunk(self, rows: Layout, keys: Layout) -> TileWork:
        """A tile on a chunk edge counts for every chunk it touches."""
        height, width = self.tile
        by_row = np.unpackbits(per_chunk(np.bitwise_or, self._bits, rows, height), axis=1, count=self.seen.shape[1])
        need = per_chunk(np.logical_or, by_row.view(np.bool_).T, keys, width).T
        counts = np.stack((self.partial, self.unmasked, self.busy), axis=1)
        partial, unmasked, busy = np.ascontiguousarray(per_chunk(np.add, counts, rows, height).T)
        return TileWork(partial, unmasked, busy, need, self.tile)

    def per_tile(self) -> TileWork:
        """Of every row of tiles by itself."""
        return TileWork(self.partial, self.unmasked, self.busy, self.seen, self.tile)


def tile_table(v: BoundaryVectors, tile: tuple[int, int]) -> TileTable:
    """The tile table of `v`, its columns added up."""
    classes = classify(v, *tile).cpu().numpy()
    partial = (classes == TileClass.PARTIAL.value).sum((0, 1, 3), dtype=np.int64)
    unmasked = (classes == TileClass.UNMASKED.value).sum((0, 1, 3), dtype=np.int64)
    taken = classes != TileClass.SKIP.value
    return TileTable(partial, unmasked, taken.any(3).sum((0, 1), dtype=np.int64), taken.any((0, 1)), tile)


def tile_work(v: BoundaryVectors, rows: Layout, keys: Layout) -> TileWork:
    """Reduce the tile table of `v` to chunks."""
    return tile_table(v, (tile_size(rows), tile_size(keys))).per_chunk(rows, keys)


def tile_size(layout: Layout) -> int:
    """Up to TILE, dividing every chunk edge, unless the table would have more than TABLE_EDGE tiles on this axis."""
    return tabled(layout.length, gcd(TILE, *layout.bounds[:-1]))


def tabled(length: int, tile: int = TILE) -> int:
    """The tile, or the next that is 2, 4, ... times as large and of which an axis has TABLE_EDGE at most."""
    while -(-length // tile) > TABLE_EDGE:
        tile *= 2
    return tile


def per_chunk(combine: np.ufunc, table: NDArray[Any], layout: Layout, tile: int) -> NDArray[Any]:
    """The entries of the tiles that each chunk touches, combined along axis 0."""
    edges = [edge for a, b in pairwise(layout.bounds) for edge in (a // tile, -(-b // tile))]
    padded = np.concatenate((table, np.zeros((1, *table.shape[1:]), table.dtype)))  # an edge may be the last
    combined: NDArray[Any] = combine.reduceat(padded, edges, axis=0)[::2]
    return combined
