"""Tile classes: what a kernel may do with a block_q x block_kv tile, from block minima and maxima alone.

Guarantees: SKIP and UNMASKED are promises (every element masked; none masked), PARTIAL promises nothing. Neither
function ever holds anything of size nq x nk. The two rules are proved symbolically in `maskc.ir` (see `classify`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from maskc.boundary import BlockTable, BoundaryVectors

_CHUNK = 1 << 22  # tiles classified at once: bounds the temporaries to a few tens of megabytes


class TileClass(IntEnum):
    """SKIP: all masked. PARTIAL: test each element. UNMASKED: none masked."""

    SKIP = 0
    PARTIAL = 1
    UNMASKED = 2


@dataclass(frozen=True, eq=False, slots=True)
class Extremes:
    """Minimum and maximum of one vector over each KV block: int32 [batch, heads, nK]."""

    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class BlockMinMax:
    """Block min/max of each vector that exists, for one KV block size. A ragged last block counts its own columns only."""

    block_kv: int
    lts: Extremes | None
    lte: Extremes | None
    uts: Extremes | None
    ute: Extremes | None
    diag: Extremes | None


def block_minmax(v: BoundaryVectors, block_kv: int) -> BlockMinMax:
    """Block minima and maxima of the vectors of `v`, on their device, in one pass over n columns."""
    return BlockMinMax(block_kv, *(None if t is None else _extremes(t, block_kv) for t in v.tensors))


def classify(v: BoundaryVectors, block_q: int, block_kv: int) -> torch.Tensor:
    """Tile classes as uint8 [batch, heads, ceil(nq / block_q), ceil(nk / block_kv)] (see `TileClass`), on v's device.

    Rows of the tile are [r0, r1), columns [c0, c1), both cut at nq and nk.
    SKIP: the rows that every column of the block masks, [0, c0) with `causal`, [0, min diag), [max lts, min lte) and
    [max uts, min ute), together cover [r0, r1); or the block table hides every block that the tile touches.
    UNMASKED: r0 >= c1 - 1 with `causal`, r0 >= max diag, each of the two intervals lies below or above the rows or is
    empty in every column, and the block table keeps every block that the tile touches.
    """
    device = v.device
    r0 = torch.arange(0, v.nq, block_q, dtype=torch.int32, device=device)
    c0 = torch.arange(0, v.nk, block_kv, dtype=torch.int32, device=device)
    r1, c1 = (r0 + block_q).clamp(max=v.nq), (c0 + block_kv).clamp(max=v.nk)
    bounds = block_minmax(v, block_kv)
    out = torch.empty(v.batch, v.heads, len(r0), len(c0), dtype=torch.uint8, device=device)
    step = max(1, _CHUNK // max(1, v.batch * v.heads * len(c0)))
    for i in range(0, len(r0), step):
        rows = slice(i, i + step)
        out[:, :, rows] = _classes(v, bounds, r0[rows, None], r1[rows, None], c0, c1)
    if v.blocks is not None:
        _apply_blocks(out, v.blocks, r0, r1, c0, c1)
    return out


def _extremes(vector: torch.Tensor, block: int) -> Extremes:
    *lead, n = vector.shape
    full = n // block * block
    body = vector[..., :full].reshape(*lead, n // block, block)
    low, high = body.amin(-1), body.amax(-1)
    if full < n:
        tail = vector[..., full:]
        low = torch.cat((low, tail.amin(-1, keepdim=True)), -1)
        high = torch.cat((high, tail.amax(-1, keepdim=True)), -1)
    return Extremes(low, high)


def _classes(
    v: BoundaryVectors, bounds: BlockMinMax, r0: torch.Tensor, r1: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor
) -> torch.Tensor:
    """Classes of the tiles of rows [r0, r1) (each [rows, 1]), without the block table."""
    shape = (v.batch, v.heads, r0.shape[0], c0.shape[0])
    covered = r0.expand(shape)  # rows [r0, covered) are masked in every column
    clear = torch.ones(shape, dtype=torch.bool, device=r0.device)
    if v.causal:
        covered = torch.maximum(covered, c0)
        clear &= r0 >= c1 - 1
    if bounds.diag is not None:
        covered = torch.maximum(covered, _beside(bounds.diag.low))
        clear &= r0 >= _beside(bounds.diag.high)
    slots = [s for s in ((bounds.lts, bounds.lte), (bounds.uts, bounds.ute)) if s != (None, None)]
    for start, end in slots:
        if start is not None:
            apart = r1 <= _beside(start.low)
            clear &= apart if end is None else apart | (_beside(end.high) <= r0) | _beside(end.high <= start.low)
        elif end is not None:
            clear &= _beside(end.high) <= r0
    first, later = ([s for s in slots if (s[0] is None) == from_the_top] for from_the_top in (True, False))
    for start, end in (*first, *later, *later[:-1]):  # of two that start anywhere, either may come first
        reached = covered.clamp(min=v.nq) if end is None else torch.maximum(covered, _beside(end.low))
        covered = reached if start is None else torch.where(_beside(start.high) <= covered, reached, covered)
    classes = clear.to(torch.uint8) + TileClass.PARTIAL.value  # UNMASKED is one more
    return classes.masked_fill_(covered >= r1, TileClass.SKIP.value)


def _beside(by_block: torch.Tensor) -> torch.Tensor:
    """[batch, heads, nK] beside the rows of tiles."""
    return by_block[:, :, None]


def _apply_blocks(
    out: torch.Tensor, blocks: BlockTable, r0: torch.Tensor, r1: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor
) -> None:
    """Lower the classes `out` by the block table: SKIP where it hides the whole tile, PARTIAL where it hides a part."""
    sums = torch.nn.functional.pad(blocks.keep.to(torch.int32), (1, 0, 1, 0)).cumsum(-1).cumsum(-2)
    top, bottom = (r0 // blocks.block_q).long(), ((r1 - 1) // blocks.block_q).long() + 1
    left, right = (c0 // blocks.block_kv).long(), ((c1 - 1) // blocks.block_kv).long() + 1
    upper, lower = sums[:, :, top], sums[:, :, bottom]
    kept = lower[..., right] - lower[..., left] - upper[..., right] + upper[..., left]
    touched = (bottom - top)[:, None] * (right - left)
    out.masked_fill_((kept < touched) & (out == TileClass.UNMASKED.value), TileClass.PARTIAL.value)
    out.masked_fill_(kept == 0, TileClass.SKIP.value)
