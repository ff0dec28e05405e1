"""Explores every interleaving of the queues of several ranks, state by state.

A rank has four streams; a step of a stream starts when the one before it is complete. With one hardware queue a step also
starts only when everything enqueued before it, on any stream, has started, so that a wait holds up all that follows.
Copies and kernels take time: they have a beginning and an end, and others run in between. While the attention kernel of a
rank runs, no other kernel finds a place there: own keys are offered by one that began before it, or after its end.

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
    Fill,
    Operation,
    Pull,
    Push,
    Put,
    Settle,
    Step,
    Stream,
    Sum,
    Wait,
    Word,
    told,
)

TORN = -1
STREAMS: tuple[Stream, ...] = ("compute", "offer", "copy", "send")


class Violation(Exception):
    """The protocol lets something wrong happen."""


class At(NamedTuple):
    """How far a stream is: completed steps, and progress inside the next one (0: not started)."""

    done: int
    phase: int


class State(NamedTuple):
    at: tuple[tuple[At, ...], ...]
    words: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]  # [rank][half, part]: the epoch whose keys lie there
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

    stop_frees_streams: stopping a rank also ends the waits of its streams, not only those of its kernel. reduced: moves
    that touch no data are taken first and alone (see `Move`).
    """

    programs: Sequence[Sequence[Step]]
    one_queue: bool = False
    mortal: int | None = None
    stop_frees_streams: bool = True
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
        slots = [1 + max((op.piece for _, op in p if isinstance(op, Pull | Push)), default=-1) for p in self.programs]
        ranks = len(self.programs)
        empty = tuple((0,) * n for n in slots)
        return State(
            ((At(0, 0),) * len(STREAMS),) * ranks,
            (0,) * len(self.index),
            ((0,) * HALVES * self.parts,) * ranks,
            empty,
            empty,
            empty,
            False,
            (False,) * ranks,
        )

    @cached_property
    def parts(self) -> int:
        """In which keys are offered."""
        return 1 + max((op.part for program in self.programs for _, op in program if isinstance(op, Fill)), default=0)

    @cached_property
    def index(self) -> dict[Word, int]:
        """Place of each word in a state."""
        operations = [(rank, op) for rank, program in enumerate(self.programs) for _, op in program]
        named = {op.word for _, op in operations if isinstance(op, Wait | Put)}
        kernels = [(rank, op) for rank, op in operations if isinstance(op, Attend)]
        gated = {Word("flag", rank, slot) for rank, op in kernels for slot in op.pieces}
        reported = {Word("finished", rank, slot) for rank, op in kernels for slot in op.finishes}
        offered = {Word("offered", rank, rank) for rank, op in operations if isinstance(op, Fill)}
        added = {Word("came", rank, reader) for rank, op in kernels for reader in op.adds}
        return {word: i for i, word in enumerate(sorted(named | gated | reported | offered | added))}

    def _queue(self, rank: int, stream: int) -> list[tuple[int, Operation]]:
        return [(i, op) for i, (name, op) in enumerate(self.programs[rank]) if name == STREAMS[stream]]

    @cached_property
    def queues(self) -> list[list[list[tuple[int, Operation]]]]:
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
        stopped = state.stopped[rank]
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
            case Fill(half, epoch, part):
                if at.phase == 0 and part == 0 and self._attending(state, rank):
                    return
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                words = _with(state.words, self.index[Word("offered", rank, rank)], epoch)
                sources = _with(state.sources, rank, _with(state.sources[rank], half * self.parts + part, value))
                yield Move(then._replace(sources=sources, words=words), False)
            case Settle():
                yield Move(complete, True, True)
            case Pull(slot, source, half, epoch, parts):
                for part in range(*parts):
                    found = state.sources[source][half * self.parts + part]
                    if found != epoch and not stopped:
                        what = f"epoch {found} of rank {source} instead of {epoch} (phase {at.phase})"
                        raise Violation(f"rank {rank} copies {what}")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(buffers=_with(state.buffers, rank, _with(state.buffers[rank], slot, value))), False)
            case Attend():
                yield from self._kernel_moves(state, rank, op, at.phase, onward, complete)
            case Push(slot, _, epoch):
                if (found := state.made[rank][slot]) != epoch and not stopped:
                    raise Violation(f"rank {rank} pushes gradients of epoch {found} instead of {epoch}")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(staged=_with(state.staged, rank, _with(state.staged[rank], slot, value))), False)
            case Sum(readers, epoch):
                for reader in () if stopped else readers:
                    self._added_up(state, rank, reader, epoch)
                yield Move(onward if at.phase == 0 else complete, False)
            case _:
                assert_never(op)

    def _kernel_moves(
        self, state: State, rank: int, kernel: Attend, phase: int, onward: State, complete: State
    ) -> Iterator[Move]:
        """Start, then per piece gate, read, and report where the kernel reports it; then what is left to report, and to add."""
        work = [("start", -1)]
        for slot in kernel.pieces:
            work += [("gate", slot), ("read", slot), *([("report", slot)] if slot in kernel.finishes else [])]
        work += [("report", slot) for slot in kernel.finishes if slot not in kernel.pieces]
        work += [("add", reader) for reader in kernel.adds]
        then = complete if phase == len(work) - 1 else onward
        what, slot = work[phase]
        stopped = state.stopped[rank]
        match what:
            case "start":
                yield Move(then, False)
            case "gate":
                if self._word(state, Word("flag", rank, slot)) >= kernel.epoch or stopped:
                    yield Move(then, True, True)
            case "read":
                if (found := state.buffers[rank][slot]) != kernel.epoch and not stopped:
                    raise Violation(f"the kernel of rank {rank} reads epoch {found} in slot {slot} instead of {kernel.epoch}")
                yield Move(then, False)
            case "report":
                words = _with(state.words, self.index[Word("finished", rank, slot)], kernel.epoch)
                made = _with(state.made, rank, _with(state.made[rank], slot, kernel.epoch))
                yield Move(then._replace(words=words, made=made), False)
            case "add":
                if self._word(state, Word("came", rank, slot)) >= told(kernel.epoch, self.parts, self.parts) and not stopped:
                    self._added_up(state, rank, slot, kernel.epoch)
                yield Move(then, False)

    def _added_up(self, state: State, rank: int, reader: int, epoch: int) -> None:
        pushed = (op for _, op in self.programs[reader] if isinstance(op, Push))
        for slot in {op.piece for op in pushed if (op.owner, op.epoch) == (rank, epoch)}:
            if (found := state.staged[reader][slot]) != epoch:
                raise Violation(f"rank {rank} adds up epoch {found} of rank {reader} instead of {epoch}")

    def _attending(self, state: State, rank: int) -> bool:
        at, queue = state.at[rank][0], self.queues[rank][0]
        return at.phase > 0 and isinstance(queue[at.done][1], Attend)

    def _word(self, state: State, word: Word) -> int:
        return state.words[self.index[word]]


def _advanced(state: State, rank: int, stream: int, at: At) -> State:
    return state._replace(at=_with(state.at, rank, _with(state.at[rank], stream, at)))


def _with(items: Any, index: int, value: Any) -> Any:
    return (*items[:index], value, *items[index + 1 :])


def readers_of(plans: Sequence[OverlapPlan], rank: int) -> tuple[int, ...]:
    """The ranks that copy from `rank`."""
    return tuple(p.rank for p in plans if rank in p.sources)
