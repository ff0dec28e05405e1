"""Masks that are neither proved nor refuted: the data decide, column by column, in O(n m log m).

The visible rows of a column are the union of m intervals. They are sorted and swept; what they leave uncovered are the
masked runs, of which the vectors hold two (beside the free triangle, where every row before the key is masked anyway).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from maskc.binding.evaluate import Frame, Truth, both, concatenate, maximum, minimum
from maskc.diagnostics import Diagnostic, MaskcError
from maskc.ir.intervals import Interval, Vector
from maskc.ir.lower import interval_cases
from maskc.ir.nodes import MaskFn, Pred

_BUDGET = 2  # masked runs that the vectors of a column hold
_SHOWN = 6  # runs that a message lists


def fold(fn: MaskFn, frames: list[Frame]) -> tuple[dict[Vector, Tensor], bool]:
    """(the vectors that are needed, whether the free triangle is used) over all columns of the frames.

    Reads one small vector back from the device. Raises M416 for the first column that needs more than two runs.
    """
    cases = interval_cases(fn)
    rows = [visible_rows(cases, frame) for frame in frames]
    below = torch.stack([(lo[0] >= _key(frame)).all() for (lo, _), frame in zip(rows, frames, strict=True)]).all()
    swept = [sweep(lo, hi, _nq(f), torch.where(below, _key(f), 0)) for (lo, hi), f in zip(rows, frames, strict=True)]
    lts, lte, uts, ute, runs = (concatenate([part[i] for part in swept]) for i in range(5))
    flags = below, (lts < lte).any(), ((lts < lte) & (lte < _nq(frames[0]))).any(), (uts < ute).any(), (uts > 0).any()
    if runs.numel() == 0:
        return {}, bool(below)
    read = torch.stack([runs.amax(), (runs > _BUDGET).flatten().to(torch.uint8).argmax(), *flags]).tolist()
    worst, place, causal, has_lower, has_lte, has_upper, has_uts = read
    if worst > _BUDGET:
        raise MaskcError(_too_many(fn, rows, frames, place, runs.shape, bool(causal)))
    needed: dict[Vector, Tensor] = {}
    if has_lower:
        needed |= {"lts": lts, "lte": lte} if has_lte else {"lts": lts}
    if has_upper:
        needed |= {"uts": uts, "ute": ute} if has_uts else {"ute": ute}
    return needed, bool(causal)


def visible_rows(cases: tuple[tuple[tuple[Pred, ...], Interval], ...], frame: Frame) -> tuple[Tensor, Tensor]:
    """Starts and ends of the visible intervals of each column, int32 [m, batch, heads, columns], by start; empty: (nq, nq)."""
    nq = _nq(frame)
    intervals = [(frame.spread(nq), frame.spread(nq))]
    for guards, interval in cases:
        where = reduce(both, (frame.truth(g) for g in guards), cast(Truth, True))
        if where is False:
            continue
        lo, hi = (frame.spread(minimum(maximum(frame.value(x).number, 0), nq)) for x in (interval.lo, interval.hi))
        seen = (lo < hi) & where
        intervals.append((torch.where(seen, lo, nq), torch.where(seen, hi, nq)))
    lead = [max(t.shape[axis] for pair in intervals for t in pair) for axis in (0, 1)]
    lows, highs = (torch.stack([pair[i].expand(*lead, -1) for pair in intervals]) for i in (0, 1))
    lows, order = lows.sort(0)
    return lows, highs.gather(0, order)


def sweep(lows: Tensor, highs: Tensor, nq: int, first: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lts, lte, uts, ute, number of masked runs) of each column, counted from row `first` [columns] on.

    lows, highs: visible intervals [m, batch, heads, columns] by start, empty ones (nq, nq). Of two runs the later one is
    the lower slot; a single run is the lower slot where it ends at nq.
    """
    reach = first.expand(lows.shape[1:])
    runs = torch.zeros_like(lows[0])
    bounds = [runs] * 4  # start and end of the first and of the second run
    for lo, hi in zip([*lows, torch.full_like(runs, nq)], [*highs, runs], strict=True):
        gap = lo > reach
        runs = runs + gap
        for i in range(_BUDGET):
            here = gap & (runs == i + 1)
            bounds[2 * i : 2 * i + 2] = torch.where(here, reach, bounds[2 * i]), torch.where(here, lo, bounds[2 * i + 1])
        reach = torch.maximum(reach, hi)
    s1, e1, s2, e2 = bounds
    two, one_low = runs >= _BUDGET, (runs == 1) & (e1 == nq)
    lts = torch.where(two, s2, torch.where(one_low, s1, nq))
    lte = torch.where(two, e2, nq)
    up = two | ((runs == 1) & ~one_low)
    return lts, lte, torch.where(up, s1, 0), torch.where(up, e1, 0), runs


def _nq(frame: Frame) -> int:
    assert frame.nq is not None
    return frame.nq


def _key(frame: Frame) -> Tensor:
    """The key of each column, at most nq: rows before it are the free triangle."""
    assert frame.col is not None
    return frame.col.clamp(max=_nq(frame)).to(torch.int32)


def _too_many(
    fn: MaskFn, rows: list[tuple[Tensor, Tensor]], frames: list[Frame], place: int, shape: torch.Size, causal: bool
) -> Diagnostic:
    item, head, key = (int(x) for x in torch.unravel_index(torch.tensor(place), shape))
    index = next(i for i, f in enumerate(frames) if f.col is not None and f.first <= key < f.first + f.col.shape[-1])
    lows, highs = (
        t[:, min(item, t.shape[1] - 1), min(head, t.shape[2] - 1), key - frames[index].first].tolist() for t in rows[index]
    )
    count, masked = masked_runs(zip(lows, highs, strict=True), _nq(frames[index]), key if causal else 0)
    place_text = "".join(f", {what} {i}" for what, i, n in (("batch item", item, shape[0]), ("head", head, shape[1])) if n > 1)
    return Diagnostic(
        "M416",
        f"key {key}{place_text} of `{fn.name}` needs {count} masked runs; the column form holds {_BUDGET}",
        fn.span,
        "store the tokens in an order that joins the runs, or make two calls and merge them by their log-sum-exp",
        (("masked rows", masked + (" (beside the free triangle)" if causal else "")),),
    )


def masked_runs(visible: Iterable[tuple[int, int]], nq: int, first: int) -> tuple[int, str]:
    """How many runs of masked rows from row `first` on sorted visible ones leave, and a line that names the first of them."""
    found, reach = [], min(first, nq)
    for lo, hi in [*visible, (nq, nq)]:
        if lo > reach:
            found.append(str(reach) if lo == reach + 1 else f"{reach}-{lo - 1}")
        reach = max(reach, hi)
    more = len(found) - _SHOWN
    return len(found), " | ".join(found if more <= 0 else [*found[:_SHOWN], f"... {more} more"])
