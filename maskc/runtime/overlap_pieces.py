"""How the keys of a rank are cut into pieces: in how many groups of heads they come, and how many rows a copy has at least.

More groups let work on the first heads start sooner; fewer pieces take less time to copy. What a forward gains by which is
told from the plan alone, by classes of work: the row tiles of a chunk and a group of heads, of which all wait for the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from maskc.runtime.layout import Layout
from maskc.runtime.machine import BACKWARD_FACTOR, FORWARD_FLOPS
from maskc.runtime.overlap_plan import OverlapPlan, joined

PIECE_SECONDS, BACKWARD_PIECE_SECONDS, MOST_PIECES = 30e-6, 20e-6, 256
"""That a copy of K takes at least, forward and for given keys backward, and how many pieces there are at most."""
LINE_BYTES = 1024
"""Of what lies behind each other in a row of given keys: a copy engine writes shorter lines to another GPU at less than 0.9 of
its rate."""
COPY_SECONDS, FLAG_SECONDS = 3e-6, 4e-6
"""That a piece takes besides its bytes: each operation of a copy engine (K and V of one head are one), and its flag."""
FORWARD_SPEED = 750e12
"""FLOP/s of the forward kernel, as it is and not as its planned clock goes."""
LEVEL = 0.005
"""Share of the time by which more groups of heads must end sooner: fewer pieces cost the host and the gate less."""
FEWEST_PIECES, HIDING_PIECES, PRICE = 4, 24, 0.06
"""Of a forward: pieces where they can be had; of which the last, and the work that needs it, is little; what share of the time
those may cost."""
FEWEST_BACKWARD = 8
"""Pieces of a backward where they can be had."""
ENOUGH_PIECES = 32
"""Of a backward of unknown speed: then what cannot hide, the first that comes and the last that leaves, is some percent."""
SEND_OPERATIONS = 400
"""Of one call on the stream that gradients leave by."""
GRADIENTS = 2
"""Bytes of the gradients of a key, in fp32, over its own."""
GIVEN_SHARE = 1 / 3
"""Of the time of attention, that gradients may take on the link which a kernel gives: of half of it, more hides if pushed."""
LONG_SECONDS = 0.1
"""Of a backward, from which gradients that take little of it leave at once. A GPU runs at its limit of power then, where a link
that is merely awake costs attention some 2 % of its time, and NVLink falls asleep 50 ms after its last traffic: shorter calls are
over before that helps."""
ROW_TILE = 192
"""Rows of a tile of the forward, or thereabouts."""
Leaving: TypeAlias = Literal["given", "by pieces", "at once"]
"""How gradients of others' keys leave where both ways are open: given by the kernel as its tiles end, or pushed by copy engines,
those of each piece as they are complete, or all together once all are."""


class Speed(NamedTuple):
    """Of a GPU: seconds that one multiprocessor takes for a cell of a head, and how many there are."""

    cell: float
    processors: int

    @classmethod
    def of(cls, dims: int, batch: int, processors: int) -> Speed:
        """dims: head dims of keys and values together."""
        return cls(batch * FORWARD_FLOPS * dims / 2 / FORWARD_SPEED * processors, processors)


def choose_pieces(
    plan: OverlapPlan, keys: Layout | None, heads: int, row_bytes: int, rate: float, speed: Speed | None = None
) -> tuple[int, int]:
    """(groups of heads, rows from which a copy is large enough): with which a forward ends soonest.

    keys: where copies may be joined. row_bytes: of K alone. speed: None where it is not known, and pieces are then the
    smallest that still keep the link busy.
    """
    least = _least_bytes(plan, row_bytes, rate)
    possible = _possible_groups(plan, heads, row_bytes, least)
    chosen = possible[-1]
    if speed is not None and plan.work and plan.pulls:
        ends, pieces = {}, {}
        for groups in possible:
            cut = plan if keys is None else joined(plan, keys, round(least / row_bytes * groups))
            operations = 1 if groups == heads else 2
            each = operations * COPY_SECONDS + FLAG_SECONDS
            ends[groups] = expected_end(cut, groups, 2 * row_bytes / rate, each, speed)
            pieces[groups] = groups * len(cut.pulls)
        chosen, better = (_fewest(ends, pieces, n) for n in (FEWEST_PIECES, HIDING_PIECES))
        chosen = better if better > chosen and ends[better] <= ends[chosen] * (1 + PRICE) else chosen
    return chosen, round(least / row_bytes * chosen)


def _fewest(ends: Mapping[int, float], pieces: Mapping[int, int], least: int) -> int:
    """Of the numbers of groups that give so many pieces, if there are any, the least of which none ends noticeably sooner."""
    enough = {groups: end for groups, end in ends.items() if pieces[groups] >= least} or ends
    return min(groups for groups, end in enough.items() if end <= min(enough.values()) * (1 + LEVEL))


def expected_end(plan: OverlapPlan, groups: int, row_seconds: float, piece_seconds: float, speed: Speed) -> float:
    """Seconds after which a forward ends, about.

    row_seconds: that a row of K and V takes on the link. piece_seconds: that a piece takes besides. From when the first of
    some tiles need not wait, they and all that can begin no sooner take as long as their work does on all multiprocessors,
    of which some are done half a tile later than others, and no less than one of them.
    """
    rows = np.array([s.rows for s in plan.slots])
    foreign = np.arange(len(rows)) >= plan.own
    chunks = [sum(1 << c for c in s.chunks) for s in plan.slots]
    needs = np.array([[w.need & of_slot != 0 for of_slot in chunks] for w in plan.work])
    each = np.where(foreign, rows * row_seconds / groups + piece_seconds, 0.0)
    tiles = np.array([max(1.0, w.rows / ROW_TILE / groups) for w in plan.work])
    tile = np.array([w.cells for w in plan.work]) * speed.cell / groups / tiles
    share = needs * rows / np.maximum(1, (needs * rows).sum(1, keepdims=True))
    before = (share.cumsum(1) - share) * tile[:, None]
    waits = np.where(needs & foreign, each.cumsum() - before, -math.inf).max(1)
    begin = np.maximum(0.0, waits + each.sum() * np.arange(groups)[:, None]).ravel()
    order = np.argsort(begin)
    begin, tile, tiles = begin[order], np.tile(tile, groups)[order], np.tile(tiles, groups)[order]
    left, count = (x[::-1].cumsum()[::-1] for x in (tile * tiles, tiles))
    shortest = np.minimum.accumulate(tile[::-1])[::-1]
    uneven = np.where(count > speed.processors, shortest / 2, 0.0)
    ends = begin + np.maximum(tile, left / speed.processors + uneven)
    return float(max(ends.max(), groups * each.sum()))


def choose_backward_pieces(
    plan: OverlapPlan, keys: Layout, heads: int, row_bytes: int, rate: float, speed: Speed | None = None
) -> tuple[int, int]:
    """The same for the backward, whose key tiles need no other piece; without `speed` the fewest groups that give ENOUGH_PIECES.

    Each piece costs the host and the streams two copies that come, two that leave, and their words.
    """
    least = _least_bytes(plan, row_bytes, rate)
    possible = [(g, round(least / row_bytes * g)) for g in _possible_groups(plan, heads, row_bytes, least)]
    if speed is None or not plan.work:
        return _enough(plan, keys, possible)
    pieces = {g: g * len(joined(plan, keys, rows).pulls) for g, rows in possible}
    lent = sum(keys.size_of(c) for _, chunks in plan.lends for c in chunks)
    coming, gradients = (rows * 2 * row_bytes / rate for rows in (sum(s.rows for s in plan.pulls), GRADIENTS * lent))
    attention = backward_seconds(plan, speed)
    ends = {g: backward_end(max(1, n), coming, gradients, attention) for g, n in pieces.items()}
    chosen = _fewest(ends, pieces, FEWEST_BACKWARD)
    return next(c for c in possible if c[0] == chosen)


def way_of_gradients(plan: OverlapPlan, row_bytes: int, rate: float, speed: Speed | None) -> Leaving:
    """How those of others' keys leave; given where the plan does not say what there is to do."""
    if speed is None or not plan.work:
        return "given"
    leaving, attention = GRADIENTS * 2 * row_bytes * sum(s.rows for s in plan.pulls) / rate, backward_seconds(plan, speed)
    if leaving > GIVEN_SHARE * attention:
        return "by pieces"
    return "at once" if attention >= LONG_SECONDS else "given"


def backward_seconds(plan: OverlapPlan, speed: Speed) -> float:
    """Of the kernel alone, about."""
    return BACKWARD_FACTOR * sum(w.cells for w in plan.work) * speed.cell / speed.processors


def backward_end(pieces: int, keys: float, gradients: float, attention: float) -> float:
    """Seconds after which a backward ends, about, on a link that copies both ways at a time.

    keys: that those of others take on the link. gradients: likewise, what others have of those of own keys, which come behind.
    Nothing leaves before the first piece is there, and the last one leaves after the kernel.
    """
    each = 2 * COPY_SECONDS + FLAG_SECONDS
    leaving = GRADIENTS * keys / pieces + each
    return max(attention + leaving, keys / pieces + each + pieces * leaving, keys + pieces * each + gradients)


def _least_bytes(plan: OverlapPlan, row_bytes: int, rate: float, seconds: float = PIECE_SECONDS) -> float:
    """Of K that a piece has at least."""
    return max(rate * seconds, sum(s.rows for s in plan.pulls) * row_bytes / MOST_PIECES)


def _possible_groups(plan: OverlapPlan, heads: int, row_bytes: int, least: float) -> Sequence[int]:
    total = sum(s.rows for s in plan.pulls) * row_bytes
    return [1, *(g for g in range(2, heads + 1) if heads % g == 0 and total / g >= least)]


def choose_given(
    plan: OverlapPlan, keys: Layout, heads: int, row_bytes: int, rate: float, head_bytes: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The same for given keys, (forward, backward), from the plan alone: owner and reader come to the same.

    head_bytes: of a row of a head of K.
    """

    def possible(seconds: float) -> list[tuple[int, int]]:
        least = _least_bytes(plan, row_bytes, rate, seconds)
        groups = _possible_groups(plan, heads, row_bytes, least)
        return [(g, round(least / row_bytes * g)) for g in groups if g == 1 or heads // g * head_bytes >= LINE_BYTES]

    return possible(PIECE_SECONDS)[-1], _enough(plan, keys, possible(BACKWARD_PIECE_SECONDS))


def _enough(plan: OverlapPlan, keys: Layout, possible: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first, of the fewest groups, that gives ENOUGH_PIECES, else the last."""
    return next((c for c in possible if c[0] * len(joined(plan, keys, c[1]).pulls) >= ENOUGH_PIECES), possible[-1])


def sent_together(plan: OverlapPlan, groups: int, batch: int) -> int:
    """Groups of heads whose gradients leave in one copy: behind a wait, a stream takes some 1000 operations and no more."""
    copies = 2 * batch * sum(len(s.chunks) for s in plan.pulls)
    fitting = (n for n in range(1, groups + 1) if groups % n == 0)
    return next((n for n in fitting if groups * len(plan.pulls) + copies * groups // n <= SEND_OPERATIONS), groups)
