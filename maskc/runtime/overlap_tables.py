"""What gated kernels read besides the mask: the order of their work, and which chunks their keys lie in.

Made once per mask batch from its vectors on the host, which does not wait for the GPU; beyond FEW_TILES the GPU tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.spec import KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec
from maskc.runtime import hopper, hopper_bwd
from maskc.runtime.exchange import on_device
from maskc.runtime.localize import on_host
from maskc.runtime.machine import BACKWARD_FACTOR, FORWARD_FLOPS
from maskc.runtime.overlap_order import (
    Heads,
    Ints,
    Trial,
    backward_items,
    forward_items,
    head_groups,
    soonest_backward,
    soonest_forward,
    steady_backward,
)
from maskc.runtime.overlap_pieces import COPY_SECONDS, GRADIENTS
from maskc.runtime.overlap_plan import OverlapPlan
from maskc.runtime.remember import remembered
from maskc.tiles import TileClass, classify

FEW = 16
"""Work items for each multiprocessor, below which it matters which come last."""
IN_STEP = 10
"""Likewise, from which CTAs in step save more than short items at the end."""
WAVES = 2
"""Own items for each multiprocessor that come before others: by falling work, they end together after two."""
FORWARD_EAGER, BACKWARD_EAGER = (0.0, 0.1, 0.2), 0.5
"""See `Planned.order`: what is tried forward then, of which the first is taken where items are many; backward, there."""
TRIALS = Trial(), Trial(0.3, 1, 0.005), Trial(0, 0.8, 0.015), Trial(0.3, 0.8, 0.02), Trial(0.5, 1, 0.02), Trial(0, 0, 0.06)
"""What is tried backward where items are few. Long ones of all heads before others cost the cache up to 6 % of the time."""
FORWARD_RATE, BACKWARD_RATE = 950e12, 750e12
"""FLOP/s of the planned clock, more than kernels reach: a kernel that is ahead of the plan waits, one behind it does not."""
LATE, START_SECONDS = 1.1, 20e-6
"""When keys are expected: so much later than a full link and the time of a copy itself bring them, for the same reason."""
LITTLE = 0.025
"""Of the time of a backward: copies of keys and gradients that take less do not pay for another order of its tiles."""
SUM_PROCESSORS, SUM_RATE, MEMORY_RATE = 4, 50e9, 3e12
"""Multiprocessors that sums beside a kernel get at most; bytes/s that one reads and writes, and that all do."""
SUM_TIME = 0.25
"""Of a kernel's time, for those sums: the gradients of the last pieces are complete some time before its end."""
FEW_TILES = 1 << 18
"""That the host classifies itself, in a few milliseconds at most, while the GPU may still be at work."""
PARTIAL_WORK, UNMASKED_WORK, ROW_WORK = 18, 16, 16
"""Work of a tile and of a row (or column) of tiles, as the schedule kernels count it."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Of the forward: order of work items (uint32 bits), slot range of every KV block."""

    items: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class BackwardTables:
    """Of the backward: order of work items, slot range of every key tile, tiles of every slot from number 0 on.

    spare: multiprocessors that the kernel had better leave to sums over CTAs that share the query heads of a key head.
    """

    items: Tensor
    blocks: Tensor
    tiles: Tensor
    spare: int


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
    """
    ranges = plan.block_slots(spec.block_kv)
    parts, whole = forward_work(local, ranges, len(plan.slots), spec)
    kv_bytes = 2 * plan.rows * spec.head_dim * 2
    group = min(heads * batch, max(1, hopper.L2_BYTES // max(1, kv_bytes)) * (heads // heads_kv))
    dealt = Heads(heads, batch, head_groups(heads, heads_kv, groups, len(plan.slots)))
    seconds = FORWARD_FLOPS * spec.block_q * spec.block_kv * spec.head_dim / UNMASKED_WORK / FORWARD_RATE * processors
    items = forward_items(parts, whole, dealt, local.batch > 1, group, arrivals, seconds, processors)
    few = len(items.packed) < FEW * processors
    chosen = soonest_forward(items, processors, FORWARD_EAGER if few else FORWARD_EAGER[:1])
    return Tables(*_on(device, chosen, _packed(ranges)))


def forward_work(local: BoundaryVectors, ranges: Ints, slots: int, spec: KernelSpec) -> tuple[Ints, Ints]:
    """([masks, Q blocks, slots]: the work of the blocks of keys that end in each slot, [masks, Q blocks]: with that of none)."""
    work = _tiles(local, spec.block_q, spec.block_kv)
    return by_slot(work, ranges[:, 1], slots), work.sum(2) + ROW_WORK


def by_slot(work: Ints, last: Ints, slots: int) -> Ints:
    """[masks, Q blocks, slots] of [masks, Q blocks, KV blocks]: sums over blocks. last: slot of each, never rising."""
    out = np.zeros((*work.shape[:2], slots), dtype=np.int64)
    begins = np.flatnonzero(np.diff(last, prepend=slots))
    if len(begins):
        out[:, :, last[begins]] = np.add.reduceat(work, begins, axis=2)
    return out


@dataclass(frozen=True, slots=True)
class Units:
    """How the backward kernel deals heads: the query heads of a key head are `splits` groups of `heads`."""

    batch: int
    hq: int
    hk: int
    splits: int
    heads: int
    groups: int = 1

    def first_pieces(self, slots: int) -> Ints:
        """[batch * hk * splits]: the first piece of the group of heads of each."""
        by_head = np.repeat(head_groups(self.hk, self.hk, self.groups, slots), self.splits)
        pieces: Ints = np.tile(by_head, self.batch)
        return pieces

    def masks(self, local: BoundaryVectors) -> Ints:
        """[batch * hk * splits]: the mask of each (batch item, key head, split)."""
        unit = np.arange(self.batch * self.hk * self.splits, dtype=np.int64)
        first_head = unit % (self.hk * self.splits) * self.heads
        item = unit // (self.hk * self.splits) if local.batch > 1 else 0
        masks: Ints = item * local.heads + first_head // (self.hq // local.heads)
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
    given: bool = False,
) -> BackwardTables:
    """Tables of a mask over the key buffer.

    arrivals: seconds after which each piece is expected. first: the kernel counts slots, and with them the words of
    pieces, from this number on. given: the kernel adds to the gradients of own keys what others have of them. Tiles that these
    wait for are then spread, and leave as they end, or soon behind where they are pushed; else what counts is the last piece.
    """
    ranges = plan.block_slots(spec.block_kv)
    load = backward_load(local, spec, units)
    flops = BACKWARD_FACTOR * FORWARD_FLOPS * spec.block_q * spec.block_kv * spec.head_dim * units.heads
    seconds = flops / UNMASKED_WORK / BACKWARD_RATE * processors
    alone = float(load.sum()) * seconds / processors
    in_line = (1 + GRADIENTS) * max(arrivals, default=0.0) < LITTLE * alone
    if spec.deterministic:  # a tile may wait for lower ones, so those come first
        unit, tile = np.indices(load.shape)
        items = (tile.ravel() | unit.ravel() << 16).astype(np.uint32)
    else:
        few, near = load.size < FEW * processors, hopper_bwd.heads_together(local.nq * spec.head_dim)
        together = max(1, near // units.heads) if few else 1
        # Rows of a unit that L2 cannot hold are read once by CTAs in step, which take tiles as they lie.
        in_step = given and near < units.heads and load.size >= IN_STEP * processors
        plain = in_line or in_step
        read = {c for _, chunks in plan.lends for c in chunks}
        lent = np.array([s.chunk in read for s in plan.slots[: plan.own]] + [False], dtype=np.bool_)
        seen = lent[np.minimum(ranges[:, 1], plan.own)] if given else None
        tiles_of = ranges[:, 1], load, units.first_pieces(len(plan.slots)), plan.own
        planned, pieces = backward_items(*tiles_of, together, arrivals, seconds, seen, plain, WAVES * processors)
        if few and not in_step:
            items = soonest_backward(planned, pieces, processors, () if given else _leaving(arrivals), TRIALS)
        else:
            items = steady_backward(planned, processors, 0.0 if given else BACKWARD_EAGER)
    slots = np.arange(len(plan.slots))
    tiles = np.pad(((ranges[:, :1] <= slots) & (slots <= ranges[:, 1:])).sum(0), (first, 0)).astype(np.uint32)
    order, blocks, counts = _on(device, items, _packed(ranges + first), tiles)
    spare = 0 if in_line else spare_processors(plan, spec, units, arrivals, alone, processors)
    return BackwardTables(order, blocks, counts, spare)


def spare_processors(
    plan: OverlapPlan, spec: BackwardSpec, units: Units, arrivals: Sequence[float], alone: float, processors: int
) -> int:
    """How many multiprocessors a kernel had better leave to the sums over CTAs of others' gradients, which then leave beside it.

    So many that they add in SUM_TIME of the kernel's time; none where one of them costs more than to do all that behind it.
    alone: seconds of the kernel with all of them.
    """
    if units.splits == 1:
        return 0
    heads = units.batch * units.hk * 2 * spec.head_dim
    moved = (units.splits + 1) * 4 * heads * sum(s.rows for s in plan.pulls)
    if moved / MEMORY_RATE + sum(_leaving(arrivals)) < alone / processors:
        return 0
    return min(SUM_PROCESSORS, math.ceil(moved / (SUM_RATE * SUM_TIME * alone)))


def backward_load(local: BoundaryVectors, spec: BackwardSpec, units: Units) -> Ints:
    """[units, key tiles]: work for each query head."""
    load: Ints = (_tiles(local, spec.block_q, spec.block_kv).sum(1) + ROW_WORK)[units.masks(local)]
    return load


def _tiles(local: BoundaryVectors, block_q: int, block_kv: int) -> Ints:
    """[masks, Q blocks, KV blocks]: the work of each tile, 0 where it is SKIP."""
    shape = -(-local.nq // block_q), -(-local.nk // block_kv)
    few = local.batch * local.heads * math.prod(shape) <= FEW_TILES
    classes = classify(on_host(local) if few else local, block_q, block_kv).cpu().numpy().reshape(-1, *shape)
    cost = np.zeros(256, dtype=np.int64)
    cost[TileClass.PARTIAL.value], cost[TileClass.UNMASKED.value] = PARTIAL_WORK, UNMASKED_WORK
    work: Ints = cost[classes]
    return work


def _packed(ranges: Ints) -> NDArray[np.uint32]:
    packed: NDArray[np.uint32] = (ranges[:, 0] | ranges[:, 1] << 16).astype(np.uint32)
    return packed


def _on(device: torch.device, *tables: NDArray[np.uint32]) -> tuple[Tensor, ...]:
    return tuple(t.view(torch.int32) for t in on_device(device, *(t.view(np.uint8) for t in tables)))


def expected_arrivals(plan: OverlapPlan, row_bytes: int, groups: int, rate: float, latency: float) -> tuple[float, ...]:
    """Seconds after which each piece is expected: own at once, others one after another over one link."""
    out, clock = [], latency + START_SECONDS
    for _ in range(groups):
        for i, slot in enumerate(plan.slots):
            foreign = i >= plan.own
            clock += LATE * (slot.rows * row_bytes / groups / rate + 2 * COPY_SECONDS) if foreign else 0.0
            out.append(clock if foreign else 0.0)
    return tuple(out)


def _leaving(arrivals: Sequence[float]) -> list[float]:
    """Seconds that the gradients of each piece take; 0 of own ones."""
    out, last = [], 0.0
    for at in arrivals:
        out.append(GRADIENTS * (at - last) if at else 0.0)
        last = at or last
    return out
