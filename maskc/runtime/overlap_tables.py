"""What gated kernels read besides the mask: the order of their work, and which chunks their keys lie in.

Made once per mask batch, with one copy of the mask's tile classes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.spec import KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec
from maskc.runtime import hopper, hopper_bwd
from maskc.runtime.layout import Layout
from maskc.runtime.machine import BACKWARD_FACTOR, DEFAULT_MACHINE, FORWARD_FLOPS
from maskc.runtime.overlap_order import (
    Heads,
    backward_items,
    forward_end,
    head_groups,
    items_when_due,
    latest_slots,
    masks_of_heads,
    work_items,
)
from maskc.runtime.overlap_plan import OverlapPlan, joined
from maskc.runtime.remember import remembered
from maskc.tiles import TileClass, classify

FEW = 16
"""Work items of a forward for each multiprocessor, below which it matters which come last."""
PIECE_SECONDS, MOST_PIECES = 30e-6, 256
"""That a copy of K takes at least, for one of half a MiB takes 3 us longer than its bytes; and how many there are at most."""
ENOUGH_PIECES = 32
"""Of a backward: then what cannot hide, the first piece that comes and the last that leaves, is some percent of the copies."""
LATE, OFFER_SECONDS = 1.25, 50e-6
"""A forward takes a tile when its keys are expected, so much later than a full link brings them: to wait costs more than to
take another tile first."""
PARTIAL_WORK, UNMASKED_WORK, ROW_WORK = 18, 16, 16
"""Work of a tile and of a row (or column) of tiles, as the schedule kernels count it."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Of the forward: order of work items (uint32 bits), slot range of every KV block."""

    items: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class BackwardTables:
    """Of the backward: order of work items, slot range of every key tile, tiles of every slot from number 0 on."""

    items: Tensor
    blocks: Tensor
    tiles: Tensor


@remembered
def gate_tables(
    local: BoundaryVectors,
    plan: OverlapPlan,
    spec: KernelSpec,
    heads: int,
    batch: int,
    heads_kv: int,
    groups: int,
    arrivals: tuple[float, ...],
    processors: int,
    device: torch.device,
) -> Tables:
    """Tables of a mask over the key buffer; as many heads as share keys in cache are taken together.

    heads, batch: of q. groups: of key heads, copied one after another. arrivals: seconds after which each piece is expected.
    Where items are few, the order of those that come last is the one that ends sooner by the planned clock.
    """
    seen, work = _tiles(local, spec.block_q, spec.block_kv)
    ranges = plan.block_slots(spec.block_kv)
    latest, load, masked = latest_slots(seen, ranges, plan.own), work.sum(2) + ROW_WORK, local.batch > 1
    kv_bytes = 2 * plan.rows * spec.head_dim * 2
    group = min(heads * batch, max(1, hopper.L2_BYTES // max(1, kv_bytes)) * (heads // heads_kv))
    dealt = Heads(heads, batch, head_groups(heads, heads_kv, groups, len(plan.slots)), plan.own)
    seconds = FORWARD_FLOPS * spec.block_q * spec.block_kv * spec.head_dim / UNMASKED_WORK / DEFAULT_MACHINE.flops
    due = [LATE * at + OFFER_SECONDS for at in arrivals]
    items = items_when_due(latest, load, dealt, masked, group, due, seconds)
    if plan.pulls and 0 < len(items) < FEW * processors:
        orders = [items, *(work_items(latest, load, dealt, masked, group, last_by_work=last) for last in (False, True))]
        given = _parts(work, ranges, seconds * processors), masks_of_heads(dealt, len(load), masked)
        first = np.tile(dealt.first_piece, batch)
        items = min(orders, key=lambda order: forward_end(order, *given, first, arrivals, processors))
    return Tables(_on(device, items), _on(device, _packed(ranges)))


def _parts(work: NDArray[np.int64], ranges: NDArray[np.int64], seconds: float) -> list[list[list[tuple[int, float]]]]:
    """[masks][Q blocks]: (last slot of a block of keys, seconds of the blocks that end in it) in the order of visit."""
    slots = np.unique(ranges[:, 1])
    by_slot = np.stack([work[:, :, ranges[:, 1] == slot].sum(2) for slot in slots], axis=-1)
    return [[[(int(slots[i]), float(tile[i] * seconds)) for i in np.nonzero(tile)[0]] for tile in mask] for mask in by_slot]


@dataclass(frozen=True, slots=True)
class Units:
    """How the backward kernel deals heads: the query heads of a key head are `splits` groups of `heads`."""

    batch: int
    hq: int
    hk: int
    splits: int
    heads: int
    groups: int = 1

    def first_pieces(self, slots: int) -> NDArray[np.int64]:
        """[batch * hk * splits]: the first piece of the group of heads of each."""
        by_head = np.repeat(head_groups(self.hk, self.hk, self.groups, slots), self.splits)
        pieces: NDArray[np.int64] = np.tile(by_head, self.batch)
        return pieces

    def masks(self, local: BoundaryVectors) -> NDArray[np.int64]:
        """[batch * hk * splits]: the mask of each (batch item, key head, split)."""
        unit = np.arange(self.batch * self.hk * self.splits, dtype=np.int64)
        first_head = unit % (self.hk * self.splits) * self.heads
        item = unit // (self.hk * self.splits) if local.batch > 1 else 0
        masks: NDArray[np.int64] = item * local.heads + first_head // (self.hq // local.heads)
        return masks


@remembered
def backward_tables(
    local: BoundaryVectors,
    plan: OverlapPlan,
    spec: BackwardSpec,
    units: Units,
    arrivals: tuple[float, ...],
    processors: int,
    device: torch.device,
    first: int = 0,
    whole: bool = False,
) -> BackwardTables:
    """Tables of a mask over the key buffer.

    arrivals: seconds after which each piece is expected. first: the kernel counts slots, and with them the words of
    pieces, from this number on. whole: the kernel adds to gradients of own keys what others have of them.
    """
    _, work = _tiles(local, spec.block_q, spec.block_kv)
    ranges = plan.block_slots(spec.block_kv)
    masks = units.masks(local)
    load = (work.sum(1) + ROW_WORK)[masks]  # [units, key tiles]
    flops = BACKWARD_FACTOR * FORWARD_FLOPS * spec.block_q * spec.block_kv * spec.head_dim * units.heads
    seconds = flops / UNMASKED_WORK / DEFAULT_MACHINE.flops
    if spec.deterministic:  # a tile may wait for lower ones, so those come first
        unit, tile = np.indices(load.shape)
        items = (tile.ravel() | unit.ravel() << 16).astype(np.uint32)
    else:
        given = ranges[:, 1], load, units.first_pieces(len(plan.slots)), plan.own
        near = hopper_bwd.heads_together(local.nq * spec.head_dim)
        group = near if load.size < hopper_bwd.FEW * processors else 1
        read = {c for _, chunks in plan.lends for c in chunks}
        lent = np.array([s.chunk in read for s in plan.slots[: plan.own]] + [False], dtype=np.bool_)
        later = lent[np.minimum(ranges[:, 1], plan.own)] if whole else None
        items = backward_items(*given, group, arrivals, seconds, 2 * near, later)
    slots = np.arange(len(plan.slots))
    tiles = np.pad(((ranges[:, :1] <= slots) & (slots <= ranges[:, 1:])).sum(0), (first, 0)).astype(np.uint32)
    return BackwardTables(_on(device, items), _on(device, _packed(ranges + first)), _on(device, tiles))


def _tiles(local: BoundaryVectors, block_q: int, block_kv: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """[masks, Q blocks, KV blocks]: which tiles are not SKIP, and their work."""
    shape = -(-local.nq // block_q), -(-local.nk // block_kv)
    classes = classify(local, block_q, block_kv).cpu().numpy().reshape(-1, *shape)
    cost = np.zeros(256, dtype=np.int64)
    cost[TileClass.PARTIAL.value], cost[TileClass.UNMASKED.value] = PARTIAL_WORK, UNMASKED_WORK
    return classes != TileClass.SKIP.value, cost[classes]


def _packed(ranges: NDArray[np.int64]) -> NDArray[np.uint32]:
    packed: NDArray[np.uint32] = (ranges[:, 0] | ranges[:, 1] << 16).astype(np.uint32)
    return packed


def _on(device: torch.device, words: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(words.view(np.int32)).to(device)


def expected_arrivals(plan: OverlapPlan, row_bytes: int, groups: int, rate: float, latency: float) -> tuple[float, ...]:
    """Seconds after which each piece is expected: own at once, others one after another over one link."""
    out, brought = [], 0.0
    for _ in range(groups):
        for i, slot in enumerate(plan.slots):
            foreign = i >= plan.own
            brought += slot.rows * row_bytes / groups if foreign else 0
            out.append(latency + brought / rate if foreign else 0.0)
    return tuple(out)


def choose_pieces(plan: OverlapPlan, heads: int, row_bytes: int, rate: float) -> tuple[int, int]:
    """(groups of heads, rows from which a copy is large enough): the smallest pieces that still keep the link busy.

    row_bytes: of K alone.
    """
    least = _least_bytes(plan, row_bytes, rate)
    groups = _possible_groups(plan, heads, row_bytes, least)[-1]
    return groups, round(least / row_bytes * groups)


def choose_backward_pieces(plan: OverlapPlan, keys: Layout, heads: int, row_bytes: int, rate: float) -> tuple[int, int]:
    """The same for the backward, whose key tiles need no other piece: the fewest groups that give ENOUGH_PIECES.

    Each piece costs the host and the streams two copies that come, two that leave, and their words.
    """
    least = _least_bytes(plan, row_bytes, rate)
    possible = [(g, round(least / row_bytes * g)) for g in _possible_groups(plan, heads, row_bytes, least)]
    enough = (c for c in possible if c[0] * len(joined(plan, keys, c[1]).pulls) >= ENOUGH_PIECES)
    return next(enough, possible[-1])


def _least_bytes(plan: OverlapPlan, row_bytes: int, rate: float) -> float:
    """Of K that a piece has at least."""
    return max(rate * PIECE_SECONDS, sum(s.rows for s in plan.pulls) * row_bytes / MOST_PIECES)


def _possible_groups(plan: OverlapPlan, heads: int, row_bytes: int, least: float) -> list[int]:
    total = sum(s.rows for s in plan.pulls) * row_bytes
    return [1, *(g for g in range(2, heads + 1) if heads % g == 0 and total / g >= least)]
