"""In which order a rank visits key chunks while they still arrive. Pure integers.

The kernel walks its key axis from right to left, so the buffer that collects the chunks is laid out from right to left in
the order of arrival: first the rank's own chunks, then those of others in the order in which they are copied. A *slot* is
a position in that order. Localized vectors over `OverlapPlan.columns` make any kernel visit keys in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskc.runtime.layout import Layout
from maskc.runtime.plan import AttentionPlan

FEW_HEADS = 4
"""Key heads up to which chunks come in the order of the rows that need them: fewer than this many groups of heads leave most
rows waiting for their last chunk."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A key chunk that some row of the rank can see.

    source: the rank that it is copied from, the rank itself for its own chunks: the owner inside a node, else the rank
    of this node that brings it in. across: the copy comes from another node. start, rows: its place in the key buffer.
    joined: chunks that lie behind each other at the source, ascending, where one copy brings several; `chunk` is the first.
    """

    chunk: int
    source: int
    across: bool
    start: int
    rows: int
    joined: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.joined or (self.chunk,)


class RowWork(NamedTuple):
    """A chunk of a rank's rows, with all query heads of a batch item.

    rows: times heads. need: key chunks that it sees, as bits. cells: of the mask in tiles that are computed, times heads.
    """

    rows: int
    need: int
    cells: float


@dataclass(frozen=True)
class OverlapPlan:
    """The key buffer of one rank.

    slots: in the order of visit and of arrival; the first `own` of them are the rank's own chunks. carried: chunks that
    the rank brings into its node for neighbours alone, in the order of copying, after its own. rows: of the buffer.
    lends: (reader, the rank's own chunks that it can see), readers ascending; backward, gradients come back from them.
    work: of the rank's row chunks; none where the plan does not say how many heads there are.
    """

    rank: int
    own: int
    slots: tuple[Slot, ...]
    carried: tuple[int, ...]
    rows: int
    lends: tuple[tuple[int, tuple[int, ...]], ...] = ()
    work: tuple[RowWork, ...] = ()

    @property
    def columns(self) -> tuple[int, ...]:
        """Key chunks in the order in which they lie in the buffer."""
        return tuple(c for s in reversed(self.slots) for c in s.chunks)

    @property
    def pulls(self) -> tuple[Slot, ...]:
        """The copies, in the order in which they are issued."""
        return self.slots[self.own :]

    def pieces(self, groups: int) -> tuple[int, ...]:
        """What is copied, in order: slot + group of heads * number of slots. All chunks of the first heads come first."""
        count = len(self.slots)
        return tuple(g * count + s for g in range(groups) for s in range(self.own, count))

    def slot_of(self, piece: int) -> Slot:
        return self.slots[piece % len(self.slots)]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks that chunks come from, by first use."""
        return tuple(dict.fromkeys(s.source for s in self.pulls))

    def block_slots(self, block_kv: int) -> NDArray[np.int64]:
        """[KV blocks, 2]: first and last slot that the keys of each block lie in."""
        starts = np.array([s.start for s in reversed(self.slots)], dtype=np.int64)
        first = np.arange(0, self.rows, block_kv)
        last = np.minimum(first + block_kv, self.rows) - 1
        newest, oldest = (len(starts) - np.searchsorted(starts, at, side="right") for at in (first, last))
        return np.stack((oldest, newest), axis=1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Cut:
    """How the calls of one direction cut keys into pieces: each slot of a plan into groups of heads.

    plan: its slots may be joined, else that of the buffer. heads: of keys in all. first: number of its first word, among those
    of both directions.
    """

    plan: OverlapPlan
    groups: int
    heads: int
    first: int = 0

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """What is copied, in order, see `OverlapPlan.pieces`."""
        return self.plan.pieces(self.groups)

    @property
    def words(self) -> int:
        """One per piece, with those of own slots, which nobody uses."""
        return self.groups * len(self.plan.slots)

    @property
    def group_heads(self) -> int:
        return self.heads // self.groups

    def heads_of(self, piece: int, groups: int = 1) -> slice:
        """Those of a piece, and of so many groups in all from there on."""
        group = piece // len(self.plan.slots)
        return slice(group * self.group_heads, (group + groups) * self.group_heads)


def overlap_plan(
    plan: AttentionPlan, rank: int, part: int = 0, heads: tuple[int, int] | None = None, masks: int = 1
) -> OverlapPlan:
    """The visit order of one rank under one mask of the plan.

    heads: of queries and keys, where the plan does not say. masks: batch items times mask heads that the plan's workloads are
    summed over.
    """
    of_queries, of_keys = heads or (plan.heads or 0, plan.heads_kv or 0)
    everything = frozenset(range(plan.keys.chunk_count))
    needed = [plan.needed(r, part) if plan.prune else everything for r in range(plan.world)]
    turns: tuple[int, ...] = ()
    if plan.prune and 0 < of_keys <= FEW_HEADS:
        mask, rows = plan.parts[part], plan.rows.chunks_of(rank)
        own = sum(1 << c for c in plan.keys.chunks_of(rank))
        turns = turns_of_chunks([(mask.need[r], mask.workloads[r]) for r in rows], own, plan.keys.chunk_count)
    made = plan_visits(plan.keys, needed, rank, plan.node_size if plan.hierarchical else plan.world, turns)
    return replace(made, work=_row_work(plan, rank, part, of_queries, masks))


def _row_work(plan: AttentionPlan, rank: int, part: int, heads: int, masks: int) -> tuple[RowWork, ...]:
    """heads: of queries."""
    mask, cells = plan.parts[part], heads / masks * plan.tile[0] * plan.tile[1] / plan.costs.unmasked
    chunks = plan.rows.chunks_of(rank) if heads else ()
    return tuple(RowWork(plan.rows.size_of(c) * heads, mask.need[c], mask.workloads[c] * cells) for c in chunks)


def turns_of_chunks(rows: Sequence[tuple[int, int]], own: int, count: int) -> tuple[int, ...]:
    """Per chunk, when its turn is: those that some rows still need come together, first for most work per chunk.

    rows: (chunks that a part of the rows needs as bits, its work). own: chunks that are there, as bits.
    """
    there, turns, left = own, [0] * count, list(rows)
    for turn in range(1, len(rows) + 1):
        left = [(need, work) for need, work in left if need & ~there]
        if not left:
            break
        need, _ = max(left, key=lambda row: row[1] / (row[0] & ~there).bit_count())
        for chunk in range(count):
            if need & ~there & 1 << chunk:
                turns[chunk] = turn
        there |= need
    return tuple(turns)


def plan_visits(
    keys: Layout, needed: Sequence[frozenset[int]], rank: int, node_size: int, turns: Sequence[int] = ()
) -> OverlapPlan:
    """Own chunks, then those of ranks of the node, then those from outside, first the ones this rank brings in itself.

    needed: per rank, the key chunks that its rows can see. node_size: ranks that reach each other directly; a chunk
    enters a node once, to the rank in its owner's place. turns: per chunk, which of those that come the same way come first.
    Where they do not tell, peers are taken in cyclic order behind the rank, so that no two ranks pull from the same one at
    the same time.
    """
    world = keys.world

    def order(chunk: int) -> tuple[int, int, int, int, int]:
        owner = keys.owner[chunk]
        source = _source(keys, chunk, rank, node_size)
        outside = owner // node_size != rank // node_size
        distance = 0 if owner == rank else 1 if not outside else 2 if source == owner else 3
        return distance, turns[chunk] if turns else 0, (rank - source) % world, (rank - owner) % world, -chunk

    visited = sorted(needed[rank], key=order)
    rows = sum(keys.size_of(c) for c in visited)
    slots, stop = [], rows
    for c in visited:
        source = _source(keys, c, rank, node_size)
        size = keys.size_of(c)
        stop -= size
        slots.append(Slot(c, source, source // node_size != rank // node_size, stop, size))
    own = sum(keys.owner[c] == rank for c in visited)
    mine = frozenset(keys.chunks_of(rank))
    lends = tuple((r, tuple(sorted(mine & n))) for r, n in enumerate(needed) if r != rank and mine & n)
    return OverlapPlan(rank, own, tuple(slots), _carried(keys, needed, rank, node_size), rows, lends)


def joined(plan: OverlapPlan, keys: Layout, rows: int) -> OverlapPlan:
    """The same buffer with fewer copies: foreign slots that lie behind each other at both ends, until one has `rows` rows."""
    behind = {b: a for r in plan.sources for a, b in pairwise(keys.chunks_of(r))}
    slots = list(plan.slots[: plan.own])
    for s in plan.pulls:
        last = slots[-1] if len(slots) > plan.own else None
        if (
            last is not None
            and last.source == s.source
            and last.start == s.start + s.rows  # others' slots may be left out of `plan`
            and behind.get(last.chunk) == s.chunk
            and last.rows < rows
        ):
            slots[-1] = replace(s, rows=s.rows + last.rows, joined=(*s.chunks, *last.chunks))
        else:
            slots.append(s)
    return replace(plan, slots=tuple(slots))


def _source(keys: Layout, chunk: int, rank: int, node_size: int) -> int:
    """Where a rank gets a chunk from."""
    owner = keys.owner[chunk]
    node = rank // node_size
    if owner // node_size == node:
        return owner
    relay = node * node_size + owner % node_size
    return owner if relay == rank else relay


def _carried(keys: Layout, needed: Sequence[frozenset[int]], rank: int, node_size: int) -> tuple[int, ...]:
    node = rank // node_size
    neighbours = [r for r in range(node * node_size, min((node + 1) * node_size, keys.world)) if r != rank]
    wanted = frozenset[int]().union(*(needed[r] for r in neighbours)) - needed[rank]
    mine = (c for c in wanted if keys.owner[c] // node_size != node and keys.owner[c] % node_size == rank % node_size)
    return tuple(sorted(mine, key=lambda c: ((rank - keys.owner[c]) % keys.world, -c)))
