"""Explores every interleaving of the queues of several ranks, state by state.

A rank has two streams; a step of a stream starts when the one before it is complete. With one hardware queue a step also
starts only when everything enqueued before it, on either stream, has started, so that a wait holds up all that follows.
Copies and kernels take time: they have a beginning and an end, and others run in between.

Found out: a wait for ever, a chunk read before it is there or while it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, assert_never

from maskc.runtime.protocol import HALVES, Attend, Ended, Fill, Operation, Pull, Put, Step, Stream, Wait, Word

TORN = -1
STREAMS: tuple[Stream, Stream] = ("compute", "copy")


class Violation(Exception):
    """The protocol lets something wrong happen."""


class At(NamedTuple):
    """How far a stream is: completed steps, and progress inside the next one (0: not started)."""

    done: int
    phase: int


class State(NamedTuple):
    at: tuple[tuple[At, At], ...]
    words: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]  # [rank][half]: the epoch whose keys lie there
    buffers: tuple[tuple[int, ...], ...]  # [rank][slot]
    dead: bool
    stopped: tuple[bool, ...]  # [rank]: the host has told everything to stop waiting


class Move(NamedTuple):
    state: State
    only_order: bool  # touches no data: it can run at once, no other move can undo or notice that it was early


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
            if self.reduced and self.mortal is None:
                moves = next(([m] for m in moves if m.only_order), moves)
            for move in moves:
                if move.state not in seen:
                    seen.add(move.state)
                    stack.append(move.state)
            assert len(seen) < limit, "too many states"
        return len(seen)

    # ---- the system

    def _first(self) -> State:
        slots = [1 + max((op.slot for _, op in p if isinstance(op, Pull)), default=-1) for p in self.programs]
        ranks = len(self.programs)
        return State(
            ((At(0, 0), At(0, 0)),) * ranks,
            (0,) * len(self.index),
            ((0,) * HALVES,) * ranks,
            tuple((0,) * n for n in slots),
            False,
            (False,) * ranks,
        )

    @cached_property
    def index(self) -> dict[Word, int]:
        """Place of each word in a state."""
        operations = [(rank, op) for rank, program in enumerate(self.programs) for _, op in program]
        named = {op.word for _, op in operations if isinstance(op, Wait | Put)}
        gated = {Word("flag", rank, slot) for rank, op in operations if isinstance(op, Attend) for slot in op.slots}
        return {word: i for i, word in enumerate(sorted(named | gated))}

    def _queue(self, rank: int, stream: int) -> list[tuple[int, Operation]]:
        return [(i, op) for i, (name, op) in enumerate(self.programs[rank]) if name == STREAMS[stream]]

    @cached_property
    def queues(self) -> list[list[list[tuple[int, Operation]]]]:
        """[rank][stream]: (place in the order of enqueueing, operation)."""
        return [[self._queue(rank, stream) for stream in (0, 1)] for rank in range(len(self.programs))]

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
            for stream in (0, 1):
                yield from self._stream_moves(state, rank, stream)
            if state.dead and not state.stopped[rank]:
                yield Move(state._replace(stopped=_with(state.stopped, rank, True)), False)
        if self.mortal is not None and not state.dead:
            yield Move(state._replace(dead=True), False)

    def _may_start(self, state: State, rank: int, stream: int) -> bool:
        if not self.one_queue:
            return True
        other, queues = state.at[rank][1 - stream], self.queues[rank]
        started = other.done + (other.phase > 0)
        mine = queues[stream][state.at[rank][stream].done][0]
        return started == len(queues[1 - stream]) or queues[1 - stream][started][0] > mine

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
                if self._word(state, word) >= epoch or (stopped and self.stop_frees_streams):
                    yield Move(complete, True)
            case Put(word, epoch):
                i = self.index[word]
                yield Move(complete._replace(words=_with(state.words, i, max(epoch, state.words[i]))), True)
            case Ended(epoch):
                compute = self.queues[rank][0]
                kernel = next(i for i, (_, x) in enumerate(compute) if isinstance(x, Attend) and x.epoch == epoch)
                if state.at[rank][0].done > kernel:
                    yield Move(complete, True)
            case Fill(half, epoch):
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(sources=_with(state.sources, rank, _with(state.sources[rank], half, value))), False)
            case Pull(slot, source, half, epoch):
                found = state.sources[source][half]
                if found != epoch and not stopped:
                    raise Violation(f"rank {rank} copies epoch {found} of rank {source} instead of {epoch} (phase {at.phase})")
                value, then = (TORN, onward) if at.phase == 0 else (epoch, complete)
                yield Move(then._replace(buffers=_with(state.buffers, rank, _with(state.buffers[rank], slot, value))), False)
            case Attend(slots, epoch):
                yield from self._kernel_moves(state, rank, slots, epoch, at.phase, onward, complete)
            case _:
                assert_never(op)

    def _kernel_moves(
        self, state: State, rank: int, slots: tuple[int, ...], epoch: int, phase: int, onward: State, complete: State
    ) -> Iterator[Move]:
        """Start, then gate and read by turns."""
        if phase == 0:
            yield Move(onward, True)
        elif phase > 2 * len(slots):
            yield Move(complete, True)
        elif phase % 2:
            if self._word(state, Word("flag", rank, slots[phase // 2])) >= epoch or state.stopped[rank]:
                yield Move(onward, True)
        else:
            slot = slots[phase // 2 - 1]
            if (found := state.buffers[rank][slot]) != epoch and not state.stopped[rank]:
                raise Violation(f"the kernel of rank {rank} reads epoch {found} in slot {slot} instead of {epoch}")
            yield Move(onward, False)

    def _word(self, state: State, word: Word) -> int:
        return state.words[self.index[word]]


def _advanced(state: State, rank: int, stream: int, at: At) -> State:
    return state._replace(at=_with(state.at, rank, _with(state.at[rank], stream, at)))


def _with(items: Any, index: int, value: Any) -> Any:
    return (*items[:index], value, *items[index + 1 :])
