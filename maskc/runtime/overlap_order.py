"""In which order kernels take their work while keys arrive and gradients leave. Pure integers and planned seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

ITEM_LIMIT = 1 << 16
"""Row tiles, key tiles, and heads times batch items, must stay below this: an item is packed into 32 bits."""


def latest_slots(seen: NDArray[np.bool_], block_slots: NDArray[np.int64], own: int) -> NDArray[np.int64]:
    """[masks, Q blocks]: the last slot that a row tile waits for; own - 1 where it needs nothing but own chunks.

    seen: [masks, Q blocks, KV blocks], the tiles that are not SKIP.
    """
    newest = block_slots[:, 1] if len(block_slots) else np.zeros(seen.shape[2], dtype=np.int64)
    latest = np.where(seen, newest, -1).max(axis=2, initial=-1)
    waits: NDArray[np.int64] = np.maximum(latest, own - 1).astype(np.int64)
    return waits


@dataclass(frozen=True, slots=True)
class Heads:
    """How heads are dealt: `heads` of q, for batch items; a group of heads of keys is copied together.

    first_piece: [heads], the number of the group times that of slots. own: slots below are the rank's own.
    """

    heads: int
    batch: int
    first_piece: NDArray[np.int64]
    own: int


def head_groups(heads: int, heads_kv: int, groups: int, slots: int) -> NDArray[np.int64]:
    """[heads]: the first piece of the group that the keys of each query head are in."""
    kv_head = np.arange(heads, dtype=np.int64) // (heads // heads_kv)
    return kv_head // (heads_kv // groups) * slots


def masks_of_heads(dealt: Heads, masks: int, masked_batches: bool) -> NDArray[np.int64]:
    """[batch items * heads]: the mask of each; there are `masks`: (batch items if masked_batches) times mask heads."""
    mask_heads = masks // dealt.batch if masked_batches else masks
    which = np.arange(dealt.heads * dealt.batch, dtype=np.int64)
    item = which // dealt.heads * mask_heads if masked_batches else 0
    of: NDArray[np.int64] = item + which % dealt.heads // (dealt.heads // mask_heads)
    return of


def work_items(
    latest: NDArray[np.int64],
    work: NDArray[np.int64],
    dealt: Heads,
    masked_batches: bool,
    group: int,
    *,
    last_by_work: bool = False,
) -> NDArray[np.uint32]:
    """The order of a kernel's work items: Q block | (batch item * heads + head) << 16.

    Row tiles whose last piece comes first go first, so that nobody takes a tile of the last piece while others could
    run; among equals, `group` heads together (their keys stay in cache), then by falling work. last_by_work: of the heads
    that come last, tiles go by falling work alone: where the kernel waits for copies anyway, it then ends sooner.

    latest, work: [masks, Q blocks], masks being (batch items if masked_batches) times mask heads. Raises ValueError
    beyond ITEM_LIMIT.
    """
    stage, load, block, of = _dealt(latest, work, dealt, masked_batches)
    if last_by_work:
        stage = np.minimum(stage, max(dealt.own, int(dealt.first_piece.max(initial=0))))
    order = np.lexsort((of, block, -load, of // group, stage))
    return (block[order] | of[order] << 16).astype(np.uint32)


def items_when_due(
    latest: NDArray[np.int64],
    work: NDArray[np.int64],
    dealt: Heads,
    masked_batches: bool,
    group: int,
    arrivals: Sequence[float],
    seconds: float,
) -> NDArray[np.uint32]:
    """The order of `work_items` where attention takes longer than the copies: as without copies, but for what is not due.

    By the planned clock always the first item whose last piece is expected by then, in the order of `group` heads
    together, then by falling work; so it ends with short tiles, and tiles of own keys only fill the time before others come.

    arrivals: seconds after which each piece is expected. seconds: that the whole GPU takes for a work of 1.
    """
    stage, load, block, of = _dealt(latest, work, dealt, masked_batches)
    plain = np.lexsort((of, block, -load, of // group))
    packed = (block[plain] | of[plain] << 16).astype(np.uint32)
    due = np.where(stage < 0, 0.0, np.asarray(arrivals)[np.maximum(stage, 0)])[plain].tolist()
    spent, later = (load[plain] * seconds).tolist(), sorted(range(len(plain)), key=due.__getitem__)
    there: list[int] = []
    order: list[int] = []
    clock, at = 0.0, 0
    while len(order) < len(plain):
        while at < len(later) and due[later[at]] <= clock:
            heappush(there, later[at])
            at += 1
        if there:
            order.append(heappop(there))
            clock += spent[order[-1]]
        else:
            clock = due[later[at]]
    return packed[order]


def _dealt(
    latest: NDArray[np.int64], work: NDArray[np.int64], dealt: Heads, masked_batches: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per item: the piece that it waits for last, -1 if none; its work, its Q block, its batch item * heads + head."""
    heads, batch = dealt.heads, dealt.batch
    masks, q_blocks = latest.shape
    if q_blocks > ITEM_LIMIT or heads * batch > ITEM_LIMIT:
        raise ValueError(f"{q_blocks} Q blocks and {heads * batch} heads: at most {ITEM_LIMIT} of each")
    which = np.arange(heads * batch, dtype=np.int64)
    mask = masks_of_heads(dealt, masks, masked_batches)
    first = dealt.first_piece[which % heads]
    stage = np.where(latest[mask] < dealt.own, -1, latest[mask] + first[:, None])
    block = np.broadcast_to(np.arange(q_blocks), stage.shape)
    of = np.broadcast_to(which[:, None], stage.shape)
    return stage.ravel(), work[mask].ravel(), block.ravel(), of.ravel()


def forward_end(
    items: NDArray[np.uint32],
    parts: Sequence[Sequence[Sequence[tuple[int, float]]]],
    mask: NDArray[np.int64],
    first_piece: NDArray[np.int64],
    arrivals: Sequence[float],
    processors: int,
) -> float:
    """When a forward kernel of so many CTAs is done, by the planned clock.

    items: as `work_items` packs them. parts: [masks][Q blocks], (slot, seconds of one CTA) in the order of visit. mask,
    first_piece: [batch items * heads]. arrivals: seconds, by piece; 0 for own ones.
    """
    free = [0.0] * processors
    for item in items.tolist():
        clock, which = free[0], item >> 16
        for slot, seconds in parts[mask[which]][item & 0xFFFF]:
            clock = max(clock, arrivals[first_piece[which] + slot]) + seconds
        heapreplace(free, clock)
    return max(free)


def backward_items(
    latest: NDArray[np.int64],
    load: NDArray[np.int64],
    first_piece: NDArray[np.int64],
    own: int,
    group: int,
    arrivals: Sequence[float],
    seconds: float,
    tail: int = 0,
    lent: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint32]:
    """The order of the backward kernel's work items: key tile | unit << 16, a unit being what shares a head of keys.

    Keys of others arrive late, but their gradients leave early: each piece is taken as soon as it is expected, in the
    order of arrival. Own tiles fill the time before, and the rest of them come last. Among those, `group` units together
    (their rows stay in cache), then by falling work; the last `tail` units count as one group, for the kernel ends sooner
    where its last items are short ones of many. Tiles that others see (`lent`) come after those that they do not, for
    what others have of their gradients is on its way.

    latest: [key tiles], the last slot of each. load: [units, key tiles]. first_piece: [units], as in `Heads`. own: slots
    below are the rank's own. arrivals: seconds, by piece. seconds: that the whole GPU takes for a load of 1. Raises
    ValueError beyond ITEM_LIMIT.
    """
    units, tiles = load.shape
    if units > ITEM_LIMIT or tiles > ITEM_LIMIT:
        raise ValueError(f"{tiles} key tiles and {units} units: at most {ITEM_LIMIT} of each")
    stage = np.where(latest < own, -1, latest + first_piece[:, None])
    unit, tile = np.indices(load.shape)
    together = np.where(stage < 0, np.minimum(unit // group, max(0, units - tail) // group), unit // group)
    later = np.where(stage < 0, lent if lent is not None else False, False)
    order = np.lexsort(tuple(x.ravel() for x in (unit, tile, -load, together, later, stage)))
    stages, packed, spent = stage.ravel()[order], (tile | unit << 16).ravel()[order], load.ravel()[order] * seconds
    mine = int((stages < 0).sum())
    ends = np.cumsum(spent[:mine])
    out: list[NDArray[np.int64]] = []
    at, filled, clock = mine, 0, 0.0
    while at < len(stages):
        stop = int(np.searchsorted(stages, stages[at], side="right"))
        due = arrivals[stages[at]]
        if due > clock and filled < mine:
            before = ends[filled - 1] if filled else 0.0
            upto = min(mine, int(np.searchsorted(ends, before + due - clock)) + 1)
            out.append(packed[filled:upto])
            clock += ends[upto - 1] - before
            filled = upto
        out.append(packed[at:stop])
        clock = max(clock, due) + spent[at:stop].sum()
        at = stop
    return np.concatenate([*out, packed[filled:mine]]).astype(np.uint32)
