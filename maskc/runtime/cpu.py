"""The CPU backend: tiled online softmax that skips by tile class, and its closed-form backward.

Layouts: q [B, Sq, Hq, D], k [B, Sk, Hk, D], val [B, Sk, Hk, Dv], out [B, Sq, Hq, Dv], lse [B, Hq, Sq] (natural log,
-inf for a row that sees nothing). Query head h reads kv head h // (Hq // Hk) and mask head h // (Hq // Hm). Arithmetic
is fp64 for fp64 inputs and fp32 for every other dtype. Results do not depend on the order of threads, so
`deterministic` is always met.

Formulas (P = exp(S - lse), S = scale * Q K^T): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O) + dlse),
dQ = scale * dS K, dK = scale * dS^T Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from maskc.boundary import BoundaryVectors
from maskc.diagnostics import Diagnostic
from maskc.runtime.merge import accumulator
from maskc.tiles import TileClass, classify

BLOCK_Q = 128
BLOCK_KV = 128
UNMASKED_BLOCKS = 4  # neighbouring unmasked tiles are multiplied at once
_CELLS = 1 << 18  # short sequences: as many batch items are worked on together as hold about this many scores
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def why_not(v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor, val: torch.Tensor) -> Diagnostic | None:
    """The reason why this backend cannot run the call, or None."""
    if q.device.type != "cpu":
        return Diagnostic(
            "M507", f'backend "cpu" needs CPU tensors, q is on `{q.device}`', help='backend "auto" follows the tensors'
        )
    if q.dtype not in DTYPES:
        return Diagnostic("M505", f'backend "cpu" has no {q.dtype}', help="cast q, k and v to float32, bfloat16 or float16")
    return None


def schedule(v: BoundaryVectors, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Nothing: tile classes are cheap beside CPU attention and are made in every call."""
    return ()


def forward(
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    scale: float,
    *,
    schedule: tuple[torch.Tensor, ...] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out in `out_dtype` or q's dtype, lse fp32 (fp64 for fp64)."""
    acc = accumulator(q.dtype)
    batch, nq, heads, _ = q.shape
    out = q.new_empty(batch, nq, heads, val.shape[3], dtype=out_dtype or q.dtype)
    lse = torch.empty(batch, heads, nq, dtype=acc, device=q.device)
    for part in _parts(v, q, k):
        keys, values = _heads_first(k[part.items], acc), _heads_first(val[part.items], acc)
        for r0, r1, tiles in part.row_tiles():
            queries = _heads_first(q[part.items, r0:r1], acc).mul_(scale).view(len(keys), -1, q.shape[3])
            top = queries.new_full(queries.shape[:-1], -torch.inf)
            total = torch.zeros_like(top)
            mixed = queries.new_zeros(*top.shape, val.shape[3])
            for tile in tiles:
                key_tile, value_tile = tile.visible(keys), tile.visible(values)
                scores = tile.mask_(queries @ key_tile.mT, -torch.inf)
                new_top = torch.maximum(top, scores.amax(-1))
                pivot = new_top.masked_fill(new_top == -torch.inf, 0.0)  # no -inf minus -inf in rows still empty
                shrink = torch.exp(top - pivot)
                weights = scores.sub_(pivot[..., None]).exp_()
                total = total.mul_(shrink).add_(weights.sum(-1))
                mixed = mixed.mul_(shrink[..., None]).baddbmm_(weights, value_tile)
                top = new_top
            empty = top == -torch.inf
            mixed = mixed.div_(total.masked_fill(empty, 1.0)[..., None])
            out[part.items, r0:r1] = mixed.view(part.count, heads, r1 - r0, val.shape[3]).transpose(1, 2)
            lse[part.items, :, r0:r1] = (top + total.log()).masked_fill_(empty, -torch.inf).view(part.count, heads, r1 - r0)
    return out, lse


def backward(
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    deterministic: bool = False,
    *,
    schedule: tuple[torch.Tensor, ...] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in `grad_dtype` or the inputs' own. `dlse` [B, Hq, Sq] is the gradient of lse, None for zero.

    `out` and `lse` may be those of a softmax over more keys than `k` holds: the result is this call's share.
    """
    acc, heads, kv_heads = accumulator(q.dtype), q.shape[2], k.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=grad_dtype or x.dtype, device=x.device) for x in (q, k, val))
    for part in _parts(v, q, k):
        keys, values = _heads_first(k[part.items], acc), _heads_first(val[part.items], acc)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for r0, r1, tiles in part.row_tiles():
            norm = lse[part.items, :, r0:r1].to(acc).reshape(len(keys), -1, 1)
            empty = norm == -torch.inf  # such rows may hold NaN, which no zero may meet
            queries, out_rows, douts = (
                _heads_first(x[part.items, r0:r1], acc).view(len(keys), -1, x.shape[3]).masked_fill_(empty, 0.0)
                for x in (q, out, dout)
            )
            queries.mul_(scale)
            delta = (douts * out_rows).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= dlse[part.items, :, r0:r1].to(acc).reshape(delta.shape).masked_fill(empty, 0.0)
            norm = norm.masked_fill(empty, torch.inf)  # exp(s - inf) = 0
            dqueries = torch.zeros_like(queries)
            for tile in tiles:
                key_tile, value_tile = tile.visible(keys), tile.visible(values)
                weights = tile.mask_((queries @ key_tile.mT).sub_(norm).exp_(), 0.0)
                dvalues[:, tile.c0 : tile.c1].baddbmm_(weights.mT, douts)
                dscores = (douts @ value_tile.mT).sub_(delta).mul_(weights)
                dqueries.baddbmm_(dscores, key_tile)
                dkeys[:, tile.c0 : tile.c1].baddbmm_(dscores.mT, queries)
            dq[part.items, r0:r1] = dqueries.mul_(scale).view(part.count, heads, r1 - r0, q.shape[3]).transpose(1, 2)
        dk[part.items] = dkeys.view(part.count, kv_heads, *dkeys.shape[1:]).transpose(1, 2)
        dv[part.items] = dvalues.view(part.count, kv_heads, *dvalues.shape[1:]).transpose(1, 2)
    return dq, dk, dv


# ---------------------------------------------------------------- shared


@dataclass(frozen=True, eq=False, slots=True)
class _Tile:
    """Key columns [c0, c1) beside one block of rows.

    masked: bool [items or 1, Hm, 1, rows, cols], None where nothing is masked. hidden: bool [items * Hk, cols, 1], keys
    that none of the rows sees in any query head of the kv head, None where there are none. share: Hq / Hm.
    """

    c0: int
    c1: int
    share: int
    masked: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def visible(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [c0, c1) of [items * Hk, Sk, D], zero where hidden, so that no NaN of theirs meets a zero weight."""
        rows = x[:, self.c0 : self.c1]
        return rows if self.hidden is None else rows.masked_fill(self.hidden, 0.0)

    def mask_(self, scores: torch.Tensor, value: float) -> torch.Tensor:
        """Fill the masked elements of [items * Hk, Hq / Hk * rows, cols], in place."""
        if self.masked is not None:
            _, mask_heads, _, rows, cols = self.masked.shape
            scores.view(-1, mask_heads, self.share, rows, cols).masked_fill_(self.masked, value)
        return scores


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """Batch items that are worked on together, with the classes of their tiles over all items and mask heads."""

    v: BoundaryVectors
    items: slice
    heads: int
    kv_heads: int
    classes: list[list[int]]

    @property
    def count(self) -> int:
        return int(self.items.stop - self.items.start)

    def row_tiles(self) -> Iterator[tuple[int, int, Iterator[_Tile]]]:
        """(first row, end row, live tiles) for each block of rows."""
        for i, classes in enumerate(self.classes):
            r0, r1 = i * BLOCK_Q, min((i + 1) * BLOCK_Q, self.v.nq)
            yield r0, r1, self._tiles(r0, r1, classes)

    def _tiles(self, r0: int, r1: int, classes: list[int]) -> Iterator[_Tile]:
        share = self.heads // self.v.heads
        for tile_class, blocks in groupby(range(len(classes)), classes.__getitem__):
            run = list(blocks)
            wide = UNMASKED_BLOCKS if tile_class == TileClass.UNMASKED else 1
            for j in run[::wide] if tile_class != TileClass.SKIP else ():
                c0, c1 = j * BLOCK_KV, min(j + wide, run[-1] + 1) * BLOCK_KV
                c1 = min(c1, self.v.nk)
                if tile_class == TileClass.UNMASKED:
                    yield _Tile(c0, c1, share)
                else:
                    masked = self.v.masked_tile(r0, r1, c0, c1, self.items)
                    yield _Tile(c0, c1, share, masked[:, :, None], self._hidden(masked.all(2)))

    def _hidden(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[items or 1, Hm, cols] by mask head as [items * Hk, cols, 1] by kv head."""
        if not hidden.any():
            return None
        by_query_head = hidden.repeat_interleave(self.heads // self.v.heads, 1)
        by_kv_head = by_query_head.reshape(len(hidden), self.kv_heads, -1, hidden.shape[2]).all(2)
        return by_kv_head.expand(self.count, -1, -1).reshape(self.count * self.kv_heads, -1, 1)


def _parts(v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor) -> Iterator[_Part]:
    classes = classify(v, BLOCK_Q, BLOCK_KV)
    step = max(1, _CELLS // max(1, q.shape[1] * k.shape[1] * q.shape[2]))
    for b in range(0, q.shape[0], step):
        items = slice(b, min(b + step, q.shape[0]))
        own = (classes if v.batch == 1 else classes[items]).flatten(0, 1)
        low, high = own.amin(0), own.amax(0)
        merged = torch.where(low == high, low, TileClass.PARTIAL.value)
        yield _Part(v, items, q.shape[2], k.shape[2], merged.tolist())


def _heads_first(x: torch.Tensor, acc: torch.dtype) -> torch.Tensor:
    """A new contiguous [items * H, S, D] of [items, S, H, D], in the accumulator's dtype."""
    batch, rows, heads, width = x.shape
    new = torch.empty(batch, heads, rows, width, dtype=acc, device=x.device)
    return new.copy_(x.transpose(1, 2)).view(batch * heads, rows, width)
