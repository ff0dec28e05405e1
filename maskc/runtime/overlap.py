"""Attention beside the copies of its keys: the executors of one rank.

They enqueue the same steps (`maskc.runtime.protocol`), visit keys in the same order, and give the same bits:

    gated             one kernel, launched at once, whose loader waits for each chunk; copy engines bring the chunks
    copy-then-attend  the kernel starts when all copies are complete
    sm-copy           as "gated", but a few CTAs copy the chunks, and the forward kernel leaves multiprocessors to them

Backward, the gradients of a chunk leave while the kernel works on others ("copy-then-attend": after it), and every rank
adds up those of its own keys in fp32: its own first, then those of others by rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias, TypeVar, assert_never

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import GATE_SLOTS, KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.diagnostics import MaskcError, error
from maskc.runtime import exchange, hopper, hopper_bwd, ops
from maskc.runtime.layout import Layout
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.merge import Partial, empty
from maskc.runtime.overlap_plan import OverlapPlan, joined
from maskc.runtime.overlap_sum import GradientSum, over_splits, own_runs
from maskc.runtime.overlap_tables import (
    BackwardTables,
    Tables,
    Units,
    backward_tables,
    choose_pieces,
    expected_arrivals,
    gate_tables,
)
from maskc.runtime.protocol import (
    Attend,
    Begin,
    Fill,
    Operation,
    Pull,
    Push,
    Put,
    Step,
    Stream,
    Sum,
    Turn,
    Wait,
    Word,
    backward_steps,
    call_steps,
    regrouped,
)
from maskc.runtime.remember import remembered
from maskc.runtime.transport import HostQueues, KeyShape, Pair, Queues, Transport, head_major, read_word, write_word

Executor: TypeAlias = Literal["gated", "copy-then-attend", "sm-copy"]
TICK = 1024e-9
"""Seconds of one unit of the gate's clock."""
STOPPED = 0xFFFFFFFF
"""What the host writes to make kernels stop waiting."""
COPY_CTAS = 8
"""CTAs that copy in "sm-copy", and multiprocessors that the forward kernel leaves to them."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Lasting:
    """Words of a rank that outlive a call, of any plan: epochs in them only grow, so old ones are harmless.

    flags, finished, counts: int32 on the rank's device, a word per piece; counts are zero between kernels. failed: in
    host memory, not zero once somebody gave up waiting.
    """

    flags: Tensor
    finished: Tensor
    counts: Tensor
    failed: Tensor

    @classmethod
    def of(cls, device: torch.device, slots: int = GATE_SLOTS) -> Lasting:
        """Zeros; the device's are there for every stream once the current stream of the device is."""
        words = torch.zeros(3, max(1, slots), dtype=torch.int32, device=device)
        failed = torch.zeros(1, dtype=torch.int32)
        return cls(words[0], words[1], words[2], failed.pin_memory() if device.type == "cuda" else failed)


class Gradients(NamedTuple):
    """dQ, and fp32 dK and dV of every key in the buffer [splits, B, Hk, rows, D], still to be summed over splits."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Overlapped:
    """One rank of overlapped attention over one plan: its key buffer, used by one call after another.

    plan: whom to copy what from. keys: the key layout. shape: of K and V. readers: ranks that copy from this one.
    timeout: seconds that one wait of the kernel may take. lasting: what outlives this object, made for it if None.
    rate: bytes per second expected of the link. groups: of key heads, copied one after another; None: as many as the rate
    allows. Neither changes a result, and ranks may differ in them.

    Raises:
        MaskcError: M722 where the transport would have to relay chunks for other ranks, or for too many chunks.
    """

    def __init__(
        self,
        plan: OverlapPlan,
        keys: Layout,
        shape: KeyShape,
        transport: Transport,
        queues: Queues,
        device: torch.device,
        *,
        readers: Sequence[int] = (),
        timeout: float = 10.0,
        lasting: Lasting | None = None,
        rate: float = DEFAULT_MACHINE.intra,
        groups: int | None = None,
    ) -> None:
        row_bytes = shape.batch * shape.heads * shape.dim_k * shape.dtype.itemsize
        chosen, rows = choose_pieces(plan, shape.heads, row_bytes, rate)
        self.groups = groups or chosen
        if getattr(transport, "joins", False):
            plan = joined(plan, keys, rows)
        _check(plan, keys, timeout, self.groups)
        self.plan, self.layout, self.shape, self.transport = plan, keys, shape, transport
        self.queues, self.device, self.rate = queues, device, rate
        self.readers, self.timeout, self.epoch = tuple(readers), timeout, 0
        self.words = lasting or Lasting.of(device, self.groups * len(plan.slots))
        self.keys, self.values = shape.empty(plan.rows, device)
        self._places: dict[int, Pair] = {}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._runs, self.sums = own_runs(plan, keys), GradientSum(plan, keys, shape, transport, device)

    # ---- calls

    def forward(
        self, local: BoundaryVectors, q: Tensor, k: Tensor, v: Tensor, scale: float, executor: Executor = "gated"
    ) -> Partial:
        """(out, lse) of the rank's rows; returns while copies and kernel run, see `finish`.

        local: the mask over `plan.columns`. q [B, rows, Hq, D]; k, v [B, rows, Hk, D]: the rank's own keys. Where some
        keys did not arrive, lse is NaN.
        """
        attend = partial(self.attend, local, q, scale, gated=executor != "copy-then-attend", leave=_left_free(executor))
        variant = ("forward", hopper.mask_form(local), q.shape[3], q.dtype)
        self._prepare(local, variant, partial(attend, there=True), partial(self._forward_tables, local, q), executor)
        turn = self.transport.begin(self.readers)
        out, lse = self._enqueue(call_steps(self.plan, self.readers, turn, self.groups), turn, _Call(executor, k, v), attend)
        if q.device.type == "cuda" and lse.numel():
            exchange.spoil(lse, self.words.failed.data_ptr())
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
        attend = partial(
            self.attend_backward,
            local,
            q,
            out,
            lse,
            dout,
            scale,
            dlse=dlse,
            gated=executor != "copy-then-attend",
            deterministic=deterministic,
        )
        variant = ("backward", hopper.mask_form(local), q.shape[3], q.dtype, deterministic)

        def tables() -> None:
            self._backward_tables(local, q, deterministic)
            _ = self.sums.table

        self._prepare(local, variant, partial(attend, there=True), tables, executor)
        readers = self.readers if gather else None
        turn = self.transport.begin(readers, dict.fromkeys(s.source for s in self.plan.pulls))
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        call = _Call(executor, k, v, (dk, dv))
        steps = backward_steps(self.plan, self.readers, turn, self.groups, gather)
        made = self._enqueue(steps, turn, call, partial(attend, there=not gather))
        return made.dq, dk, dv

    def attend(
        self, local: BoundaryVectors, q: Tensor, scale: float, *, gated: bool, there: bool = False, leave: int = 0
    ) -> Partial:
        """The forward kernel of the current epoch over the key buffer.

        gated: it waits for flags; there: all chunks count as there. leave: multiprocessors that it does not use.
        """
        keys, values = self._buffer()
        if q.shape[1] == 0 or self.plan.rows == 0:
            acc = torch.float64 if q.dtype == torch.float64 else torch.float32
            out, lse = empty(q.shape[0], q.shape[1], q.shape[2], values.shape[3], acc, q.device)
            return out.to(q.dtype), lse
        if q.device.type == "cpu":
            self._host_gate(there)
            return ops.forward(local, q, keys, values, scale, backend="cpu")
        spec, schedule = _forward_spec(local, q), _schedule(local, q.shape[3])
        if not gated:
            return hopper.forward_with(spec, local, q, keys, values, scale, schedule)
        tables = self._forward_tables(local, q)
        gate = hopper.GateTables(
            tables.items.data_ptr(),
            tables.blocks.data_ptr(),
            self.words.flags.data_ptr(),
            self.words.failed.data_ptr(),
            round(self.timeout / TICK),
            self.epoch & 0xFFFFFFFF,
            len(self.plan.slots) if there else self.plan.own,
            len(self.plan.slots),
            self.shape.heads // self.groups,
        )
        spec = replace(spec, gated=True)
        return hopper.forward_with(spec, local, q, keys, values, scale, schedule, gate=gate, leave=leave)

    def attend_backward(
        self,
        local: BoundaryVectors,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        scale: float,
        *,
        dlse: Tensor | None = None,
        gated: bool,
        there: bool = False,
        deterministic: bool = False,
    ) -> Gradients:
        """The backward kernels of the current epoch; gated: they report each chunk whose gradients are complete."""
        keys, values = self._buffer()
        if q.shape[1] == 0 or self.plan.rows == 0:
            self._report()
            dk, dv = (torch.zeros_like(t, dtype=_accumulator(q)).transpose(1, 2)[None] for t in (keys, values))
            return Gradients(torch.zeros_like(q), dk, dv)
        if q.device.type == "cpu":
            self._host_gate(there)
            acc = _accumulator(q)
            given = (local, q, keys, values, out, lse, dout, dlse, scale)
            dq, dk, dv = ops.backward(*given, backend="cpu", deterministic=deterministic, grad_dtype=acc)
            self._report()
            return Gradients(dq.to(q.dtype), dk.transpose(1, 2)[None], dv.transpose(1, 2)[None])
        spec = _backward_spec(local, q, deterministic)
        run = partial(hopper_bwd.backward_with, v=local, q=q, k=keys, val=values, out=out, lse=lse, dout=dout, dlse=dlse)
        run = partial(run, scale=scale, dtype=q.dtype, parts=True)
        if not gated:
            return Gradients(*run(spec))
        tables, words = self._backward_tables(local, q, deterministic), self.words
        gate = hopper_bwd.GateTables(
            *(t.data_ptr() for t in (tables.items, tables.blocks, tables.tiles)),
            *(t.data_ptr() for t in (words.flags, words.counts, words.finished, words.failed)),
            round(self.timeout / TICK),
            self.epoch & 0xFFFFFFFF,
            len(self.plan.slots) if there else self.plan.own,
            self.plan.own,
            len(self.plan.slots),
            self.shape.heads // self.groups,
        )
        return Gradients(*run(replace(spec, gated=True), gate=gate))

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
            write_word(failed, 0)
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
        slot = self.plan.slot_of(found - 1)
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
        if executor == "sm-copy":
            for half in range(2):
                self._copy_table(half)
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
        for stream, run in groupby(regrouped(steps) if call.executor == "sm-copy" else steps, itemgetter(0)):
            with self.queues.on(stream):
                for _, op in run:
                    made = self._do(stream, op, turn, call, attend, result)
                    result = made if made is not None else result
        assert result is not None
        return result

    def _do(
        self, stream: Stream, op: Operation, turn: Turn, call: _Call, attend: Callable[[], Result], result: Result | None
    ) -> Result | None:
        """Enqueue one operation; torch's current stream is its stream."""
        queues, by_kernel = self.queues, call.executor == "sm-copy" and self.device.type == "cuda"
        match op:
            case Wait(word, epoch):
                queues.wait(stream, self._address(word), epoch)
            case Put(word, epoch):
                if not (by_kernel and word.kind == "flag"):
                    queues.put(stream, self._address(word), epoch)
            case Begin():
                queues.follow(stream, "compute")
                queues.keep(stream, (self.keys, self.values))
            case Fill(half, _):
                self.fill(half, call.k, call.v)
            case Pull(piece, _, half, _):
                if not by_kernel:
                    self.pull(piece, half)
                elif piece == self.plan.own:
                    self._copy_by_kernel(half)
            case Attend():
                if call.executor == "copy-then-attend":
                    queues.follow("compute", "copy")
                made = attend()
                if call.executor == "copy-then-attend":
                    queues.follow("send", "compute")
                    self._report()
                if isinstance(made, Gradients):
                    queues.keep("send", (made.dk, made.dv))
                return made
            case Push(piece, _, _):
                assert isinstance(result, Gradients)
                self.push(piece, result)
            case Sum():
                assert isinstance(result, Gradients)
                assert call.grads is not None
                self.add_up(result, call.grads)
            case _:
                assert_never(op)
        return None

    def pull(self, piece: int, half: int) -> None:
        """Enqueue the copy of a piece on torch's current stream."""
        at = self.plan.slot_of(piece)
        self.transport.pull(at.source, half, at.chunk, self._heads(piece), self._place(piece))

    def push(self, piece: int, made: Gradients) -> None:
        """Enqueue the way of a piece's gradients to their owner on torch's current stream."""
        at, heads = self.plan.slot_of(piece), self._heads(piece)
        start = at.start
        for chunk in at.chunks:
            rows = slice(start, start + self.layout.size_of(chunk))
            dk, dv = (over_splits(t[:, :, heads, rows]) for t in (made.dk, made.dv))
            self.transport.push(at.source, chunk, heads, (dk, dv))
            start = rows.stop

    def add_up(self, made: Gradients, out: Pair) -> None:
        """Enqueue the sum of what everybody has of the gradients of own keys on torch's current stream."""
        self.sums.add((made.dk, made.dv), out, self.words.failed.data_ptr())

    def _report(self) -> None:
        """What a kernel that has ended without reports says of its gradients: all are complete."""
        for piece in self.plan.pieces(self.groups):
            self.queues.put("send", self._address(Word("finished", self.plan.rank, piece)), self.epoch)

    def _host_gate(self, there: bool) -> None:
        if not there:
            for piece in self.plan.pieces(self.groups):
                HostQueues().wait("compute", self._address(Word("flag", self.plan.rank, piece)), self.epoch)

    def fill(self, half: int, k: Tensor, v: Tensor) -> None:
        """Own keys to the right end of the buffer, and to where other ranks copy them from."""
        readable = self.transport.own(half)
        if self.device.type == "cuda":
            own = hopper.addressable(k), hopper.addressable(v)
            for start, rows in self._runs:
                exchange.fill(own, (self.keys, self.values), start, rows)
            if readable is not None:
                exchange.fill(own, readable, 0, slice(0, k.shape[1]))
            return
        for start, rows in self._runs:
            self.keys[:, start : start + rows.stop - rows.start] = head_major(k[:, rows])
            self.values[:, start : start + rows.stop - rows.start] = head_major(v[:, rows])
        if readable is not None:
            readable[0].copy_(head_major(k))
            readable[1].copy_(head_major(v))

    # ---- places and tables

    def _forward_tables(self, local: BoundaryVectors, q: Tensor) -> Tables:
        _supported(local, q, *self._buffer())
        heads = q.shape[2], q.shape[0], self.shape.heads, self.groups
        return gate_tables(local, self.plan, _forward_spec(local, q), *heads, q.device)

    def _backward_tables(self, local: BoundaryVectors, q: Tensor, deterministic: bool) -> BackwardTables:
        _supported(local, q, *self._buffer())
        spec, shape = _backward_spec(local, q, deterministic), self.shape
        split = hopper_bwd.split_heads(spec, local, q, self._buffer()[0])
        units = Units(q.shape[0], q.shape[2], shape.heads, *split, self.groups)
        row_bytes = shape.batch * shape.heads * (shape.dim_k + shape.dim_v) * shape.dtype.itemsize
        arrivals = expected_arrivals(self.plan, row_bytes, self.groups, self.rate, DEFAULT_MACHINE.latency)
        return backward_tables(local, self.plan, spec, units, arrivals, hopper.multiprocessors(q.device), q.device)

    def _buffer(self) -> Pair:
        """[B, rows, Hk, D], as kernels take keys."""
        return head_major(self.keys), head_major(self.values)

    def _heads(self, piece: int) -> slice:
        each, group = self.shape.heads // self.groups, piece // len(self.plan.slots)
        return slice(group * each, (group + 1) * each)

    def _place(self, piece: int) -> Pair:
        """A piece in the key buffer."""
        if piece not in self._places:
            at, heads = self.plan.slot_of(piece), self._heads(piece)
            k, v = (t[heads, at.start : at.start + at.rows] for t in (self.keys, self.values))
            self._places[piece] = k, v
        return self._places[piece]

    def _address(self, word: Word) -> int:
        match word.kind:
            case "flag":
                return self.words.flags.data_ptr() + 4 * word.by
            case "finished":
                return self.words.finished.data_ptr() + 4 * word.by
            case _:
                return self.transport.address(word)

    def _copy_by_kernel(self, half: int) -> None:
        table, pieces = self._copy_table(half)
        words = self.words.flags.data_ptr(), self.words.counts.data_ptr()
        parts, repeats = 2 * (self.shape.heads // self.groups), getattr(self.transport, "slowness", 1)
        exchange.copy_chunks(table, pieces, parts, words, self.epoch, COPY_CTAS, repeats)

    def _copy_table(self, half: int) -> tuple[Tensor, Tensor]:
        """(copies of K and V of each head of each piece, numbers of pieces)."""
        if half not in self._copies:
            pieces = self.plan.pieces(self.groups)
            pairs: list[tuple[Tensor, Tensor]] = []
            for piece in pieces:
                at = self.plan.slot_of(piece)
                there = self.transport.readable(at.source, half, at.chunk, self._heads(piece), at.rows)
                for into, source in zip(self._place(piece), there, strict=True):
                    pairs += zip(into, source, strict=True)
            numbers = torch.tensor(pieces, dtype=torch.int32).to(self.device)
            self._copies[half] = exchange.copy_table(pairs, self.device), numbers
        return self._copies[half]


@dataclass(frozen=True, slots=True)
class _Call:
    """The tensors of a call that steps need."""

    executor: Executor
    k: Tensor
    v: Tensor
    grads: Pair | None = None


_warm: set[tuple[object, ...]] = set()


def _check(plan: OverlapPlan, keys: Layout, timeout: float, groups: int) -> None:
    relayed = plan.carried or any(s.source != keys.owner[s.chunk] for s in plan.slots)
    if relayed:
        raise error("M722", "chunks would be passed on between nodes", None, "make the plan with hierarchical=False")
    if groups * len(plan.slots) > GATE_SLOTS:
        what = f"{len(plan.slots)} key chunks in {groups} groups of heads"
        raise error("M722", f"{what}; a gated kernel tells {GATE_SLOTS} pieces apart", None, "larger chunks")
    if not 0 < timeout / TICK < 1 << 32:
        raise error("M722", f"timeout is {timeout} s; it lies between 0 and {TICK * (1 << 32):.0f}")


def _refuse_capture(device: torch.device) -> None:
    """A captured call would write and wait for the same epoch at every replay, so that its flags would be up already."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise error("M722", "an overlapped call cannot be captured into a CUDA graph", None, "capture what is around it")


def _supported(local: BoundaryVectors, q: Tensor, keys: Tensor, values: Tensor) -> None:
    if (reason := hopper.why_not(local, q, keys, values)) is not None:
        raise MaskcError(reason)


def _forward_spec(local: BoundaryVectors, q: Tensor) -> KernelSpec:
    return forward_spec(hopper.mask_form(local), q.shape[3], hopper.DTYPES[q.dtype])


def _backward_spec(local: BoundaryVectors, q: Tensor, deterministic: bool) -> BackwardSpec:
    return select_backward(hopper.mask_form(local), q.shape[3], hopper.DTYPES[q.dtype], deterministic=deterministic)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _left_free(executor: Executor) -> int:
    return COPY_CTAS if executor == "sm-copy" else 0


@remembered
def _schedule(local: BoundaryVectors, head_dim: int) -> tuple[Tensor, ...]:
    return hopper.schedule(local, head_dim)
