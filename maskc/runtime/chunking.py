"""The chunk size of a plan that names none: rows even over the ranks first, and no smaller than the balance asks for.

Small chunks balance better; large ones are better otherwise. A kernel's tile of 192 rows that straddles the end of a
chunk works on what both chunks see, a key tile costs its loads and its gradients once per rank that reads it, and copies
are longer. So a plan starts from FINE chunks a rank, and looks whether COARSE ones, or arcs (arcs.py), are faster.
"""

from __future__ import annotations

from functools import lru_cache

FINE, COARSE = 8, 4
"""Chunks a rank, about."""
EVEN = 0.005
"""Imbalance that is worth larger chunks, or arcs."""
TILE = 128
"""Chunks are multiples of this, unless they are hardly that long."""
BEST = 384
"""Multiples of this suit the forward kernel best: whole tiles of 192 rows, in whole tiles of keys."""


@lru_cache(maxsize=64)  # a training asks for the same at every step
def default_chunk(length: int, world: int, per_rank: int = FINE, limit: int | None = None) -> int:
    """The size, for about `per_rank` chunks a rank, that leaves the fullest rank the fewest rows.

    From 3/4 to twice an even share, in multiples of TILE, of BEST among those as even; an even share itself where that is
    at most half a TILE. At most `limit` chunks, if given.
    """
    share = max(1, -(-length // (per_rank * world)), -(-length // limit) if limit else 1)
    if share <= TILE // 2:
        return share
    sizes = range(max(1, round(0.75 * share / TILE)) * TILE, 2 * share + TILE, TILE)
    allowed = [size for size in sizes if not limit or -(-length // size) <= limit]
    return min(allowed, key=lambda size: (fullest(length, world, size), size % BEST != 0, abs(size - share)))


def fullest(length: int, world: int, chunk: int) -> int:
    """Rows of the fullest rank, where ranks hold equally many chunks as far as there are any."""
    chunks = -(-length // chunk)
    return min(length, -(-chunks // world) * chunk)
