"""Explores every interleaving of the queues of several ranks, state by state.

A rank has three streams; a step of a stream starts when the one before it is complete. With one hardware queue a step also
starts only when everything enqueued before it, on any stream, has started, so that a wait holds up all that follows.
Copies and kernels take time: they have a beginning and an end, and others run in between.

Found out: a wait for ever; a chunk, or gradients of one, read before they are there or while they are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, assert_never

from maskc.runtime.overlap_plan import OverlapPlan
from maskc.runtime.protocol import (
    HALVES,
    Attend,
    Begin,
    End,
    Give,
    Operation,
    Pull,
    Push,
    Put,
    Settle,
    Stream,
    Sum,
    Wait,
    Word,
    told,
)

TORN = -1
STREAMS: tuple[Stream, ...] = ("compute", "copy", "send")


@dataclass(frozen=True)
class Change:
    """What runs between calls writes the own keys of the next one."""

    epoch: int


@dataclass(frozen=True)
class Fill:
    """Keys of an epoch come to a half of the memory that others pull from."""

    half: int
    epoch: int


@dataclass(frozen=True)
class AttendAfter(Attend):
    """A kernel that waits for nothing: what is before it in its stream has."""


Program = Sequence[tuple[Stream, Operation | Change | Fill]]


class Violation(Exception):
    """The protocol lets something wrong happen."""


class At(NamedTuple):
    """How far a stream is: completed steps, and progress inside the next one (0: not started)."""

    done: int
    phase: int


class State(NamedTuple):
    at: tuple[tuple[At, ...], ...]
    words: tuple[int, ...]
    own: tuple[int, ...]  # [rank]: the epoch of its own keys
    sources: tuple[tuple[int, ...], ...]  # [rank][half]: the epoch whose keys lie there, to be pulled
    buffers: tuple[tuple[int, ...], ...]  # [rank][piece]
    made: tuple[tuple[int, ...], ...]  # [rank][piece]: the epoch whose gradients the rank's kernel has completed
    staged: tuple[tuple[int, ...], ...]  # [rank][piece]: the epoch whose gradients lie in the staging of the chunk's owner
    dead: bool
    stopped: tuple[bool, ...]  # [rank]: the host has told everything to stop waiting


class Move(NamedTuple):
    state: State
    only_order: bool  # touches no data: it can run at once, no other move can undo or notice that it was early
    private: bool = False  # and no other rank can notice that it was made, not even that this one died before


@dataclass(frozen=True)
class Explorer:
    """programs: what each rank enqueues. one_queue: a single hardware queue. mortal: a rank that may die at any time.

    stop_frees_streams: stopping a rank also ends the waits of its streams, not only those of its kernel. stop_tells_all:
    before, it ends the kernels of all ranks, whose results are useless then. parts: in which gradients are sent. reduced:
    moves that touch no data are taken first and alone (see `Move`).
    """

    programs: Sequence[Program]
    one_queue: bool = False
    mortal: int | None = None
    stop_frees_streams: bool = True
    stop_tells_all: bool = True
    parts: int = 1
    reduced: bool = True

    def explore(self, limit: int = 2_000_000) -> int:
        """The number of states. Raises Violation."""
        first = self._first()
        seen, stack = {first}, [first]
        while stack:
            state = stack.pop()
            moves = list(self._moves(state))
            if not moves and not self._finished(state):
                raise Violation(f"waits for ever at {self._where(state)}")
            if self.reduced:
                moves = next(([m] for m in moves if (m.only_order if self.mortal is None else m.private)), moves)
            for move in moves:
                if move.state not in seen:
                    seen.add(move.state)
                    stack.append(move.state)
            assert len(seen) < limit, "too many states"
        return len(seen)

    # ---- the system

    def _first(self) -> State:
        ranks = len(self.programs)
        used = [(r, n) for r, program in enumerate(self.programs) for _, op in program for n in _pieces(op)]
        empty = tuple((0,) * max((n + 1 for rank, n in used if rank == r), default=0) for r in range(ranks))
        return State(
            ((At(0, 0),) * len(STREAMS),) * ranks,
            (0,) * len(self.index),
            (0,) * ranks,
            ((0,) * HALVES,) * ranks,
            empty,
            empty,
            empty,
            False,
            (False,) * ranks,
        )

    @cached_property
    def index(self) -> dict[Word, int]:
        """Place of each word in a state."""
        operations = [(rank, op) for rank, program in enumerate(self.programs) for _, op in program]
        named = {op.word for _, op in operations if isinstance(op, Wait | Put)}
        kernels = [(rank, op) for rank, op in operations if isinstance(op, Attend)]
        gated = {Word("flag", rank, slot) for rank, op in kernels for slot in op.pieces}
        reported = {Word("finished", rank, slot) for rank, op in kernels for slot in op.finishes}
        added = {Word("came", rank, reader) for rank, op in kernels for reader in op.adds}
        return {word: i for i, word in enumerate(sorted(named | gated | reported | added))}

    @cached_property
    def gathered(self) -> dict[tuple[int, int], int]:
        """Of the kernels of each rank, by epoch: the epoch of the keys in its buffer."""
        found: dict[tuple[int, int], int] = {}
        for rank, program in enumerate(self.programs):
            last = 0
            for op in (op for _, op in program if isinstance(op, Attend)):
                last = op.epoch if op.pieces else last
                found[rank, op.epoch] = last
        return found

    def _queue(self, rank: int, stream: int) -> list[tuple[int, Any]]:
        return [(i, op) for i, (name, op) in enumerate(self.programs[rank]) if name == STREAMS[stream]]

    @cached_property
    def queues(self) -> list[list[list[tuple[int, Any]]]]:
        """[rank][stream]: (place in the order of enqueueing, operation)."""
        return [[self._queue(rank, stream) for stream in range(len(STREAMS))] for rank in range(len(self.programs))]

    def _finished(self, state: State) -> bool:
        return all(
            (state.dead and rank == self.mortal) or all(at.done == len(q) for at, q in zip(state.at[rank], queues, strict=True))
            for rank, queues in enumerate(self.queues)
        )

    def _where(self, state: State) -> str:
        out = []
        for rank, queues in enumerate(self.queues):
            out += [f"rank {rank}: {q[at.done][1]}" for at, q in zip(state.at[rank], queues, strict=True) if at.done < len(q)]
        return "; ".join(out)

    def _moves(self, state: State) -> Iterator[Move]:
        for rank in range(len(self.programs)):
            if state.dead and rank == self.mortal:
                continue
            for stream in range(len(STREAMS)):
                yield from self._stream_moves(state, rank, stream)
            if state.dead and not state.stopped[rank]:
                yield Move(state._replace(stopped=_with(state.stopped, rank, True)), False)
        if self.mortal is not None and not state.dead:
            yield Move(state._replace(dead=True), False)

    def _may_start(self, state: State, rank: int, stream: int) -> bool:
        if not self.one_queue:
            return True
        mine = self.queues[rank][stream][state.at[rank][stream].done][0]
        for at, queue in zip(state.at[rank], self.queues[rank], strict=True):
            started = at.done + (at.phase > 0)
            if started < len(queue) and queue[started][0] < mine:
                return False
        return True

    def _stream_moves(self, state: State, rank: int, stream: int) -> Iterator[Move]:
        at, queue = state.at[rank][stream], self.queues[rank][stream]
        if at.done == len(queue) or (at.phase == 0 and not self._may_start(state, rank, stream)):
            return
        stopped, useless = state.stopped[rank], self._useless(state, rank)
        op = queue[at.done][1]
        complete = _advanced(state, rank, stream, At(at.done + 1, 0))
        onward = _advanced(state, rank, stream, At(at.done, at.phase + 1))
        match op:
            case Wait(word, epoch):
                freed = stopped and self.stop_frees_streams and word.kind != "finished"
                if self._word(state, word) >= epoch or freed:
                    yield Move(complete, True, True)
            case Put(word, epoch):
                i = self.index[word]
                yield Move(complete._replace(words=_with(state.words, i, max(epoch, state.words[i]))), True)
            case Begin():
                before = sum(place < queue[at.done][0] for place, _ in self.queues[rank][0])
                if state.at[rank][0].done >= before:
                    yield Move(complete, True, True)
            case End(after):
                other = STREAMS.index(after)
                before = sum(place < queue[at.done][0] for place, _ in self.queues[rank][other])
                if state.at[rank][other].done >= before:
                    yield Move(complete, True, True)
            case Change(epoch):
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(own=_with(state.own, rank, value)), False)
            case Fill(half, epoch):
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(sources=_with(state.sources, rank, _with(state.sources[rank], half, value))), False)
            case Settle():
                yield Move(complete, True, True)
            case Give(reader, slot, epoch):
                if (found := state.own[rank]) != epoch and not useless:
                    raise Violation(f"rank {rank} gives keys of epoch {found} instead of {epoch} (phase {at.phase})")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(_filled(then, reader, slot, value), False)
            case Pull(slot, source, half, epoch):
                if (found := state.sources[source][half]) != epoch and not useless:
                    what = f"epoch {found} of rank {source} instead of {epoch} (phase {at.phase})"
                    raise Violation(f"rank {rank} copies {what}")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(_filled(then, rank, slot, value), False)
            case Attend():
                yield from self._kernel_moves(state, rank, op, at.phase, onward, complete)
            case Push(slot, _, epoch):
                if (found := state.made[rank][slot]) != epoch and not useless:
                    raise Violation(f"rank {rank} pushes gradients of epoch {found} instead of {epoch}")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(staged=_with(state.staged, rank, _with(state.staged[rank], slot, value))), False)
            case Sum(readers, epoch):
                for reader in () if useless else readers:
                    self._added_up(state, rank, reader, epoch)
                yield Move(onward if at.phase == 0 else complete, False)
            case _:
                assert_never(op)

    def _kernel_moves(
        self, state: State, rank: int, kernel: Attend, phase: int, onward: State, complete: State
    ) -> Iterator[Move]:
        """Start, then per piece gate, read, and report where the kernel reports it; then what is left to report, and to add."""
        waits, keys = not isinstance(kernel, AttendAfter), self.gathered[rank, kernel.epoch]
        work = [("start", -1)]
        for slot in kernel.pieces:
            work += [("gate", slot)] if waits else []
            work += [("read", slot), *([("report", slot)] if slot in kernel.finishes else [])]
        for slot in kernel.finishes:
            work += [("read", slot), ("report", slot)] if slot not in kernel.pieces else []
        work += [("add", reader) for reader in kernel.adds]
        then = complete if phase == len(work) - 1 else onward
        what, slot = work[phase]
        useless = self._useless(state, rank)
        match what:
            case "start":
                yield Move(then, False)
            case "gate":
                if self._word(state, Word("flag", rank, slot)) >= kernel.epoch or useless:
                    yield Move(then, True, True)
            case "read":
                if (found := state.buffers[rank][slot]) != keys and not useless:
                    raise Violation(f"the kernel of rank {rank} reads epoch {found} in slot {slot} instead of {keys}")
                yield Move(then, False)
            case "report":
                words = _with(state.words, self.index[Word("finished", rank, slot)], kernel.epoch)
                made = _with(state.made, rank, _with(state.made[rank], slot, kernel.epoch))
                yield Move(then._replace(words=words, made=made), False)
            case "add":
                if self._word(state, Word("came", rank, slot)) >= told(kernel.epoch, self.parts, self.parts) and not useless:
                    self._added_up(state, rank, slot, kernel.epoch)
                yield Move(then, False)

    def _added_up(self, state: State, rank: int, reader: int, epoch: int) -> None:
        pushed = (op for _, op in self.programs[reader] if isinstance(op, Push))
        for slot in {op.piece for op in pushed if (op.owner, op.epoch) == (rank, epoch)}:
            if (found := state.staged[reader][slot]) != epoch:
                raise Violation(f"rank {rank} adds up epoch {found} of rank {reader} instead of {epoch}")

    def _useless(self, state: State, rank: int) -> bool:
        return any(state.stopped) if self.stop_tells_all else state.stopped[rank]

    def _word(self, state: State, word: Word) -> int:
        return state.words[self.index[word]]


def _advanced(state: State, rank: int, stream: int, at: At) -> State:
    return state._replace(at=_with(state.at, rank, _with(state.at[rank], stream, at)))


def _filled(state: State, rank: int, slot: int, value: int) -> State:
    return state._replace(buffers=_with(state.buffers, rank, _with(state.buffers[rank], slot, value)))


def _pieces(op: object) -> tuple[int, ...]:
    """Of the buffer of its rank."""
    match op:
        case Attend(pieces, _, finishes):
            return (*pieces, *finishes)
        case Pull(piece) | Push(piece):
            return (piece,)
    return ()


def _with(items: Any, index: int, value: Any) -> Any:
    return (*items[:index], value, *items[index + 1 :])


def readers_of(plans: Sequence[OverlapPlan], rank: int) -> tuple[int, ...]:
    """The ranks that need keys of `rank`."""
    return tuple(p.rank for p in plans if rank in p.sources)
