"""What the kernels of all ranks visit, over what one kernel visits for the whole mask.

Workloads of a plan count tiles of chunks. A kernel cuts the rows that a rank holds into tiles of its own, so some straddle
two chunks that are far apart and are visited for what either sees (where its warp groups pass over what their rows do not
see, a tile is what one group has); and keys that several ranks read are loaded, and their gradients written, by each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import HEAD_DIMS
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime.hopper import mask_form
from maskc.runtime.localize import localize
from maskc.tiles import TileClass, classify

if TYPE_CHECKING:
    from maskc.boundary import BoundaryVectors
    from maskc.runtime.plan import AttentionPlan

Tile = tuple[int, int]
"""(rows, keys)."""


@dataclass(frozen=True, slots=True)
class KernelTiles:
    """The tiles of both kernels; and of all ranks over one kernel: tiles visited, and key tiles that the backward reads."""

    forward_tile: Tile
    backward_tile: Tile
    forward: float
    backward: float
    keys: float


def kernel_tiles(v: BoundaryVectors, p: AttentionPlan, head_dim: int = 128) -> KernelTiles | None:
    """The counts for the vectors `v` of the whole sequence. None for a head dim that no kernel takes, or without work.

    Takes about as long as classifying the tiles of `v` four times.
    """
    fitting = [d for d in HEAD_DIMS if d >= head_dim]
    if not fitting:
        return None
    ranks = [localize(v, p.rows, p.rows.chunks_of(r), p.keys, tuple(sorted(p.needed(r)))) for r in range(p.world)]
    form = mask_form(ranks[0])
    forward, backward = forward_spec(form, min(fitting), "bf16"), select_backward(form, min(fitting), "bf16")
    tiles = (forward.block_q // forward.row_groups, forward.block_kv), (backward.block_q, backward.block_kv)
    whole, parts = _visited(v, *tiles), [_visited(x, *tiles) for x in ranks]
    if not all(whole):
        return None
    return KernelTiles(*tiles, *(sum(n) / one for n, one in zip(zip(*parts, strict=True), whole, strict=True)))


def _visited(v: BoundaryVectors, forward: Tile, backward: Tile) -> tuple[int, int, int]:
    """Tiles of the forward and of the backward that are not skipped, and key tiles of the latter that any row sees."""
    seen = classify(v, *backward) != TileClass.SKIP.value
    return int((classify(v, *forward) != TileClass.SKIP.value).sum()), int(seen.sum()), int(seen.any(2).sum())
