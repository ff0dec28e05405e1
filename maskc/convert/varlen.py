"""FlashAttention's variable-length arguments: `cu_seqlens_q`, `cu_seqlens_k`, `causal`, `window_size`, over packed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.constructors import segments
from maskc.boundary import BoundaryVectors
from maskc.convert.arguments import check_integers, tensor_of
from maskc.convert.columns import Mask, bound, difference, vectors_of, visible_intervals
from maskc.diagnostics import error


@dataclass(frozen=True, eq=False, slots=True)
class Varlen:
    """Arguments of `flash_attn_varlen_func`: int32 offsets, lengths of the longest document, and the causal flag."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


def from_cu_seqlens(
    cu_seqlens_q: object,
    cu_seqlens_k: object = None,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    nq: int | None = None,
    nk: int | None = None,
) -> BoundMask:
    """The mask of `flash_attn_varlen_func`; tokens beyond the last offset (nq, nk given) see nothing.

    Document i is rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] and keys of the same i. As there, `causal` and
    `window_size` (left, right; -1 = no limit) are aligned at the bottom right of each document, and a window W = (W, 0)
    shows W + 1 keys. Without cu_seqlens_k, and with causal or full documents, the result is std:doc_causal or
    std:doc_full, whose documents a context-parallel plan knows.

    Raises M451 for offsets that are none, and M4xx of `bind`.
    """
    cu_q = _offsets("cu_seqlens_q", cu_seqlens_q)
    cu_k = cu_q if cu_seqlens_k is None else _offsets("cu_seqlens_k", cu_seqlens_k)
    if len(cu_q) != len(cu_k):
        raise error("M451", f"cu_seqlens_q has {len(cu_q) - 1} documents, cu_seqlens_k has {len(cu_k) - 1}")
    check_integers(0, nq=nq, nk=nk)
    pair = isinstance(window_size, Sequence) and len(window_size) == 2
    if not pair or not all(isinstance(x, int) and x >= -1 for x in window_size):
        hint = "a pair (left, right), each the number of keys, or -1 for no limit"
        raise error("M451", f"window_size is {window_size!r}", None, hint)
    left, right = window_size
    if cu_seqlens_k is None and left == -1 and right == -1:
        from maskc.targets import load

        mask = load("std:doc_causal" if causal else "std:doc_full")
        return mask.bind(doc=segments(cu_seqlens=cu_q), nq=nq, nk=nq if nk is None else nk)
    rows, keys = int(cu_q[-1]) if nq is None else nq, int(cu_k[-1]) if nk is None else nk
    for name, cu, size in (("cu_seqlens_q", cu_q, rows), ("cu_seqlens_k", cu_k, keys)):
        if int(cu[-1]) > size:
            raise error("M451", f"{name} ends at {int(cu[-1])}, there are {size} tokens")
    return _rectangles(cu_q, cu_k, left, 0 if causal else right, rows, keys)


def to_cu_seqlens(mask: Mask, nq: int | None = None, nk: int | None = None) -> Varlen:
    """Offsets of a mask that is packed documents of one sequence, full or causal inside; batch items are packed in order.

    Raises M453 with the first cell that no documents explain.
    """
    v = vectors_of(mask, nq, nk)
    if v.nq != v.nk or v.heads != 1:
        raise error("M453", f"cu_seqlens need one mask over one sequence, not {v.heads} heads, {v.nq} rows and {v.nk} keys")
    lows, highs = visible_intervals(v)
    ends = highs[0, :, 0].masked_fill(lows[0, :, 0] == v.nq, 0).tolist()
    items = [_chain(item) for item in ends]
    if len(items) > 1 and any(cu[-1] != v.nk for cu in items):
        raise error(
            "M453", "batch items end in tokens that see nothing; packed offsets have no place for them", None, "unpad them"
        )
    nearest = None
    for causal in (True, False):
        wrong = [difference(_one(v, b), vectors_of(from_cu_seqlens(cu, causal=causal, nq=v.nq))) for b, cu in enumerate(items)]
        if not any(wrong):
            joined = [0] + [b * v.nk + end for b, cu in enumerate(items) for end in cu[1:]]
            cu_seqlens = torch.tensor(joined, dtype=torch.int32, device=v.device)
            longest = int(cu_seqlens.diff().max()) if len(joined) > 1 else 0
            return Varlen(cu_seqlens, cu_seqlens, longest, longest, causal)
        nearest = nearest or next((b, d) for b, d in enumerate(wrong) if d is not None)
    assert nearest is not None
    item, d = nearest
    where = f"row {d.row}, key {d.key}" + (f", batch item {item}" if len(items) > 1 else "")
    raise error(
        "M453", f"the mask is not packed documents: {where} differs", None, "cu_seqlens hold full or causal documents only"
    )


def _one(v: BoundaryVectors, item: int) -> BoundaryVectors:
    """The mask of one batch item."""
    if v.batch == 1:
        return v
    lts, lte, uts, ute, diag = (None if t is None else t[item : item + 1] for t in v.tensors)
    return replace(v, batch=1, lts=lts, lte=lte, uts=uts, ute=ute, diag=diag)


def _chain(ends: list[int]) -> list[int]:
    """Offsets of documents, each of which ends where the last row that sees its first key does."""
    cu = [0]
    while cu[-1] < len(ends) and ends[cu[-1]] > cu[-1]:
        cu.append(ends[cu[-1]])
    return cu


def _offsets(name: str, given: object) -> Tensor:
    cu = tensor_of(name, given)
    if cu.dtype == torch.bool or cu.ndim != 1 or cu.is_floating_point() or len(cu) < 1:
        raise error("M451", f"{name} is {cu.dtype} of shape {tuple(cu.shape)}, not the int32 offsets [documents + 1]")
    if int(cu[0]) != 0 or bool((cu.diff() < 0).any()):
        raise error("M451", f"{name} does not rise from 0: {cu[:6].tolist()}{' ...' if len(cu) > 6 else ''}", None, "lengths?")
    return cu


def _rectangles(cu_q: Tensor, cu_k: Tensor, left: int, right: int, nq: int, nk: int) -> BoundMask:
    """Documents with rows and keys of their own; row i of lq sees keys from i + lk - lq - left to i + lk - lq + right."""
    key = torch.arange(nk, device=cu_k.device)
    doc = torch.searchsorted(cu_k.contiguous(), key, right=True) - 1
    inside = doc < len(cu_k) - 1
    doc = doc.clamp(max=max(0, len(cu_k) - 2))
    start, end = (cu_q.to(key.device)[doc + i] for i in (0, 1)) if len(cu_k) > 1 else (key * 0, key * 0)
    diagonal = end - (cu_k[1:][doc] - key) if len(cu_k) > 1 else key * 0
    low = start if right == -1 else torch.maximum(start, diagonal - right)
    high = end if left == -1 else torch.minimum(end, diagonal + left + 1)
    seen = inside & (low < high)
    lows = torch.where(seen, low, nq).to(torch.int32)[None, None, None]
    highs = torch.where(seen, high, nq).to(torch.int32)[None, None, None]
    return bound(lows, highs, nq, "variable-length mask")
