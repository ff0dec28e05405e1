"""Explores every interleaving of the queues of several ranks, state by state.

A rank has three streams; a step of a stream starts when the one before it is complete. With one hardware queue a step also
starts only when everything enqueued before it, on any stream, has started, so that a wait holds up all that follows.
Copies and kernels take time: they have a beginning and an end, and others run in between.

Found out: a wait for ever; a chunk, or gradients of one, read before they are there or while they are overwritten; a word that
goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
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
    Tell,
    Wait,
    Word,
)

TORN, JUNK, NAN = -1, -2, -3
"""In place of an epoch: half written; computed from keys that are not there; likewise, but it shows."""
STREAMS: tuple[Stream, ...] = ("compute", "copy", "send")
Work = list[tuple[str, int]]
"""What a kernel does, one thing after another: what, and the piece that it is about, or the reader."""
MISSED, WRONG = 1, 2
"""Flaws of a piece in the present kernel of a rank: its wait ended without it; its keys were others."""


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
    """Of what memory holds: epochs. `Explorer.places` says which place is whose."""

    at: tuple[tuple[At, ...], ...]
    words: tuple[int, ...]
    own: tuple[int, ...]  # [rank]: its own keys
    sources: tuple[tuple[int, ...], ...]  # [rank][half]: keys to be pulled
    buffers: tuple[int, ...]  # keys of pieces
    made: tuple[int, ...]  # gradients of pieces in the memory of the rank that computed them
    staged: tuple[int, ...]  # gradients in the staging of a pair of ranks
    flaws: tuple[int, ...]  # [rank]: of the pieces of its present kernel, two bits each
    failed: tuple[bool, ...]  # [rank]: its kernels wait no longer, its results are useless
    stopped: tuple[bool, ...]  # [rank]: nor do its streams
    dead: bool


class Move(NamedTuple):
    state: State
    only_order: bool  # touches no data: it can run at once, no other move can undo or notice that it was early
    private: bool = False  # and no other rank can notice that it was made, not even that this one died before


@dataclass(frozen=True)
class Places:
    """Numbers of places in a state, by whose they are.

    word: also ("told", owner, reader, piece). buffer: rank, which of its buffers, piece. made: rank, piece. staged: owner,
    reader, which of the pieces of that owner: another piece under another plan.
    """

    word: dict[Hashable, int]
    buffer: dict[tuple[int, int, int], int]
    made: dict[tuple[int, int], int]
    staged: dict[tuple[int, int, int], int]


@dataclass(frozen=True)
class Explorer:
    """programs: what each rank enqueues. one_queue: a single hardware queue. buffers: which key buffer each call uses.

    mortal: a rank that may die at any time; a kernel may give up then, and hosts stop everything. impatient: one whose kernel
    may give up at any time. stop_frees_streams: stopping a rank also ends the waits of its streams, not only those of its
    kernel. stop_tells_all: before, it ends the kernels of all ranks, whose results are useless then. sees_all: a rank whose
    sum finds that any rank has failed calls its own results useless. rework: what a kernel does instead. counts_all: it
    gives pieces, too, that it gave up waiting for. flags_apart: each key buffer has flags of its own.
    reduced: moves that touch no data are taken first and alone (see `Move`).
    """

    programs: Sequence[Program]
    one_queue: bool = False
    mortal: int | None = None
    impatient: int | None = None
    stop_frees_streams: bool = True
    stop_tells_all: bool = True
    sees_all: bool = True
    counts_all: bool = False
    flags_apart: bool = True
    rework: Callable[[Work], Work] | None = None
    buffers: str = ""
    reduced: bool = True

    def explore(self, limit: int = 2_000_000) -> int:
        """The number of states. Raises Violation."""
        first = self._first()
        seen, stack = {first}, [first]
        faultless = self.mortal is None and self.impatient is None
        while stack:
            state = stack.pop()
            moves = list(self._moves(state))
            if not moves and not self._finished(state):
                raise Violation(f"waits for ever at {self._where(state)}")
            if self.reduced:
                moves = next(([m] for m in moves if (m.only_order if faultless else m.private)), moves)
            for move in moves:
                if move.state not in seen:
                    seen.add(move.state)
                    stack.append(move.state)
            assert len(seen) < limit, "too many states"
        return len(seen)

    # ---- the system

    def _first(self) -> State:
        ranks, places = len(self.programs), self.places
        return State(
            ((At(0, 0),) * len(STREAMS),) * ranks,
            (0,) * len(places.word),
            (0,) * ranks,
            ((0,) * HALVES,) * ranks,
            (0,) * len(places.buffer),
            (0,) * len(places.made),
            (0,) * len(places.staged),
            (0,) * ranks,
            (False,) * ranks,
            (False,) * ranks,
            False,
        )

    @cached_property
    def places(self) -> Places:
        words, buffers, made = set[Any](), set[Any](), set[Any]()
        for rank, op in self._operations:
            match op:
                case Wait(word, epoch) | Put(word, epoch):
                    words.add(self._place(word, epoch))
                case Tell(owner, pieces):
                    words |= {("told", owner, rank, piece) for piece in pieces}
                case Give(reader, piece, epoch):
                    buffers.add((reader, self._buffer(epoch), piece))
                case Pull(piece, _, _, epoch):
                    buffers.add((rank, self._buffer(epoch), piece))
                case Attend(pieces, epoch, finishes, tells):
                    words |= {self._place(Word("flag", rank, piece), epoch) for piece in pieces}
                    words |= {Word("finished", rank, piece) for piece in finishes if not tells}
                    words |= {Word("sent", owner, rank) for owner in tells}
                    words |= {("told", owner, rank, piece) for piece, owner in zip(finishes, tells, strict=False)}
                    buffers |= {(rank, self._buffer(epoch), piece) for piece in (*pieces, *finishes)}
                    made |= {(rank, piece) for piece in finishes if not tells}
        staged = {(owner, rank, at) for (rank, _), cells in self.given.items() for owner, at in cells.values()}
        return Places(*({place: i for i, place in enumerate(sorted(held, key=str))} for held in (words, buffers, made, staged)))

    @cached_property
    def _operations(self) -> list[tuple[int, Any]]:
        return [(rank, op) for rank, program in enumerate(self.programs) for _, op in program]

    @cached_property
    def given(self) -> dict[tuple[int, int], dict[int, tuple[int, int]]]:
        """Gradients of a rank and epoch, given or pushed, by piece: the owner, and which of the pieces of that one it is."""
        out: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        for rank, op in self._operations:
            match op:
                case Attend(_, epoch, finishes, tells):
                    leave = list(zip(finishes, tells, strict=False))
                case Push(pieces, owner, epoch):
                    leave = [(piece, owner) for piece in pieces]
                case _:
                    continue
            cells = out.setdefault((rank, epoch), {})
            for piece, owner in leave:
                cells[piece] = owner, sum(o == owner for o, _ in cells.values())
        return out

    @cached_property
    def gathered(self) -> dict[tuple[int, int], int]:
        """Of the kernels of each rank, by epoch: the epoch of the keys in its buffer."""
        found: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for rank, op in self._operations:
            if isinstance(op, Attend):
                buffer = rank, self._buffer(op.epoch)
                last[buffer] = op.epoch if op.pieces else last.get(buffer, 0)
                found[rank, op.epoch] = last[buffer]
        return found

    def _place(self, word: Hashable, epoch: int) -> Hashable:
        """Whose place a word of a call has."""
        apart = isinstance(word, Word) and word.kind == "flag" and self.flags_apart
        return (word, self._buffer(epoch)) if apart else word

    def _buffer(self, epoch: int) -> int:
        return int(self.buffers[epoch - 1]) if self.buffers else 0

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
        trouble = state.dead or any(state.failed)
        for rank in range(len(self.programs)):
            if state.dead and rank == self.mortal:
                continue
            for stream in range(len(STREAMS)):
                yield from self._stream_moves(state, rank, stream)
            if trouble and not state.stopped[rank]:
                told = (True,) * len(state.failed) if self.stop_tells_all else _with(state.failed, rank, True)
                yield Move(state._replace(failed=told, stopped=_with(state.stopped, rank, True)), False)
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
        op = queue[at.done][1]
        complete = _advanced(state, rank, stream, At(at.done + 1, 0))
        onward = _advanced(state, rank, stream, At(at.done, at.phase + 1))
        # What streams do after a stop is of no use to anybody: everybody's results are useless before.
        loose = any(state.stopped) if self.stop_tells_all else state.stopped[rank]
        match op:
            case Wait(word, epoch):
                freed = state.stopped[rank] and self.stop_frees_streams and word.kind != "finished"
                if self._reached(state, word, epoch) or freed:
                    yield Move(complete, True, True)
            case Put(word, epoch):
                yield Move(self._said(complete, word, epoch), True)
            case Tell(owner, pieces, epoch):
                for piece in pieces:
                    complete = self._said(complete, ("told", owner, rank, piece), epoch)
                yield Move(complete, True)
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
            case Give(reader, piece, epoch):
                if (found := state.own[rank]) != epoch and not loose:
                    raise Violation(f"rank {rank} gives keys of epoch {found} instead of {epoch} (phase {at.phase})")
                value, then = (TORN, onward) if at.phase == 0 else (found, complete)
                yield Move(self._filled(then, reader, piece, epoch, value), False)
            case Pull(piece, source, half, epoch):
                if (found := state.sources[source][half]) != epoch and not loose:
                    what = f"epoch {found} of rank {source} instead of {epoch} (phase {at.phase})"
                    raise Violation(f"rank {rank} copies {what}")
                value, then = (TORN, onward) if at.phase == 0 else (found, complete)
                yield Move(self._filled(then, rank, piece, epoch, value), False)
            case Attend():
                yield from self._kernel_moves(state, rank, op, at.phase, onward, complete)
            case Push(pieces, _, epoch):
                then = onward if at.phase == 0 else complete
                for piece in pieces:
                    found = state.made[self.places.made[rank, piece]]
                    if found not in (epoch, JUNK, NAN) and not loose:
                        raise Violation(f"rank {rank} pushes gradients of epoch {found} instead of {epoch}")
                    then = self._stored(then, rank, piece, epoch, TORN if at.phase == 0 else found)
                yield Move(then, False)
            case Sum(readers, epoch):
                for reader in readers:
                    self._added_up(state, rank, reader, epoch, self.given.get((reader, epoch), {}))
                yield Move(onward if at.phase == 0 else complete, False)
            case _:
                assert_never(op)

    # ---- kernels

    def _work(self, kernel: Attend) -> Work:
        """Start; per piece wait, read, and give or report what comes of it; then what is left to report, and to add."""
        waits, owners = not isinstance(kernel, AttendAfter), dict(zip(kernel.finishes, kernel.tells, strict=False))
        last = {owner: piece for piece, owner in owners.items()}
        work = [("start", -1)]
        for piece in dict.fromkeys((*kernel.pieces, *kernel.finishes)):
            work += [("gate", piece)] if waits and piece in kernel.pieces else []
            work.append(("read", piece))
            if piece in owners:
                work += [("store", piece), ("stored", piece), ("tell", piece)]
                work += [("send", piece)] if last[owners[piece]] == piece else []
            elif piece in kernel.finishes:
                work.append(("report", piece))
        work += [("add", reader) for reader in kernel.adds]
        return self.rework(work) if self.rework else work

    @cached_property
    def _works(self) -> dict[tuple[int, int], Work]:
        return {(rank, op.epoch): self._work(op) for rank, op in self._operations if isinstance(op, Attend)}

    def _kernel_moves(
        self, state: State, rank: int, kernel: Attend, phase: int, onward: State, complete: State
    ) -> Iterator[Move]:
        epoch, keys, work = kernel.epoch, self.gathered[rank, kernel.epoch], self._works[rank, kernel.epoch]
        then = complete if phase == len(work) - 1 else onward
        what, piece = work[phase]
        flaws = state.flaws[rank] >> 2 * piece & 3 if piece >= 0 else 0
        gives = self.counts_all or not flaws & MISSED
        value = epoch if not flaws else JUNK if kernel.pieces else NAN  # kept keys are of a call whose results were NaN
        owner = dict(zip(kernel.finishes, kernel.tells, strict=False)).get(piece, -1)
        match what:
            case "start":  # one that begins after a failure gives nothing
                missed = sum(MISSED << 2 * p for p in kernel.finishes) if state.failed[rank] and kernel.tells else 0
                yield Move(then._replace(flaws=_with(state.flaws, rank, missed)), True)
            case "gate":
                without = _flawed(then, rank, piece, MISSED)
                if self._reached(state, Word("flag", rank, piece), epoch):
                    yield Move(then, True, True)
                elif state.failed[rank]:
                    yield Move(without, False)
                elif state.dead or rank == self.impatient:
                    yield Move(without._replace(failed=_with(state.failed, rank, True)), False)
            case "read":
                found = state.buffers[self.places.buffer[rank, self._buffer(epoch), piece]]
                if found != keys and not state.failed[rank]:
                    raise Violation(f"the kernel of rank {rank} reads epoch {found} in slot {piece} instead of {keys}")
                yield Move(then if found == keys else _flawed(then, rank, piece, WRONG), False)
            case "report":
                said = self._said(then, Word("finished", rank, piece), epoch)
                yield Move(said._replace(made=_with(state.made, self.places.made[rank, piece], value)), False)
            case "store" | "stored":
                made = self._stored(then, rank, piece, epoch, TORN if what == "store" else value)
                yield Move(made if gives else then, False)
            case "tell":
                yield Move(self._said(then, ("told", owner, rank, piece), epoch) if gives else then, True)
            case "send":
                of_owner = [p for p, (o, _) in self.given[rank, epoch].items() if o == owner]
                gives = self.counts_all or not any(state.flaws[rank] >> 2 * p & MISSED for p in of_owner)
                yield Move(self._said(then, Word("sent", owner, rank), epoch) if gives else then, True)
            case "add":
                cells = self.given.get((piece, epoch), {})
                told = {p: c for p, c in cells.items() if self._told(state, rank, piece, p) >= epoch}
                self._added_up(state, rank, piece, epoch, told)
                yield Move(then, False)

    def _added_up(self, state: State, rank: int, reader: int, epoch: int, cells: dict[int, tuple[int, int]]) -> None:
        """What lies there must be of this epoch; or it shows that it is useless, or the rank knows."""
        useless = any(state.failed) if self.sees_all else state.failed[rank]
        for owner, at in cells.values():
            found = state.staged[self.places.staged[owner, reader, at]]
            if owner == rank and found not in (epoch, NAN) and not useless:
                raise Violation(f"rank {rank} adds up epoch {found} of rank {reader} instead of {epoch}")

    # ---- memory

    def _reached(self, state: State, word: Hashable, epoch: int) -> bool:
        return state.words[self.places.word[self._place(word, epoch)]] >= epoch

    def _told(self, state: State, owner: int, reader: int, piece: int) -> int:
        at = self.places.word.get(("told", owner, reader, piece))
        return 0 if at is None else state.words[at]

    def _said(self, state: State, word: Hashable, epoch: int) -> State:
        at = self.places.word[self._place(word, epoch)]
        if state.words[at] > epoch:
            raise Violation(f"{word} goes back from epoch {state.words[at]} to {epoch}")
        return state._replace(words=_with(state.words, at, epoch))

    def _filled(self, state: State, rank: int, piece: int, epoch: int, value: int) -> State:
        at = self.places.buffer[rank, self._buffer(epoch), piece]
        return state._replace(buffers=_with(state.buffers, at, value))

    def _stored(self, state: State, rank: int, piece: int, epoch: int, value: int) -> State:
        owner, at = self.given[rank, epoch][piece]
        return state._replace(staged=_with(state.staged, self.places.staged[owner, rank, at], value))


def _advanced(state: State, rank: int, stream: int, at: At) -> State:
    return state._replace(at=_with(state.at, rank, _with(state.at[rank], stream, at)))


def _flawed(state: State, rank: int, piece: int, flaw: int) -> State:
    return state._replace(flaws=_with(state.flaws, rank, state.flaws[rank] | flaw << 2 * piece))


def _with(items: Any, index: int, value: Any) -> Any:
    return (*items[:index], value, *items[index + 1 :])


def readers_of(plans: Sequence[OverlapPlan], rank: int) -> tuple[int, ...]:
    """The ranks that need keys of `rank`."""
    return tuple(p.rank for p in plans if rank in p.sources)
