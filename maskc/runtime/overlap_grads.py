"""Where the gradients of a backward go, and who is told of them.

A kernel stores them in memory of its rank, from where they are pushed, or *gives* those of others' keys: it writes them to the
staging of their owners itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from maskc.runtime.exchange import Place, Report
from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import Cut, OverlapPlan, Slot, joined
from maskc.runtime.protocol import Word
from maskc.runtime.transport import KeyShape, Pair, Taking, padded


class Result(NamedTuple):
    """Rows of the gradients that a kernel leaves: first row of each chunk, by its number, and how many there are.

    Chunks follow each other as in the key buffer, each padded.
    """

    starts: Mapping[int, int]
    rows: int


def result_rows(plan: OverlapPlan, given: bool = False) -> Result:
    """plan: each chunk a slot. given: gradients of others' keys go to their owners, and only own chunks are in it."""
    starts, at = {}, 0
    for slot in reversed(plan.slots[: plan.own] if given else plan.slots):
        starts[slot.chunk] = at
        at += padded(slot.rows)
    return Result(starts, at)


def departing(plan: OverlapPlan, cut: Cut, pieces: Sequence[int], keys: Layout | None) -> list[tuple[Slot, slice]]:
    """(slot, heads): the copies that take the gradients of these pieces to their owner, all of the same heads.

    cut: of the backward. keys: where chunks that lie behind each other at both ends are one slot.
    """
    count = len(cut.plan.slots)
    slots, groups = sorted({piece % count for piece in pieces}), sorted({piece // count for piece in pieces})
    heads = cut.heads_of(groups[0] * count, len(groups))
    if keys is None:
        return [(cut.plan.slots[i], heads) for i in slots]
    chunks = {c for i in slots for c in cut.plan.slots[i].chunks}
    some = replace(plan, own=0, slots=tuple(s for s in plan.pulls if s.chunk in chunks))
    return [(slot, heads) for slot in joined(some, keys, plan.rows).slots]


class Gradients(NamedTuple):
    """dQ, and fp32 dK and dV [splits, B, Hk, rows of `result_rows`, D], still to be summed over splits.

    octets: as gated kernels store them, see templates/bwd/shared.cuh.j2; else row by row. given: see `result_rows`.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    octets: bool = False
    given: bool = False

    @property
    def pair(self) -> Pair:
        return self.dk, self.dv


def arranged(plan: OverlapPlan, grads: Tensor) -> Tensor:
    """Gradients [splits, B, Hk, rows of the key buffer, D] by the rows of `result_rows`."""
    result = result_rows(plan)
    if result.rows == plan.rows:
        return grads
    out = grads.new_empty(*grads.shape[:3], result.rows, grads.shape[4])
    for slot in plan.slots:
        start = result.starts[slot.chunk]
        out[:, :, :, start : start + slot.rows] = grads[:, :, :, slot.start : slot.start + slot.rows]
    return out


@dataclass(frozen=True, slots=True)
class Owners:
    """What a kernel needs that gives gradients. address: of a word between ranks. sent: see `Lasting`."""

    taking: Taking
    address: Callable[[Word], int]
    sent: Tensor


class Told(NamedTuple):
    """The words of a reader's gradients of a chunk.

    word: address of that of the first group of heads; those of the next group of `group_heads` lie `slots` further.
    """

    word: int
    slots: int
    group_heads: int

    @classmethod
    def of(cls, cut: Cut, chunk: int, words: Tensor) -> Told:
        """cut: of the reader's backward. words: of its pieces."""
        slot = next(i for i, s in enumerate(cut.plan.slots) if chunk in s.chunks)
        return cls(words.data_ptr() + 4 * slot, len(cut.plan.slots), cut.group_heads)


def places(plan: OverlapPlan, shape: KeyShape, owners: Owners | None) -> list[Place]:
    """Where gradients go, by chunk as in the buffer. owners: None where none are given."""
    result, out = result_rows(plan, owners is not None), []
    for slot in reversed(plan.slots):
        rows = slot.start, slot.rows
        if owners is None or slot.source == plan.rank:
            dk, dv = (4 * result.starts[slot.chunk] * dim for dim in (shape.dim_k, shape.dim_v))  # bytes of fp32
            out.append(Place(dk, dv, result.rows * shape.dim_k, *rows, False))
        else:
            to = owners.taking.place(slot.source, slot.chunk)
            out.append(Place(to[0].data_ptr(), to[1].data_ptr(), to[0].stride(1), *rows, True))
    return out


def first_places(plan: OverlapPlan, block_kv: int) -> list[int]:
    """Per key tile, which of `places` its first key has."""
    starts = [s.start for s in reversed(plan.slots)]
    return [bisect_right(starts, at) - 1 for at in range(0, plan.rows, block_kv)]


def reports(cut: Cut, finished: Tensor, owners: Owners | None) -> list[Report]:
    """Who is told of each slot of a backward; before them as many for nobody as the forward has words."""

    def report(number: int, slot: Slot) -> Report:
        if owners is None or slot.source == cut.plan.rank:
            return Report(finished.data_ptr() + 4 * (cut.first + number), 0, 0, 0)
        rank, owner = cut.plan.rank, slot.source
        word = owners.taking.told(owner, rank).data_ptr() + 4 * number
        counted = owners.sent.data_ptr() + 4 * cut.plan.sources.index(owner)
        pieces = cut.groups * sum(s.source == owner for s in cut.plan.pulls)
        return Report(word, owners.address(Word("sent", owner, rank)), counted, pieces)

    return [Report(0, 0, 0, 0)] * cut.first + [report(i, slot) for i, slot in enumerate(cut.plan.slots)]
