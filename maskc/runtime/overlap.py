"""Attention beside the copies of its keys: the executors "gated" and "copy-then-attend" of one rank, forward.

Both enqueue the same steps (`maskc.runtime.protocol`) and visit keys in the same order, so their results are the same
bits. "gated" launches one kernel at once, whose loader waits for each chunk; "copy-then-attend" launches it when all
copies are complete.

Nothing chooses these executors by itself: they have been checked without a GPU only (docs/tuning.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import GATE_SLOTS, KernelSpec
from maskc.diagnostics import MaskcError, error
from maskc.runtime import hopper, ops
from maskc.runtime.layout import Layout
from maskc.runtime.merge import Partial, empty
from maskc.runtime.overlap_plan import OverlapPlan, latest_slots, work_items
from maskc.runtime.protocol import Attend, Ended, Fill, Pull, Put, Wait, Word, call_steps
from maskc.runtime.remember import remembered
from maskc.runtime.transport import HostQueues, KeyShape, Queues, Transport, read_word, write_word
from maskc.tiles import TileClass, classify

Executor: TypeAlias = Literal["gated", "copy-then-attend"]
TICK = 1024e-9
"""Seconds of one unit of the gate's clock."""
STOPPED = 0xFFFFFFFF
"""What the host writes to make kernels stop waiting."""
PARTIAL_WORK, UNMASKED_WORK, ROW_WORK = 18, 16, 16
"""Work of a tile and of a row of tiles, as the schedule kernels count it."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What the gate of one mask reads: order of work items (uint32 bits), slot range of every KV block."""

    items: Tensor
    blocks: Tensor


class Overlapped:
    """One rank of overlapped attention: its key buffer, flags and epoch, used by one call after another.

    plan: whom to copy what from. keys: the key layout. shape: of K and V. readers: ranks that copy from this one.
    timeout: seconds that one wait of the kernel may take.

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
    ) -> None:
        _check(plan, keys, timeout)
        self.plan, self.layout, self.transport, self.queues, self.device = plan, keys, transport, queues, device
        self.readers, self.timeout, self.epoch = tuple(readers), timeout, 0
        self._warm: set[tuple[object, ...]] = set()
        self.keys, self.values = shape.empty(plan.rows, device)
        self.flags = torch.zeros(max(1, len(plan.slots)), dtype=torch.int32, device=device)
        failed = torch.zeros(1, dtype=torch.int32)
        self.failed = failed.pin_memory() if device.type == "cuda" else failed
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # buffers are filled before another stream writes to them

    def forward(
        self, local: BoundaryVectors, q: Tensor, k: Tensor, v: Tensor, scale: float, executor: Executor = "gated"
    ) -> Partial:
        """(out, lse) of the rank's rows; returns while copies and kernel run, see `finish`.

        local: the mask over `plan.columns`. q [B, rows, Hq, D]; k, v [B, rows, Hk, D]: the rank's own keys.
        """
        if read_word(self.failed.data_ptr()):
            self.finish()
        self._warm_up(local, q, scale, executor)
        self.epoch += 1
        result: Partial | None = None
        for stream, op in call_steps(self.plan, self.readers, self.epoch):
            match op:
                case Wait(word, epoch):
                    self.queues.wait(stream, self._address(word), epoch)
                case Put(word, epoch):
                    self.queues.put(stream, self._address(word), epoch)
                case Ended():
                    self.queues.kernel_ended()
                case Fill(half, _):
                    self._fill(half, k, v)
                case Pull(slot, _, half, _):
                    with self.queues.on(stream):
                        self.pull(slot, half)
                case Attend():
                    if executor == "copy-then-attend":
                        self.queues.copies_ended()
                    result = self.attend(local, q, scale, gated=executor == "gated")
                    self.queues.kernel_launched()
                case _:
                    assert_never(op)
        assert result is not None
        return result

    def attend(self, local: BoundaryVectors, q: Tensor, scale: float, *, gated: bool, there: bool = False) -> Partial:
        """The kernel of the current epoch over the key buffer. gated: it waits for flags; there: all chunks count as there."""
        keys, values = self.keys.transpose(0, 1), self.values.transpose(0, 1)
        if q.shape[1] == 0 or self.plan.rows == 0:
            acc = torch.float64 if q.dtype == torch.float64 else torch.float32
            out, lse = empty(q.shape[0], q.shape[1], q.shape[2], values.shape[3], acc, q.device)
            return out.to(q.dtype), lse
        if q.device.type == "cpu":
            for slot in range(self.plan.own, len(self.plan.slots)):
                HostQueues().wait("compute", self._address(Word("flag", self.plan.rank, slot)), self.epoch)
            return ops.forward(local, q, keys, values, scale, backend="cpu")
        if (reason := hopper.why_not(local, q, keys, values)) is not None:
            raise MaskcError(reason)
        spec = forward_spec(hopper.mask_form(local), q.shape[3], hopper.DTYPES[q.dtype])
        if not gated:
            return hopper.forward_with(spec, local, q, keys, values, scale, _schedule(local, q.shape[3]))
        tables = gate_tables(local, self.plan, spec, q.shape[2], q.shape[0], q.shape[2] // keys.shape[2], q.device)
        gate = hopper.GateTables(
            tables.items.data_ptr(),
            tables.blocks.data_ptr(),
            self.flags.data_ptr(),
            self.failed.data_ptr(),
            round(self.timeout / TICK),
            self.epoch & 0xFFFFFFFF,
            len(self.plan.slots) if there else self.plan.own,
        )
        spec = replace(spec, gated=True)
        return hopper.forward_with(spec, local, q, keys, values, scale, _schedule(local, q.shape[3]), gate=gate)

    def pull(self, slot: int, half: int) -> None:
        """Enqueue the copy of a slot's chunk on torch's current stream."""
        at = self.plan.slots[slot]
        rows = slice(at.start, at.start + at.rows)
        self.transport.pull(at.source, half, at.chunk, (self.keys[rows], self.values[rows]))

    def finish(self, timeout: float | None = None) -> None:
        """Wait for everything enqueued; afterwards the rank can be used again.

        timeout: seconds after which the host stops all waits (default: twice that of a wait of the kernel).

        Raises:
            MaskcError: M721 when a chunk did not arrive; the results of calls since the last `finish` are useless.
        """
        deadline = time.monotonic() + (2 * self.timeout if timeout is None else timeout)
        while not self.queues.idle() and time.monotonic() < deadline and not read_word(self.failed.data_ptr()):
            time.sleep(1e-4)
        if not self.queues.idle():
            self.stop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = read_word(self.failed.data_ptr())
        if found:
            write_word(self.failed.data_ptr(), 0)
            raise error("M721", self._missing(found))

    def stop(self) -> None:
        """End every wait of this rank, from any thread: of its kernel and of its streams."""
        if not read_word(self.failed.data_ptr()):
            write_word(self.failed.data_ptr(), STOPPED)
        self.transport.release(self.epoch)

    # ---- steps

    def _warm_up(self, local: BoundaryVectors, q: Tensor, scale: float, executor: Executor) -> None:
        """Compile, load and launch a variant once in the open: loading a kernel while a stream waits may wait for it."""
        key = (hopper.mask_form(local), q.shape[3], q.dtype, executor)
        if q.device.type == "cuda" and key not in self._warm:
            self.attend(local, q, scale, gated=executor == "gated", there=True)
            torch.cuda.current_stream(q.device).synchronize()
            self._warm.add(key)

    def _fill(self, half: int, k: Tensor, v: Tensor) -> None:
        """Own keys to the right end of the buffer, and to where other ranks copy them from."""
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        at = 0
        wanted = {s.chunk: s for s in self.plan.slots[: self.plan.own]}
        for chunk in self.layout.chunks_of(self.plan.rank):
            size = self.layout.size_of(chunk)
            if (slot := wanted.get(chunk)) is not None:
                self.keys[slot.start : slot.start + size].copy_(k[at : at + size])
                self.values[slot.start : slot.start + size].copy_(v[at : at + size])
            at += size
        if (readable := self.transport.own(half)) is not None:
            readable[0].copy_(k)
            readable[1].copy_(v)

    def _address(self, word: Word) -> int:
        return self.flags.data_ptr() + 4 * word.by if word.kind == "flag" else self.transport.address(word)

    def _missing(self, found: int) -> str:
        if found == STOPPED:
            return f"rank {self.plan.rank}: waiting was stopped in call {self.epoch}"
        slot = self.plan.slots[found - 1]
        return f"rank {self.plan.rank}: key chunk {slot.chunk} of rank {slot.source} did not arrive within {self.timeout} s"


def _check(plan: OverlapPlan, keys: Layout, timeout: float) -> None:
    relayed = plan.carried or any(s.source != keys.owner[s.chunk] for s in plan.slots)
    if relayed:
        raise error("M722", "chunks would be passed on between nodes", None, "make the plan with hierarchical=False")
    if len(plan.slots) > GATE_SLOTS:
        raise error("M722", f"{len(plan.slots)} key chunks; a gated kernel tells {GATE_SLOTS} apart", None, "larger chunks")
    if not 0 < timeout / TICK < 1 << 32:
        raise error("M722", f"timeout is {timeout} s; it lies between 0 and {TICK * (1 << 32):.0f}")


@remembered
def _schedule(local: BoundaryVectors, head_dim: int) -> tuple[Tensor, ...]:
    return hopper.schedule(local, head_dim)


@remembered
def gate_tables(
    local: BoundaryVectors, plan: OverlapPlan, spec: KernelSpec, heads: int, batch: int, ratio: int, device: torch.device
) -> Tables:
    """Tables of a mask over the key buffer; once per mask batch, with one copy of its tile classes to the host.

    heads, batch: of q. ratio: query heads per key head; as many heads as share keys in cache are taken together.
    """
    classes = classify(local, spec.block_q, spec.block_kv).cpu().numpy().reshape(-1, *_blocks(local, spec))
    seen = classes != TileClass.SKIP.value
    partial, unmasked = ((classes == c.value).sum(2, dtype=np.int64) for c in (TileClass.PARTIAL, TileClass.UNMASKED))
    ranges = plan.block_slots(spec.block_kv)
    latest = latest_slots(seen, ranges, plan.own)
    work = PARTIAL_WORK * partial + UNMASKED_WORK * unmasked + ROW_WORK
    kv_bytes = 2 * plan.rows * spec.head_dim * 2
    group = min(heads * batch, max(1, hopper.L2_BYTES // max(1, kv_bytes)) * ratio)
    items = work_items(latest, work, heads, batch, local.batch > 1, group)
    blocks = (ranges[:, 0] | ranges[:, 1] << 16).astype(np.uint32)
    on_device = (torch.from_numpy(x.view(np.int32)).to(device) for x in (items, blocks))
    return Tables(*on_device)


def _blocks(local: BoundaryVectors, spec: KernelSpec) -> tuple[int, int]:
    return -(-local.nq // spec.block_q), -(-local.nk // spec.block_kv)
