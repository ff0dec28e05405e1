"""FlexAttention: `mask_mod` and `BlockMask`, read element by element, written from vectors and tile tables in O(n)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.boundary import BoundaryVectors
from maskc.convert.arguments import check_integers
from maskc.convert.columns import Mask, vectors_of
from maskc.convert.dense import LIMIT, check_size, from_slabs
from maskc.diagnostics import error
from maskc.tiles import TileClass, classify

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_SLAB = 1 << 22  # elements evaluated at once


def from_mask_mod(
    mask_mod: MaskMod,
    nq: int,
    nk: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
    limit: int = LIMIT,
) -> BoundMask:
    """The mask of a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`, evaluated for every element in slabs of keys.

    batch, heads: sizes on which the result depends. Raises M452 above `limit` elements, M450 with the first column that
    needs more than two masked runs.
    """
    check_integers(0, nq=nq, nk=nk)
    check_integers(1, batch=batch, heads=heads)
    check_size(batch, heads, nq, nk, limit, "mask_mod")
    step = max(1, _SLAB // max(1, batch * heads * nq))
    return from_slabs(_slabs(mask_mod, batch, heads, nq, nk, step, device), nq, "mask_mod")


def from_block_mask(block_mask: BlockMask, *, limit: int = LIMIT) -> BoundMask:
    """The mask of a BlockMask: full blocks, and its `mask_mod` in partial ones. Raises as `from_mask_mod`."""
    batch, heads, nq, nk = block_mask.shape
    check_size(batch, heads, nq, nk, limit, "BlockMask")
    block_q, block_kv = block_mask.BLOCK_SIZE
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    width = max(1, _SLAB // max(1, batch * heads * nq * block_kv))

    def slabs() -> Iterator[Tensor]:
        device = partial.device
        inner = _slabs(block_mask.mask_mod, batch, heads, nq, nk, width * block_kv, device)
        for i, seen in enumerate(inner):
            part, whole = (_spread(t[..., i * width : (i + 1) * width], block_q, block_kv, seen) for t in (partial, full))
            yield part & seen | whole

    return from_slabs(slabs(), nq, "BlockMask")


def to_mask_mod(mask: Mask, nq: int | None = None, nk: int | None = None, *, query_heads: int | None = None) -> MaskMod:
    """A `mask_mod` that reads the boundary vectors; `query_heads` is needed where the mask has heads of its own."""
    v = vectors_of(mask, nq, nk)
    return mask_mod_of(v, _share(v, query_heads))


def to_block_mask(
    mask: Mask,
    nq: int | None = None,
    nk: int | None = None,
    *,
    query_heads: int | None = None,
    block: int | tuple[int, int] = 128,
) -> BlockMask:
    """A BlockMask from the tile classes: nothing of size nq x nk is made."""
    v = vectors_of(mask, nq, nk)
    block_q, block_kv = (block, block) if isinstance(block, int) else block
    check_integers(1, **{"block[0]": block_q, "block[1]": block_kv})
    share = _share(v, query_heads)
    return block_mask_of(v, block_tables(v, block_q, block_kv), share, (block_q, block_kv))


# ---------------------------------------------------------------- shared with the backend "flex"


def mask_mod_of(v: BoundaryVectors, share: int) -> MaskMod:
    """The element test over vectors; query head h reads mask head h // share."""
    lts, lte, uts, ute, diag = v.tensors
    keep = None if v.blocks is None else v.blocks.keep
    block_q, block_kv = (1, 1) if v.blocks is None else (v.blocks.block_q, v.blocks.block_kv)
    causal, items, heads = v.causal, v.batch > 1, v.heads > 1
    tables = None if keep is None else (keep.shape[0] > 1, keep.shape[1] > 1)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        item, head = (b if items else 0), (h // share if heads else 0)
        seen = q >= k if causal else q >= 0
        if diag is not None:
            seen = seen & (q >= diag[item, head, k])
        if lts is not None:
            below = q < lts[item, head, k]
            seen = seen & (below if lte is None else below | (q >= lte[item, head, k]))
        if ute is not None:
            above = q >= ute[item, head, k]
            seen = seen & (above if uts is None else above | (q < uts[item, head, k]))
        if keep is not None and tables is not None:
            seen = seen & keep[b if tables[0] else 0, h // share if tables[1] else 0, q // block_q, k // block_kv]
        return seen

    return mask_mod


def block_tables(v: BoundaryVectors, block_q: int, block_kv: int) -> tuple[Tensor, ...]:
    """(count, indices) of partial and of full KV blocks per Q block: int32 [batch, mask heads, nQ] and [.., nQ, nK].

    Ragged blocks at the edges are never full: torch tests their elements too.
    """
    classes = classify(v, block_q, block_kv)
    for edge in ([classes[..., -1, :]] if v.nq % block_q else []) + ([classes[..., -1]] if v.nk % block_kv else []):
        edge.masked_fill_(edge == TileClass.UNMASKED.value, TileClass.PARTIAL.value)
    return *_listed(classes == TileClass.PARTIAL.value), *_listed(classes == TileClass.UNMASKED.value)


def block_mask_of(v: BoundaryVectors, tables: tuple[Tensor, ...], share: int, block: tuple[int, int]) -> BlockMask:
    """The BlockMask of `block_tables`, its heads spread over the query heads."""
    from torch.nn.attention.flex_attention import BlockMask

    if v.heads > 1 and share > 1:
        tables = tuple(t.repeat_interleave(share, 1) for t in tables)
    partial_count, partial, full_count, full = tables
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=block,
        mask_mod=mask_mod_of(v, share),
        seq_lengths=(v.nq, v.nk),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which ones first) along the last axis of a bool table."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.to(torch.uint8), dim=-1, descending=True, stable=True)
    return count, order.to(torch.int32)


# ---------------------------------------------------------------- reading


def _share(v: BoundaryVectors, query_heads: int | None) -> int:
    if v.heads == 1:
        return 1
    if query_heads is None or query_heads % v.heads:
        raise error("M453", f"the mask has {v.heads} heads; query_heads is {query_heads}", None, "give a multiple of its heads")
    return query_heads // v.heads


def _slabs(
    mask_mod: MaskMod, batch: int, heads: int, nq: int, nk: int, step: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Bool [batch, heads, nq, columns] for each slab of columns; a mask without elements is not asked for any."""
    if not batch * heads * nq * nk:
        yield torch.zeros(batch, heads, nq, nk, dtype=torch.bool, device=device)
        return
    each = mask_mod
    for axis in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        each = torch.vmap(each, in_dims=axis)
    b, h, q = (torch.arange(size, device=device) for size in (batch, heads, nq))
    for first in range(0, nk, step):
        seen = each(b, h, q, torch.arange(first, min(first + step, nk), device=device))
        if seen.dtype != torch.bool:
            raise error(
                "M451", f"mask_mod returns {seen.dtype}, not bool", None, "a score_mod changes scores; only masks convert"
            )
        yield seen


def _table(count: Tensor, indices: Tensor) -> Tensor:
    """Bool [batch, heads, nQ, nK] of the first `count` indices of each row."""
    columns = indices.shape[-1]
    wanted = torch.arange(columns, device=indices.device) < count[..., None]
    out = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return out.scatter_(-1, torch.where(wanted, indices, columns).long(), torch.ones_like(out))[..., :columns]


def _spread(table: Tensor, block_q: int, block_kv: int, like: Tensor) -> Tensor:
    return table.repeat_interleave(block_q, -2).repeat_interleave(block_kv, -1)[..., : like.shape[-2], : like.shape[-1]]
