"""Rows to ranks in few pieces of neighbours, rows and work even: arcs of a circle.

Let the sequence be a circle, its end joined to its beginning. An arc with a share of the rows holds, over all places where
it may lie, the same share of the work on average; as it moves, what it holds changes little by little; so at some place
it holds just that share, whatever the mask. Cut out there, the rest closes to a circle again. P - 1 such cuts deal rows
and work evenly to P ranks in at most 2 P - 1 pieces (the necklace theorem: Goldberg and West 1985, Alon 1987). Of
places that are about even, the one is taken where work that is not and keys that travel cost the least time together.

Rows are counted in tiles, so work is only as even as whole tiles allow; where that is too little, as with ranks of few tiles,
single tiles at the ends of pieces change hands. Each step is best by itself, not all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from maskc.runtime.chunking import COARSE, EVEN, FINE
from maskc.runtime.layout import Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Needs = Sequence[tuple[int, Bools]]
"""Per mask its weight and, bool [row tiles, key tiles], what is seen."""
SLACK = 0.004
"""Of a rank's work, by which all cuts together may be off for fewer keys to travel."""
PLACES = 32
"""Such places, at most, of which the keys that travel are counted."""
SWAPS, TRIED = 4, 8
"""Swaps of single tiles, at most, for each rank; those that even out most of which the keys that travel are counted."""
COLUMNS = 512
"""Groups of neighbouring key tiles, at most, by which the keys of an arc are counted."""


def arcs(work: Ints, needs: Needs, world: int, tile: int, length: int, price: float) -> Layout:
    """Rows and keys, tiles of `tile` positions with this work each, cut where owner or readers change.

    Ranks hold equally many tiles, up to one. A chunk is at most about a quarter of a rank's rows. price: of a key tile that
    travels, in units of work.
    """
    owner = owners(work, needs, world, price)
    held = owner[None] == np.arange(world)[:, None]
    readers = np.concatenate([np.stack([seen[mine].any(0) for mine in held]) | held for _, seen in needs])
    owned, read = np.flatnonzero(np.diff(owner)), np.flatnonzero(np.diff(readers, axis=1).any(0))
    inner = np.union1d(owned, read)
    if len(inner) > 2 * FINE * world:  # so many copies would cost more than keys that nobody needs
        inner = owned
    edges = [0, *(inner + 1).tolist(), len(work)]
    largest = -(-len(work) // (COARSE * world))
    starts = [at for a, b in pairwise(edges) for at in _cut(a, b, largest)]
    return Layout(world, (*(at * tile for at in starts), length), tuple(owner[starts].tolist()))


def _cut(start: int, stop: int, largest: int) -> list[int]:
    """Where equal parts of a range begin, none above `largest`."""
    parts = -(-(stop - start) // largest)
    return [start + (stop - start) * i // parts for i in range(parts)]


def owners(work: Ints, needs: Needs, world: int, price: float) -> Ints:
    """The rank of every tile: a circle for two groups of ranks, halved, and so on inside each; then single tiles swapped."""
    circle = _Circle(work, needs, price, SLACK / max(1, (world - 1).bit_length()))
    counts = np.diff(np.arange(world + 1) * len(work) // world)
    owner = np.zeros(len(work), dtype=np.int64)
    left = [(np.arange(len(work)), 0, world)]
    while left:
        ring, low, high = left.pop()
        if high - low == 1:
            owner[ring] = low
            continue
        middle = (low + high) // 2
        halves = circle.halved(ring, int(counts[low:middle].sum()), (middle - low) / (high - low), high - low)
        left += [(halves[0], low, middle), (halves[1], middle, high)]
    circle.even_out(owner, world)
    return owner


class _Circle:
    """Tiles with their work, and the groups of key tiles that their rows see."""

    def __init__(self, work: Ints, needs: Needs, price: float, slack: float) -> None:
        self.work, self.price, self.slack = work, price, slack
        width = -(-len(work) // COLUMNS)
        self.column = np.arange(len(work)) // width
        self.sizes = np.bincount(self.column)
        starts = np.arange(0, len(work), width)
        self.needs = [(weight, np.logical_or.reduceat(seen, starts, axis=1) if width > 1 else seen) for weight, seen in needs]

    def halved(self, ring: Ints, size: int, share: float, ranks: int) -> tuple[Ints, Ints]:
        """An arc of `size` tiles of a ring that holds its share of the work, and the rest from its end on."""
        if not 0 < size < len(ring):
            return ring[:size], ring[size:]
        twice = np.concatenate((ring, ring))
        sums = np.concatenate(((0,), np.cumsum(self.work[twice])))
        total = int(sums[len(ring)])
        off = np.abs(sums[size : size + len(ring)] - sums[: len(ring)] - share * total) / (ranks // 2)  # a rank
        places = np.flatnonzero(off <= max(self.slack * total / ranks, off.min()))
        if len(places) > PLACES:
            places = places[np.arange(PLACES) * len(places) // PLACES]
        halves = {int(at): (twice[at : at + size], twice[at + size : at + len(ring)]) for at in places}

        def seconds(at: int) -> tuple[float, int]:
            inflow = [self.inflow(tiles) for tiles in halves[at]]
            return float(off[at]) + self.price * max(inflow), sum(inflow)

        return halves[min(halves, key=seconds)]

    def even_out(self, owner: Ints, world: int) -> None:
        """Where a rank is above the mean by more than EVEN: swap tiles at ends of pieces until none is by more than SLACK."""
        loads = np.bincount(owner, weights=self.work, minlength=world).astype(np.int64)
        mean = float(loads.sum()) / world
        if loads.max() <= (1 + EVEN) * mean:
            return
        for _ in range(SWAPS * world):
            heavy = int(loads.argmax())
            if loads[heavy] <= (1 + SLACK) * mean or (swap := self._best_swap(owner, loads, heavy)) is None:
                return
            mine, theirs = swap
            moved, light = self.work[mine] - self.work[theirs], owner[theirs]
            loads[heavy] -= moved
            loads[light] += moved
            owner[mine], owner[theirs] = light, heavy

    def _best_swap(self, owner: Ints, loads: Ints, heavy: int) -> tuple[int, int] | None:
        """A tile of the heaviest rank and one of another's, after whose swap the two are fastest; None if none helps."""
        changes = np.flatnonzero(np.diff(owner))
        ends = np.unique(np.concatenate((changes, changes + 1, (0, len(owner) - 1))))
        mine, theirs = ends[owner[ends] == heavy], ends[owner[ends] != heavy]
        moved = self.work[mine][:, None] - self.work[theirs]
        peaks = np.maximum(loads[heavy] - moved, loads[owner[theirs]] + moved).ravel()
        best = [int(i) for i in np.argsort(peaks, kind="stable")[:TRIED] if peaks[i] < loads[heavy]]

        def seconds(i: int) -> float:
            a, b = mine[i // len(theirs)], theirs[i % len(theirs)]
            swapped = owner.copy()
            swapped[a], swapped[b] = owner[b], heavy
            return float(peaks[i]) + self.price * max(self.inflow(np.flatnonzero(swapped == r)) for r in (heavy, owner[b]))

        if not best:
            return None
        i = min(best, key=seconds)
        return int(mine[i // len(theirs)]), int(theirs[i % len(theirs)])

    def inflow(self, tiles: Ints) -> int:
        """Key tiles that come into these tiles' half from anywhere else."""
        others = self.sizes - np.bincount(self.column[tiles], minlength=len(self.sizes))
        return sum(weight * int(others[seen[tiles].any(0)].sum()) for weight, seen in self.needs)
