"""Localization: the vectors of the whole sequence, rewritten for the rows of one rank. Nothing is sent.

L(x) counts the owned rows below x. It never falls, and for an owned row y with local index L(y):
start <= y < stop  <=>  L(start) <= L(y) < L(stop). So mapping each vector through L, entry by entry, keeps every interval
exact for every set of owned rows, as long as those rows are held in ascending order. With c the chunk of x,
L(x) = before[c] + own[c] * (x - edge[c]): one gather per entry, no loop over chunks.

`q < k` means nothing once rows and columns are renumbered, so the free triangle becomes a vector first: the upper
interval [0, k) where that slot is free or already starts at 0, else DIAG, a third bound beside both intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from weakref import WeakKeyDictionary

import numpy as np
import torch

from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import error
from maskc.runtime.layout import Layout, Range
from maskc.runtime.remember import remembered

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RowMap:
    """L for one set of chunks. `chunk` is the common chunk size (one division) or None (binary search in `bounds`)."""

    bounds: tuple[int, ...]
    before: tuple[int, ...]
    own: tuple[int, ...]
    chunk: int | None

    @classmethod
    def of(cls, layout: Layout, chunks: Sequence[int]) -> RowMap:
        """The map of the rows in `chunks`, which must be ascending.

        Raises:
            MaskcError: M704 when they are not: no interval could describe a mask over unsorted rows.
        """
        if any(a >= b for a, b in pairwise(chunks)):
            raise error("M704", f"chunks of a rank must be in ascending order, got {tuple(chunks)}")
        owned = set(chunks)
        own = [int(c in owned) for c in range(layout.chunk_count)]
        before = [0]
        for c, mine in enumerate(own):
            before.append(before[-1] + mine * layout.size_of(c))
        return cls(layout.bounds, tuple(before), (*own, 0), layout.chunk)

    @property
    def length(self) -> int:
        """Number of owned rows."""
        return self.before[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """L(x), elementwise: int32 of any shape to int32 of that shape. Values outside [0, length] are clipped first."""
        x = x.clamp(0, self.bounds[-1])
        return self._looked_up(x) if x.device.type == "cpu" else self._computed(x)

    def _looked_up(self, x: torch.Tensor) -> torch.Tensor:
        """In a table of every row: few operations, which cost a CPU as much as their entries."""
        below = np.cumsum(np.repeat((0, *self.own[:-1]), (1, *np.diff(self.bounds))), dtype=np.int32)
        return torch.from_numpy(below).index_select(0, x.flatten()).view(x.shape)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        """From tables of every chunk: a small transfer, which no host waits for."""
        table = torch.tensor((self.bounds, self.before, self.own), dtype=torch.int32).to(x.device, non_blocking=True)
        if self.chunk is not None:
            at = (x // self.chunk).clamp_(max=len(self.own) - 1)
        else:
            at = torch.searchsorted(table[0], x.contiguous(), right=True) - 1
        return table[1][at] + table[2][at] * (x - table[0][at])


def fold_causal(v: BoundaryVectors, device: torch.device | None = None) -> BoundaryVectors:
    """The same mask with causal=False: the triangle as UTE where one interval still has room for it, else as DIAG.

    `device`: for the new vector, where the mask has none yet (default: v's).
    """
    if not v.causal:
        return v
    device = device or v.device
    key = torch.arange(v.nk, dtype=torch.int32, device=device).clamp_(max=v.nq).expand(v.batch, v.heads, v.nk).contiguous()
    if v.ute is None:
        return replace(v, causal=False, ute=key)
    if v.uts is None:
        return replace(v, causal=False, ute=torch.maximum(v.ute, key))
    if v.lts is None:
        return replace(v, causal=False, lts=v.uts, lte=v.ute, uts=None, ute=key)
    return replace(v, causal=False, diag=key if v.diag is None else torch.maximum(v.diag, key))


def localize(
    v: BoundaryVectors,
    rows: Layout,
    row_chunks: Sequence[int],
    keys: Layout,
    key_chunks: Sequence[int],
    device: torch.device | None = None,
    elsewhere: bool = True,
) -> BoundaryVectors:
    """The mask of the rows in `row_chunks` (ascending) against the keys in `key_chunks` (any order), as local vectors.

    Works on CPU and GPU tensors, for every vector form, and leaves out nothing: cell (l, m) of the result is the cell
    of the l-th owned row and the m-th listed key. Raises MaskcError M704 for unsorted rows, M705 when the layouts are
    of other lengths than the mask. `device` matters for a causal mask without vectors only. elsewhere: say which keys
    rows of other ranks see.
    """
    if (rows.length, keys.length) != (v.nq, v.nk):
        raise error("M705", f"the mask has {v.nq} rows and {v.nk} keys, the plan {rows.length} and {keys.length}")
    seen, v = seen_keys(v, device) if elsewhere else None, fold_causal(v, device)
    row_map = RowMap.of(rows, row_chunks)
    key_ranges = keys.ranges(tuple(key_chunks))
    nk = sum(stop - start for start, stop in key_ranges)

    present = [t for t in v.tensors if t is not None]
    mapped = iter(_separate(row_map(take(torch.stack(present), key_ranges, -1))) if present else ())
    blocks = None if v.blocks is None else local_blocks(v.blocks, rows.ranges(tuple(row_chunks)), key_ranges)
    lts, lte, uts, ute, diag = (None if t is None else next(mapped) for t in v.tensors)
    seen = None if seen is None else take(seen, key_ranges, -1)
    return BoundaryVectors(row_map.length, nk, v.batch, v.heads, False, lts, lte, uts, ute, diag, blocks, seen)


def _separate(stacked: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its parts, each as aligned as a tensor of its own."""
    parts = stacked.unbind()
    return parts if parts[0].numel() % 32 == 0 else [part.clone() for part in parts]


@remembered
def seen_keys(v: BoundaryVectors, device: torch.device | None = None) -> torch.Tensor | None:
    """Bool [batch, heads, nk]: keys that some row sees. None where a block table says so as well.

    The first row outside all masked ranges of a key: each range is left at most once. `device` as in `fold_causal`.
    """
    if v.blocks is not None:
        return None
    device = device or v.device
    row = torch.zeros(v.batch, v.heads, v.nk, dtype=torch.int32, device=device)
    key = torch.arange(v.nk, dtype=torch.int32, device=device)
    for _ in range(v.causal + sum(t is not None for t in (v.lts, v.ute, v.diag))):
        if v.causal:
            row = torch.maximum(row, key)
        if v.diag is not None:
            row = torch.maximum(row, v.diag)
        if v.lts is not None:
            after = row >= v.lts
            row = row.masked_fill(after, v.nq) if v.lte is None else torch.where(after, torch.maximum(row, v.lte), row)
        if v.ute is not None:
            inside = torch.maximum(row, v.ute)
            row = inside if v.uts is None else torch.where(row >= v.uts, inside, row)
    return row < v.nq


@remembered
def localized(
    v: BoundaryVectors,
    rows: Layout,
    row_chunks: tuple[int, ...],
    keys: Layout,
    key_chunks: tuple[int, ...],
    device: torch.device | None,
) -> BoundaryVectors:
    """`localize`, remembered per vectors object: all layers of one batch share the result."""
    made = localize(v, rows, row_chunks, keys, key_chunks, device)
    if made.device.type != "cpu" and (v.device.type == "cpu" or v in _on_host):
        host = on_host(v)
        host = replace(host) if host is v else host  # v holds what is made, which must not hold v
        _on_host[made] = partial(_localized_on_host, host, rows, row_chunks, keys, key_chunks)
    return made


@remembered
def _localized_on_host(
    v: BoundaryVectors, rows: Layout, row_chunks: tuple[int, ...], keys: Layout, key_chunks: tuple[int, ...]
) -> BoundaryVectors:
    return localize(v, rows, row_chunks, keys, key_chunks, _CPU, elsewhere=False)


_on_host: WeakKeyDictionary[BoundaryVectors, Callable[[], BoundaryVectors]] = WeakKeyDictionary()


def equal_on_host(v: BoundaryVectors, host: BoundaryVectors) -> None:
    """Say that `host`, in host memory, equals `v`, so that `on_host` of it, or of what it is localized to, copies nothing."""
    if v.device.type != "cpu":
        _on_host.setdefault(v, lambda: host)


def on_host(v: BoundaryVectors) -> BoundaryVectors:
    """The same vectors in host memory, perhaps without `elsewhere`. The host waits for those that it must copy."""
    if v.device.type == "cpu":
        return v
    if v not in _on_host:
        blocks = None if v.blocks is None else replace(v.blocks, keep=v.blocks.keep.cpu())
        lts, lte, uts, ute, diag = (None if t is None else t.detach().cpu() for t in v.tensors)
        equal_on_host(v, replace(v, lts=lts, lte=lte, uts=uts, ute=ute, diag=diag, blocks=blocks, elsewhere=None))
    return _on_host[v]()


def take(t: torch.Tensor, ranges: Sequence[Range], dim: int) -> torch.Tensor:
    """The given ranges of one axis, concatenated; a view when they are one range."""
    parts = [t.narrow(dim, start, stop - start) for start, stop in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else t.narrow(dim, 0, 0)


def local_blocks(table: BlockTable, rows: Sequence[Range], keys: Sequence[Range]) -> BlockTable:
    """The block table over local rows and columns, in blocks small enough that each lies in one block of `table`."""
    block_q, block_kv = _common_block(table.block_q, rows), _common_block(table.block_kv, keys)
    keep = table.keep[:, :, _block_index(rows, block_q, table.block_q, table.keep.device)]
    return BlockTable(
        keep[:, :, :, _block_index(keys, block_kv, table.block_kv, table.keep.device)].contiguous(), block_q, block_kv
    )


def _common_block(block: int, ranges: Sequence[Range]) -> int:
    """The largest size that divides the block and every edge, global and local, between ranges."""
    at = 0
    for i, (start, stop) in enumerate(ranges):
        block = gcd(block, start, at)
        at += stop - start
        if i + 1 < len(ranges):
            block = gcd(block, stop)
    return block


def _block_index(ranges: Sequence[Range], step: int, block: int, device: torch.device) -> torch.Tensor:
    parts = [torch.arange(start, stop, step) // block for start, stop in ranges]
    return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)).to(device, non_blocking=True)
