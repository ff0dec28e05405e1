"""In which order kernels take their work while keys arrive and gradients leave. Pure integers and planned seconds.

Both directions are lists by a planned clock: whenever a multiprocessor is free, it takes the first item, in the order that
one would have without copies, that can go through without waiting; if there is none, the one that can do so soonest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ITEM_LIMIT = 1 << 16
"""Row tiles, key tiles, and heads times batch items, must stay below this: an item is packed into 32 bits."""

TAIL = 2
"""Times the longest tile of a forward: work of the heads at its end, which is given out by falling work."""
PIECE, OWN, LENT = range(3)
"""Kinds of key tiles: of keys of others, own ones, and own ones that others see."""
SPREAD = 0.5
"""Of the time of a backward, over which tiles are spread whose gradients leave as they end."""
LAST = 2
"""Times the longest tile of a backward of many items: work at its end that is dealt so that all end together."""
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
        come sooner. The same as `evenly` with a share of infinity, in a tenth of the time.
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

    def evenly(self, processors: int, eager: float = 0.0, share: float = 1.0) -> tuple[Ints, Floats]:
        """(the same, when each is done), but all end together.

        An item goes before all others as soon as it would else end after the soonest end; of several the longest. share: of
        that end, by which it must be done: the less, the sooner long items come. 0: always the longest first. Infinity: `order`.
        """
        nobody = len(self.spent)  # as above
        start, begin_by = np.maximum(0.0, self.ready - eager * self.spent), share * self.soonest_end(processors) - self.spent
        by_start = np.argsort(start, kind="stable")
        begins, coming = [*start[by_start].tolist(), inf], by_start.tolist()
        due, ready, spent = begin_by.tolist(), self.ready.tolist(), self.spent.tolist()
        there, latest = [nobody], [(inf, nobody)]  # heaps of what has come, and may have been taken by the other
        taken, at = bytearray(nobody + 1), 0
        free, order, ends = [0.0] * processors, list[int](), [0.0] * nobody
        for _ in range(nobody):
            clock = free[0]
            while begins[at] <= clock:
                heappush(there, coming[at])
                heappush(latest, (due[coming[at]], coming[at]))
                at += 1
            while taken[there[0]]:
                heappop(there)
            while taken[latest[0][1]]:
                heappop(latest)
            item = latest[0][1] if latest[0][0] <= clock else there[0]
            if item == nobody:
                item, at = coming[at], at + 1
            taken[item] = True
            order.append(item)
            begin = ready[item]
            ends[item] = (begin if begin > clock else clock) + spent[item]
            heapreplace(free, ends[item])
        return np.array(order, dtype=np.int64), np.array(ends)

    def soonest_end(self, processors: int) -> float:
        """Before which no order ends: all work spread evenly, or an item that comes late."""
        return max(float(self.spent.sum()) / processors, float((self.ready + self.spent).max(initial=0.0)))

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
    lent: NDArray[np.bool_] | None = None,
    plain: bool = False,
    filling: int = 0,
) -> tuple[Planned, Ints]:
    """(key tiles: tile | unit << 16, a unit being what shares a head of keys; the piece of each, -1 for own ones).

    `group` units go together (their rows stay in cache), among those tiles by falling work. Keys of others arrive late, but
    their gradients leave early: pieces come first, in the order of arrival, and own tiles last; where pieces are not there
    yet, own tiles fill the time. lent: own tiles that others see, where gradients leave as tiles end; then those of others
    are spread over the first half of the work, for all at once they would wait for the link, and these tiles come at its end,
    when what others have of their gradients is there. plain: nothing of that, all tiles come as they do without copies; of
    several units by falling work, of one as they lie, but first about `filling` own ones, all of their units. They fill the time
    until keys come: single ones would send CTAs out of step, which then read rows one by one to the end.

    latest: [key tiles], the last slot of each. load: [units, key tiles]. first_piece: [units], as in `Heads`. own: slots
    below are the rank's own. arrivals: seconds, by piece. seconds: that one multiprocessor takes for a load of 1. Raises
    ValueError beyond ITEM_LIMIT.
    """
    units, tiles = load.shape
    _check(tiles, "key tiles", units, "units")
    foreign, unit, tile = latest >= own, np.arange(units)[:, None], np.arange(tiles)
    piece = np.where(foreign, latest + first_piece[:, None], -1)
    together = unit // group
    if not plain:
        kind = np.where(foreign, PIECE, OWN if lent is None else np.where(lent, LENT, OWN))
        turn = np.where(foreign, piece if lent is None else first_piece[:, None], 0)
        order = _sorted(load.shape, kind, turn, together, -load, tile)
        order = order if lent is None else order[_spread(np.tile(kind, units)[order], load.ravel()[order])]
    elif group > 1:
        order = _sorted(load.shape, together, -load, tile)
    else:
        full = min(max(1, round(filling / max(1, tiles - int(foreign.sum())))), units // 2)
        order = _sorted(load.shape, foreign | (unit >= full))
    pieces = piece.ravel()[order]
    ready = np.where(pieces < 0, 0.0, np.asarray(arrivals)[np.maximum(pieces, 0)])
    packed = (tile | unit << 16).ravel()[order].astype(np.uint32)
    return Planned(packed, ready, load.ravel()[order] * seconds), pieces


def _sorted(shape: tuple[int, ...], *keys: NDArray[Any]) -> Ints:
    """[units, key tiles] by number: by the first key, where it is the same by the next, at last unit by unit as they lie."""
    return np.lexsort([np.broadcast_to(key, shape).ravel() for key in reversed(keys)])


def _spread(kind: Ints, load: Ints) -> Ints:
    """Tiles of all kinds, those of each in their order, in one: pieces beside the first SPREAD of the work, lent ones last."""
    place, last = np.zeros(len(kind)), float(load[kind == LENT].sum()) / max(1, int(load.sum()))
    for which, begin, end in ((PIECE, 0.0, SPREAD), (OWN, 0.0, 1 - last), (LENT, 1 - last, 1.0)):
        work = load[kind == which]
        place[kind == which] = begin + (end - begin) * (work.cumsum() - work / 2) / max(1, int(work.sum()))
    return np.argsort(place, kind="stable")


class Trial(NamedTuple):
    """An order to try, see `Planned.evenly`; `price`: the share of its time that it must save for what it costs in cache."""

    eager: float = 0.0
    share: float = 1.0
    price: float = 0.0


def soonest_backward(
    items: Planned, pieces: Ints, processors: int, leaving: Sequence[float], trials: Iterable[Trial] = (Trial(),)
) -> NDArray[np.uint32]:
    """The order after which the kernel, and the gradients of all pieces behind each other, are soonest done.

    leaving: seconds that the gradients of each piece take on their way; none where they leave as their tiles end. trials: by
    rising price; those whose price nothing could save any more are left out.
    """
    soonest, best, chosen = items.soonest_end(processors), inf, np.zeros(0, dtype=np.int64)
    for eager, share, price in trials:
        if best <= soonest * (1 + price):
            break
        order, ends = items.evenly(processors, eager, share)
        end = _all_gone(ends, pieces, leaving) * (1 + price)
        if end < best:
            best, chosen = end, order
    return items.packed[chosen]


def _all_gone(ends: Floats, pieces: Ints, leaving: Sequence[float]) -> float:
    """When the kernel is done and the gradients of all pieces have left."""
    sent, done = 0.0, np.zeros(len(leaving))
    if len(leaving):
        np.maximum.at(done, pieces[pieces >= 0], ends[pieces >= 0])
    for there, seconds in zip(done.tolist(), leaving, strict=True):
        sent = max(sent, there) + seconds if seconds else sent
    return max(sent, float(ends.max(initial=0.0)))


def steady_backward(items: Planned, processors: int, eager: float = 0.0) -> NDArray[np.uint32]:
    """The order of many items: the last of them, work for LAST times as long as the longest takes, end together."""
    order = items.order(processors, eager)
    spent = items.spent[order]
    behind = int(np.searchsorted(spent[::-1].cumsum(), LAST * processors * float(spent.max(initial=0.0)))) + 1
    head, tail = np.split(order, [max(0, len(order) - behind)])
    last, _ = Planned(items.packed[tail], np.zeros(len(tail)), items.spent[tail]).evenly(processors)
    return items.packed[np.concatenate((head, tail[last]))]


def _check(tiles: int, what: str, heads: int, which: str) -> None:
    if tiles > ITEM_LIMIT or heads > ITEM_LIMIT:
        raise ValueError(f"{tiles} {what} and {heads} {which}: at most {ITEM_LIMIT} of each")
