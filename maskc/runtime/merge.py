"""Partial attention results over disjoint keys, combined by their log-sum-exp in fp32 (fp64 for fp64)."""

from __future__ import annotations

import torch

Partial = tuple[torch.Tensor, torch.Tensor]
"""(out [B, Sq, Hq, Dv], lse [B, Hq, Sq], natural log, -inf for rows that saw nothing), both fp32 or fp64."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Of sums, log-sum-exp and partial results of operands of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(a: Partial, b: Partial) -> Partial:
    """The result over the keys of both. A row that saw nothing in one part keeps the other part's bits.

    lse = log(exp(la) + exp(lb)), out = oa * exp(la - lse) + ob * exp(lb - lse).
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf is no number
    weight_a, weight_b = (torch.exp(part - base).transpose(1, 2)[..., None] for part in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, lse


def empty(batch: int, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Partial:
    """The result over no keys: zeros and -inf."""
    out = torch.zeros(batch, rows, heads, dim, dtype=dtype, device=device)
    return out, torch.full((batch, heads, rows), -torch.inf, dtype=dtype, device=device)
