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

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, product
from operator import itemgetter
from typing import Literal, TypeAlias, TypeVar, assert_never

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.diagnostics import error
from maskc.runtime import comm, exchange, hopper
from maskc.runtime.driver_streams import StreamWord
from maskc.runtime.merge import Partial
from maskc.runtime.overlap_grads import Gradients, departing
from maskc.runtime.overlap_kernels import InPlace, KeyBuffer, Whole, backward_block, forward_block
from maskc.runtime.overlap_plan import Cut, Slot
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
from maskc.runtime.transport import Pair, head_major, read_word, write_word

Executor: TypeAlias = Literal["gated", "copy-then-attend", "sm-copy"]
STOPPED = 0xFFFFFFFF
"""What the host writes to make kernels stop waiting."""
COPY_CTAS = 8
"""CTAs that copy in "sm-copy", and multiprocessors that the attention kernels leave to them."""
__all__ = ["COPY_CTAS", "STOPPED", "Executor", "Gradients", "KeyBuffer", "Lasting", "Overlapped"]
Result = TypeVar("Result")


class Overlapped(KeyBuffer):
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
        self, local: BoundaryVectors, q: Tensor, k: Tensor, v: Tensor, scale: float, executor: Executor = "gated"
    ) -> Partial:
        """(out, lse) of the rank's rows; returns while copies and kernel run, see `finish`.

        local: the mask over `plan.columns`. q [B, rows, Hq, D]; k, v [B, rows, Hk, D]: the rank's own keys. Where some
        keys did not arrive, lse is NaN.
        """
        gated = executor != "copy-then-attend"
        own = self.in_place(k, v, forward_block(local, q)) if gated else None
        attend = partial(self.attend, local, q, scale, gated=gated, own=own, leave=_left_free(executor))
        variant = ("forward", hopper.mask_form(local), q.shape[3], q.dtype)
        self._prepare(local, variant, partial(attend, there=True), partial(self._forward_tables, local, q), executor)
        turn = self.transport.begin()
        cut = self.forward_cut
        call = _Call(executor, cut, k, v, self._runs if own is None else own.lead)
        out, lse = self._enqueue(call_steps(cut.plan, turn, cut.groups, self.gifts[0]), turn, call, attend)
        if q.device.type == "cuda" and lse.numel():
            exchange.spoil((lse,), self.words.everybody)
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the rank's rows and own keys; returns while everything runs, see `finish`.

        out, lse: what `forward` returned; dout, dlse like them. deterministic: dQ too is added in a fixed order, in which
        nothing hides behind anything. gather: keys are copied again; False where the buffer still holds those of the
        last call. Where some keys did not arrive, dk and dv are NaN.
        """
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
            self.sums.table(gives)

        self._prepare(local, variant, partial(attend, there=True), tables, executor)
        turn = self.transport.begin(dict.fromkeys(s.source for s in self.plan.pulls))
        cut = self.backward_cut
        added = self._added(own, whole, turn.epoch)
        call = _Call(executor, cut, k, v, self._runs if own is None else own.lead, (dk, dv), added, gather)
        how = gather, self.departures, self.transport.one_engine, gives, gated and self.transport.takes is not None
        steps = backward_steps(cut.plan, turn, cut.groups, self.gifts[1], *how)
        made = self._enqueue(steps, turn, call, partial(attend, there=not gather, give=gives))
        for owner, size in self._given_bytes.items() if gives else ():
            comm.count_sent("grad", owner, size)
        return made.dq, dk, dv

    # ---- waiting for the end

    def finish(self, timeout: float | None = None) -> None:
        """Wait for everything enqueued; afterwards the rank can be used again.

        timeout: seconds after which the host stops all waits (default: twice that of a wait of the kernel).

        Raises:
            MaskcError: M721 when a chunk did not arrive; the results of calls since the last `finish` are useless.
        """
        failed = self.words.failed.data_ptr()
        deadline = time.monotonic() + (2 * self.timeout if timeout is None else timeout)
        while not self.queues.idle() and time.monotonic() < deadline and not read_word(failed):
            time.sleep(1e-4)
        if not self.queues.idle():
            self.stop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = read_word(failed)
        if found:
            if self.words.everybody.numel() == 1:  # else others go by it, too, and the link is not used again
                write_word(failed, 0)
                for t in (self.words.counts, self.words.sent, self.words.lost):  # as they stand
                    t.zero_()
            raise error("M721", self._missing(found))

    def stop(self) -> None:
        """End every wait of this rank, from any thread: of its kernel and of its streams."""
        failed = self.words.failed.data_ptr()
        if not read_word(failed):
            write_word(failed, STOPPED)
        self.transport.release(self.epoch)

    def _missing(self, found: int) -> str:
        if found == STOPPED:
            return f"rank {self.plan.rank}: waiting was stopped in call {self.epoch}"
        cut = self.forward_cut if found <= self.forward_cut.words else self.backward_cut
        slot = cut.plan.slot_of(found - 1 - cut.first)
        return f"rank {self.plan.rank}: key chunk {slot.chunk} of rank {slot.source} did not arrive within {self.timeout} s"

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
        _refuse_capture(self.device)
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
        sums: list[StreamWord] = []  # over CTAs, on a stream of their own
        words: list[StreamWord] = []
        for op in operations:
            if isinstance(op, Tell):
                words += [StreamWord(False, self._told_at[op.owner] + 4 * p, op.epoch & 0xFFFFFFFF) for p in op.pieces]
                continue
            assert isinstance(op, Wait | Put)
            waits = isinstance(op, Wait)
            if waits or not (copied and op.word.kind == "flag"):
                apart = waits and op.word.kind == "finished" and _in_parts(result)
                (sums if apart else words).append(StreamWord(waits, self.address(call.cut, op.word), op.epoch & 0xFFFFFFFF))
        if sums:
            self.queues.words("sum", sums)
        if words:
            self.queues.words(stream, words)

    def _do(
        self, stream: Stream, op: Operation, turn: Turn, call: _Call, attend: Callable[[], Result], result: Result | None
    ) -> Result | None:
        """Enqueue one operation; torch's current stream is its stream."""
        queues = self.queues
        match op:
            case Wait() | Put() | Tell():
                raise AssertionError(f"{op}: words go with those beside them, see `_say`")
            case Begin():
                queues.follow(stream, "compute")
                if self.transport.gives is None and stream not in self._kept_on:
                    queues.keep(stream, (self.keys, self.values))
                    self._kept_on.add(stream)
            case Settle():
                self.settle(call.k, call.v, call.settled)
            case Give(reader, piece, _):
                self.give(call.cut, reader, piece, call.own, call.executor == "sm-copy")
            case Pull(piece, _, half, _):
                if not self._by_kernel(call):
                    self.pull(call.cut, piece, half)
                elif piece == self.plan.own:
                    self._copy_by_kernel(call.cut, half)
            case Attend():
                if call.executor == "copy-then-attend":
                    self._await_keys(call)
                made = attend()
                if call.executor == "copy-then-attend":
                    queues.follow("send", "compute")
                    self._report()
                return made
            case Push(pieces, _, _):
                assert isinstance(result, Gradients)
                self.push(pieces, result)
            case End(after):
                queues.follow(stream, after)
            case Sum():
                assert isinstance(result, Gradients)
                assert call.grads is not None
                self.add_up(result, call.grads, call.added)
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

    def push(self, pieces: tuple[int, ...], made: Gradients) -> None:
        """Enqueue the way of these pieces' gradients to their owner on torch's current stream, which is "send"."""
        found = self._departing.get(pieces)
        if found is None:
            joining = self.layout if self.transport.joins else None
            found = self._departing[pieces] = departing(self.plan, self.backward_cut, pieces, joining)
        for at, heads in found:
            self._push(at, heads, made)

    def _push(self, at: Slot, heads: slice, made: Gradients) -> None:
        rows = self.result_rows(at)
        if made.dk.shape[0] == 1:
            self.transport.push_rows(at.source, at.chunk, heads, rows, (made.dk[0], made.dv[0]))
            return
        with self.queues.on("sum"):  # the next sum need not wait for this piece to be gone
            dk, dv = (over_splits(t[:, :, heads, rows]) for t in (made.dk, made.dv))
        self.queues.follow("send", "sum")
        self.queues.keep("send", (dk, dv))
        self.transport.push(at.source, at.chunk, heads, (dk, dv))

    def add_up(self, made: Gradients, out: Pair, added: exchange.Added | None = None) -> None:
        """Enqueue the sum of what everybody has of the gradients of own keys on torch's current stream."""
        self.sums.add(made, out, self.words.everybody, added)

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
        _laid((k, v), (self.keys, self.values), self._runs if runs is None else runs)

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
    """What steps of a call need. settled: own keys that the kernel reads in the buffer. gather: keys are copied."""

    executor: Executor
    cut: Cut
    k: Tensor
    v: Tensor
    settled: Sequence[exchange.Run]
    grads: Pair | None = None
    added: exchange.Added | None = None
    gather: bool = True

    @cached_property
    def own(self) -> Pair:
        """Keys and values as copy engines and kernels can read them."""
        return (hopper.addressable(self.k), hopper.addressable(self.v)) if self.k.device.type == "cuda" else (self.k, self.v)


_warm: set[tuple[object, ...]] = set()
"""Kinds of calls that this process has made once in the open: what they compiled and loaded lasts as long as it does."""


def _refuse_capture(device: torch.device) -> None:
    """A captured call would write and wait for the same epoch at every replay, so that its flags would be up already."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise error("M722", "an overlapped call cannot be captured into a CUDA graph", None, "capture what is around it")


def _in_parts(result: object) -> bool:
    """Whether gradients have to be summed over several CTAs before they leave."""
    return isinstance(result, Gradients) and result.dk.shape[0] > 1


def _left_free(executor: Executor) -> int:
    return COPY_CTAS if executor == "sm-copy" else 0


def _laid(own: Pair, into: Pair, runs: Sequence[exchange.Run]) -> None:
    """Rows of own keys and values [B, rows, Hk, D] to rows of [Hk, rows, B, D], with the whole machine."""
    if not runs:
        return
    if own[0].device.type == "cuda" and into[0][0].is_contiguous():
        ctas = hopper.multiprocessors(own[0].device)
        exchange.fill((hopper.addressable(own[0]), hopper.addressable(own[1])), into, runs, ctas)
        return
    for t, to in zip(own, into, strict=True):
        for start, rows in runs:
            to[:, start : start + rows.stop - rows.start].copy_(head_major(t[:, rows]))
