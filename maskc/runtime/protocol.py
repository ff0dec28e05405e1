"""What the queues of a rank do in one overlapped call, as data: executors enqueue it, tests explore its interleavings.

Ranks agree through 32-bit words that only grow. `ready[reader][source]` = e: the source's keys of epoch e can be read.
`done[source][reader]` = e: the reader has copied what it needs of epoch e. `flag[rank][slot]` = e: the chunk of epoch e
lies in the rank's key buffer. An epoch is one call; nothing is ever reset.

Own keys lie in one of two halves of the source buffer by turns, so a rank waits for its readers two calls late. Of every
pair of ranks each signals before it waits, whatever the number of hardware queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from maskc.runtime.overlap_plan import OverlapPlan

HALVES = 2
"""Epochs whose keys lie in a source buffer at a time."""
Stream: TypeAlias = Literal["compute", "copy"]


class Word(NamedTuple):
    """A word in the memory of rank `holder`, written by rank `by` ("ready", "done"), or by the copy of slot `by` ("flag")."""

    kind: Literal["ready", "done", "flag"]
    holder: int
    by: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream goes on once the word has reached the epoch."""

    word: Word
    epoch: int


@dataclass(frozen=True, slots=True)
class Put:
    """The word becomes the epoch once everything before it in the stream is complete."""

    word: Word
    epoch: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Own keys and values to a half of the source buffer, and to the rank's own slots."""

    half: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Pull:
    """The chunk of a slot from a half of its source's buffer to the rank's key buffer."""

    slot: int
    source: int
    half: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream goes on once the kernel of that epoch is complete."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Attend:
    """The kernel; it waits itself for the flag of each of these slots before it reads the chunk."""

    slots: tuple[int, ...]
    epoch: int


Operation: TypeAlias = Wait | Put | Fill | Pull | Ended | Attend
Step: TypeAlias = tuple[Stream, Operation]


def call_steps(plan: OverlapPlan, readers: Sequence[int], epoch: int) -> tuple[Step, ...]:
    """Everything one call enqueues, in the order of enqueueing; epochs count from 1.

    readers: the ranks that copy from this one. The kernel comes last: all it waits for is enqueued before it.
    """
    rank, half = plan.rank, epoch % HALVES
    steps: list[Step] = []
    if epoch > HALVES:
        steps += [("compute", Wait(Word("done", rank, r), epoch - HALVES)) for r in readers]
    steps.append(("compute", Fill(half, epoch)))
    steps += [("compute", Put(Word("ready", r, rank), epoch)) for r in readers]
    if epoch > 1 and plan.pulls:
        steps.append(("copy", Ended(epoch - 1)))
    waited: set[int] = set()
    for slot, pull in enumerate(plan.pulls, plan.own):
        source = pull.source
        if source not in waited:
            waited.add(source)
            steps.append(("copy", Wait(Word("ready", rank, source), epoch)))
        steps.append(("copy", Pull(slot, source, half, epoch)))
        steps.append(("copy", Put(Word("flag", rank, slot), epoch)))
        if all(later.source != source for later in plan.slots[slot + 1 :]):
            steps.append(("copy", Put(Word("done", source, rank), epoch)))
    steps.append(("compute", Attend(tuple(range(plan.own, len(plan.slots))), epoch)))
    return tuple(steps)


def readers_of(plans: Sequence[OverlapPlan], rank: int) -> tuple[int, ...]:
    """The ranks that copy from `rank`."""
    return tuple(p.rank for p in plans if rank in p.sources)
