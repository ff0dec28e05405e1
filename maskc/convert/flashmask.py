"""FlashMask `startend_row_indices`: int32 [batch, mask heads, keys, 1 | 2 | 4] beside a `causal` flag.

    causal      1 column   rows q >= LTS are masked
    causal      2 columns  LTS <= q < LTE
    not causal  2 columns  q >= LTS, and q < UTE
    not causal  4 columns  LTS <= q < LTE, and UTS <= q < UTE

`causal` also masks k > q + (nk - nq): the triangle is aligned at the bottom right, unlike that of maskc's vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.fold import sweep
from maskc.convert.arguments import check_integers, tensor_of
from maskc.convert.columns import BUDGET, Mask, bound, gaps_between, vectors_of, visible_intervals
from maskc.diagnostics import error

_FORMS = {(True, 1): "LTS", (True, 2): "LTS, LTE", (False, 2): "LTS, UTE", (False, 4): "LTS, LTE, UTS, UTE"}


@dataclass(frozen=True, eq=False, slots=True)
class FlashMask:
    """Arguments of `flashmask_attention`; `startend_row_indices` is None for a mask that `causal` says in full."""

    startend_row_indices: Tensor | None
    causal: bool


def from_flashmask(startend_row_indices: object, *, causal: bool, nq: int | None = None, nk: int | None = None) -> BoundMask:
    """The mask of FlashMask's indices; nq is nk unless given, nk that of the indices.

    Values outside [0, nq] are clipped, empty and swapped intervals mean what they say, as in FlashMask itself. Raises
    M451 for a shape, dtype or number of columns that FlashMask does not define.
    """
    check_integers(0, nq=nq, nk=nk)
    if startend_row_indices is None:
        if nk is None:
            raise error("M451", "without startend_row_indices nothing says how many keys there are", None, "give nk=")
        indices = torch.zeros(1, 1, nk, 0, dtype=torch.int32)
    else:
        indices = tensor_of("startend_row_indices", startend_row_indices)
        if indices.ndim != 4:
            shape = tuple(indices.shape)
            raise error("M451", f"startend_row_indices has shape {shape}, not [batch, mask heads, keys, 1, 2 or 4]")
        if indices.dtype not in (torch.int32, torch.int64):
            raise error("M451", f"startend_row_indices is {indices.dtype}, not int32")
        if (causal, indices.shape[3]) not in _FORMS:
            forms = "; ".join(f"causal={c} with {n} ({names})" for (c, n), names in _FORMS.items())
            raise error(
                "M451", f"causal={causal} does not go with {indices.shape[3]} columns of indices", None, f"there are {forms}"
            )
        if nk is not None and nk != indices.shape[2]:
            raise error("M451", f"startend_row_indices are for {indices.shape[2]} keys, nk is {nk}")
    keys = indices.shape[2]
    rows = keys if nq is None else nq
    zero = torch.zeros(indices.shape[:3], dtype=torch.int32, device=indices.device)
    spans = _spans(indices.clamp(-1, rows + 1).to(torch.int32), zero, rows, causal)
    if causal:
        spans.append((zero, _diagonal(zero, rows)))
    return bound(*gaps_between(spans, rows, zero), rows, "FlashMask mask")


def to_flashmask(mask: Mask, nq: int | None = None, nk: int | None = None) -> FlashMask:
    """The smallest of FlashMask's forms that holds the mask. Raises M453 for the first key that needs three runs."""
    v = vectors_of(mask, nq, nk)
    lows, highs = visible_intervals(v)
    zero = torch.zeros_like(lows[0])
    diagonal = _diagonal(zero, v.nq)
    if bool((lows[0] >= diagonal).all()):
        lts, lte, uts, ute, runs = sweep(lows, highs, v.nq, diagonal)
        if not bool((runs > 1).any()):
            upper = uts < ute  # a single run may be in either slot
            start, end = torch.where(upper, uts, lts), torch.where(upper, ute, lte)
            if not bool((start < end).any()):
                return FlashMask(None, True)
            return FlashMask(_stacked(start) if bool((end == v.nq).all()) else _stacked(start, end), True)
    lts, lte, uts, ute, runs = sweep(lows, highs, v.nq, zero)
    if not bool(runs.any()):
        return FlashMask(None, False)
    if int(runs.max()) > BUDGET:
        item, head, key = (int(x) for x in (runs > BUDGET).nonzero()[0])
        text = f"key {key} (batch item {item}, head {head}) has {int(runs[item, head, key])} masked runs; FlashMask holds 2"
        raise error("M453", text, None, "beside a causal triangle FlashMask has room for one run of masked rows")
    if bool(((lte == v.nq) & (uts == 0)).all()):
        return FlashMask(_stacked(lts, ute), False)
    return FlashMask(_stacked(lts, lte, uts, ute), False)


def _spans(indices: Tensor, zero: Tensor, nq: int, causal: bool) -> list[tuple[Tensor, Tensor]]:
    """Masked rows of one of `_FORMS`, without the triangle."""
    column = indices.unbind(3)
    end = torch.full_like(zero, nq)
    match len(column):
        case 0:
            return []
        case 1:
            return [(column[0], end)]
        case 2:
            return [(column[0], column[1])] if causal else [(column[0], end), (zero, column[1])]
        case _:
            return [(column[0], column[1]), (column[2], column[3])]


def _diagonal(zero: Tensor, nq: int) -> Tensor:
    """First row that the bottom-right triangle shows to each key."""
    nk = zero.shape[-1]
    return (torch.arange(nk, dtype=torch.int32, device=zero.device) - (nk - nq)).clamp(0, nq).expand_as(zero)


def _stacked(*columns: Tensor) -> Tensor:
    return torch.stack(columns, -1).to(torch.int32).contiguous()
