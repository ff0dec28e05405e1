"""BoundaryVectors: the mask of one batch as a kernel reads it. The one contract between binding and every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class BlockTable:
    """Data-driven visibility per block: bool [B or 1, Hm or 1, ceil(nq / block_q), ceil(nk / block_kv)]."""

    keep: torch.Tensor
    block_q: int
    block_kv: int


@dataclass(frozen=True, eq=False, slots=True)
class BoundaryVectors:
    """Masked rows of key k are [lts, lte) and [uts, ute) in either order, rows q < diag, and with `causal` rows q < k.

    Each vector is int32 [batch, heads, nk], contiguous, values in [0, nq], all on one device, or None where the mask
    has no such bound: an absent lte reads as nq, an absent uts as 0, an absent lts or ute means that the interval
    does not exist. batch and heads are 1 where the mask does not depend on them (they broadcast); heads is the number
    of mask heads Hm, which divides the query heads. `diag` exists under context parallelism only.
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

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(lts, lte, uts, ute, diag)."""
        return self.lts, self.lte, self.uts, self.ute, self.diag

    def masked(self) -> torch.Tensor:
        """Dense bool [batch, heads, nq, nk], True where masked: for tests and small pictures only."""
        device = next((t.device for t in self.tensors if t is not None), torch.device("cpu"))
        if self.blocks is not None:
            device = self.blocks.keep.device
        q = torch.arange(self.nq, device=device)[None, None, :, None]
        k = torch.arange(self.nk, device=device)[None, None, None, :]
        out = torch.zeros(self.batch, self.heads, self.nq, self.nk, dtype=torch.bool, device=device)
        if self.causal:
            out |= q < k
        if self.diag is not None:
            out |= q < self.diag[:, :, None, :]
        if self.lts is not None:
            below = q < self.lte[:, :, None, :] if self.lte is not None else torch.ones_like(out)
            out |= (q >= self.lts[:, :, None, :]) & below
        if self.ute is not None:
            above = q >= self.uts[:, :, None, :] if self.uts is not None else torch.ones_like(out)
            out |= above & (q < self.ute[:, :, None, :])
        if self.blocks is not None:
            keep = self.blocks.keep
            rows = torch.arange(self.nq, device=device) // self.blocks.block_q
            cols = torch.arange(self.nk, device=device) // self.blocks.block_kv
            out |= ~keep[:, :, rows][:, :, :, cols]
        return out
