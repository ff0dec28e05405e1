"""Ranks that make the same calls in another order: told at the next call, where anything tells the calls apart."""

from __future__ import annotations

from typing import Any

import torch

import maskc
from maskc.runtime.plan import plan
from tests.dist.test_faults import outcomes

N = 64
CAUSAL, WINDOW = "mask m = k <= q", "mask m = k <= q < k + 60"
"""Masks whose plans are alike but for tiles: keys of one could be taken for those of the other."""


def called(rank: int, group: Any, text: str) -> torch.Tensor:
    spec = maskc.compile_text(text).bind(nq=N, nk=N)
    p = plan(spec, world_size=2, chunk=8, order="zigzag")
    q, k, v = (torch.randn(1, p.rows.local_length(rank), 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = maskc.run(spec, q, k, v, group, plan=p, strategy="gated")
    assert isinstance(out, torch.Tensor)
    return out


def swapped(rank: int, group: Any) -> None:
    """Two masks that both ranks know, eight calls; then rank 1 takes them the other way round, and both go on."""
    for text in (CAUSAL, WINDOW, WINDOW, CAUSAL):
        called(rank, group, text).sum().backward()
    for text in (CAUSAL, WINDOW) if rank == 0 else (WINDOW, CAUSAL):
        called(rank, group, text)
    for _ in range(20):
        called(rank, group, CAUSAL)


def test_masks_whose_order_differs_are_noticed() -> None:
    found = outcomes(swapped)
    assert [r and r[0] for r in found] == ["M721", "M721"], found
    assert any(r and "call 9 of rank" in r[1] for r in found), found
