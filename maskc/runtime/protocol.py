"""What the queues of a rank do in one overlapped call, as data: executors enqueue it, tests explore its interleavings.

Ranks agree through 32-bit words that only grow; nothing is ever reset. An epoch is one call, and every rank counts every
call of a link:

    offered[rank][rank]     the kernel that fills the source buffer has its place on the machine
    ready[reader][source]   so many parts of the source's keys can be read, of all epochs: PARTS a call
    done[source][reader]    the reader has copied what it needs of this epoch
    flag[rank][piece]       the piece of this epoch lies in the rank's key buffer
    finished[rank][piece]   backward: the kernel has written the last gradient of the piece
    sent[owner][reader]     backward: so many parts of the reader's gradients lie in the owner's staging, as in "ready"
    came[owner][reader]     backward: the same, where the owner's kernel looks
    free[reader][owner]     backward: the owner has added them up, the staging may be written again

A piece is what one copy brings: a group of heads of a key chunk. All chunks of the first heads come first, so that work
on these heads can start when a part of all keys is there, however much of them a row sees. A part is what a rank tells of
at a time: as nearly as heads allow an eighth of them (PARTS), of all chunks, the first heads first.

Own keys are copied for others beside the attention kernel, by a few CTAs. That kernel takes every multiprocessor and
waits for others in turn, so it starts once those CTAs are on the machine: else both sides of a pair might wait for ever.
Own keys lie in one of two halves of the source buffer by turns, so a rank waits for its readers two calls late. Of every
pair of ranks each signals before it waits, whatever the number of hardware queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

from maskc.codegen.spec_bwd import GRAD_PARTS
from maskc.runtime.overlap_plan import OverlapPlan

HALVES = 2
"""Epochs whose keys lie in a source buffer at a time."""
PARTS = GRAD_PARTS
"""Of all heads, in which keys become ready and gradients are sent."""
Stream: TypeAlias = Literal["compute", "offer", "copy", "send", "sum"]
Kind: TypeAlias = Literal["offered", "ready", "done", "flag", "finished", "sent", "came", "free"]


class Word(NamedTuple):
    """A word in the memory of rank `holder`, written by rank `by`, or by what belongs to piece `by` ("flag", "finished")."""

    kind: Kind
    holder: int
    by: int


def told(epoch: int, parts: int, of: int = PARTS) -> int:
    """What a word that counts parts ("ready", "sent", "came") says when so many of an epoch's are there."""
    return (epoch - 1) * of + parts


def last_value(kind: Kind, epoch: int) -> int:
    """What a word says at the end of an epoch."""
    return told(epoch, PARTS) if kind in ("ready", "sent", "came") else epoch


def part_heads(part: int, heads: int, of: int = PARTS) -> slice:
    """Heads of a part; none where there are more parts than heads."""
    return slice(part * heads // of, (part + 1) * heads // of)


# ---------------------------------------------------------------- operations


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
class Begin:
    """The stream goes on once everything enqueued on the compute stream so far is complete."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of own keys and values to a half of the source buffer; in the first, "offered" of the rank becomes the epoch.

    One kernel does all parts of a call, and tells of each.
    """

    half: int
    epoch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Settle:
    """Own keys and values to the rank's own slots."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A piece from a half of its source's buffer to the rank's key buffer. parts: which its heads are in, [first, end)."""

    piece: int
    source: int
    half: int
    epoch: int
    parts: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Attend:
    """The kernel; it waits itself for the flag of each of `pieces` before it reads the piece.

    finishes: pieces whose gradients it completes, in about this order, each with its "finished" word. adds: readers whose
    gradients of own keys it adds as far as "came" tells of them.
    """

    pieces: tuple[int, ...]
    epoch: int
    finishes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Push:
    """The gradients of a piece, and of the same chunk in the groups of heads behind it, to the staging of its owner."""

    piece: int
    owner: int
    epoch: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Sum:
    """What the kernel and these readers have of the gradients of own keys, added up in this order."""

    readers: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class End:
    """The compute stream goes on once everything enqueued on this stream so far is complete: it may use the memory again."""

    after: Stream


Operation: TypeAlias = Wait | Put | Begin | Fill | Settle | Pull | Attend | Push | Sum | End
Step: TypeAlias = tuple[Stream, Operation]


# ---------------------------------------------------------------- epochs


@dataclass(frozen=True, slots=True)
class Turn:
    """A call's epoch, and what its memory was last used for: (rank, epoch) each.

    late: readers of the half that this call fills. pushed: owners whose staging this rank wrote.
    """

    epoch: int
    late: tuple[tuple[int, int], ...] = ()
    pushed: tuple[tuple[int, int], ...] = ()

    @property
    def half(self) -> int:
        return self.epoch % HALVES


@dataclass(slots=True)
class Epochs:
    """Counts the calls of one link; plans, and with them readers and owners, may change from call to call."""

    epoch: int = 0
    _halves: list[tuple[tuple[int, int], ...]] = field(default_factory=lambda: [()] * HALVES)
    _pushed: dict[int, int] = field(default_factory=dict)

    def begin(self, readers: Iterable[int] | None, owners: Iterable[int] = ()) -> Turn:
        """The turn of a call whose keys `readers` copy (None: it offers none) and which pushes gradients to `owners`."""
        self.epoch += 1
        owners, half = tuple(owners), self.epoch % HALVES
        late = () if readers is None else self._halves[half]
        pushed = tuple((o, self._pushed[o]) for o in owners if o in self._pushed)
        if readers is not None:
            self._halves[half] = tuple((r, self.epoch) for r in readers)
        self._pushed.update(dict.fromkeys(owners, self.epoch))
        return Turn(self.epoch, late, pushed)


# ---------------------------------------------------------------- what a call enqueues


def call_steps(
    plan: OverlapPlan, readers: Sequence[int], turn: Turn, groups: int = 1, parts: int = PARTS, by_parts: bool = True
) -> tuple[Step, ...]:
    """Everything a forward call enqueues, in the order of enqueueing.

    readers: the ranks that copy from this one. groups: of heads, the pieces of a chunk. The kernel comes last: all it
    waits for is enqueued before it.
    """
    return (*_gather(plan, readers, turn, groups, parts, by_parts), ("compute", Attend(plan.pieces(groups), turn.epoch)))


def backward_steps(
    plan: OverlapPlan,
    readers: Sequence[int],
    turn: Turn,
    groups: int = 1,
    gather: bool = True,
    together: int = 1,
    keys_first: bool = False,
    adds: bool = False,
    parts: int = PARTS,
    by_parts: bool = True,
) -> tuple[Step, ...]:
    """The same for a backward call.

    The gradients of a piece leave once its last tile is done, in the order of pieces, on a stream of their own: waiting
    for one must not hold up the keys of the next call. gather: keys are copied again, else those of others are in the
    buffer; own ones may have been read in place.
    together: groups of heads that leave in one copy, a divisor of `groups`. keys_first: nothing leaves before the last key
    has come, which otherwise waits for its turn on the one copy engine there is. adds: the kernel itself adds what has
    come of the gradients of own keys; the stream of copies, which is done by then, tells it.
    """
    rank, epoch, foreign = plan.rank, turn.epoch, plan.pieces(groups)
    lenders = tuple(reader for reader, _ in plan.lends)
    steps: list[Step] = list(_gather(plan, readers, turn, groups, parts, by_parts)) if gather else [("compute", Settle(epoch))]
    steps.append(("compute", Attend(foreign if gather else (), epoch, foreign, lenders if adds else ())))
    pushed = dict(turn.pushed)
    count = len(plan.slots)
    leaving = [p for p in foreign if p // count % together == 0]
    last = {(plan.slot_of(piece).source, piece // count): piece for piece in leaving}
    if keys_first and gather and foreign:
        steps.append(("send", Wait(Word("flag", rank, foreign[-1]), epoch)))
    for piece in leaving:
        owner, group = plan.slot_of(piece).source, piece // count
        steps += [("send", Wait(Word("finished", rank, piece + g * count), epoch)) for g in range(together)]
        if owner in pushed:
            steps.append(("send", Wait(Word("free", rank, owner), pushed.pop(owner))))
        steps.append(("send", Push(piece, owner, epoch, together)))
        gone = (group + together) * parts // groups
        if last[owner, group] == piece and gone > group * parts // groups:
            steps.append(("send", Put(Word("sent", owner, rank), told(epoch, gone, parts))))
    if adds:
        for part, reader in product(range(parts), lenders):
            value = told(epoch, part + 1, parts)
            steps += [("copy", Wait(Word("sent", rank, reader), value)), ("copy", Put(Word("came", rank, reader), value))]
    steps += [("compute", Wait(Word("sent", rank, r), told(epoch, parts, parts))) for r in lenders]
    steps.append(("compute", Sum(lenders, epoch)))
    steps += [("compute", Put(Word("free", r, rank), epoch)) for r in lenders]
    return (*steps, ("compute", End("send"))) if leaving else tuple(steps)


def regrouped(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same call with its copies and flags in one piece, as a kernel makes them: all waits before, all "done" after."""
    copies = [s for s in steps if _of_copies(s)]

    def phase(step: Step) -> int:
        op = step[1]
        return 0 if isinstance(op, Wait) else 2 if isinstance(op, Put) and op.word.kind == "done" else 1

    ordered = iter(sorted(copies, key=phase))
    return tuple(next(ordered) if _of_copies(s) else s for s in steps)


def _of_copies(step: Step) -> bool:
    stream, op = step
    after = isinstance(op, Wait | Put) and op.word.kind in ("sent", "came")
    return stream == "copy" and not isinstance(op, Begin) and not after


def _gather(plan: OverlapPlan, readers: Sequence[int], turn: Turn, groups: int, parts: int, by_parts: bool) -> Iterable[Step]:
    """Own keys to their places, and the copies of others behind each other, with a flag after each.

    by_parts: a copy waits for the parts that its heads are in, else for all: a wait each would take time where they come at
    once.
    """
    rank, half, epoch = plan.rank, turn.half, turn.epoch
    steps: list[Step] = [("copy", Begin())] if plan.pulls else []
    steps += [("offer", Wait(Word("done", rank, r), late)) for r, late in turn.late]
    if readers:
        steps.append(("offer", Begin()))
        for part in range(parts):
            steps.append(("offer", Fill(half, epoch, part)))
            steps += [("offer", Put(Word("ready", r, rank), told(epoch, part + 1, parts))) for r in readers]
        steps.append(("compute", Wait(Word("offered", rank, rank), epoch)))
    steps.append(("compute", Settle(epoch)))
    waited: dict[int, int] = {}
    count = len(plan.slots)
    for piece in plan.pieces(groups):
        source, group = plan.slot_of(piece).source, piece // count
        within = group * parts // groups, -(-(group + 1) * parts // groups)
        upto = within[1] if by_parts else parts
        if upto > waited.get(source, 0):
            waited[source] = upto
            steps.append(("copy", Wait(Word("ready", rank, source), told(epoch, upto, parts))))
        steps.append(("copy", Pull(piece, source, half, epoch, within)))
        steps.append(("copy", Put(Word("flag", rank, piece), epoch)))
    # behind the last flag, for which the kernel waits; sources wait for these words two calls late
    return steps + [("copy", Put(Word("done", source, rank), epoch)) for source in plan.sources]
