"""Own keys and their gradients where gated kernels read and complete them: in the rank's own tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from maskc.runtime.transport import Pair


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
