"""What the queues of a rank do in one overlapped call, as data: executors enqueue it, tests explore its interleavings.

Keys come in one of two ways. Between GPUs their owner *gives* them: its copy engine writes own keys and values, as they
lie in its tensors, into the key buffer of each reader. From memory that nobody computes in, a reader *pulls* them.

Ranks agree through 32-bit words that only grow; nothing is ever reset. An epoch is one call, and every rank counts every
call of a link:

    open[owner][reader]     given keys: the reader's key buffer may be written
    gave[reader][owner]     given keys: all of this epoch are there
    ready[reader][source]   pulled keys: the source's can be read
    done[source][reader]    pulled keys: the reader has copied what it needs of this epoch
    flag[rank][piece]       the piece of this epoch lies in the rank's key buffer
    finished[rank][piece]   pushed gradients: the kernel has written the last one of the piece
    told[owner][reader, piece]  backward: the gradients of the piece lie in the owner's staging; its kernel looks there
    sent[owner][reader]     backward: all gradients of the reader lie in the owner's staging
    free[reader][owner]     backward: the owner has added them up, the staging may be written again

A piece is what one copy brings: a group of heads of a key chunk. All chunks of the first heads come first, so that work
on these heads can start when a part of all keys is there, however much of them a row sees.

Gradients of keys of others reach the staging of their owner in one of two ways, which need not be the same on all ranks.
A kernel *gives* them: it writes them there itself. Or it leaves them in its own memory, and a copy engine *pushes* them.

A key buffer may be written once all that its rank enqueued before the call is complete, and own keys may be overwritten
once all readers have them, so a call ends no sooner. An owner gives keys after all that it enqueued before the call, its
sum of the last gradients too: whoever has been given a piece may write gradients of it without waiting for "free". Of every
pair of ranks each signals before it waits, whatever the number of hardware queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from maskc.runtime.overlap_plan import OverlapPlan

HALVES = 2
"""Epochs whose keys lie in memory that readers pull from at a time."""
Stream: TypeAlias = Literal["compute", "copy", "send", "sum"]
Kind: TypeAlias = Literal["open", "gave", "ready", "done", "flag", "finished", "sent", "free"]


class Word(NamedTuple):
    """A word in the memory of rank `holder`, written by rank `by`, or by what belongs to piece `by` ("flag", "finished")."""

    kind: Kind
    holder: int
    by: int


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
class Settle:
    """Own keys and values to the rank's own slots."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Give:
    """Own keys and values to a piece of a reader's key buffer."""

    reader: int
    piece: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A piece from a half of its source's memory to the rank's key buffer."""

    piece: int
    source: int
    half: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Attend:
    """The kernel; it waits itself for the flag of each of `pieces` before it reads the piece.

    finishes: pieces whose gradients it completes, in about this order. tells: the owners of their keys, one each, where it
    gives them: it writes those of a piece once its flag is up, then its "told" word, and behind the last piece of an owner
    "sent"; none of this for a piece that it did not wait to the end for. Else each has its "finished" word. adds: readers
    whose gradients of own keys it adds as far as "told" words say that they are there.
    """

    pieces: tuple[int, ...]
    epoch: int
    finishes: tuple[int, ...] = ()
    tells: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Push:
    """The gradients of pieces of one owner to its staging: of the same groups of heads of all their chunks."""

    pieces: tuple[int, ...]
    owner: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Tell:
    """The "told" words of pieces whose gradients were pushed to their owner."""

    owner: int
    pieces: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Sum:
    """What the kernel and these readers have of the gradients of own keys, added up in this order."""

    readers: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class End:
    """The stream goes on once everything enqueued on the stream `after` so far is complete: it may use the memory again."""

    after: Stream


Operation: TypeAlias = Wait | Put | Begin | Settle | Give | Pull | Attend | Push | Tell | Sum | End
Step: TypeAlias = tuple[Stream, Operation]


# ---------------------------------------------------------------- epochs


@dataclass(frozen=True, slots=True)
class Turn:
    """A call's epoch. before: (owner, epoch) of the last calls that wrote the staging that this one writes."""

    epoch: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def half(self) -> int:
        return self.epoch % HALVES


@dataclass(slots=True)
class Epochs:
    """Counts the calls of one link; plans, and with them owners, may change from call to call."""

    epoch: int = 0
    _last: dict[int, int] = field(default_factory=dict)

    def begin(self, owners: Iterable[int] = ()) -> Turn:
        """The turn of a call whose gradients go to `owners`."""
        self.epoch += 1
        owners = tuple(owners)
        before = tuple((o, self._last[o]) for o in owners if o in self._last)
        self._last.update(dict.fromkeys(owners, self.epoch))
        return Turn(self.epoch, before)


# ---------------------------------------------------------------- what a call enqueues


class Gift(NamedTuple):
    """What a rank gives: a piece of the key buffer of a reader, as the reader numbers it."""

    reader: int
    piece: int


def gifts(readers: Mapping[int, tuple[OverlapPlan, int]], rank: int, world: int) -> tuple[Gift, ...]:
    """What a rank gives in a call, in order: to all readers at a time, the one behind it first, as each counts on it.

    readers: of each its plan and its groups of heads.
    """

    def turn(gift: Gift) -> tuple[float, int, int]:
        plan, groups = readers[gift.reader]
        return gift.piece // len(plan.slots) / groups, (gift.reader - rank) % world, gift.piece

    every = (Gift(r, p) for r, (plan, n) in readers.items() for p in plan.pieces(n) if plan.slot_of(p).source == rank)
    return tuple(sorted(every, key=turn))


class Departure(NamedTuple):
    """Pieces whose gradients are pushed together, and those of which the stream waits to be complete before."""

    owner: int
    pieces: tuple[int, ...]
    awaited: tuple[int, ...]


def by_pieces(plan: OverlapPlan, groups: int, together: int = 1) -> tuple[Departure, ...]:
    """In the order of pieces. together: groups of heads that leave together, a divisor of `groups`."""
    count = len(plan.slots)
    first = (piece for piece in plan.pieces(groups) if piece // count % together == 0)
    each = ((plan.slot_of(piece).source, tuple(piece + g * count for g in range(together))) for piece in first)
    return tuple(Departure(owner, pieces, pieces) for owner, pieces in each)


def at_once(plan: OverlapPlan, groups: int) -> tuple[Departure, ...]:
    """All that goes to an owner together, and nothing before everything is complete: so a link is awake for one short time."""
    every = plan.pieces(groups)
    of = {owner: tuple(piece for piece in every if plan.slot_of(piece).source == owner) for owner in plan.sources}
    return tuple(Departure(owner, pieces, () if i else every) for i, (owner, pieces) in enumerate(of.items()))


def call_steps(plan: OverlapPlan, turn: Turn, groups: int = 1, given: Sequence[Gift] | None = None) -> tuple[Step, ...]:
    """Everything a forward call enqueues, in the order of enqueueing.

    groups: of heads, the pieces of a chunk. given: what the rank gives, in order; None: keys are pulled. Of copies, the
    kernel needs what is enqueued before it, here and by others.
    """
    attend: Step = "compute", Attend(plan.pieces(groups), turn.epoch)
    return (*_gather(plan, turn, groups, given), attend, *_given(given))


def backward_steps(
    plan: OverlapPlan,
    turn: Turn,
    groups: int = 1,
    given: Sequence[Gift] | None = None,
    gather: bool = True,
    departures: Sequence[Departure] | None = None,
    keys_first: bool = False,
    given_grads: bool = False,
    in_line: bool = False,
) -> tuple[Step, ...]:
    """The same for a backward call.

    gather: keys are copied again, else those of others are in the buffer; own ones may have been read in place.
    given_grads: the kernel gives the gradients of others' keys. Else they leave by a stream of their own, since waiting for
    one must not hold up the keys of the next call. departures: how they do; None: each piece by itself. keys_first: nothing
    leaves before the last key is copied, which otherwise waits for its turn on the one copy engine there is.
    in_line: owners are told of each piece, given or pushed, and the kernel adds what comes of the gradients of own keys.
    """
    rank, epoch, foreign = plan.rank, turn.epoch, plan.pieces(groups)
    lenders = tuple(reader for reader, _ in plan.lends)
    steps: list[Step] = list(_gather(plan, turn, groups, given)) if gather else [("compute", Settle(epoch))]
    leaving: tuple[Step, ...] = ()
    attend = Attend(foreign if gather else (), epoch, foreign)
    if given_grads:
        if given is None or not gather:  # given keys say as much as "free"
            steps += [("compute", Wait(Word("free", rank, owner), last)) for owner, last in turn.before]
        attend = replace(attend, tells=tuple(plan.slot_of(piece).source for piece in foreign))
    else:
        departures = by_pieces(plan, groups) if departures is None else departures
        leaving = _pushes(rank, turn, departures, keys_first and gather, in_line)
    attend = replace(attend, adds=lenders if in_line else ())
    steps += [("compute", attend), *leaving]
    steps += [("compute", Wait(Word("sent", rank, reader), epoch)) for reader in lenders]
    steps.append(("compute", Sum(lenders, epoch)))
    steps += [("compute", Put(Word("free", reader, rank), epoch)) for reader in lenders]
    if leaving:
        steps.append(("compute", End("send")))
    return (*steps, *_given(given if gather else None))


def _pushes(rank: int, turn: Turn, departures: Sequence[Departure], keys_first: bool, tells: bool) -> tuple[Step, ...]:
    """Gradients from the memory of this rank to that of the owners of their keys, for whom it waits."""
    epoch, before = turn.epoch, dict(turn.before)
    last = {leaving.owner: i for i, leaving in enumerate(departures)}
    steps: list[Step] = [("send", End("copy"))] if keys_first and departures else []
    for i, (owner, pieces, awaited) in enumerate(departures):
        steps += [("send", Wait(Word("finished", rank, piece), epoch)) for piece in awaited]
        if owner in before:
            steps.append(("send", Wait(Word("free", rank, owner), before.pop(owner))))
        steps.append(("send", Push(pieces, owner, epoch)))
        if tells:
            steps.append(("send", Tell(owner, pieces, epoch)))
        if last[owner] == i:
            steps.append(("send", Put(Word("sent", owner, rank), epoch)))
    return tuple(steps)


def regrouped(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same call with its pulls and flags in one piece, as a kernel makes them: all waits before, all "done" after."""
    copies = [s for s in steps if _of_copies(s)]

    def phase(step: Step) -> int:
        op = step[1]
        return 0 if isinstance(op, Wait) else 2 if isinstance(op, Put) and op.word.kind == "done" else 1

    ordered = iter(sorted(copies, key=phase))
    return tuple(next(ordered) if _of_copies(s) else s for s in steps)


def _of_copies(step: Step) -> bool:
    stream, op = step
    return stream == "copy" and not isinstance(op, Begin)


def _gather(plan: OverlapPlan, turn: Turn, groups: int, given: Sequence[Gift] | None) -> Iterable[Step]:
    """Own keys to their places, and copies behind each other, with a flag after each."""
    rank, half, epoch = plan.rank, turn.half, turn.epoch
    steps: list[Step] = [("copy", Begin())] if plan.pulls or given else []
    if given is not None:
        steps += [("copy", Put(Word("open", source, rank), epoch)) for source in plan.sources]
        steps.append(("compute", Settle(epoch)))
        readers: list[int] = []
        for reader, piece in given:
            if reader not in readers:
                readers.append(reader)
                steps.append(("copy", Wait(Word("open", rank, reader), epoch)))
            steps += [("copy", Give(reader, piece, epoch)), ("copy", Put(Word("flag", reader, piece), epoch))]
        return steps + [("copy", Put(Word("gave", reader, rank), epoch)) for reader in readers]
    steps.append(("compute", Settle(epoch)))
    waited: set[int] = set()
    for piece in plan.pieces(groups):
        source = plan.slot_of(piece).source
        if source not in waited:
            waited.add(source)
            steps.append(("copy", Wait(Word("ready", rank, source), epoch)))
        steps += [("copy", Pull(piece, source, half, epoch)), ("copy", Put(Word("flag", rank, piece), epoch))]
    # behind the last flag, for which the kernel waits; sources wait for these words two calls late
    return steps + [("copy", Put(Word("done", source, rank), epoch)) for source in plan.sources]


def _given(given: Sequence[Gift] | None) -> tuple[Step, ...]:
    """What comes next may write to own keys."""
    return (("compute", End("copy")),) if given else ()
