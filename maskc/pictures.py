"""Bound masks as text: the stages `vectors` and `tiles`, and the picture of a small mask. Uses torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from maskc.boundary import VECTOR_NAMES, BoundaryVectors
from maskc.tiles import TileClass

TILE_LETTERS = {TileClass.SKIP: ".", TileClass.PARTIAL: "p", TileClass.UNMASKED: "#"}


def vectors_text(v: BoundaryVectors) -> str:
    """Sizes, then one line for every vector of every batch item and mask head, as runs of equal or consecutive values."""
    lines = [f"nq {v.nq}  nk {v.nk}  batch {v.batch}  heads {v.heads}  causal {'yes' if v.causal else 'no'}"]
    for name, vector in zip(VECTOR_NAMES, v.tensors, strict=True):
        if vector is None:
            continue
        for b, item in enumerate(vector.tolist()):
            lines += [f"{name}[{b},{h}]: {' '.join(_runs(values))}" for h, values in enumerate(item)]
    if v.blocks is not None:
        lines.append(f"blocks {v.blocks.block_q} x {v.blocks.block_kv}")
        lines += _grids(v.blocks.keep, {0: ".", 1: "#"})
    return "\n".join(lines) + "\n"


def tiles_text(classes: torch.Tensor, block_q: int, block_kv: int) -> str:
    """Tile classes [B, Hm, nQ, nK] as letters, a row of Q blocks a line."""
    counts = tile_counts(classes)
    head = f"tiles {block_q} x {block_kv}: " + ", ".join(f"{n} {c.name} {TILE_LETTERS[c]}" for c, n in counts.items())
    return "\n".join([head, *_grids(classes, {int(c): letter for c, letter in TILE_LETTERS.items()})]) + "\n"


def tile_counts(classes: torch.Tensor) -> dict[TileClass, int]:
    """How many tiles of each class, over all batch items and heads."""
    counts = torch.bincount(classes.flatten().long(), minlength=len(TileClass)).tolist()
    return {c: counts[c] for c in TileClass}


def picture(v: BoundaryVectors, marks: Sequence[int] = (), head: int = 0) -> list[str]:
    """Rows down, keys across, `#` where the row sees the key. `marks`: keys before which a gap shows a boundary."""
    visible = (~v.masked()[0, head]).tolist()
    gaps = {m for m in marks if 0 < m < v.nk}
    width = len(str(v.nq - 1))
    lines = []
    for q, row in enumerate(visible):
        if q in gaps and v.nq == v.nk:
            lines.append("")
        cells = "".join((" " if k in gaps else "") + ("#" if seen else ".") for k, seen in enumerate(row))
        lines.append(f"{q:>{width}} {cells}")
    return lines


def visible_pairs(v: BoundaryVectors) -> int:
    """How many (q, k) pairs are visible, over all batch items and mask heads; O(n) but for a block table."""
    if v.blocks is None:
        return int(_visible_rows(v, 0, v.nq).sum())
    total = 0
    columns = torch.arange(v.nk) // v.blocks.block_kv
    for block in range(v.blocks.keep.shape[2]):
        rows = _visible_rows(v, block * v.blocks.block_q, min((block + 1) * v.blocks.block_q, v.nq))
        total += int((rows * v.blocks.keep[:, :, block][:, :, columns]).sum())
    return total


def _visible_rows(v: BoundaryVectors, r0: int, r1: int) -> torch.Tensor:
    """Visible rows of each column among [r0, r1): int64 [batch, heads, nk]."""
    spans = [(start.clamp(r0, r1), torch.maximum(end, start).clamp(r0, r1)) for start, end in _masked_spans(v)]
    free = torch.full((v.batch, v.heads, v.nk), r1 - r0)
    if not spans:
        return free
    starts, order = torch.stack([s.expand_as(free) for s, _ in spans]).sort(0)
    ends = torch.stack([e.expand_as(free) for _, e in spans]).gather(0, order)
    reached = torch.full_like(free, r0)
    for start, end in zip(starts, ends, strict=True):
        free = free - (end - torch.maximum(start, reached)).clamp(min=0)
        reached = torch.maximum(reached, end)
    return free


def _masked_spans(v: BoundaryVectors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    zero, last = torch.tensor(0), torch.tensor(v.nq)
    if v.causal:
        yield zero, torch.arange(v.nk)
    if v.diag is not None:
        yield zero, v.diag.long()
    for start, end in ((v.lts, v.lte), (v.uts, v.ute)):
        if start is not None or end is not None:
            yield zero if start is None else start.long(), last if end is None else end.long()


def _runs(values: Sequence[int]) -> Iterator[str]:
    """`7x3` for 7 7 7, `4..9` for 4 5 6 7 8 9, else the number."""
    i = 0
    while i < len(values):
        equal = rising = i + 1
        while equal < len(values) and values[equal] == values[i]:
            equal += 1
        while rising < len(values) and values[rising] == values[rising - 1] + 1:
            rising += 1
        if equal - i > 1:
            yield f"{values[i]}x{equal - i}"
            i = equal
        elif rising - i > 2:
            yield f"{values[i]}..{values[rising - 1]}"
            i = rising
        else:
            yield str(values[i])
            i += 1


def _grids(table: torch.Tensor, letters: dict[int, str]) -> Iterator[str]:
    batch, heads = table.shape[:2]
    for b in range(batch):
        for h in range(heads):
            if batch * heads > 1:
                yield f"batch {b}, head {h}"
            yield from ("".join(letters[int(cell)] for cell in row) for row in table[b, h].tolist())
