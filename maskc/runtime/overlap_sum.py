"""Gradients of a rank's own keys: its own part, then those of the ranks that read them, in the order of ranks.

One kernel adds them in fp32 and rounds once, so the result does not depend on when they came.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from maskc.runtime import exchange
from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import OverlapPlan, Slot
from maskc.runtime.transport import KeyShape, Pair, Transport


class OwnChunk(NamedTuple):
    """An own chunk: its rows in the rank's tensors, its slot if rows of this rank see it, and which other ranks do."""

    chunk: int
    rows: slice
    slot: Slot | None
    readers: tuple[int, ...]


def own_chunks(plan: OverlapPlan, keys: Layout) -> tuple[OwnChunk, ...]:
    slots = {s.chunk: s for s in plan.slots[: plan.own]}
    out, at = [], 0
    for chunk in keys.chunks_of(plan.rank):
        size = keys.size_of(chunk)
        readers = tuple(r for r, chunks in plan.lends if chunk in chunks)
        out.append(OwnChunk(chunk, slice(at, at + size), slots.get(chunk), readers))
        at += size
    return tuple(out)


def own_runs(plan: OverlapPlan, keys: Layout) -> tuple[tuple[int, slice], ...]:
    """(place in the key buffer, rows of the rank's tensors) of own chunks that it sees itself, neighbours joined."""
    runs: list[tuple[int, slice]] = []
    for _, rows, slot, _ in own_chunks(plan, keys):
        if slot is None:
            continue
        if runs and runs[-1][1].stop == rows.start and runs[-1][0] + rows.start - runs[-1][1].start == slot.start:
            runs[-1] = runs[-1][0], slice(runs[-1][1].start, rows.stop)
        else:
            runs.append((slot.start, rows))
    return tuple(runs)


class GradientSum:
    """Adds up dK and dV of one plan: fp32 [splits, B, rows of the key buffer, Hk, D], and what lies in staging."""

    def __init__(self, plan: OverlapPlan, keys: Layout, shape: KeyShape, transport: Transport, device: torch.device) -> None:
        self.plan, self.shape, self.transport, self.device = plan, shape, transport, device
        self.chunks, self.rows = own_chunks(plan, keys), keys.local_length(plan.rank)

    def add(self, made: Pair, out: Pair, failed: int) -> None:
        """Write dK and dV [B, own rows, Hk, D] on torch's current stream; NaN if the word at `failed` is set."""
        if self.device.type == "cuda":
            exchange.sum_gradients(self.table, made, out, failed)
        else:
            self.add_on_host(made, out)

    def add_on_host(self, made: Pair, out: Pair) -> None:
        for which, grads in enumerate(made):
            for chunk, rows, slot, readers in self.chunks:
                parts = [grads[:, :, slot.start : slot.start + slot.rows].sum(0)] if slot is not None else []
                parts += [self.transport.staged(r, chunk)[which] for r in readers]
                out[which][:, rows] = sum(parts[1:], parts[0]) if parts else 0

    @cached_property
    def table(self) -> exchange.SumTable:
        """Made once; the host does not wait for it."""
        return exchange.SumTable.of(self.addends(), self.device)

    def addends(self) -> list[exchange.Addend]:
        out = []
        for which, dim in enumerate((self.shape.dim_k, self.shape.dim_v)):
            row = self.shape.heads * dim
            for chunk, rows, slot, readers in self.chunks:
                size = (rows.stop - rows.start) * row
                for b in range(self.shape.batch):
                    own = None if slot is None else (b * self.plan.rows + slot.start) * row
                    parts = tuple(self.transport.staged(r, chunk)[which][b].data_ptr() for r in readers)
                    out.append(exchange.Addend(which, (b * self.rows + rows.start) * row, own, size, parts))
        return out


def over_splits(grads: Tensor) -> Tensor:
    """The parts [splits, ...] of one rank's kernel as one tensor."""
    return grads[0] if grads.shape[0] == 1 else grads.sum(0)
