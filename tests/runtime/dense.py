"""Dense attention in fp64, as obvious as it can be: the reference of every backend."""

from __future__ import annotations

import torch

from maskc.boundary import BoundaryVectors

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    masked: torch.Tensor, q: torch.Tensor, k: torch.Tensor, val: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in the dtype of the inputs; `masked` bool [batch or 1, Hm, Sq, Sk]. Rows that see nothing: 0 and -inf."""
    heads = q.shape[2]
    keys, values = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, val))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    scores = scores.masked_fill(masked.repeat_interleave(heads // masked.shape[1], 1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, values), lse


def reference(
    v: BoundaryVectors,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    scale: float,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, Grads]:
    """(out, lse, (dq, dk, dv)) by autograd through `attend` in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, val)]
    out, lse = attend(v.masked(), *leaves, scale)
    total = (out * dout.to(dtype)).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(dtype)).sum()
    grads = torch.autograd.grad(total, leaves)
    return out.detach(), lse.detach(), grads
