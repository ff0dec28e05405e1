"""The masks of a plan as chunks see them: workloads and needs, all read off one tile table per mask and size of tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from maskc.boundary import BoundaryVectors
from maskc.runtime.layout import Layout
from maskc.runtime.plan_arguments import Spec
from maskc.runtime.plan_specs import spec_name, vectors_digest
from maskc.runtime.tile_work import TileCosts, TileTable, TileWork, tile_size, tile_table

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MaskPart:
    """What the plan keeps of one mask.

    digest: of its vectors. weight: layers that use it. need[i]: bit j says that row chunk i sees key chunk j.
    workloads: per row chunk, in tile costs, summed over batch items and heads.
    """

    name: str
    digest: str
    weight: int
    need: tuple[int, ...]
    workloads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one batch, before any row has an owner. items: batch items times heads that workloads are summed over."""

    specs: tuple[Spec, ...]
    vectors: tuple[BoundaryVectors, ...]
    weights: tuple[int, ...]
    costs: TileCosts
    _tables: dict[tuple[int, int], tuple[TileTable, ...]] = field(default_factory=dict)

    @property
    def items(self) -> int:
        return math.lcm(*(v.heads for v in self.vectors)) * math.lcm(*(v.batch for v in self.vectors))

    def tables(self, tile: tuple[int, int]) -> tuple[TileTable, ...]:
        if tile not in self._tables:
            self._tables[tile] = tuple(tile_table(v, tile) for v in self.vectors)
        return self._tables[tile]

    def works(self, rows: Layout, keys: Layout) -> tuple[TileWork, ...]:
        """Per mask, by chunks."""
        return tuple(t.per_chunk(rows, keys) for t in self.tables((tile_size(rows), tile_size(keys))))

    def by_tile(self, tile: int) -> tuple[Ints, list[tuple[int, NDArray[np.bool_]]]]:
        """Joint work of every row of square tiles, and per mask its weight and, [row tiles, key tiles], what is seen."""
        tables = [table.per_tile() for table in self.tables((tile, tile))]
        joint = np.sum([w * loads for w, loads in zip(self.weights, self.loads(tables), strict=True)], axis=0)
        return joint, [(w, table.need) for w, table in zip(self.weights, tables, strict=True)]

    def loads(self, works: Sequence[TileWork]) -> tuple[Ints, ...]:
        """Workloads per mask; one that heads or items share is worked through for each."""
        pairs = zip(self.vectors, works, strict=True)
        return tuple(work.cost(self.costs) * (self.items // (v.heads * v.batch)) for v, work in pairs)

    def parts(self, works: Sequence[TileWork]) -> tuple[MaskPart, ...]:
        """What a plan keeps of them."""
        found = zip(self.specs, self.vectors, self.weights, works, self.loads(works), strict=True)
        return tuple(
            MaskPart(spec_name(spec), vectors_digest(v), weight, tuple(map(_bits, work.need)), tuple(loads.tolist()))
            for spec, v, weight, work, loads in found
        )


def _bits(row: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
