"""In which order kernels take their work while keys arrive and gradients leave. Pure integers and planned seconds.

Both directions are lists by a planned clock: whenever a multiprocessor is free, it takes the first item, in the order that
one would have without copies, that can go through without waiting; if there is none, the one that can do so soonest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_LIMIT = 1 << 16
"""Row tiles, key tiles, and heads times batch items, must stay below this: an item is packed into 32 bits."""

TAIL = 2
"""Times the longest tile of a forward: work of the heads at its end, which is given out by falling work."""
Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Heads:
    """How heads are dealt: `heads` of q, for batch items; a group of heads of keys is copied together.

    first_piece: [heads], the number of the group times that of slots.
    """

    heads: int
    batch: int
    first_piece: Ints


def head_groups(heads: int, heads_kv: int, groups: int, slots: int) -> Ints:
    """[heads]: the first piece of the group that the keys of each query head are in."""
    kv_head = np.arange(heads, dtype=np.int64) // (heads // heads_kv)
    return kv_head // (heads_kv // groups) * slots


def masks_of_heads(dealt: Heads, masks: int, masked_batches: bool) -> Ints:
    """[batch items * heads]: the mask of each; there are `masks`: (batch items if masked_batches) times mask heads."""
    mask_heads = masks // dealt.batch if masked_batches else masks
    which = np.arange(dealt.heads * dealt.batch, dtype=np.int64)
    item = which // dealt.heads * mask_heads if masked_batches else 0
    of: Ints = item + which % dealt.heads // (dealt.heads // mask_heads)
    return of


@dataclass(frozen=True, slots=True)
class Planned:
    """Work items of a kernel, as they would go without copies.

    packed: uint32 [items]. ready: seconds from which each can be worked through without waiting. spent: seconds that one
    multiprocessor takes.
    """

    packed: NDArray[np.uint32]
    ready: Floats
    spent: Floats

    def order(self, processors: int, eager: float = 0.0) -> Ints:
        """Items by number in the order in which so many multiprocessors take them.

        eager: an item may be taken by this share of its time too early, and then waits. That costs time, but long items
        come sooner.
        """
        start = self.ready - eager * self.spent
        late = np.flatnonzero(start > 0.0)
        if not len(late):
            return np.arange(len(start))
        late = late[np.argsort(start[late], kind="stable")]
        nobody = len(start)  # a number behind those of all items; and no clock reaches the last time
        begins, later = [*start[late].tolist(), inf], late.tolist()
        there, came = [*np.flatnonzero(start <= 0.0).tolist(), nobody], [nobody]
        ready, spent = self.ready.tolist(), self.spent.tolist()
        free, order = [0.0] * processors, list[int]()
        taken = at = 0  # of those that are there from the start, of those that come later
        while at < len(later):
            clock = free[0]
            while begins[at] <= clock:
                heappush(came, later[at])
                at += 1
            if came[0] < there[taken]:
                item = heappop(came)
            elif there[taken] < nobody:
                item = there[taken]
                taken += 1
            else:
                item = later[at]
                at += 1
            order.append(item)
            begin = ready[item]
            heapreplace(free, (begin if begin > clock else clock) + spent[item])
        left = np.ones(len(start), dtype=np.bool_)
        left[order] = False
        return np.concatenate((np.array(order, dtype=np.int64), np.flatnonzero(left)))

    def ends(self, order: Ints, processors: int) -> Floats:
        """When each item is done where they are taken in this order."""
        free, ends = [0.0] * processors, []
        for ready, spent in zip(self.ready[order].tolist(), self.spent[order].tolist(), strict=True):
            end = (ready if ready > free[0] else free[0]) + spent
            heapreplace(free, end)
            ends.append(end)
        out = np.empty(len(order))
        out[order] = ends
        return out

    def orders(self, processors: int, eager: Iterable[float]) -> list[Ints]:
        """Those that differ."""
        return list({order.tobytes(): order for order in (self.order(processors, e) for e in eager)}.values())


def forward_items(
    parts: Ints,
    whole: Ints,
    dealt: Heads,
    masked_batches: bool,
    group: int,
    arrivals: Sequence[float],
    seconds: float,
    processors: int,
) -> Planned:
    """Row tiles: Q block | (batch item * heads + head) << 16.

    Without copies `group` heads go together, whose keys then stay in cache, and among those long tiles first; the last heads
    as one group, in which the `processors` have work for TAIL times as long as the longest tile takes, so that all end
    together. A tile visits slots in their order, so it can begin so much before its last piece arrives as what it does before
    takes.

    parts: [masks, Q blocks, slots], the work of each slot's keys, masks being (batch items if masked_batches) times mask
    heads. whole: [masks, Q blocks], the work of a tile, with what belongs to no key. arrivals: seconds, by piece; 0 for own
    ones. seconds: that one multiprocessor takes for a work of 1. Raises ValueError beyond ITEM_LIMIT.
    """
    masks, q_blocks, slots = parts.shape
    which = np.arange(dealt.heads * dealt.batch, dtype=np.int64)
    _check(q_blocks, "Q blocks", len(which), "heads")
    mask, first = masks_of_heads(dealt, masks, masked_batches), dealt.first_piece[which % dealt.heads]
    before = (whole[:, :, None] - parts[:, :, ::-1].cumsum(2)[:, :, ::-1]) * seconds
    due, ready = np.asarray(arrivals), np.zeros((len(which), q_blocks))
    for piece in np.unique(first):
        waits = np.where(parts > 0, due[piece : piece + slots] - before, 0.0).max(axis=2, initial=0.0)
        of = first == piece
        ready[of] = waits[mask[of]]
    head, block, load = np.repeat(which, q_blocks), np.tile(np.arange(q_blocks), len(which)), whole[mask].ravel()
    tail = TAIL * int(whole.max(initial=0)) * processors * len(which) // max(1, int(load.sum()))
    together = np.minimum(head // group, max(0, len(which) - 1 - tail) // group)
    order = np.lexsort((head, block, -load, together))
    packed = (block | head << 16).astype(np.uint32)
    return Planned(packed[order], ready.ravel()[order], load[order] * seconds)


def soonest_forward(items: Planned, processors: int, eager: Iterable[float] = (0.0,)) -> NDArray[np.uint32]:
    """The order that ends soonest by the planned clock."""
    orders = items.orders(processors, eager)
    if len(orders) == 1:
        return items.packed[orders[0]]
    return items.packed[min(orders, key=lambda order: float(items.ends(order, processors).max(initial=0.0)))]


def backward_items(
    latest: Ints,
    load: Ints,
    first_piece: Ints,
    own: int,
    group: int,
    arrivals: Sequence[float],
    seconds: float,
    tail: int = 0,
    lent: NDArray[np.bool_] | None = None,
    in_line: bool = False,
) -> tuple[Planned, Ints]:
    """(key tiles: tile | unit << 16, a unit being what shares a head of keys; the piece of each, -1 for own ones).

    Keys of others arrive late, but their gradients leave early: pieces come first, in the order of arrival, and own tiles
    last; where pieces are not there yet, own tiles fill the time. Among those, `group` units together (their rows stay in
    cache), then by falling work; the last `tail` units count as one group, for the kernel ends sooner where its last items
    are short ones of many. Tiles that others see (`lent`) come after those that they do not, for what others have of their
    gradients is on its way. in_line: nothing of that, all tiles come as they do without copies; of one unit as they lie,
    of several by falling work.

    latest: [key tiles], the last slot of each. load: [units, key tiles]. first_piece: [units], as in `Heads`. own: slots
    below are the rank's own. arrivals: seconds, by piece. seconds: that one multiprocessor takes for a load of 1. Raises
    ValueError beyond ITEM_LIMIT.
    """
    units, tiles = load.shape
    _check(tiles, "key tiles", units, "units")
    piece = np.where(latest < own, -1, latest + first_piece[:, None])
    unit, tile = np.indices(load.shape)
    together = np.where(piece < 0, np.minimum(unit // group, max(0, units - tail) // group), unit // group)
    later = np.where(piece < 0, lent if lent is not None else False, False)
    last = np.where(piece < 0, np.iinfo(np.int64).max, piece)
    beside: tuple[Any, ...] = (unit, tile, -load, together, later, last)
    alone: tuple[Any, ...] = (unit, tile, -load, unit // group) if group > 1 else (tile, unit)
    order = np.lexsort(tuple(x.ravel() for x in (alone if in_line else beside)))
    pieces = piece.ravel()[order]
    ready = np.where(pieces < 0, 0.0, np.asarray(arrivals)[np.maximum(pieces, 0)])
    packed = (tile | unit << 16).ravel()[order].astype(np.uint32)
    return Planned(packed, ready, load.ravel()[order] * seconds), pieces


def soonest_backward(
    items: Planned,
    pieces: Ints,
    processors: int,
    leaving: Sequence[float],
    eager: Iterable[float] = (0.0,),
    other: tuple[Planned, Ints, float] | None = None,
) -> NDArray[np.uint32]:
    """The order after which the kernel, and the gradients of all pieces behind each other, are soonest done.

    leaving: seconds that the gradients of each piece take on their way. other: the same in another order, after which the
    sum of own gradients takes so many seconds more.
    """

    def end(ends: Floats, pieces: Ints) -> float:
        sent, done = 0.0, np.zeros(len(leaving))
        np.maximum.at(done, pieces[pieces >= 0], ends[pieces >= 0])
        for there, seconds in zip(done.tolist(), leaving, strict=True):
            sent = max(sent, there) + seconds if seconds else sent
        return max(sent, float(ends.max(initial=0.0)))

    tried = [(items, pieces, 0.0)] if other is None else [(items, pieces, 0.0), other]
    orders = [(*of, order) for of in tried for order in of[0].orders(processors, eager)]
    if len(orders) == 1:
        return items.packed[orders[0][3]]
    best, _, _, order = min(orders, key=lambda o: end(o[0].ends(o[3], processors), o[1]) + o[2])
    return best.packed[order]


def _check(tiles: int, what: str, heads: int, which: str) -> None:
    if tiles > ITEM_LIMIT or heads > ITEM_LIMIT:
        raise ValueError(f"{tiles} {what} and {heads} {which}: at most {ITEM_LIMIT} of each")
