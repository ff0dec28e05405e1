"""Own keys and their gradients where gated kernels read and complete them: in the rank's own tensors; else in the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from maskc.runtime import exchange, hopper
from maskc.runtime.transport import Pair, head_major


class Whole(NamedTuple):
    """Gradients of own keys that the kernel completes itself.

    results: dK and dV of `InPlace.pair`. lent: per tile what others have of them, tables of `exchange.lent_table`. added:
    int32 [batch * heads, tiles], the epoch in which the kernel has completed them.
    """

    results: Pair
    lent: tuple[Tensor, Tensor]
    added: Tensor


class InPlace(NamedTuple):
    """Own keys that a gated kernel reads where they are: K and V [B, rows, Hk, D] of blocks of `block_kv` keys from `block` on.

    rows: which they are. lead: (place in the buffer, rows) of those before, which lie in a block with keys of others.
    """

    block: int
    block_kv: int
    pair: Pair
    rows: slice
    lead: tuple[tuple[int, slice], ...]


NOWHERE = 1 << 30
"""First block of own keys where the kernel finds them in the buffer."""


def laid(own: Pair, into: Pair, runs: Sequence[exchange.Run]) -> None:
    """Rows of own keys and values [B, rows, Hk, D] to rows of [Hk, rows, B, D], with the whole machine."""
    if not runs:
        return
    if own[0].device.type == "cuda" and into[0][0].is_contiguous():
        ctas = hopper.multiprocessors(own[0].device)
        exchange.fill((hopper.addressable(own[0]), hopper.addressable(own[1])), into, runs, ctas)
        return
    for t, to in zip(own, into, strict=True):
        for start, rows in runs:
            to[:, start : start + rows.stop - rows.start].copy_(head_major(t[:, rows]))
