"""The data contract of a plan: how tensors of the whole sequence become a rank's tensors, and back.

Every rank's rows are its chunks in ascending order. All of this but `unshard` is local; labels, positions and losses
follow the same order as q, k and v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from maskc.diagnostics import error
from maskc.runtime.layout import Layout, Range
from maskc.runtime.localize import take

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Axis = Literal["rows", "keys"]
Per = Literal["doc", "sequence"]


class DataContract:
    """Methods of `AttentionPlan` that deal with data. `dim` is the sequence axis; `of` says rows (q) or keys (k, v)."""

    rows: Layout
    keys: Layout
    world: int
    documents: tuple[tuple[Range, ...], ...] | None
    segments: tuple[str, ...]

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1, of: Axis = "rows") -> torch.Tensor:
        """A rank's part of a tensor of the whole sequence. Differentiable; a view where the rank owns one range."""
        axis = self._axis(of)
        expect(x, dim, axis.length, f"the sequence has {axis.length} {of}")
        return take(x, axis.ranges(axis.chunks_of(rank)), dim)

    def unshard(self, x: torch.Tensor, group: ProcessGroup | None = None, dim: int = 1, of: Axis = "rows") -> torch.Tensor:
        """The tensor of the whole sequence from every rank's part, on every rank: the only method that communicates.

        Its gradient is summed over the ranks, which is right for a loss that is the sum of what the ranks compute.
        """
        from maskc.runtime.comm import gather_sequence

        return gather_sequence(x, self._axis(of), group, dim)

    def positions(self, rank: int, per: Per = "sequence", of: Axis = "rows") -> torch.Tensor:
        """Positions of the rank's rows, int64: [rows], or [B, rows] where the documents of the batch items differ.

        per: counted from the start of the "sequence" or of each "doc" (rows that no document covers count from the
        start of their gap). For rotary embeddings and the like.
        """
        axis = self._axis(of)
        _check_per(per)
        index = torch.arange(axis.length)
        if per == "sequence":
            return self.shard(index, rank, 0, of)
        starts = torch.stack([_starts(item, axis.length) for item in self._documents(axis)])
        local = self.shard(index - starts, rank, 1, of)
        return local[0] if len(local) == 1 else local

    def shift_labels(self, labels: torch.Tensor, ignore: int = -100, dim: int = 1) -> torch.Tensor:
        """Next-token labels of the whole sequence [B, S]: position i gets the label of i + 1, `ignore` where a document ends.

        Without documents the sequence is one. Raises MaskcError M712 when several inputs could be the documents.
        """
        return self.roll(labels, -1, dim, "doc" if self.documents is not None or self.segments else "sequence", ignore)

    def roll(self, x: torch.Tensor, n: int, dim: int = 1, per: Per = "sequence", fill: float | None = None) -> torch.Tensor:
        """`torch.roll` along the whole sequence, or inside each document (nothing leaks from one into the next).

        fill: what positions get whose value would come from around the end; None lets them wrap.
        """
        expect(x, dim, self.rows.length, f"the sequence has {self.rows.length} rows")
        _check_per(per)
        if isinstance(n, bool) or not isinstance(n, int) or abs(n) >= 1 << 62:
            raise error("M710", f"n is {n!r}; a sequence is rolled by a whole number of positions")
        items = self._documents(self.rows) if per == "doc" else (((0, self.rows.length),),)
        tables = [_rolled(item, self.rows.length, n) for item in items]
        if len(tables) == 1:
            return _pick(x, *tables[0], dim, fill)
        if dim != 1 or len(tables) != x.shape[0]:
            raise error("M710", f"documents differ over {len(tables)} batch items, x is {tuple(x.shape)}: expected [B, S, ...]")
        return torch.stack([_pick(x[b], source, wraps, 0, fill) for b, (source, wraps) in enumerate(tables)])

    def loss_weight(self, rank: int, labels: torch.Tensor | None = None, ignore: int = -100) -> float:
        """Factor for the mean loss over the rank's own rows, so that averaging gradients over the ranks is exact.

        With loss_r = loss_weight(r) * mean over own rows, the mean of loss_r over the ranks is the mean over all rows.
        `labels` [..., S] of the whole sequence leaves out rows whose label is `ignore`. A rank without rows gets 0.
        """
        if labels is None:
            return self.world * self.rows.local_length(rank) / self.rows.length if self.rows.length else 0.0
        expect(labels, -1, self.rows.length, f"the sequence has {self.rows.length} rows")
        counted = labels != ignore
        own, total = int(self.shard(counted, rank, labels.dim() - 1).sum()), int(counted.sum())
        return self.world * own / total if total else 0.0

    def _axis(self, of: str) -> Layout:
        if of not in ("rows", "keys"):
            raise error("M713", f"of={of!r}: a sequence axis is rows or keys")
        return self.rows if of == "rows" else self.keys

    def _documents(self, axis: Layout) -> tuple[tuple[Range, ...], ...]:
        if self.documents is None or axis.length != self.rows.length:
            names = ", ".join(f"`{name}`" for name in self.segments)
            held = f"these masks have {names}" if names else "these have none"
            raise error("M712", f"documents are the one segments input of the masks; {held}", None, "give plan(documents=NAME)")
        return self.documents


def _check_per(per: str) -> None:
    if per not in get_args(Per):
        raise error("M713", f"per={per!r}: positions count per doc or per sequence")


def expect(x: torch.Tensor, dim: int, length: int, why: str) -> None:
    """Raise M710 unless x is a tensor with so many positions along `dim`."""
    if not isinstance(x, torch.Tensor):
        raise error("M710", f"{type(x).__name__} is not a tensor: {why}")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim() or x.shape[dim] != length:
        raise error("M710", f"axis {dim!r} of a tensor of shape {tuple(x.shape)}: {why}")


def _starts(documents: tuple[Range, ...], length: int) -> torch.Tensor:
    """Start of its document for each position, int64 [S]."""
    out = torch.empty(length, dtype=torch.int64)
    for start, stop in documents:
        out[start:stop] = start
    return out


def _rolled(documents: tuple[Range, ...], length: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source position of each position, and where it came around an end."""
    source, wraps = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.bool)
    for start, stop in documents:
        at = torch.arange(stop - start) - n
        source[start:stop] = start + at % (stop - start)
        wraps[start:stop] = (at < 0) | (at >= stop - start)
    return source, wraps


def _pick(x: torch.Tensor, source: torch.Tensor, wraps: torch.Tensor, dim: int, fill: float | None) -> torch.Tensor:
    out = x.index_select(dim, source.to(x.device))
    if fill is None:
        return out
    shape = [1] * x.dim()
    shape[dim] = -1
    return out.masked_fill(wraps.to(x.device).view(shape), fill)
