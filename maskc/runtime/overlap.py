"""Attention beside the copies of its keys: the executors of one rank.

They enqueue the same steps (`maskc.runtime.protocol`), visit keys in the same order, and give the same bits:

    gated             one kernel, launched at once, whose loader waits for each chunk; copy engines bring the chunks
    copy-then-attend  the kernel starts when all copies are complete
    sm-copy           as "gated", but a few CTAs copy the chunks, on multiprocessors that the kernels leave to them

Backward, the gradients of a chunk leave while the kernel works on others ("copy-then-attend": after it): a gated kernel
writes them to where the owner of the keys adds them up, if it reaches that and has all of their sum, else copies follow it.
Every rank adds up those of its own keys in fp32: its own first, then those of others by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, product
from operator import itemgetter
from typing import Literal, TypeAlias, TypeVar, assert_never

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.runtime import comm, exchange, hopper
from maskc.runtime.driver_streams import StreamWord
from maskc.runtime.merge import Partial
from maskc.runtime.overlap_again import Again, refuse_capture
from maskc.runtime.overlap_finish import STOPPED
from maskc.runtime.overlap_grads import Gradients, departing
from maskc.runtime.overlap_kernels import KeyBuffer, backward_block, forward_block
from maskc.runtime.overlap_places import InPlace, Whole, laid
from maskc.runtime.overlap_plan import Cut, Slot
from maskc.runtime.overlap_replay import (
    BACKWARD,
    FORWARD,
    SPOIL,
    SUM,
    Tape,
    gradient_sum,
    laid_again,
    place_of,
    summed_again,
)
from maskc.runtime.overlap_sum import over_splits
from maskc.runtime.overlap_words import Lasting
from maskc.runtime.protocol import (
    Attend,
    Begin,
    End,
    Give,
    Operation,
    Pull,
    Push,
    Put,
    Settle,
    Step,
    Stream,
    Sum,
    Tell,
    Turn,
    Wait,
    Word,
    backward_steps,
    call_steps,
    regrouped,
)
from maskc.runtime.ready import Ready, keeping
from maskc.runtime.transport import Pair, Prepared, Queues, read_word

Executor: TypeAlias = Literal["gated", "copy-then-attend", "sm-copy"]
COPY_CTAS = 8
"""CTAs that copy in "sm-copy", and multiprocessors that the attention kernels leave to them."""
__all__ = ["COPY_CTAS", "STOPPED", "Executor", "Gradients", "KeyBuffer", "Lasting", "Overlapped"]
Result = TypeVar("Result")


class Overlapped(Again):
    """One rank of overlapped attention over one plan: its key buffer, used by one call after another."""

    @cached_property
    def _copies(self) -> dict[tuple[Cut, int], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _departing(self) -> dict[tuple[int, ...], list[tuple[Slot, slice]]]:
        """What is pushed for pieces."""
        return {}

    @cached_property
    def _kept_on(self) -> set[Stream]:
        """Streams that the allocator knows to use the key buffer."""
        return set()

    # ---- calls

    def forward(
        self, local: BoundaryVectors, q: Tensor, k: Tensor, v: Tensor, scale: float, executor: Executor = "gated", tag: int = 0
    ) -> Partial:
        """(out, lse) of the rank's rows; returns while copies and kernel run, see `finish`.

        local: the mask over `plan.columns`. q [B, rows, Hq, D]; k, v [B, rows, Hk, D]: the rank's own keys. tag: see
        `Transport.begin`. Where some keys did not arrive, lse is NaN.
        """
        tensors = q, k, v
        key = self._key(executor, "forward", scale, q.dtype, tensors=tensors)
        if (found := self._replays.find(local, key, tensors)) is not None:
            return self._forward_again(found, tensors, tag)
        gated = executor != "copy-then-attend"
        own = self.in_place(k, v, forward_block(local, q)) if gated else None
        attend = partial(self.attend, local, q, scale, gated=gated, own=own, leave=_left_free(executor))
        variant = ("forward", hopper.mask_form(local), q.shape[3], q.dtype)
        self._prepare(local, variant, partial(attend, there=True), partial(self._forward_tables, local, q), executor)
        turn = self.transport.begin(tag=tag)
        cut = self.forward_cut
        tape, ready = self._tape(local, key, tensors), list[Ready]()
        by = None if tape is None else keeping(ready, (*FORWARD, *SPOIL))
        call = _Call(executor, turn, cut, k, v, self._runs if own is None else own.lead, tape=tape)
        out, lse = self._enqueue(call_steps(cut.plan, turn, cut.groups, self.gifts[0]), turn, call, partial(attend, by=by))
        if q.device.type == "cuda" and lse.numel():
            exchange.spoil((lse,), self.words.everybody, by=by)
        if tape is not None:
            self._keep_forward(local, key, tape, ready, own, (q, k, v, out, lse))
        return out, lse

    def backward(
        self,
        local: BoundaryVectors,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        scale: float,
        executor: Executor = "gated",
        *,
        dlse: Tensor | None = None,
        deterministic: bool = False,
        gather: bool = True,
        tag: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the rank's rows and own keys; returns while everything runs, see `finish`.

        out, lse: what `forward` returned; dout, dlse like them. deterministic: dQ too is added in a fixed order, in which
        nothing hides behind anything. gather: keys are copied again; False where the buffer still holds those of the
        last call. Where some keys did not arrive, dk and dv are NaN.
        """
        tensors = q, k, v, out, dout
        key = self._key(executor, "backward", scale, q.dtype, deterministic, gather, tensors=tensors)
        simple = dlse is None and out.dtype == dout.dtype == q.dtype and lse.is_contiguous()
        if simple and (found := self._replays.find(local, key, tensors)) is not None:
            return self._backward_again(found, tensors, lse, tag)
        gated = executor != "copy-then-attend"
        own = self.in_place(k, v, backward_block(local, q, deterministic)) if gated else None
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        gives = gated and self.gives_gradients(local, q, deterministic)
        whole = self.whole(local, q, own, (dk, dv), deterministic)
        parts = gated and self.splits(local, q, deterministic) > 1
        spare = self._backward_tables(local, q, deterministic).spare if parts else 0
        attend = partial(
            self.attend_backward,
            local,
            q,
            out,
            lse,
            dout,
            scale,
            dlse=dlse,
            gated=gated,
            own=own,
            whole=whole,
            deterministic=deterministic,
            leave=max(spare, _left_free(executor)),
        )
        variant = ("backward", hopper.mask_form(local), q.shape[3], q.dtype, deterministic)

        def tables() -> None:
            self._backward_tables(local, q, deterministic, whole is not None)
            if gated:
                self.ways(backward_block(local, q, deterministic), gives)
            self.sums.table(gives)

        self._prepare(local, variant, partial(attend, there=True), tables, executor)
        turn = self.transport.begin(self.plan.sources, tag)
        cut = self.backward_cut
        added = self._added(own, whole, turn.epoch)
        # where an owner was not written to before, later calls wait for more words than this one
        tape = self._tape(local, key, tensors) if simple and len(turn.before) == len(self.plan.sources) else None
        call = _Call(executor, turn, cut, k, v, self._runs if own is None else own.lead, (dk, dv), added, gather, tape)
        ready = list[Ready]()
        by = None if tape is None else keeping(ready, BACKWARD)
        how = gather, self.departures, self.transport.one_engine, gives, gated and self.transport.takes is not None
        steps = backward_steps(cut.plan, turn, cut.groups, self.gifts[1], *how)
        made = self._enqueue(steps, turn, call, partial(attend, there=not gather, give=gives, by=by))
        for owner, size in self._given_bytes.items() if gives else ():
            comm.count_sent("grad", owner, size)
            if tape is not None:
                tape.sent("grad", owner, size)
        if tape is not None:
            self._keep_backward(local, key, tape, ready, own, whole, (q, k, v, dk, dv), made, deterministic)
        return made.dq, dk, dv

    # ---- steps

    def _prepare(
        self,
        local: BoundaryVectors,
        variant: tuple[object, ...],
        attend: Callable[[], object],
        tables: Callable[[], object],
        executor: Executor,
    ) -> None:
        """Everything that a wait could hold up: kernels are compiled, loaded and launched once in the open, tables made."""
        if read_word(self.words.failed.data_ptr()):
            self.finish()
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                refuse_capture()
        if self.plan.rows and local.nq:
            tables()
        if executor == "sm-copy" and self.transport.pulls is not None:
            for cut, half in product((self.forward_cut, self.backward_cut), range(2)):
                self._copy_table(cut, half)
        warm = (self.device, executor == "copy-then-attend", *variant)
        if warm not in _warm:
            attend()
            exchange.warm(self.device)
            torch.cuda.current_stream(self.device).synchronize()
            _warm.add(warm)

    def _enqueue(self, steps: Sequence[Step], turn: Turn, call: _Call, attend: Callable[[], Result]) -> Result:
        """Everything a call does, in order; what `attend` returned."""
        self.epoch = turn.epoch
        self.queues.on("compute")
        result: Result | None = None
        for stream, run in groupby(regrouped(steps) if self._by_kernel(call) else steps, itemgetter(0)):
            with self.queues.on(stream):
                for words, some in groupby((op for _, op in run), lambda op: isinstance(op, Wait | Put | Tell)):
                    if words:
                        self._say(stream, some, call, result)
                        continue
                    for op in some:
                        made = self._do(stream, op, turn, call, attend, result)
                        result = made if made is not None else result
        assert result is not None
        return result

    def _say(self, stream: Stream, operations: Iterable[Operation], call: _Call, result: object) -> None:
        """Enqueue waits and words that follow each other, in one operation of their stream."""
        copied = self._by_kernel(call)  # which tells of its copies, too
        sums: list[tuple[StreamWord, int]] = []  # over CTAs, on a stream of their own; each with the place of its value
        words: list[tuple[StreamWord, int]] = []
        for op in operations:
            if isinstance(op, Tell):
                words += [(StreamWord(False, self._told_at[op.owner] + 4 * p, op.epoch & 0xFFFFFFFF), 0) for p in op.pieces]
                continue
            assert isinstance(op, Wait | Put)
            waits = isinstance(op, Wait)
            if waits or not (copied and op.word.kind == "flag"):
                apart = waits and op.word.kind == "finished" and _in_parts(result)
                word = StreamWord(waits, self.address(call.cut, op.word), op.epoch & 0xFFFFFFFF)
                (sums if apart else words).append((word, place_of(op, call.turn)))
        both: tuple[tuple[Stream, list[tuple[StreamWord, int]]], ...] = ("sum", sums), (stream, words)
        for to, some in both:
            if some:
                self.queues.words(to, [word for word, _ in some])
                if call.tape is not None:
                    call.tape.words(to, [word._replace(value=place) for word, place in some])

    def _do(
        self, stream: Stream, op: Operation, turn: Turn, call: _Call, attend: Callable[[], Result], result: Result | None
    ) -> Result | None:
        """Enqueue one operation; torch's current stream is its stream."""
        queues = self.queues
        match op:
            case Wait() | Put() | Tell():
                raise AssertionError(f"{op}: words go with those beside them, see `_say`")
            case Begin():
                call.follow(queues, stream, "compute")
                if self.transport.gives is None and stream not in self._kept_on:
                    queues.keep(stream, (self.keys, self.values))
                    self._kept_on.add(stream)
            case Settle():
                self.settle(call.k, call.v, call.settled)
                if call.tape is not None and call.settled:
                    call.tape.add(partial(laid_again, (self.keys, self.values), call.settled))
            case Give(reader, piece, _):
                self.give(call.cut, reader, piece, call.own, call.executor == "sm-copy")
                if call.tape is not None:
                    call.tape.copies(stream, "own", ("kv", reader), self._given(call.cut, reader, piece, call.own))
            case Pull(piece, _, half, _):
                if not self._by_kernel(call):
                    self.pull(call.cut, piece, half)
                elif piece == self.plan.own:
                    self._copy_by_kernel(call.cut, half)
            case Attend():
                if call.executor == "copy-then-attend":
                    self._await_keys(call)
                made = attend()
                if call.tape is not None:
                    call.tape.here("attend")
                if call.executor == "copy-then-attend":
                    queues.follow("send", "compute")
                    self._report()
                return made
            case Push(pieces, _, _):
                assert isinstance(result, Gradients)
                self.push(pieces, result, call.tape)
            case End(after):
                call.follow(queues, stream, after)
            case Sum():
                assert isinstance(result, Gradients)
                assert call.grads is not None
                self.add_up(result, call.grads, call.added, call.tape)
            case _:
                assert_never(op)
        return None

    def _by_kernel(self, call: _Call) -> bool:
        """Whether one kernel makes all copies of keys."""
        return call.executor == "sm-copy" and self.device.type == "cuda" and self.transport.pulls is not None

    def _await_keys(self, call: _Call) -> None:
        """The compute stream goes on once all keys of the call are there."""
        if self.transport.gives is None:
            self.queues.follow("compute", "copy")
        elif call.gather:
            gave = (self.address(call.cut, Word("gave", self.plan.rank, source)) for source in self.plan.sources)
            self.queues.words("compute", [StreamWord(True, at, self.epoch & 0xFFFFFFFF) for at in gave])

    def give(self, cut: Cut, reader: int, piece: int, own: Pair, by_kernel: bool = False) -> None:
        """Enqueue the copy of own keys to a piece of a reader's buffer on torch's current stream. cut: of this rank's call."""
        giving, theirs = self.transport.gives, self.cuts_of_readers[reader][cut is self.backward_cut]
        assert giving is not None
        giving.give(reader, theirs, piece, own, by_kernel)

    def pull(self, cut: Cut, piece: int, half: int) -> None:
        """Enqueue the copy of a piece on torch's current stream."""
        at, pulling = cut.plan.slot_of(piece), self.transport.pulls
        assert pulling is not None
        pulling.pull(at.source, half, at.chunk, cut.heads_of(piece), self._place(cut, piece))

    def _given(self, cut: Cut, reader: int, piece: int, own: Pair) -> Prepared:
        """What `give` enqueues."""
        giving, theirs = self.transport.gives, self.cuts_of_readers[reader][cut is self.backward_cut]
        assert giving is not None
        return giving.given(reader, theirs, piece, own)

    def push(self, pieces: tuple[int, ...], made: Gradients, tape: Tape | None = None) -> None:
        """Enqueue the way of these pieces' gradients to their owner on torch's current stream, which is "send".

        tape: notes it, too.
        """
        found = self._departing.get(pieces)
        if found is None:
            joining = self.layout if self.transport.joins else None
            found = self._departing[pieces] = departing(self.plan, self.backward_cut, pieces, joining)
        for at, heads in found:
            sums = self._push(at, heads, made)
            if tape is not None:
                self._note_push(at, heads, made, sums, tape)

    def _note_push(self, at: Slot, heads: slice, made: Gradients, sums: Pair | None, tape: Tape) -> None:
        rows, taking = self.result_rows(at), self.transport.takes
        assert taking is not None
        if sums is None:
            pushed = taking.pushed(at.source, at.chunk, heads, rows, (made.dk[0], made.dv[0]))
            tape.copies("send", "parts", ("grad", at.source), pushed)
            return
        tape.add(partial(summed_again, self.queues, heads, rows))
        tape.follow("send", "sum")
        tape.copies("send", "sums", ("grad", at.source), taking.pushed(at.source, at.chunk, heads, None, sums))

    def _push(self, at: Slot, heads: slice, made: Gradients) -> Pair | None:
        """What was summed for it."""
        rows = self.result_rows(at)
        if made.dk.shape[0] == 1:
            self.transport.push_rows(at.source, at.chunk, heads, rows, (made.dk[0], made.dv[0]))
            return None
        with self.queues.on("sum"):  # the next sum need not wait for this piece to be gone
            dk, dv = (over_splits(t[:, :, heads, rows]) for t in (made.dk, made.dv))
        self.queues.follow("send", "sum")
        self.queues.keep("send", (dk, dv))
        self.transport.push(at.source, at.chunk, heads, (dk, dv))
        return dk, dv

    def add_up(self, made: Gradients, out: Pair, added: exchange.Added | None = None, tape: Tape | None = None) -> None:
        """Enqueue the sum of what everybody has of the gradients of own keys on torch's current stream. tape: notes it, too."""
        if tape is None:
            self.sums.add(made, out, self.words.everybody, added)
            return
        sums, spoil = list[Ready](), list[Ready]()
        self.sums.add(made, out, self.words.everybody, added, (keeping(sums, SUM), keeping(spoil, SPOIL)))
        tape.add(gradient_sum(sums, spoil[0], tape.stream, added is not None))

    @cached_property
    def _given_bytes(self) -> dict[int, int]:
        """Of gradients, by the owner of their keys."""
        rows = {owner: sum(s.rows for s in self.plan.pulls if s.source == owner) for owner in self.plan.sources}
        return {owner: n * self.shape.heads * self.shape.gradient_bytes for owner, n in rows.items()}

    @cached_property
    def _told_at(self) -> dict[int, int]:
        """Address of the first word that tells each owner of gradients."""
        taking = self.transport.takes
        return {} if taking is None else {o: taking.told(o, self.plan.rank).data_ptr() for o in self.plan.sources}

    def _added(self, own: InPlace | None, whole: Whole | None, epoch: int) -> exchange.Added | None:
        """What the backward kernel adds up itself."""
        if own is None or whole is None:
            return None
        return exchange.Added(whole.added, epoch, own.block, own.block_kv)

    def settle(self, k: Tensor, v: Tensor, runs: Sequence[exchange.Run] | None = None) -> None:
        """Own keys to their places in the buffer; all that the rank sees, or some."""
        laid((k, v), (self.keys, self.values), self._runs if runs is None else runs)

    # ---- places and tables

    def _copy_by_kernel(self, cut: Cut, half: int) -> None:
        table, pieces = self._copy_table(cut, half)
        words = self.words.flags.data_ptr(), self.words.copied.data_ptr()
        parts, repeats = 2 * cut.group_heads, getattr(self.transport, "slowness", 1)
        exchange.copy_chunks(table, pieces, parts, words, self.epoch, COPY_CTAS, repeats)

    def _copy_table(self, cut: Cut, half: int) -> tuple[Tensor, Tensor]:
        """(copies of K and V of each head of each piece, numbers of their words)."""
        if (cut, half) not in self._copies:
            pairs: list[tuple[Tensor, Tensor]] = []
            pulling = self.transport.pulls
            assert pulling is not None
            for piece in cut.pieces:
                at = cut.plan.slot_of(piece)
                there = pulling.readable(at.source, half, at.chunk, cut.heads_of(piece), at.rows)
                for into, source in zip(self._place(cut, piece), there, strict=True):
                    pairs += zip(into, source, strict=True)
            numbers = torch.tensor([cut.first + piece for piece in cut.pieces], dtype=torch.int32).to(self.device)
            self._copies[cut, half] = exchange.copy_table(pairs, self.device), numbers
        return self._copies[cut, half]


@dataclass(frozen=True)
class _Call:
    """What steps of a call need.

    settled: own keys that the kernel reads in the buffer. gather: keys are copied. tape: what notes the steps, to be made again.
    """

    executor: Executor
    turn: Turn
    cut: Cut
    k: Tensor
    v: Tensor
    settled: Sequence[exchange.Run]
    grads: Pair | None = None
    added: exchange.Added | None = None
    gather: bool = True
    tape: Tape | None = None

    def follow(self, queues: Queues, stream: Stream, other: Stream) -> None:
        queues.follow(stream, other)
        if self.tape is not None:
            self.tape.follow(stream, other)

    @cached_property
    def own(self) -> Pair:
        """Keys and values as copy engines and kernels can read them."""
        return (hopper.addressable(self.k), hopper.addressable(self.v)) if self.k.device.type == "cuda" else (self.k, self.v)


_warm: set[tuple[object, ...]] = set()
"""Kinds of calls that this process has made once in the open: what they compiled and loaded lasts as long as it does."""


def _in_parts(result: object) -> bool:
    """Whether gradients have to be summed over several CTAs before they leave."""
    return isinstance(result, Gradients) and result.dk.shape[0] > 1


def _left_free(executor: Executor) -> int:
    return COPY_CTAS if executor == "sm-copy" else 0
