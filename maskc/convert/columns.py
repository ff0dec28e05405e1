"""Columns as sorted visible intervals: the form that every format is read into, written from, and compared in.

Intervals of a mask are a pair (lows, highs) of int32 [m, batch, heads, nk]: disjoint, by start, empty ones (nq, nq).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.fold import masked_runs, sweep
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import Diagnostic, MaskcError, MaskcTypeError, error

Mask = BoundMask | BoundaryVectors
Intervals = tuple[Tensor, Tensor]
BUDGET = 2  # masked runs that the vectors of a column hold


def vectors_of(mask: object, nq: int | None = None, nk: int | None = None) -> BoundaryVectors:
    """The vectors of a mask; sizes are needed where it does not know its own."""
    if not isinstance(mask, BoundMask | BoundaryVectors):
        hint = "compile(...).bind(...) makes one"
        raise MaskcTypeError(Diagnostic("M511", f"converters take a bound mask, not {type(mask).__name__}", help=hint))
    return mask if isinstance(mask, BoundaryVectors) else mask.vectors(nq, nk)


def visible_intervals(v: BoundaryVectors) -> Intervals:
    """The visible rows of every column. Raises M453 for a block table, which is not one of columns."""
    if v.blocks is not None:
        hint = "maskc.convert.to_dense and to_block_mask take block tables"
        raise error("M453", "a mask with a block table is not a list of row intervals per key", None, hint)
    shape, nq = (v.batch, v.heads, v.nk), v.nq
    key = torch.arange(v.nk, device=v.device, dtype=torch.int32)
    spans: list[tuple[Tensor | int, Tensor | int]] = [(0, key)] if v.causal else []
    if v.diag is not None:
        spans.append((0, v.diag))
    for start, end in ((v.lts, v.lte), (v.uts, v.ute)):
        if start is not None or end is not None:
            spans.append((0 if start is None else start, nq if end is None else end))
    pairs = [tuple(torch.as_tensor(x, dtype=torch.int32, device=v.device).expand(shape) for x in pair) for pair in spans]
    return gaps_between([(lo, hi) for lo, hi in pairs], nq, torch.zeros(shape, dtype=torch.int32, device=v.device))


def gaps_between(spans: list[tuple[Tensor, Tensor]], nq: int, zero: Tensor) -> Intervals:
    """What a union of row spans leaves of [0, nq), for spans in any order and of any extent."""
    clipped = [(lo.clamp(0, nq), hi.clamp(0, nq)) for lo, hi in spans]
    starts = torch.stack([torch.where(lo < hi, lo, nq) for lo, hi in clipped] + [torch.full_like(zero, nq)])
    ends = torch.stack([torch.where(lo < hi, hi, nq) for lo, hi in clipped] + [torch.full_like(zero, nq)])
    starts, order = starts.sort(0)
    lows, highs, reach = [], [], zero
    for lo, hi in zip(starts, ends.gather(0, order), strict=True):
        seen = reach < lo
        lows.append(torch.where(seen, reach, nq))
        highs.append(torch.where(seen, lo, nq))
        reach = torch.maximum(reach, hi)
    return by_start(torch.stack(lows).to(torch.int32), torch.stack(highs).to(torch.int32))


def by_start(lows: Tensor, highs: Tensor) -> Intervals:
    lows, order = lows.sort(0)
    return lows, highs.gather(0, order)


def merged(lows: Tensor, highs: Tensor, nq: int) -> Intervals:
    """The union of intervals that may overlap, as disjoint ones."""
    zero = torch.zeros_like(lows[0])
    masked = gaps_between(list(zip(lows, highs, strict=True)), nq, zero)
    return gaps_between(list(zip(*masked, strict=True)), nq, zero)


def packed(lows: Tensor, highs: Tensor, nq: int, what: str) -> BoundaryVectors:
    """Vectors of sorted visible intervals (which may touch or overlap), with the free triangle wherever it is right.

    Raises M450 for the first column with more than two masked runs; `what` names the mask there.
    """
    nk, key = lows.shape[-1], _keys(lows, nq)
    causal = bool((lows[0] >= key).all())
    lts, lte, uts, ute, runs = sweep(lows, highs, nq, key if causal else torch.zeros_like(key))
    if runs.numel() and int(runs.max()) > BUDGET:
        item, head, column = (int(x) for x in (runs > BUDGET).nonzero()[0])
        pairs = [(int(lo[item, head, column]), int(hi[item, head, column])) for lo, hi in zip(lows, highs, strict=True)]
        raise too_many(what, (item, head, column), pairs, nq, causal)
    has_lower, has_upper = bool((lts < lte).any()), bool((uts < ute).any())
    has_lte, has_uts = has_lower and bool(((lts < lte) & (lte < nq)).any()), has_upper and bool((uts > 0).any())
    present = (has_lower, has_lte, has_uts, has_upper)
    batch, heads = lows.shape[1:3] if any(present) else (1, 1)
    slots = zip((lts, lte, uts, ute), present, strict=True)
    first, second, third, fourth = (t.to(torch.int32).contiguous() if has else None for t, has in slots)
    return BoundaryVectors(nq, nk, batch, heads, causal, first, second, third, fourth)


def bound(lows: Tensor, highs: Tensor, nq: int, what: str) -> BoundMask:
    """`packed` as a mask that `maskc.run` takes."""
    return BoundMask.from_vectors(packed(lows, highs, nq, what), what)


def too_many(what: str, place: tuple[int, int, int], visible: list[tuple[int, int]], nq: int, causal: bool) -> MaskcError:
    """M450 for a column whose sorted visible runs are given."""
    item, head, key = place
    count, masked = masked_runs(visible, nq, key if causal else 0)
    where = (f", batch item {item}" if item else "") + (f", head {head}" if head else "")
    return error(
        "M450",
        f"key {key}{where} of the {what} needs {count} masked runs; the column form holds {BUDGET}",
        None,
        "store the tokens in an order that joins the runs, or make two calls and merge them by their log-sum-exp",
        ("masked rows", masked + (" (beside the free triangle)" if causal else "")),
    )


def _keys(lows: Tensor, nq: int) -> Tensor:
    return torch.arange(lows.shape[-1], device=lows.device, dtype=torch.int32).clamp(max=nq)


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Difference:
    """The first cell, in row order, that one mask shows and the other hides, and how many cells differ in all."""

    batch: int
    head: int
    row: int
    key: int
    cells: int


def difference(a: BoundaryVectors, b: BoundaryVectors) -> Difference | None:
    """Where two masks of equal sizes differ, in O(n); None where they are equal. Neither may have a block table."""
    batch, heads = max(a.batch, b.batch), max(a.heads, b.heads)
    shape = (-1, batch, heads, a.nk)
    mine, other = ([x.expand(shape) for x in visible_intervals(v)] for v in (a, b))
    cells = _sizes(mine) + _sizes(other) - 2 * _overlap(mine, other)
    total = int(cells.sum())
    if total == 0:
        return None
    row = torch.where(cells > 0, _first_unequal(_edges(mine, a.nq), _edges(other, a.nq)), a.nq)
    place = (row.long() * a.nk + torch.arange(a.nk, device=row.device)).flatten(2).amin(-1)
    item, head = divmod(int(place.argmin()), heads)
    first, key = divmod(int(place[item, head]), a.nk)
    return Difference(item, head, first, key, total)


def _sizes(intervals: list[Tensor]) -> Tensor:
    lows, highs = intervals
    return (highs - lows).long().sum(0)


def _overlap(a: list[Tensor], b: list[Tensor]) -> Tensor:
    total = torch.zeros_like(a[0][0], dtype=torch.int64)
    for lo, hi in zip(*a, strict=True):
        for low, high in zip(*b, strict=True):
            total += (torch.minimum(hi, high) - torch.maximum(lo, low)).clamp(min=0)
    return total


def _edges(intervals: list[Tensor], nq: int) -> Tensor:
    """Rows at which a column changes between hidden and visible, ascending, padded with nq: [2 * 5, ...]."""
    edges = torch.stack(intervals, 1).flatten(0, 1)
    return torch.cat([edges, torch.full((10 - len(edges), *edges.shape[1:]), nq, dtype=edges.dtype, device=edges.device)])


def _first_unequal(a: Tensor, b: Tensor) -> Tensor:
    at = (a != b).to(torch.uint8).argmax(0, keepdim=True)
    return torch.minimum(a, b).gather(0, at)[0]
