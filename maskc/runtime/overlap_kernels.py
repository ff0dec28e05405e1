"""The keys of a rank in the order of arrival, and the attention kernels over them, which wait for flags or do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import GATE_SLOTS, KernelSpec
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.diagnostics import MaskcError, error
from maskc.runtime import hopper, hopper_bwd, ops
from maskc.runtime.exchange import lent_table, way_tables
from maskc.runtime.layout import Layout
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.merge import Partial, accumulator, empty
from maskc.runtime.overlap_grads import Gradients, Owners, Result, Told, arranged, first_places, places, reports, result_rows
from maskc.runtime.overlap_pieces import (
    Leaving,
    Speed,
    choose_backward_pieces,
    choose_given,
    choose_pieces,
    sent_together,
    way_of_gradients,
)
from maskc.runtime.overlap_places import NOWHERE, InPlace, Whole
from maskc.runtime.overlap_plan import Cut, OverlapPlan, Slot, joined
from maskc.runtime.overlap_sum import GradientSum, by_blocks, own_runs
from maskc.runtime.overlap_tables import BackwardTables, Tables, Units, backward_tables, expected_arrivals, gate_tables
from maskc.runtime.overlap_words import OWNERS, Lasting
from maskc.runtime.protocol import Departure, Gift, Word, at_once, by_pieces, gifts
from maskc.runtime.ready import Launch
from maskc.runtime.remember import remembered
from maskc.runtime.transport import KeyShape, Pair, Queues, Transport, head_major, padded

Spec = TypeVar("Spec", KernelSpec, BackwardSpec)
TICK = 1024e-9
"""Seconds of one unit of the gate's clock."""


class KeyBuffer:
    """The key buffer of one rank and plan; see `Overlapped`, which fills it.

    plan: whom to copy what from. keys: the key layout. shape: of K and V. readers: the plans of ranks that see own keys, where
    these, or gradients of them, are given. timeout: seconds that one wait of the kernel may take. lasting: what outlives this
    object, made for it if None. rate: bytes per second expected of the link. groups: of key heads, copied one after another;
    None: as many as the rate allows. Neither changes a result; ranks that give each other keys have the same. holds: the
    log-sum-exp of the call whose keys lie in the buffer, where its owner says so.

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
        readers: Mapping[int, OverlapPlan] | None = None,
        timeout: float = 10.0,
        lasting: Lasting | None = None,
        rate: float = DEFAULT_MACHINE.intra,
        groups: int | None = None,
    ) -> None:
        _check(plan, keys, timeout)
        self.plan, self.layout, self.shape, self.transport = plan, keys, shape, transport
        self.queues, self.device, self.rate, self.timeout, self.epoch = queues, device, rate, timeout, 0
        self.holds: Tensor | None = None
        self.forward_cut, self.backward_cut = self._cuts(plan, groups)
        self.cuts_of_readers = {reader: self._cuts(theirs, groups) for reader, theirs in (readers or {}).items()}
        self.words = lasting or Lasting.of(device, self.forward_cut.words + self.backward_cut.words)
        if (giving := transport.gives) is None:
            self.keys, self.values = shape.empty(plan.rows, device)
        else:
            self.words = replace(self.words, flags=giving.flags(plan.rank))
            self.keys, self.values = giving.buffer(plan.rank, plan.rows)
            for t in (self.keys, self.values):
                t.zero_()  # what is never copied must be finite
        self._runs = own_runs(plan, keys)
        self._pieces: dict[int, Pair] = {}
        self._whole: dict[tuple[int, int, bool], tuple[tuple[Tensor, Tensor], Tensor]] = {}
        self._ways: dict[tuple[int, bool], tuple[Tensor, Tensor, Tensor]] = {}

    @cached_property
    def sums(self) -> GradientSum:
        return GradientSum(self.plan, self.layout, self.shape, self.transport, self.device)

    @property
    def _row_bytes(self) -> int:
        """Of the keys of a row alone, of all heads and batch items."""
        return max(1, self.shape.batch) * self.shape.heads * self.shape.dim_k * self.shape.dtype.itemsize

    @property
    def _speed(self) -> Speed | None:
        on_gpu, dims = self.device.type == "cuda", self.shape.dim_k + self.shape.dim_v
        return Speed.of(dims, self.shape.batch, hopper.multiprocessors(self.device)) if on_gpu else None

    def _cuts(self, plan: OverlapPlan, groups: int | None) -> tuple[Cut, Cut]:
        """How calls forward and backward cut a rank's keys. Given keys: by what all ranks know, for owners come to the same."""
        shape, given = self.shape, (self.shape.heads, self._row_bytes, self.rate)
        if self.transport.gives is not None:
            chosen = choose_given(plan, self.layout, *given, shape.dim_k * shape.dtype.itemsize)
        else:
            joining, speed = self.layout if self.transport.joins else None, self._speed
            forward_pieces = choose_pieces(plan, joining, *given, speed)
            chosen = forward_pieces, choose_backward_pieces(plan, self.layout, *given, speed)
        forward, back = (self._cut(plan, c, groups) for c in chosen)
        return forward, replace(back, first=forward.words)

    def _cut(self, plan: OverlapPlan, chosen: tuple[int, int], groups: int | None) -> Cut:
        plan = joined(plan, self.layout, chosen[1]) if self.transport.joins else plan
        cut = Cut(plan, groups or chosen[0], self.shape.heads)
        if cut.words > GATE_SLOTS:
            what = f"{len(plan.slots)} key chunks in {cut.groups} groups of heads"
            raise error("M722", f"{what}; a gated kernel tells {GATE_SLOTS} pieces apart", None, "larger chunks")
        return cut

    @cached_property
    def gifts(self) -> tuple[tuple[Gift, ...] | None, tuple[Gift, ...] | None]:
        """What this rank gives in a call forward and backward; None where keys are pulled."""
        if self.transport.gives is None:
            return None, None
        forward, backward = (
            gifts(
                {r: (cuts[i].plan, cuts[i].groups) for r, cuts in self.cuts_of_readers.items()}, self.plan.rank, self.layout.world
            )
            for i in range(2)
        )
        return forward, backward

    # ---- kernels

    def attend(
        self,
        local: BoundaryVectors,
        q: Tensor,
        scale: float,
        *,
        gated: bool,
        there: bool = False,
        own: InPlace | None = None,
        leave: int = 0,
        by: Launch | None = None,
    ) -> Partial:
        """The forward kernel of the current epoch over the key buffer.

        gated: it waits for flags; there: all chunks count as there. own: see `in_place`. leave: multiprocessors that it
        does not use. by: what launches a gated kernel.
        """
        keys, values = self._buffer()
        if q.shape[1] == 0 or self.plan.rows == 0:
            acc = accumulator(q.dtype)
            out, lse = empty(q.shape[0], q.shape[1], q.shape[2], values.shape[3], acc, q.device)
            return out.to(q.dtype), lse
        if q.device.type == "cpu":
            self._host_gate(self.forward_cut, there)
            return ops.forward(local, q, keys, values, scale, backend="cpu")
        spec, mask_tables = _forward_spec(local, q), schedule(local, q.shape[3])
        if not gated:
            return hopper.forward_with(spec, local, q, keys, values, scale, mask_tables)
        tables, cut = self._forward_tables(local, q), self.forward_cut
        gate = hopper.GateTables(
            tables.items.data_ptr(),
            tables.blocks.data_ptr(),
            self.words.flags.data_ptr(),
            self.words.failed.data_ptr(),
            round(self.timeout / TICK),
            self.epoch & 0xFFFFFFFF,
            len(cut.plan.slots) if there else cut.plan.own,
            len(cut.plan.slots),
            cut.group_heads,
            own.block if own else NOWHERE,
        )
        run = partial(hopper.forward_with, _gated(spec), local, q, keys, values, scale, mask_tables)
        return run(gate=gate, own=own.pair if own else None, leave=leave, by=by)

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
        own: InPlace | None = None,
        whole: Whole | None = None,
        give: bool = False,
        deterministic: bool = False,
        leave: int = 0,
        by: Launch | None = None,
    ) -> Gradients:
        """The backward kernels of the current epoch; gated: they report each chunk whose gradients are complete.

        whole: with `own`, where they complete gradients of own keys themselves. give: gradients of others' keys go to their
        owners, see `gives_gradients`. by: what launches gated ones.
        """
        keys, values = self._buffer()
        if q.shape[1] == 0 or self.plan.rows == 0:
            rows, acc = self._results[0].rows, accumulator(q.dtype)
            dk, dv = (t.new_zeros((1, t.shape[0], t.shape[2], rows, t.shape[3]), dtype=acc) for t in (keys, values))
            self.queues.follow("send", "compute")  # nothing leaves before it is zero
            self._report()
            octets = gated and q.device.type == "cuda"  # what others give and push is
            return Gradients(torch.zeros_like(q), dk, dv, octets)
        if q.device.type == "cpu":
            self._host_gate(self.backward_cut, there)
            acc = accumulator(q.dtype)
            given = (local, q, keys, values, out, lse, dout, dlse, scale)
            dq, *made = ops.backward(*given, backend="cpu", deterministic=deterministic, grad_dtype=acc)
            self._report()
            dk, dv = (arranged(self.plan, t.transpose(1, 2)[None]) for t in made)
            return Gradients(dq.to(q.dtype), dk, dv)
        spec = _backward_spec(local, q, deterministic)
        run = partial(hopper_bwd.backward_with, v=local, q=q, k=keys, val=values, out=out, lse=lse, dout=dout, dlse=dlse)
        run = partial(run, scale=scale, dtype=q.dtype, parts=True)
        if not gated:
            dq, *made = run(spec)
            dk, dv = (arranged(self.plan, t) for t in made)
            return Gradients(dq, dk, dv)
        tables = self._backward_tables(local, q, deterministic, whole is not None)
        gate = self._backward_gate(tables, spec.block_kv, there, own.block if own else NOWHERE, whole, give)
        run = partial(run, gate=gate, own=own.pair if own else None, whole=whole.results if whole else None, leave=leave)
        return Gradients(*run(_gated(spec), rows=self._results[give].rows, mask=mask_fields(local), by=by), True, give)

    def gives_gradients(self, local: BoundaryVectors, q: Tensor, deterministic: bool) -> bool:
        """Whether a gated kernel writes gradients of others' keys to where their owners add them up.

        Where several CTAs share the query heads of a key head, each has but a part of their sum. Where gradients would take much
        of the time of attention, kernels would wait for their stores; where they take little of a long time, they leave at once.
        """
        runs = q.device.type == "cuda" and q.shape[1] > 0 and self.plan.rows > 0
        gives = runs and self.transport.takes is not None and len(self.plan.sources) <= OWNERS
        return gives and self._leaving == "given" and self.splits(local, q, deterministic) == 1

    @cached_property
    def departures(self) -> tuple[Departure, ...]:
        """How gradients of others' keys leave that no kernel gives."""
        cut = self.backward_cut
        if self._leaving == "at once":
            return at_once(cut.plan, cut.groups)
        return by_pieces(cut.plan, cut.groups, sent_together(cut.plan, cut.groups, self.shape.batch))

    @cached_property
    def _leaving(self) -> Leaving:
        """See `way_of_gradients`. "given" counts where a kernel has all of their sum; else they are pushed by pieces."""
        both = self.transport.takes is not None
        return way_of_gradients(self.plan, self._row_bytes, self.rate, self._speed) if both else "by pieces"

    @cached_property
    def _results(self) -> tuple[Result, Result]:
        """The rows that a kernel leaves of gradients, where those of others are pushed, and where they are given."""
        return result_rows(self.plan), result_rows(self.plan, True)

    def result_rows(self, at: Slot) -> slice:
        """Of the gradients of all keys, those of a slot of a cut."""
        start = self._results[0].starts[at.chunk]
        return slice(start, start + sum(padded(self.layout.size_of(c)) for c in at.chunks))

    def sizes(self, local: BoundaryVectors, q: Tensor, deterministic: bool, give: bool) -> hopper_bwd.Sizes:
        """Of a gated backward. give: see `gives_gradients`."""
        spec, rows = _gated(_backward_spec(local, q, deterministic)), self._results[give].rows
        return hopper_bwd.Sizes.of(spec, local, q, self._buffer()[0], q.dtype, None, True, rows)

    def splits(self, local: BoundaryVectors, q: Tensor, deterministic: bool = False) -> int:
        """How many CTAs of a backward kernel share the query heads of a key head; 1 where there is no kernel."""
        if q.device.type != "cuda" or not (local.nq and self.plan.rows):
            return 1
        return hopper_bwd.split_heads(_backward_spec(local, q, deterministic), local, q, self._buffer()[0])[0]

    def in_place(self, k: Tensor, v: Tensor, block_kv: int) -> InPlace | None:
        """Own keys as kernels of such blocks can read them in k and v, which saves a copy of them; None where they cannot.

        They can where the rank's rows see all of them, but for some at an end.
        """
        if k.device.type != "cuda" or len(self._runs) != 1:
            return None
        block, lead, own = by_blocks(self._runs[0], block_kv)
        if own.start >= own.stop:
            return None
        pair = hopper.addressable(k[:, own]), hopper.addressable(v[:, own])
        return InPlace(block, block_kv, pair, own, (lead,) if lead[1].start < lead[1].stop else ())

    def whole(
        self, local: BoundaryVectors, q: Tensor, own: InPlace | None, grads: Pair, deterministic: bool, alone: bool = False
    ) -> Whole | None:
        """Where a gated kernel can complete gradients of own keys, else None.

        It can if it reads those in place, a CTA has all their heads, and what others have of them comes to this GPU. grads:
        dK and dV [B, own rows, Hk, D], of q's dtype. alone: as if no other rank had a part in them.
        """
        if own is None or self.transport.takes is None or grads[0].dtype != q.dtype:
            return None
        if self.splits(local, q, deterministic) > 1:
            return None
        key = own.block, own.block_kv, alone
        if key not in self._whole:
            tiles = self.sums.lent(own.block, own.block_kv, self._told)
            table = lent_table([[] for _ in tiles] if alone else tiles, self.device)
            added = torch.zeros(q.shape[0] * self.shape.heads, len(tiles), dtype=torch.int32, device=self.device)
            self._whole[key] = table, added
        dk, dv = (t[:, own.rows] for t in grads)
        return Whole((dk, dv), *self._whole[key])

    # ---- places and words

    def _buffer(self) -> Pair:
        """[B, rows, Hk, D], as kernels take keys."""
        return head_major(self.keys), head_major(self.values)

    def _place(self, cut: Cut, piece: int) -> Pair:
        """A piece in the key buffer."""
        number = cut.first + piece
        if number not in self._pieces:
            at, heads = cut.plan.slot_of(piece), cut.heads_of(piece)
            k, v = (t[heads, at.start : at.start + at.rows] for t in (self.keys, self.values))
            self._pieces[number] = k, v
        return self._pieces[number]

    def address(self, cut: Cut, word: Word) -> int:
        """Of a word, in a call that cuts keys like this."""
        match word.kind:
            case "flag" if word.holder != self.plan.rank:
                theirs = self.cuts_of_readers[word.holder][cut is self.backward_cut]
                return self._flags_of[word.holder] + 4 * (theirs.first + word.by)
            case "flag":
                return self.words.flags.data_ptr() + 4 * (cut.first + word.by)
            case "finished":
                return self.words.finished.data_ptr() + 4 * (cut.first + word.by)
            case _:
                return self.transport.address(word)

    @cached_property
    def _flags_of(self) -> dict[int, int]:
        """Address of the first flag of each reader."""
        giving = self.transport.gives
        return {} if giving is None else {r: giving.flags(r).data_ptr() for r in self.cuts_of_readers}

    # ---- tables, and what kernels do on the host

    def _told(self, reader: int, chunk: int) -> Told:
        assert self.transport.takes is not None
        return Told.of(self.cuts_of_readers[reader][1], chunk, self.transport.takes.told(self.plan.rank, reader))

    def ways(self, block_kv: int, give: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Tables of where a backward kernel of such tiles leaves gradients, and whom it tells."""
        if (block_kv, give) not in self._ways:
            taking = self.transport.takes if give else None
            owners = Owners(taking, self.transport.address, self.words.sent) if taking is not None else None
            made = places(self.plan, self.shape, owners), first_places(self.plan, block_kv)
            self._ways[block_kv, give] = way_tables(*made, reports(self.backward_cut, self.words.finished, owners), self.device)
        return self._ways[block_kv, give]

    def _backward_gate(
        self,
        tables: BackwardTables,
        block_kv: int,
        there: bool,
        own_tile: int = NOWHERE,
        whole: Whole | None = None,
        give: bool = False,
    ) -> hopper_bwd.GateTables:
        words, cut = self.words, self.backward_cut
        where, first, told = self.ways(block_kv, give)
        completed = [t.data_ptr() for t in (*whole.lent, whole.added)] if whole else [0, 0, 0]
        return hopper_bwd.GateTables(
            *(t.data_ptr() for t in (tables.items, tables.blocks, tables.tiles)),
            *(t.data_ptr() for t in (words.flags, words.counts, told, where, first, words.failed, words.lost)),
            round(self.timeout / TICK),
            self.epoch & 0xFFFFFFFF,
            cut.first + (len(cut.plan.slots) if there else cut.plan.own),
            cut.first + cut.plan.own,
            len(cut.plan.slots),
            cut.group_heads,
            own_tile,
            give,
            whole is not None,
            *completed,
        )

    def _forward_tables(self, local: BoundaryVectors, q: Tensor) -> Tables:
        _supported(local, q, *self._buffer())
        cut = self.forward_cut
        heads = q.shape[2], q.shape[0], cut.heads, cut.groups
        on = self._arrivals[0], hopper.multiprocessors(q.device), q.device
        return gate_tables(local, cut.plan, _forward_spec(local, q), *heads, *on)

    def _backward_tables(self, local: BoundaryVectors, q: Tensor, deterministic: bool, whole: bool = False) -> BackwardTables:
        _supported(local, q, *self._buffer())
        spec, cut = _backward_spec(local, q, deterministic), self.backward_cut
        split = hopper_bwd.split_heads(spec, local, q, self._buffer()[0])
        units = Units(q.shape[0], q.shape[2], cut.heads, *split, cut.groups)
        on = self._arrivals[1], hopper.multiprocessors(q.device), q.device
        return backward_tables(local, cut.plan, spec, units, *on, cut.first, whole)

    @cached_property
    def _arrivals(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of the pieces of each direction."""
        shape = self.shape
        row_bytes = shape.batch * shape.heads * (shape.dim_k + shape.dim_v) * shape.dtype.itemsize
        rates = self.rate, DEFAULT_MACHINE.latency
        forward, backward = (
            expected_arrivals(cut.plan, row_bytes, cut.groups, *rates) for cut in (self.forward_cut, self.backward_cut)
        )
        return forward, backward

    def _report(self) -> None:
        """What a kernel that has ended without reports says of its gradients: all are complete."""
        for piece in self.backward_cut.pieces:
            word = Word("finished", self.plan.rank, piece)
            self.queues.put("send", self.address(self.backward_cut, word), self.epoch)

    def _host_gate(self, cut: Cut, there: bool) -> None:
        if not there:
            for piece in cut.pieces:
                self.queues.wait("compute", self.address(cut, Word("flag", self.plan.rank, piece)), self.epoch)


def _check(plan: OverlapPlan, keys: Layout, timeout: float) -> None:
    relayed = plan.carried or any(s.source != keys.owner[s.chunk] for s in plan.slots)
    if relayed:
        raise error("M722", "chunks would be passed on between nodes", None, "make the plan with hierarchical=False")
    if not 0 < timeout / TICK < 1 << 32:
        raise error("M722", f"timeout is {timeout} s; it lies between 0 and {TICK * (1 << 32):.0f}")


def _supported(local: BoundaryVectors, q: Tensor, keys: Tensor, values: Tensor) -> None:
    if (reason := hopper.why_not(local, q, keys, values)) is not None:
        raise MaskcError(reason)


def forward_block(local: BoundaryVectors, q: Tensor) -> int:
    """Keys of a block of the forward kernel; 1 where there is no kernel."""
    return _forward_spec(local, q).block_kv if q.device.type == "cuda" else 1


def backward_block(local: BoundaryVectors, q: Tensor, deterministic: bool) -> int:
    """Keys of a tile of the backward kernel; 1 where there is no kernel."""
    return _backward_spec(local, q, deterministic).block_kv if q.device.type == "cuda" else 1


def _forward_spec(local: BoundaryVectors, q: Tensor) -> KernelSpec:
    return forward_spec(hopper.mask_form(local), q.shape[3], hopper.DTYPES[q.dtype])


def _backward_spec(local: BoundaryVectors, q: Tensor, deterministic: bool) -> BackwardSpec:
    return select_backward(hopper.mask_form(local), q.shape[3], hopper.DTYPES[q.dtype], deterministic=deterministic)


@cache
def _gated(spec: Spec) -> Spec:
    return replace(spec, gated=True)


@remembered
def schedule(local: BoundaryVectors, head_dim: int) -> tuple[Tensor, ...]:
    return hopper.schedule(local, head_dim)


@remembered
def mask_fields(local: BoundaryVectors) -> hopper_bwd.MaskFields:
    return hopper_bwd.MaskFields.of(local)
