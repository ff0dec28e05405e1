"""What no order of work could beat: the soonest end of attention beside its copies, from measured times and what needs what.

Work is spread evenly over the multiprocessors and never waits but for keys; a piece arrives at its share of the measured
copies. After each piece the work on it and on all later ones is still to be done, by all multiprocessors together and by the
one that has most of it. Backward, gradients leave behind each other, the first once its keys have come and a key tile of them
is worked through, and the sum of those of own keys follows the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import hopper
from maskc.runtime.overlap import Overlapped
from maskc.runtime.overlap_order import Heads, Ints, head_groups, masks_of_heads
from maskc.runtime.overlap_plan import Cut
from maskc.runtime.overlap_tables import Units, backward_load, forward_work

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Needs:
    """Work by piece, of pieces in the order in which they arrive; any unit.

    total: with that on own keys and none. after: [pieces], of one multiprocessor at least once the piece is there. of: [pieces],
    all that needs the piece. rows: [pieces], which its copy brings. first: backward, until its gradients can leave.
    """

    total: float
    after: Floats
    of: Floats
    rows: Ints
    first: float = 0.0


def forward_needs(parts: Ints, whole: Ints, dealt: Heads, masked_batches: bool, cut: Cut) -> Needs:
    """parts, whole: as `overlap_order.forward_items` takes them."""
    mask = masks_of_heads(dealt, len(parts), masked_batches)
    first = np.tile(dealt.first_piece, dealt.batch)
    slots = len(cut.plan.slots)
    by_slot, left = parts.sum(1), parts[:, :, ::-1].cumsum(2)[:, :, ::-1].max(1)
    of, after = np.zeros(cut.words), np.zeros(cut.words)
    for head, piece in enumerate(first.tolist()):
        of[piece : piece + slots] += by_slot[mask[head]]
        after[piece : piece + slots] = np.maximum(after[piece : piece + slots], left[mask[head]])
    pieces = np.array(cut.pieces, dtype=np.int64)
    return Needs(float(whole[mask].sum()), after[pieces], of[pieces], _rows(cut))


def backward_needs(latest: Ints, load: Ints, first_piece: Ints, cut: Cut) -> Needs:
    """latest, load, first_piece: as `overlap_order.backward_items` takes them."""
    of, after = np.zeros(cut.words), np.zeros(cut.words)
    piece = latest + first_piece[:, None]
    np.add.at(of, piece.ravel(), load.ravel())
    np.maximum.at(after, piece.ravel(), load.ravel())
    pieces = np.array(cut.pieces, dtype=np.int64)
    return Needs(float(load.sum()), after[pieces], of[pieces], _rows(cut), float(after[pieces[0]]) if len(pieces) else 0.0)


def needs_of(over: Overlapped, local: BoundaryVectors, q: Tensor, direction: str) -> Needs:
    """What of the work of a rank needs what of its copies. local: the mask over its key buffer."""
    form, heads, dim, batch = hopper.mask_form(local), q.shape[2], q.shape[3], q.shape[0]
    if direction == "forward":
        cut, spec = over.forward_cut, forward_spec(form, dim, "bf16")
        slots = len(cut.plan.slots)
        parts, whole = forward_work(local, cut.plan.block_slots(spec.block_kv), slots, spec)
        dealt = Heads(heads, batch, head_groups(heads, cut.heads, cut.groups, slots))
        return forward_needs(parts, whole, dealt, local.batch > 1, cut)
    cut, back = over.backward_cut, select_backward(form, dim, "bf16", deterministic=False)
    splits = over.splits(local, q)
    units = Units(batch, heads, cut.heads, splits, heads // cut.heads // splits, cut.groups)
    load, last = backward_load(local, back, units), cut.plan.block_slots(back.block_kv)[:, 1]
    return backward_needs(last, load, units.first_pieces(len(cut.plan.slots)), cut)


def soonest_end(needs: Needs, processors: int, attention: float, keys: float, leaving: float = 0.0, behind: float = 0.0) -> float:
    """In the unit of the times given: attention, copies of keys, the way of gradients to others, what follows the kernel."""
    unit = attention / needs.total  # of the whole GPU for a work of 1
    arrivals = keys * np.cumsum(needs.rows) / needs.rows.sum()
    left = needs.of[::-1].cumsum()[::-1]
    ends = arrivals + unit * np.maximum(left, needs.after * processors)
    sent = arrivals[0] + unit * processors * needs.first + leaving
    return float(max(attention, ends.max() + behind, sent))


def best(attention: float, copies: float, end: float) -> tuple[float, float]:
    """E and hidden / min of a step that ends so soon."""
    return 1 - (end - attention) / copies, (attention + copies - end) / min(attention, copies)


def _rows(cut: Cut) -> Ints:
    rows: Sequence[int] = [cut.plan.slot_of(piece).rows for piece in cut.pieces]
    return np.array(rows, dtype=np.int64)
