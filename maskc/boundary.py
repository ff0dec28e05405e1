"""BoundaryVectors: the mask of one batch as a kernel reads it. The one contract between binding and every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

VECTOR_NAMES = ("lts", "lte", "uts", "ute", "diag")
"""Of `BoundaryVectors.tensors`."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockTable:
    """Data-driven visibility per block: bool [B or 1, Hm or 1, ceil(nq / block_q), ceil(nk / block_kv)]."""

    keep: torch.Tensor
    block_q: int
    block_kv: int


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class BoundaryVectors:
    """Masked rows of key k are [lts, lte) and [uts, ute) in either order, rows q < diag, and with `causal` rows q < k.

    Each vector is int32 [batch, heads, nk], contiguous, values in [0, nq], all on one device, or None where the mask
    has no such bound: an absent lte reads as nq, an absent uts as 0, an absent lts or ute means that the interval
    does not exist. batch and heads are 1 where the mask does not depend on them (they broadcast); heads is the number
    of mask heads Hm, which divides the query heads.

    Under context parallelism only: `diag`, and `elsewhere`, bool [batch, heads, nk], keys that rows of other ranks see.
    What such a key holds is in the result anyway, so it need not be kept from the rows here that share its tile.
    """

    nq: int
    nk: int
    batch: int
    heads: int
    causal: bool
    lts: torch.Tensor | None = None
    lte: torch.Tensor | None = None
    uts: torch.Tensor | None = None
    ute: torch.Tensor | None = None
    diag: torch.Tensor | None = None
    blocks: BlockTable | None = None
    elsewhere: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of VECTOR_NAMES."""
        return self.lts, self.lte, self.uts, self.ute, self.diag

    @property
    def device(self) -> torch.device:
        """Where the vectors live; the CPU for a mask that has none."""
        if self.blocks is not None:
            return self.blocks.keep.device
        return next((t.device for t in self.tensors if t is not None), torch.device("cpu"))

    def masked(self) -> torch.Tensor:
        """Dense bool [batch, heads, nq, nk], True where masked: for tests and small pictures only."""
        return self.masked_tile(0, self.nq, 0, self.nk)

    def masked_tile(self, r0: int, r1: int, c0: int, c1: int, batch: slice = slice(None)) -> torch.Tensor:
        """Bool [batch, heads, r1 - r0, c1 - c0], True where masked; `batch` selects items of a mask that has several."""
        q = torch.arange(r0, r1, device=self.device, dtype=torch.int32)[:, None]
        k = torch.arange(c0, c1, device=self.device, dtype=torch.int32)[None, :]
        items = 1 if self.batch == 1 else len(range(*batch.indices(self.batch)))

        def tile(vector: torch.Tensor) -> torch.Tensor:
            return (vector if self.batch == 1 else vector[batch])[:, :, None, c0:c1]

        out = q < k if self.causal else torch.zeros(r1 - r0, c1 - c0, dtype=torch.bool, device=self.device)
        out = out.expand(items, self.heads, r1 - r0, c1 - c0)
        if self.diag is not None:
            out = out | (q < tile(self.diag))
        if self.lts is not None:
            lower = q >= tile(self.lts)
            out = out | (lower if self.lte is None else lower & (q < tile(self.lte)))
        if self.ute is not None:
            upper = q < tile(self.ute)
            out = out | (upper if self.uts is None else upper & (q >= tile(self.uts)))
        if self.blocks is not None:
            keep = self.blocks.keep if self.blocks.keep.shape[0] == 1 else self.blocks.keep[batch]
            rows = torch.arange(r0, r1, device=self.device) // self.blocks.block_q
            cols = torch.arange(c0, c1, device=self.device) // self.blocks.block_kv
            out = out | ~keep[:, :, rows][:, :, :, cols]
        return out
