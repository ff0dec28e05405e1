"""MagiAttention range slices: pairs of a query range and a key range with a type each; their union is visible.

In a slice of rows [qs, qe) and keys [ks, ke): FULL shows all; CAUSAL shows k <= q + ke - qe (aligned at the bottom
right); INV_CAUSAL shows k >= q + ks - qs (aligned at the top left); BI_CAUSAL shows what both show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.convert.arguments import check_integers
from maskc.convert.columns import Mask, bound, by_start, merged, vectors_of, visible_intervals
from maskc.diagnostics import error


class SliceType(IntEnum):
    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


@dataclass(frozen=True, slots=True)
class MagiSlices:
    """Half-open ranges, one of each list per slice; the slices do not overlap."""

    q_ranges: tuple[tuple[int, int], ...]
    k_ranges: tuple[tuple[int, int], ...]
    types: tuple[SliceType, ...]


Slice = tuple[int, int, int, int, SliceType]  # qs, qe, ks, ke
Interval = tuple[Tensor, Tensor]


def from_magi(
    q_ranges: Sequence[Sequence[int]] | Tensor,
    k_ranges: Sequence[Sequence[int]] | Tensor,
    types: Sequence[int] | Tensor | int = SliceType.FULL,
    *,
    nq: int,
    nk: int,
    device: torch.device | str = "cpu",
) -> BoundMask:
    """The mask that is the union of the slices (one type for all, or one each), for nq rows and nk keys.

    Raises M451 for ranges that are none, M450 where the union shows a key to rows in too many runs.
    """
    slices = _slices(q_ranges, k_ranges, types, nq, nk)
    edges = sorted({0, nk, *(s[2] for s in slices), *(s[3] for s in slices)})
    inside = [(lo, hi, [s for s in slices if s[2] <= lo and hi <= s[3]]) for lo, hi in pairwise(edges)]
    parts = [_columns(lo, hi, chosen, nq, device) for lo, hi, chosen in inside]
    width = max([1, *(len(lows) for lows, _ in parts)])
    lows, highs = (_joined([part[i] for part in parts], width, nq, device) for i in (0, 1))
    return bound(lows, highs, nq, "union of slices")


def to_magi(mask: Mask, nq: int | None = None, nk: int | None = None) -> MagiSlices:
    """Slices that show exactly what the mask shows, at most three per stretch of keys in which its bounds run straight.

    Raises M453 for a mask that differs over batch items or heads.
    """
    v = vectors_of(mask, nq, nk)
    if v.batch > 1 or v.heads > 1:
        raise error("M453", f"slices are one mask for all; this one has {v.batch} batch items and {v.heads} heads")
    lows, highs = (x[:, 0, 0] for x in visible_intervals(v))
    found = [s for lo, hi in zip(lows, highs, strict=True) for s in _cover(lo, hi)]
    return MagiSlices(
        tuple((qs, qe) for qs, qe, *_ in found), tuple((ks, ke) for _, _, ks, ke, _ in found), tuple(s[4] for s in found)
    )


# ---------------------------------------------------------------- slices -> columns


def _slices(q_ranges: object, k_ranges: object, types: Sequence[int] | Tensor | int, nq: int, nk: int) -> list[Slice]:
    check_integers(0, nq=nq, nk=nk)
    row_pairs, key_pairs = _pairs("q_ranges", q_ranges), _pairs("k_ranges", k_ranges)
    types = types.tolist() if isinstance(types, Tensor) else types
    each = [types] * len(row_pairs) if isinstance(types, int) else list(types)
    if not len(row_pairs) == len(key_pairs) == len(each):
        raise error("M451", f"there are {len(row_pairs)} q_ranges, {len(key_pairs)} k_ranges and {len(each)} types")
    out = []
    for i, (rows, keys, kind) in enumerate(zip(row_pairs, key_pairs, each, strict=True)):
        for name, pair, size in (("q_ranges", rows, nq), ("k_ranges", keys, nk)):
            if len(pair) != 2 or not all(isinstance(x, int) for x in pair) or not 0 <= pair[0] <= pair[1] <= size:
                raise error("M451", f"{name}[{i}] = {tuple(pair)} is no range within [0, {size})")
        if kind not in tuple(SliceType):
            names = ", ".join(f"{t.value} {t.name}" for t in SliceType)
            raise error("M451", f"types[{i}] = {kind} is no type of slice", None, f"there are {names}")
        out.append((rows[0], rows[1], keys[0], keys[1], SliceType(kind)))
    return out


def _pairs(name: str, given: object) -> list[list[int]]:
    """Ranges as lists; tensors and arrays [slices, 2] are such."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, Sequence) or not all(isinstance(pair, Sequence) for pair in given):
        raise error("M451", f"{name} is {given!r}", None, "a list of pairs (start, end)")
    return [list(pair) for pair in given]


def _columns(lo: int, hi: int, slices: list[Slice], nq: int, device: torch.device | str) -> Interval:
    """Sorted, disjoint visible rows of keys [lo, hi), all of which lie in every one of the slices: [m, 1, 1, hi - lo]."""
    k = torch.arange(lo, hi, dtype=torch.int32, device=device)
    lows, highs = [torch.full_like(k, nq)], [torch.full_like(k, nq)]
    for qs, qe, ks, ke, kind in slices:
        low, high = torch.full_like(k, qs), torch.full_like(k, qe)
        if kind in (SliceType.CAUSAL, SliceType.BI_CAUSAL):
            low = (k - (ke - qe)).clamp(min=qs)
        if kind in (SliceType.INV_CAUSAL, SliceType.BI_CAUSAL):
            high = (k - ks + qs + 1).clamp(max=qe)
        lows.append(torch.where(low < high, low, nq))
        highs.append(torch.where(low < high, high, nq))
    starts, ends = merged(*by_start(torch.stack(lows), torch.stack(highs)), nq)
    used = max(1, int((starts < ends).sum(0).max()) if starts.numel() else 1)
    return starts[:used, None, None], ends[:used, None, None]


def _joined(parts: list[Tensor], width: int, nq: int, device: torch.device | str) -> Tensor:
    if not parts:
        return torch.full((1, 1, 1, 0), nq, dtype=torch.int32, device=device)
    pads = [torch.full((width - len(p), *p.shape[1:]), nq, dtype=p.dtype, device=p.device) for p in parts]
    return torch.cat([torch.cat([p, pad]) for p, pad in zip(parts, pads, strict=True)], -1)


# ---------------------------------------------------------------- columns -> slices


def _cover(lows: Tensor, highs: Tensor) -> Iterator[Slice]:
    """Slices of one visible interval per key: [nk] each, empty where equal."""
    n = len(lows)
    if n == 0:
        return
    step_lo, step_hi = lows.diff(), highs.diff()
    empty = lows >= highs
    straight = (step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1) & (empty[1:] == empty[:-1])
    code = torch.where(straight, step_lo * 2 + step_hi, -1)
    breaks = ((code[1:] != code[:-1]).nonzero().flatten() + 1).tolist() if n > 1 else []
    codes = code.tolist()
    lo, hi = lows.tolist(), highs.tolist()
    at = 0
    for end in [*breaks, len(codes)]:  # steps [previous break, end) are alike
        if end <= at:
            continue
        kind = codes[at] if at < len(codes) else -1
        if kind >= 0:
            yield from _stretch(at, end + 1, lo[at], hi[at], lo[end], hi[end])
            at = end + 1
        else:
            for k in range(at, end):
                yield from _stretch(k, k + 1, lo[k], hi[k], lo[k], hi[k])
            at = end
    for k in range(at, n):
        yield from _stretch(k, k + 1, lo[k], hi[k], lo[k], hi[k])


def _stretch(c0: int, c1: int, lo0: int, hi0: int, lo1: int, hi1: int) -> Iterator[Slice]:
    """Keys [c0, c1) whose first visible row runs straight from lo0 to lo1 and whose end runs from hi0 to hi1."""
    if lo0 >= hi0:
        return
    rises, falls = lo1 > lo0, hi1 > hi0
    if not rises and not falls:
        yield lo0, hi0, c0, c1, SliceType.FULL
    elif rises and not falls:
        yield lo0, lo1 + 1, c0, c1, SliceType.CAUSAL
        if lo1 + 1 < hi0:
            yield lo1 + 1, hi0, c0, c1, SliceType.FULL
    elif falls and not rises:
        if lo0 < hi0 - 1:
            yield lo0, hi0 - 1, c0, c1, SliceType.FULL
        yield hi0 - 1, hi1, c0, c1, SliceType.INV_CAUSAL
    else:
        yield from _band(c0, c1, lo0, hi0 - lo0)


def _band(c0: int, c1: int, first: int, height: int) -> Iterator[Slice]:
    """Key k is seen by rows first + k - c0 and the `height` - 1 next ones."""
    length = c1 - c0
    if length < height:
        yield first, first + length, c0, c1, SliceType.CAUSAL
        if length < height - 1:
            yield first + length, first + height - 1, c0, c1, SliceType.FULL
        yield first + height - 1, first + height + length - 1, c0, c1, SliceType.INV_CAUSAL
        return
    if height > 1:
        yield first, first + height - 1, c0, c0 + height - 1, SliceType.CAUSAL
    yield first + height - 1, first + length, c0, c1, SliceType.BI_CAUSAL
    if height > 1:
        yield first + length, first + length + height - 1, c1 - height + 1, c1, SliceType.INV_CAUSAL
