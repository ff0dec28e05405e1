"""The overlapped executors on host queues: the steps they enqueue give the dense answer, epoch after epoch."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import GATE_SLOTS, MaskForm
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper, mask_tables
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.overlap import STOPPED, Overlapped
from maskc.runtime.overlap_grads import Gradients
from maskc.runtime.overlap_plan import Cut, overlap_plan
from maskc.runtime.overlap_sum import by_blocks
from maskc.runtime.overlap_tables import expected_arrivals, gate_tables
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.protocol import Epochs, Turn, Word, at_once, by_pieces
from maskc.runtime.transport import (
    HostQueues,
    KeyShape,
    Loopback,
    Pair,
    by_chunk,
    head_major,
    read_word,
    write_word,
)
from tests.dist.cases import FORMS, Case, dense, tensors, vectors
from tests.overlap.explorer import readers_of

CPU = torch.device("cpu")


class World:
    """Every rank of a case with its loopback."""

    def __init__(self, case: Case, groups: int | None = None, rate: float = 1e12) -> None:
        self.case, self.v = case, vectors(case)
        self.p: AttentionPlan = case.plan(self.v)
        shape = KeyShape(case.batch[0], case.heads[1], *case.dims, torch.float64)
        self.plans = [overlap_plan(self.p, r) for r in range(case.world)]
        self.links = [Loopback(self.p.keys, o.rank, o.sources, shape, pinned=False, lends=o.lends) for o in self.plans]
        self.ranks = [
            Overlapped(o, self.p.keys, shape, link, HostQueues(), CPU, timeout=0.2, groups=groups, rate=rate)
            for o, link in zip(self.plans, self.links, strict=True)
        ]

    def post(self, rank: int, epoch: int, k: Tensor, val: Tensor) -> None:
        for peer in self.plans[rank].sources:
            self.links[rank].post(peer, epoch, self._fill(peer, k, val))

    def _fill(self, peer: int, k: Tensor, val: Tensor) -> Callable[[Pair], None]:
        def fill(pair: Pair) -> None:
            for half, whole in zip(pair, (k, val), strict=True):
                half.copy_(head_major(self.p.shard(whole, peer, of="keys")))

        return fill

    def forward(self, rank: int, q: Tensor, k: Tensor, val: Tensor, executor: str) -> tuple[Tensor, Tensor]:
        local = localize(self.v, self.p.rows, self.p.rows.chunks_of(rank), self.p.keys, self.plans[rank].columns)
        mine = [self.p.shard(q, rank), *(self.p.shard(x, rank, of="keys") for x in (k, val))]
        return self.ranks[rank].forward(local, *mine, q.shape[3] ** -0.5, executor)  # type: ignore[arg-type]

    def backward(
        self, rank: int, q: Tensor, k: Tensor, val: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor, executor: str
    ) -> Any:
        local = localize(self.v, self.p.rows, self.p.rows.chunks_of(rank), self.p.keys, self.plans[rank].columns)
        mine = [self.p.shard(q, rank), *(self.p.shard(x, rank, of="keys") for x in (k, val)), out, lse, self.p.shard(dout, rank)]
        given = self.p.shard(dlse, rank, 2)
        return self.ranks[rank].backward(local, *mine, q.shape[3] ** -0.5, executor, dlse=given)  # type: ignore[arg-type]

    def pushed(self, rank: int, chunk: int) -> Pair:
        dk, dv = (t.clone() for t in self.links[rank].pushed(chunk))
        return dk, dv

    def rows(self, rank: int) -> dict[int, slice]:
        """Where each own chunk lies in the rank's keys."""
        out, at = {}, 0
        for chunk in self.p.keys.chunks_of(rank):
            out[chunk] = slice(at, at + self.p.keys.size_of(chunk))
            at += self.p.keys.size_of(chunk)
        return out


@pytest.mark.parametrize("number", range(30))
def test_every_rank_gives_its_rows_of_the_dense_answer(number: int) -> None:
    """Random masks, layouts, heads, batches; four calls with other keys; the buffer is poisoned before each."""
    world = (2, 3, 4)[number % 3]
    case = Case(
        world,
        (40, 29, 65)[number % 3],
        number,
        FORMS[number % len(FORMS)],
        causal=number % 2 == 0,
        order=("balanced", "contiguous", "zigzag")[number % 3],
        chunk=(None, 1, 3, 8)[number % 4],
        heads=(4, (1, 2, 4)[number % 3], 2),
        batch=((1, 1), (2, 1), (2, 2))[number % 3],
        dims=(8, (8, 4)[number % 2]),
    )
    made = World(case, groups=case.heads[1] if number % 2 else None, rate=1e6 if number % 4 == 0 else 1e12)
    for epoch in range(1, 5):
        step = replace(case, seed=case.seed + 100 * epoch)
        q, k, val, _, _ = tensors(step)
        want = dense(replace(step, form=case.form), made.v)
        for rank, running in enumerate(made.ranks):
            running.keys.fill_(math.nan)
            running.values.fill_(math.nan)
            made.post(rank, epoch, k, val)
            out, lse = made.forward(rank, q, k, val, ("gated", "copy-then-attend")[epoch % 2])
            running.finish()
            torch.testing.assert_close(out, made.p.shard(want["out"], rank), rtol=0, atol=1e-10)
            torch.testing.assert_close(lse, made.p.shard(want["lse"], rank, 2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("executor", ["gated", "copy-then-attend", "sm-copy"])
def test_every_rank_sends_its_gradients_and_adds_up_those_of_its_keys(number: int, executor: str) -> None:
    """What a rank pushed and what it summed, against what each rank would compute alone from the dense answer."""
    case = Case(
        (2, 3)[number % 2],
        (40, 29)[number % 2],
        number,
        FORMS[number % len(FORMS)],
        causal=number % 2 == 0,
        order=("balanced", "contiguous", "zigzag")[number % 3],
        chunk=(None, 1, 3, 8)[number % 4],
        heads=(4, (1, 2, 4)[number % 3], 2),
        batch=((1, 1), (2, 1))[number // 2 % 2],
        dims=(8, (8, 4)[number % 2]),
    )
    made = World(case, groups=case.heads[1] if number % 2 else None, rate=1e6 if number % 4 == 0 else 1e12)
    for running in made.ranks:
        cut = running.backward_cut
        ways = by_pieces(cut.plan, cut.groups), by_pieces(cut.plan, cut.groups, cut.groups), at_once(cut.plan, cut.groups)
        running.departures = ways[number % 3]
    q, k, val, dout, dlse = tensors(case)
    want = dense(case, made.v)
    pushed: dict[tuple[int, int], Pair] = {}
    results = []
    for rank, running in enumerate(made.ranks):
        for epoch in (1, 2):
            made.post(rank, epoch, k, val)
        out, lse = made.forward(rank, q, k, val, executor)
        # Gradients of others are posted as zeros first; then those that the others really push.
        for reader in made.links[rank].lends:
            made.links[rank].post_gradients(reader, 2, lambda chunk, pair: [t.zero_() for t in pair])
        results.append(made.backward(rank, q, k, val, out, lse, dout, dlse, executor))
        pushed |= {(rank, c): made.pushed(rank, c) for s in running.plan.pulls for c in s.chunks}
    for rank, (dq, dk, dv) in enumerate(results):
        torch.testing.assert_close(dq, made.p.shard(want["dq"], rank), rtol=0, atol=1e-9)
        for i, (name, got) in enumerate((("dk", dk), ("dv", dv))):
            for chunk, rows in made.rows(rank).items():
                for reader, chunks in made.plans[rank].lends:
                    if chunk in chunks:
                        got[:, rows] += pushed[reader, chunk][i].transpose(1, 2)[:, : rows.stop - rows.start]
            torch.testing.assert_close(got, made.p.shard(want[name], rank, of="keys"), rtol=0, atol=1e-9)


def test_gradients_of_others_are_added_in_the_order_of_ranks() -> None:
    case = Case(3, 48, 1, "none", causal=False, chunk=8, order="contiguous", heads=(1, 1, 1))
    made = World(case)
    q, k, val, dout, dlse = tensors(case)
    made.post(1, 1, k, val)
    link = made.links[1]
    for reader in link.lends:
        link.post_gradients(reader, 1, lambda chunk, pair, r=reader: [t.fill_((1e20, 0.0, -1e20)[r]) for t in pair])
    out, lse = (made.p.shard(dense(case, made.v)[n], 1, d) for n, d in (("out", 1), ("lse", 2)))
    _, dk, _ = made.backward(1, q, k, val, out, lse, dout, dlse, "gated")
    assert (dk == 0).all(), "own + 1e20 swallows the own part, - 1e20 leaves nothing"


def test_who_asks_at_the_same_time_gets_the_same_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of a loopback may run in a thread of their own, and both come to a chunk for the first time."""
    world = World(Case(2, 40, 0, "none", causal=False, chunk=4, order="contiguous"))
    link, together, made = world.links[0], Barrier(2, timeout=10), KeyShape.gradients
    reader, (chunk, *_) = next(iter(link.lends.items()))

    def slow(shape: KeyShape, *where: Any) -> Pair:
        together.wait()
        return made(shape, *where)

    monkeypatch.setattr(KeyShape, "gradients", slow)
    for place in (partial(link.staged, reader, chunk), partial(link.pushed, chunk)):
        with ThreadPoolExecutor(2) as pool:
            first, second = (f.result() for f in [pool.submit(place) for _ in range(2)])
        assert first is second


def test_staging_is_not_written_before_it_was_added_up() -> None:
    case = Case(2, 40, 0, "none", causal=False, chunk=4, order="contiguous")
    made = World(case)
    q, k, val, dout, dlse = tensors(case)
    out, lse = (made.p.shard(dense(case, made.v)[n], 0, d) for n, d in (("out", 1), ("lse", 2)))
    link = made.links[0]
    for epoch in (1, 2, 3):
        made.post(0, epoch, k, val)
        link.post_gradients(1, epoch, lambda chunk, pair: None)
        if epoch == 2:
            with pytest.raises(MaskcError, match="M721"):
                made.backward(0, q, k, val, out, lse, dout, dlse, "gated")
            link.release(2)  # what `stop` does
        else:
            made.backward(0, q, k, val, out, lse, dout, dlse, "gated")


def test_a_rank_that_does_not_post_is_an_error_and_the_next_call_works() -> None:
    case = Case(2, 40, 0, "none", causal=False, chunk=4, order="zigzag")
    made = World(case)
    q, k, val, _, _ = tensors(case)
    with pytest.raises(MaskcError, match="M721"):
        made.forward(0, q, k, val, "gated")
    made.post(0, 2, k, val)
    out, _ = made.forward(0, q, k, val, "gated")
    torch.testing.assert_close(out, made.p.shard(dense(case, made.v)["out"], 0))


def test_what_the_kernel_or_the_host_wrote_is_raised_once() -> None:
    case = Case(2, 40, 0, chunk=4, order="contiguous", causal=False, form="none")
    made = World(case)
    running = made.ranks[0]
    for cut in (running.forward_cut, running.backward_cut):
        slot = cut.plan.own
        write_word(running.words.failed.data_ptr(), cut.first + slot + 1)
        with pytest.raises(MaskcError, match=rf"M721.*key chunk {cut.plan.slots[slot].chunk} of rank 1"):
            running.finish()
    running.stop()
    with pytest.raises(MaskcError, match="stopped"):
        running.finish()
    running.finish()


def test_stopping_ends_the_waits_of_streams() -> None:
    made = World(Case(2, 40, 0, "none", causal=False))
    running = made.ranks[0]
    running.epoch = 7
    running.stop()
    assert running.words.failed.item() == STOPPED - (1 << 32)
    HostQueues().wait("copy", made.links[0].address(Word("ready", 0, 1)), 7)


def test_a_source_half_is_not_overwritten_before_it_was_copied() -> None:
    case = Case(2, 40, 0, "none", causal=False)
    made = World(case)
    _, k, val, _, _ = tensors(case)
    for epoch in (1, 2):
        made.post(0, epoch, k, val)
    with pytest.raises(TimeoutError, match="rank 0 did not say done of epoch 1"):
        made.links[0].post(1, 3, timeout=0.01)


def test_plans_that_relay_are_refused() -> None:
    case = Case(4, 64, 5, "none", causal=False, chunk=4, switches={"nodes": 2})
    p = case.plan(vectors(case))
    shape = KeyShape(1, 1, 8, 8, torch.float64)
    o = overlap_plan(p, 0)
    assert any(s.source != p.keys.owner[s.chunk] for s in o.slots)
    for one in (o, replace(o, carried=()), replace(o, slots=o.slots[: o.own], carried=(9,))):  # it takes, or brings in, or both
        with pytest.raises(MaskcError, match=r"M722.*passed on"):
            Overlapped(one, p.keys, shape, Loopback(p.keys, 0, range(4), shape, pinned=False), HostQueues(), CPU)
    flat = plan(vectors(case), world_size=4, chunk=4)
    with pytest.raises(MaskcError, match=r"M722.*timeout"):
        Overlapped(
            overlap_plan(flat, 0),
            flat.keys,
            shape,
            Loopback(flat.keys, 0, range(4), shape, False),
            HostQueues(),
            CPU,
            timeout=1e5,
        )


@pytest.mark.parametrize("block", [1, 64, 80, 128])
@pytest.mark.parametrize("start", [0, 64, 127, 128, 2000])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 64), slice(10, 300)])
def test_own_keys_in_place_begin_with_a_block(block: int, start: int, rows: slice) -> None:
    first, (place, lead), own = by_blocks((start, rows), block)
    assert place == start
    assert (lead.start, lead.stop, own.stop) == (rows.start, own.start, rows.stop), "all rows, once"
    if own.start < own.stop:
        assert first * block == start + own.start - rows.start
        assert 0 <= lead.stop - lead.start < block


# ---------------------------------------------------------------- ranks that copy from each other


class Shared:
    """Every rank's key buffers and words in one process: the transport of rank `rank`."""

    joins = one_engine = False
    pulls = None

    def __init__(
        self, rank: int, words: Tensor, flags: Tensor, buffers: list[Pair], keys: Layout, staging: dict[tuple[int, int], Pair]
    ) -> None:
        self.rank, self.words, self.all_flags, self.buffers, self.keys = rank, words, flags, buffers, keys
        self.epochs, self.staging = Epochs(), staging
        self.words_told = torch.zeros(GATE_SLOTS, dtype=torch.int32)

    @property
    def gives(self) -> Shared:
        return self

    takes = gives

    def begin(self, owners: Any = (), tag: int = 0) -> Turn:
        return self.epochs.begin(owners)

    def address(self, word: Word) -> int:
        return self.words[("open", "gave", "sent", "free").index(word.kind), word.holder, word.by].data_ptr()

    def flags(self, rank: int) -> Tensor:
        return self.all_flags[rank]

    def buffer(self, rank: int, rows: int) -> Pair:
        assert self.buffers[rank][0].shape[1] == rows
        return self.buffers[rank]

    def give(self, reader: int, cut: Cut, piece: int, own: Pair, by_kernel: bool = False) -> None:
        at, heads = cut.plan.slot_of(piece), cut.heads_of(piece)
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(self.rank) if c < at.chunk)
        for there, mine in zip(self.buffers[reader], own, strict=True):
            there[heads, at.start : at.start + at.rows].copy_(head_major(mine[:, start : start + at.rows, heads]))

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        self.push(owner, chunk, heads, (grads[0][:, heads, rows], grads[1][:, heads, rows]))

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        for c, rows in by_chunk(self.keys, chunk, grads[0].shape[2]):
            for there, mine in zip(self.staging[self.rank, c], grads, strict=True):
                there[:, heads].copy_(mine[:, :, rows])

    def staged(self, reader: int, chunk: int) -> Pair:
        return self.staging[reader, chunk]

    def told(self, owner: int, reader: int) -> Tensor:
        """Nobody looks: no kernel adds anything."""
        return self.words_told

    def place(self, owner: int, chunk: int) -> Pair:
        return self.staging[self.rank, chunk]

    def release(self, epoch: int) -> None:
        raise AssertionError("nobody is late")


class Patient(HostQueues):
    """Waits until another thread has written the word."""

    def wait(self, stream: str, address: int, epoch: int) -> None:
        for _ in range(100_000):
            if read_word(address) >= epoch:
                return
            time.sleep(1e-4)
        raise AssertionError("waited for ever")


class Giver(Overlapped):
    """Gives gradients as a kernel of a GPU does: writes them to their owners, and tells those."""

    def gives_gradients(self, *_: Any) -> bool:
        return True

    def attend_backward(self, *args: Any, give: bool = False, **named: Any) -> Gradients:
        made, takes = super().attend_backward(*args, **named), self.transport.takes
        if give:
            assert takes is not None
            for slot in self.plan.pulls:
                for there, mine in zip(takes.place(slot.source, slot.chunk), made.pair, strict=True):
                    there.copy_(mine[0][:, :, self.result_rows(slot)])
            for owner in self.plan.sources:
                write_word(self.transport.address(Word("sent", owner, self.plan.rank)), self.epoch)
        return made


@pytest.mark.parametrize(("giving", "bursting"), [((), ()), ((0, 1, 2), ()), ((0, 2), ()), ((), (0, 1, 2)), ((0,), (1,))])
@pytest.mark.parametrize("causal", [True, False])
def test_ranks_that_copy_from_each_other_call_after_call(causal: bool, giving: Sequence[int], bursting: Sequence[int]) -> None:
    """Three ranks as threads, ten calls with new keys each, random pauses; key buffers are written again by every call, and
    staging, by ranks that give gradients, by some that push them piece by piece, and by others that push all at once."""
    case = Case(3, 60, 2, "none", causal=causal, chunk=4, order="contiguous", heads=(2, 1, 1))
    v = vectors(case)
    p = case.plan(v)
    shape = KeyShape(1, 1, 8, 8, torch.float64)
    words = torch.zeros(4, 3, 3, dtype=torch.int32)
    plans = [overlap_plan(p, r) for r in range(3)]
    buffers, flags = [shape.empty(o.rows, CPU) for o in plans], torch.zeros(3, 64, dtype=torch.int32)
    calls = [tensors(replace(case, seed=100 + e)) for e in range(10)]
    want = [dense(replace(case, seed=100 + e), v) for e in range(10)]
    staging = {(r, c): shape.gradients(p.keys.size_of(c), CPU) for r in range(3) for c in range(p.keys.chunk_count)}

    def serve(rank: int) -> None:
        pause = random.Random(rank)
        link = Shared(rank, words, flags, buffers, p.keys, staging)
        readers = {r: plans[r] for r in readers_of(plans, rank)}
        kind = Giver if rank in giving else Overlapped
        link.joins = bool(bursting)
        running = kind(plans[rank], p.keys, shape, link, Patient(), CPU, readers=readers)
        if rank in bursting:
            running.departures = at_once(running.backward_cut.plan, running.backward_cut.groups)
        local = localize(v, p.rows, p.rows.chunks_of(rank), p.keys, plans[rank].columns)
        for i, ((q, k, val, dout, dlse), truth) in enumerate(zip(calls, want, strict=True)):
            time.sleep(pause.random() * 0.004)
            mine = [p.shard(x, rank, of="keys") for x in (k, val)]
            rows, given = p.shard(q, rank), (p.shard(dout, rank), p.shard(dlse, rank, 2))
            out, lse = running.forward(local, rows, *mine, 8**-0.5)
            torch.testing.assert_close(out, p.shard(truth["out"], rank), rtol=0, atol=1e-10)
            time.sleep(pause.random() * 0.004)
            grads = running.backward(local, rows, *mine, out, lse, given[0], 8**-0.5, dlse=given[1], gather=i % 3 != 1)
            for name, got, of in zip(("dq", "dk", "dv"), grads, ("rows", "keys", "keys"), strict=True):
                torch.testing.assert_close(got, p.shard(truth[name], rank, of=of), rtol=0, atol=1e-9)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(serve, rank) for rank in range(3)]:
            done.result(timeout=60)


# ---------------------------------------------------------------- what a GPU would be given


def test_a_gated_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The struct of a gated call: tables of the right size, epoch, own slots, and the order of work."""
    seen: list[tuple[object, Any, int]] = []

    def launch(kernel: object, grid: object, threads: int, arguments: object, *, shared: int = 0, **_: object) -> None:
        body = arguments.body  # type: ignore[attr-defined]
        seen.append((kernel, type(body).from_buffer_copy(body), shared))

    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(hopper, "_forward_kernel", lambda spec: str(spec))
    monkeypatch.setattr(mask_tables, "launch", launch)
    monkeypatch.setattr(mask_tables, "_schedule_kernel", lambda spec, name: name)
    monkeypatch.setattr(hopper, "tensor_map", lambda *args: bytes(128))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "work_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    v = vectors(Case(2, 1024, 3, "lts"))
    p = plan(v, world_size=2, chunk=128)
    o = overlap_plan(p, 0)
    local = localize(v, p.rows, p.rows.chunks_of(0), p.keys, o.columns)
    spec = replace(forward_spec(hopper.mask_form(local), 128, "bf16"), gated=True)
    tables = gate_tables(local, o, spec, 4, 1, 2, 2, expected_arrivals(o, 1024, 2, 1e9, 1e-6), 132, CPU)
    gate = hopper.GateTables(tables.items.data_ptr(), tables.blocks.data_ptr(), 16, 32, 9, 5, o.own, len(o.slots), 1)
    q = torch.zeros(1, local.nq, 4, 128, dtype=torch.bfloat16)
    k = torch.zeros(o.rows, 1, 2, 128, dtype=torch.bfloat16).transpose(0, 1)
    hopper.forward_with(spec, local, q, k, k, 0.1, gate=gate)
    kernel, body, shared = seen[-1]
    assert str(kernel).endswith("-gated")
    assert shared == spec.shared_bytes
    assert body.items == len(tables.items) == 4 * -(-local.nq // spec.block_q)
    assert len(tables.blocks) == body.mask.kv_blocks
    assert (body.gate.flags, body.gate.failed, body.gate.timeout, body.gate.epoch, body.gate.own) == (16, 32, 9, 5, o.own)
    assert body.gate.items == tables.items.data_ptr()
    plain = replace(spec, gated=False)
    hopper.forward_with(plain, local, q, k, k, 0.1)
    assert not hasattr(seen[-1][1], "gate")


def test_gate_tables_pack_slots_and_items() -> None:
    v = vectors(Case(2, 512, 1, "none"))
    p = plan(v, world_size=2, chunk=96, order="contiguous")
    o = overlap_plan(p, 1)
    local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, o.columns)
    spec = forward_spec(MaskForm(ute=True), 128, "bf16")
    tables = gate_tables(local, o, spec, 2, 1, 2, 1, expected_arrivals(o, 1024, 1, 1e9, 1e-6), 132, CPU)
    blocks = tables.blocks.numpy().view(np.uint32)
    assert [(int(b) & 0xFFFF, int(b) >> 16) for b in blocks] == [tuple(r) for r in o.block_slots(spec.block_kv).tolist()]
    assert any(int(b) & 0xFFFF != int(b) >> 16 for b in blocks), "chunks of 96 keys share blocks"


def test_gradients_leave_together_where_they_leave_at_once() -> None:
    case = Case(2, 60, 2, "none", causal=True, chunk=4, order="contiguous", heads=(2, 2, 1))
    for way, leaving in (("given", by_pieces), ("by pieces", by_pieces), ("at once", at_once)):
        running = World(case, groups=2).ranks[1]
        running.__dict__["_leaving"] = way  # small calls do not leave at once
        assert running.departures == leaving(running.backward_cut.plan, 2)
    assert len(running.departures) == 1
