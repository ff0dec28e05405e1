"""Dense bool masks: read column by column, exactly or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.convert.arguments import tensor_of
from maskc.convert.columns import Mask, bound, too_many, vectors_of
from maskc.diagnostics import error

LIMIT = 1 << 30
"""Elements that are looked at without being asked twice (`limit=`): seconds on a GPU, a minute on a CPU."""
_SLAB = 1 << 22  # elements at once
_RUNS = 3  # visible runs of a column with at most two masked ones


def from_dense(visible: object) -> BoundMask:
    """The mask of a bool tensor [nq, nk], [batch, nq, nk] or [batch, heads, nq, nk], True where row q sees key k.

    Additive masks of floats are refused rather than guessed at: pass `mask == 0`. Raises M451 for shape or dtype, M450
    with the first column that needs more than two masked runs.
    """
    mask = tensor_of("the dense mask", visible)
    if mask.dtype != torch.bool:
        hint = "True = visible; of an additive mask pass `mask == 0`"
        raise error("M451", f"the dense mask is {mask.dtype}, not bool", None, hint)
    if not 2 <= mask.ndim <= 4:
        wanted = "[nq, nk], [batch, nq, nk] or [batch, heads, nq, nk]"
        raise error("M451", f"the dense mask has shape {tuple(mask.shape)}, not {wanted}")
    mask = mask[(None,) * (2 - mask.ndim + 2)] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    batch, heads, nq, nk = mask.shape
    step = max(1, _SLAB // max(1, batch * heads * nq))
    return from_slabs((mask[..., c : c + step] for c in range(0, max(1, nk), step)), nq, "dense mask")


def to_dense(mask: Mask, nq: int | None = None, nk: int | None = None, *, limit: int = LIMIT) -> Tensor:
    """Bool [batch, heads, nq, nk], True where visible (1 where a mask does not depend on batch or heads)."""
    v = vectors_of(mask, nq, nk)
    check_size(v.batch, v.heads, v.nq, v.nk, limit, "dense mask")
    return ~v.masked()


def check_size(batch: int, heads: int, nq: int, nk: int, limit: int, what: str) -> None:
    """Raise M452 for more than `limit` elements."""
    if batch * heads * nq * nk > limit:
        text = f"the {what} has {batch} x {heads} x {nq} x {nk} elements, more than limit = {limit}"
        raise error("M452", text, None, "write it as a .mask file, which is bound in O(n), or raise limit=")


def from_slabs(slabs: Iterable[Tensor], nq: int, what: str) -> BoundMask:
    """The mask of slabs of columns, each bool [batch, heads, nq, columns], in order."""
    parts = list(_intervals(slabs, nq, what))
    lows, highs = (torch.cat([part[i] for part in parts], -1) for i in (0, 1))
    return bound(lows, highs, nq, what)


def _intervals(slabs: Iterable[Tensor], nq: int, what: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(lows, highs) of the visible runs of each slab, int32 [3, batch, heads, columns]."""
    first = 0
    for slab in slabs:
        begins = slab.clone()
        begins[..., 1:, :] &= ~slab[..., :-1, :]
        run = begins.cumsum(-2, dtype=torch.int32)
        count = run[..., -1, :] if nq else run.new_zeros((*run.shape[:2], run.shape[3]))
        if count.numel() and int(count.max()) > _RUNS:
            item, head, column = (int(x) for x in (count > _RUNS).nonzero()[0])
            raise too_many(what, (item, head, first + column), _runs_of(slab[item, head, :, column]), nq, False)
        lows, highs = [], []
        for i in range(1, _RUNS + 1):
            here = slab & (run == i)
            size = here.sum(-2, dtype=torch.int32)
            low = here.to(torch.uint8).argmax(-2).to(torch.int32) if nq else size
            lows.append(torch.where(size > 0, low, nq))
            highs.append(torch.where(size > 0, low + size, nq))
        yield torch.stack(lows), torch.stack(highs)
        first += slab.shape[-1]


def _runs_of(column: Tensor) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for row in column.nonzero().flatten().tolist():
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
