"""Gradients of a rank's own keys: its own part, then those of the ranks that read them, in the order of ranks.

One kernel adds them in fp32 and rounds once, so the result does not depend on when they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from maskc.runtime import exchange
from maskc.runtime.layout import Layout
from maskc.runtime.overlap_grads import Gradients, Told, result_rows
from maskc.runtime.overlap_plan import OverlapPlan, Slot
from maskc.runtime.ready import Launch
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


def own_runs(plan: OverlapPlan, keys: Layout) -> tuple[exchange.Run, ...]:
    """(place in the key buffer, rows of the rank's tensors) of own chunks that it sees itself, neighbours joined."""
    return _neighbours_joined((c.slot.start, c.rows) for c in own_chunks(plan, keys) if c.slot is not None)


def _neighbours_joined(runs: Iterable[exchange.Run]) -> tuple[exchange.Run, ...]:
    out: list[exchange.Run] = []
    for place, rows in runs:
        if out and out[-1][1].stop == rows.start and out[-1][0] + rows.start - out[-1][1].start == place:
            out[-1] = out[-1][0], slice(out[-1][1].start, rows.stop)
        else:
            out.append((place, rows))
    return tuple(out)


class GradientSum:
    """Adds up dK and dV of own chunks: what this rank's kernel left, and what lies in staging."""

    def __init__(self, plan: OverlapPlan, keys: Layout, shape: KeyShape, transport: Transport, device: torch.device) -> None:
        self.plan, self.shape, self.transport, self.device = plan, shape, transport, device
        self.chunks, self.rows = own_chunks(plan, keys), keys.local_length(plan.rank)
        self._tables: dict[bool, exchange.SumTable] = {}

    def add(
        self,
        made: Gradients,
        out: Pair,
        failed: Tensor,
        added: exchange.Added | None = None,
        by: tuple[Launch | None, Launch | None] = (None, None),
    ) -> None:
        """Write dK and dV [B, own rows, Hk, D] on torch's current stream; NaN if one of the words `failed` is set.

        added: what is written already. Staging lies in octets if `made` does. by: what launches the sum, and what spoils it.
        """
        if self.device.type == "cuda":
            exchange.sum_gradients(self.table(made.given), made.pair, out, added, made.octets, by=by[0])
            exchange.spoil(out, failed, by=by[1])
        else:
            self.add_on_host(made.pair, out)

    def add_on_host(self, made: Pair, out: Pair) -> None:
        starts = result_rows(self.plan).starts
        for which, grads in enumerate(made):
            for chunk, rows, slot, readers in self.chunks:
                size = rows.stop - rows.start
                parts = [] if slot is None else [grads[:, :, :, starts[chunk] : starts[chunk] + size].sum(0)]
                parts += [self.transport.staged(r, chunk)[which][:, :, :size] for r in readers]
                out[which][:, rows] = sum(parts[1:], parts[0]).transpose(1, 2) if parts else 0

    def table(self, given: bool = False) -> exchange.SumTable:
        """Made once; the host does not wait for it."""
        found = self._tables.get(given)
        if found is None:
            found = self._tables[given] = exchange.SumTable.of(self.addends(given), self.device)
        return found

    def lent(self, block: int, block_kv: int, told: Callable[[int, int], Told]) -> list[list[exchange.Lent] | None]:
        """Per key tile from `block` on, what others have of its gradients, by rank; None where that does not lie in one piece.

        told: by reader and chunk.
        """
        out: list[list[exchange.Lent] | None] = []
        for start in range(block * block_kv, self.plan.rows, block_kv):
            stop = min(start + block_kv, self.plan.rows)
            over = [c for c in self.chunks if c.slot and c.slot.start < stop and start < c.slot.start + c.slot.rows]
            if len(over) > 1:
                out.append(None if any(c.readers for c in over) else [])
                continue
            chunk, _, slot, readers = over[0]
            assert slot is not None
            places = []
            for reader in readers:
                (dk, dv), words = self.transport.staged(reader, chunk), told(reader, chunk)
                at = dk.data_ptr(), dv.data_ptr(), dk.stride(1)
                places.append(exchange.Lent(*at, words.word, start - slot.start, words.slots, words.group_heads))
            out.append(places)
        return out

    def addends(self, given: bool = False) -> list[exchange.Addend]:
        """given: which rows the kernel leaves, see `result_rows`."""
        out, heads, result = [], self.shape.heads, result_rows(self.plan, given)
        for which, dim in enumerate((self.shape.dim_k, self.shape.dim_v)):
            for chunk, rows, slot, readers in self.chunks:
                size, place = rows.stop - rows.start, 0 if slot is None else slot.start
                staged = [self.transport.staged(r, chunk)[which] for r in readers]
                for unit in range(self.shape.batch * heads):
                    b, h = divmod(unit, heads)
                    own = None if slot is None else (unit * result.rows + result.starts[chunk]) * dim
                    first = ((b * self.rows + rows.start) * heads + h) * dim
                    parts = tuple(t.data_ptr() + (b * t.stride(0) + h * t.stride(1)) * t.element_size() for t in staged)
                    out.append(exchange.Addend(which, first, heads * dim, own, size, dim, parts, unit, place))
        return out


def over_splits(grads: Tensor) -> Tensor:
    """The parts [splits, ...] of one rank's kernel as one tensor."""
    return grads[0] if grads.shape[0] == 1 else grads.sum(0)


def by_blocks(run: exchange.Run, block_kv: int) -> tuple[int, exchange.Run, slice]:
    """(first block that begins with rows of the run or behind, the rows before it and their place, the others)."""
    start, rows = run
    block = -(-start // block_kv)
    first = min(rows.stop, rows.start + block * block_kv - start)
    return block, (start, slice(rows.start, first)), slice(first, rows.stop)
