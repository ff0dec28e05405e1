"""A rank of several on the stand-in for a GPU: what a call enqueues, and what the protocol says that it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from maskc.runtime import overlap_kernels
from maskc.runtime.link import KINDS, Link
from maskc.runtime.localize import localize
from maskc.runtime.overlap import COPY_CTAS, Overlapped
from maskc.runtime.overlap_pieces import sent_together
from maskc.runtime.overlap_plan import Cut, plan_visits
from maskc.runtime.plan import plan
from maskc.runtime.protocol import (
    Attend,
    Begin,
    Departure,
    End,
    Epochs,
    Give,
    Push,
    Put,
    Settle,
    Step,
    Sum,
    Tell,
    Turn,
    Wait,
    Word,
    at_once,
    backward_steps,
    by_pieces,
    call_steps,
)
from maskc.runtime.symmetric import Symmetric, room_of
from maskc.runtime.transport import CudaQueues, KeyShape
from tests.gpu2.ways import Leaving
from tests.overlap import stand_in
from tests.overlap.driver_log import Enqueued, Reader, Row
from tests.overlap.stand_in import GPU, on_gpu, vectors_on_gpu

DIM = 64


@dataclass(frozen=True)
class Case:
    """world: ranks. order, prune, chunk: of the plan. heads: of queries and keys. calls: f: forward, b: backward, k: over the
    keys of the call before; c, d, e: the same, copying first; s: forward whose copies multiprocessors make. way: of gradients.
    groups: of heads, forward and backward, which come one after another. rows: of queries, if others than of keys; then all
    see all. size: keys a rank, about."""

    world: int
    order: str
    heads: tuple[int, int]
    calls: str
    way: Leaving = "given"
    prune: bool = True
    chunk: int = 128
    groups: tuple[int, int] | None = None
    rows: int | None = None
    size: int = 256

    @property
    def name(self) -> str:
        shape = f"{self.heads[0]} on {self.heads[1]}, chunks of {self.chunk}"
        rows = "" if self.rows is None else f", {self.rows} rows"
        rows += "" if self.size == 256 else f", {self.size} keys a rank"
        return f"{self.calls}, {self.world} ranks, {self.order}, {shape}{rows}, {self.groups or 'chosen'} groups, {self.way}"


CASES = [
    Case(2, "zigzag", (2, 2), "fb"),
    Case(3, "zigzag", (2, 2), "fbk"),
    Case(3, "zigzag", (2, 2), "fbk", "at once"),
    Case(3, "zigzag", (2, 2), "fbkb", "by pieces"),
    Case(3, "contiguous", (2, 1), "fb", "at once", False),
    Case(4, "zigzag", (4, 2), "fb", "by pieces"),
    Case(3, "contiguous", (2, 2), "fbk", "given", False, size=203),
    Case(3, "zigzag", (2, 2), "fbk", "by pieces", chunk=56, size=203),
    Case(3, "contiguous", (2, 1), "fb", "given", False),
    Case(3, "zigzag", (2, 2), "cdef", "by pieces"),
    Case(4, "zigzag", (2, 2), "fbk", "at once", groups=(2, 2)),
    Case(3, "contiguous", (4, 4), "sfbb", "by pieces", False, 64, (4, 2)),
    Case(3, "contiguous", (2, 2), "fb", rows=128),
    Case(2, "contiguous", (2, 2), "fbd", "by pieces", False, rows=1),
    Case(2, "contiguous", (2, 2), "fb", "at once", False, rows=1),
]
RANKS = (0, 1)
"""Of a single row, the second rank has none."""
BACK, FIRST, KEPT = "bkde", "cde", "ke"


class Rank:
    """One of them; of the others there is the memory."""

    def __init__(self, case: Case, rank: int) -> None:
        import maskc

        self.case, self.rank = case, rank
        n = case.size * case.world
        rows = case.rows or n
        mask = maskc.compile("std:causal") if rows == n else maskc.compile_text("mask all = k < 100000")
        spec = mask.bind(nq=rows, nk=n)
        made = plan(spec, world_size=case.world, order=case.order, chunk=case.chunk, prune=case.prune)  # type: ignore[arg-type]
        self.keys = keys = made.keys
        needed = [frozenset(made.needed(r, 0) if made.prune else range(keys.chunk_count)) for r in range(case.world)]
        self.plans = [plan_visits(keys, needed, r, case.world) for r in range(case.world)]
        shape = KeyShape(1, case.heads[1], DIM, DIM, torch.bfloat16)
        room = room_of(keys, max(p.rows for p in self.plans), shape)
        self.memory = tuple(on_gpu(torch.zeros(room.total(case.world), dtype=torch.uint8)) for _ in range(case.world))
        self.words = torch.zeros(len(KINDS) * case.world**2, dtype=torch.int32)
        self.epochs = Epochs()
        link: Any = SimpleNamespace(room=room, memory=self.memory, begin=self.begin, address=self.address)
        link.flags, link.told = partial(Link.flags, link), partial(Link.told, link)
        self.link, own = link, self.plans[rank]
        self.transport = Symmetric(link, own, keys, shape, 1)
        readers = {r: self.plans[r] for r, _ in own.lends}
        chosen = [(n, 1) for n in case.groups] if case.groups else None
        choose = overlap_kernels.choose_given if chosen is None else lambda *_: chosen
        with mock.patch.object(overlap_kernels, "choose_given", choose):
            self.made = Overlapped(own, keys, shape, self.transport, CudaQueues(GPU), GPU, readers=readers)
        whole = spec.vectors(rows, n)
        self.local = vectors_on_gpu(localize(whole, made.rows, made.rows.chunks_of(rank), keys, own.columns))
        rows, held = made.rows.local_length(rank), keys.local_length(rank)
        self.sizes = (rows, case.heads[0]), (held, case.heads[1]), (held, case.heads[1]), (rows, case.heads[0])
        self._alive: list[torch.Tensor] = []
        self._summed: dict[str, list[int]] = {}
        self._places: dict[tuple[object, ...], tuple[dict[int, str], dict[int, Row]]] = {}
        self.renew()

    def renew(self, heads_first: bool = False) -> None:
        """Tensors at other addresses. heads_first: values by other strides."""
        q, k, v, dout = (on_gpu(torch.zeros(1, m, h, DIM, dtype=torch.bfloat16)) for m, h in self.sizes)
        v = v.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else v
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self._alive += (q, k, v, dout)

    def begin(self, owners: Iterable[int] = (), _: int = 0) -> Turn:
        return self.epochs.begin(owners)

    def address(self, word: Word) -> int:
        return self.words.data_ptr() + 4 * ((KINDS.index(word.kind) * self.case.world + word.holder) * self.case.world + word.by)

    def call(self, kind: str) -> None:
        how: Any = "copy-then-attend" if kind in FIRST else "sm-copy" if kind == "s" else "gated"
        if kind not in BACK:
            self.out, self.lse = self.made.forward(self.local, self.q, self.k, self.v, 0.1, how)
        else:
            given = self.local, self.q, self.k, self.v, self.out, self.lse, self.dout, 0.1
            self.made.backward(*given, how, gather=kind not in KEPT)

    # ---- what the protocol says

    def wanted(self, kind: str, turn: Turn) -> Enqueued:
        cut, gifts = self.cut_of(kind), self.made.gifts[kind in BACK]
        if kind not in BACK:
            return self._named(call_steps(cut.plan, turn, cut.groups, gifts), kind, ())
        leaves = self.departures(cut)
        how = kind not in KEPT, leaves, True, self._gives(kind), kind not in FIRST
        return self._named(backward_steps(cut.plan, turn, cut.groups, gifts, *how), kind, leaves)

    def _gives(self, kind: str) -> bool:
        return self.case.way == "given" and kind not in FIRST and not self.shared(kind) and self.sizes[0][0] > 0

    def shared(self, kind: str) -> bool:
        """Whether gradients are sums over several CTAs, which a stream of their own makes."""
        return kind in BACK and kind not in FIRST and self.made.splits(self.local, self.q) > 1

    def departures(self, cut: Cut) -> Sequence[Departure]:
        if self.case.way == "at once":
            return at_once(cut.plan, cut.groups)
        return by_pieces(cut.plan, cut.groups, sent_together(cut.plan, cut.groups, 1))

    def cut_of(self, kind: str) -> Cut:
        return self.made.backward_cut if kind in BACK else self.made.forward_cut

    def _named(self, steps: Sequence[Step], kind: str, leaves: Sequence[Departure]) -> Enqueued:
        out: Enqueued = []
        for stream, op in steps:
            match op:
                case Begin():
                    out.append((stream, "follow compute"))
                case End(after):
                    out.append((stream, f"follow {after}"))
                case Wait(word, epoch):
                    apart = word.kind == "finished" and self.shared(kind)
                    out.append(("sum" if apart else stream, f"wait {_text(word)} {epoch}"))
                case Put(word, epoch):
                    out.append((stream, f"write {_text(word)} {epoch}"))
                case Tell(owner, pieces, epoch):
                    out += [(stream, f"write told {owner} {piece} {epoch}") for piece in pieces]
                case Settle():
                    out += [(stream, "settle")] if self._settles(kind) else []
                case Give(reader, piece):
                    out += [(stream, "torch copies")] * 2 if kind == "s" else [(stream, f"give {reader} {piece}")]
                case Push(pieces):
                    out += [("sum", "torch sums"), (stream, "follow sum")] if self.shared(kind) else []
                    out.append((stream, f"push {next(i for i, leaving in enumerate(leaves) if leaving.pieces == pieces)}"))
                case Attend():
                    out += self._around(op, kind)
                case Sum():
                    out += [(stream, "sum"), (stream, "spoil")]
                case _:
                    raise AssertionError(op)
        return [*out, ("compute", "spoil")] if kind not in BACK and self.sizes[0][0] else out

    def _around(self, op: Attend, kind: str) -> Enqueued:
        """The kernel; one that waits for nothing starts when all keys are there, and says nothing of its gradients. Without rows
        there is none, and gradients are zero."""
        gave = [Word("gave", self.rank, source) for source in self.plans[self.rank].sources if kind not in KEPT]
        before: Enqueued = [("compute", f"wait {_text(word)} {op.epoch}") for word in gave]
        reports = [Word("finished", self.rank, piece) for piece in self.made.backward_cut.pieces]
        after: Enqueued = [("send", f"write {_text(word)} {op.epoch}") for word in reports]
        kernel: Enqueued = [("compute", "attend")]
        if not self.sizes[0][0]:
            kernel = [("compute", "torch zeros"), ("send", "follow compute"), *after] if kind in BACK else []
        return [*before, *kernel, ("send", "follow compute"), *after] if kind in FIRST else kernel

    def _settles(self, kind: str) -> bool:
        """Whether the kernel reads own keys in the buffer."""
        from maskc.runtime.overlap_kernels import backward_block, forward_block

        block = backward_block(self.local, self.q, False) if kind in BACK else forward_block(self.local, self.q)
        own = None if kind in FIRST else self.made.in_place(self.k, self.v, block)
        return bool(self.made._runs if own is None else own.lead)

    # ---- what was enqueued

    def enqueued(self, log: Sequence[str], kind: str, stream: int) -> Enqueued:
        known = {"k": self.k.data_ptr(), "v": self.v.data_ptr()}
        key = kind, self.v.stride()
        if key not in self._places:
            self._places[key] = dict(self._words(kind)), dict(self._rows(kind))
        reader = Reader(*self._places[key], known, stream, self.shared(kind))
        found = reader.read(log)
        summed = [at - reader.summed[i % 2] for i, at in enumerate(reader.summed)]
        assert self._summed.setdefault(kind, summed) == summed, f"{kind}: sums of other rows than before"
        assert kind != "s" or reader.widest <= stand_in.PROCESSORS - COPY_CTAS, "copies need multiprocessors"
        return found

    def _words(self, kind: str) -> Iterator[tuple[int, str]]:
        world, me, cut = range(self.case.world), self.rank, self.cut_of(kind)
        for word in (Word(k, holder, by) for k in KINDS for holder in world for by in world):
            yield self.address(word), _text(word)
        for reader, cuts in self.made.cuts_of_readers.items():
            theirs = cuts[kind in BACK]
            first = self.link.flags(reader, 1).data_ptr() + 4 * theirs.first
            yield from ((first + 4 * piece, _text(Word("flag", reader, piece))) for piece in theirs.pieces)
        first = self.made.words.finished.data_ptr() + 4 * self.made.backward_cut.first
        yield from ((first + 4 * p, _text(Word("finished", me, p))) for p in self.made.backward_cut.pieces)
        for owner in cut.plan.sources:
            first = self.link.told(owner, me).data_ptr()
            yield from ((first + 4 * piece, f"told {owner} {piece}") for piece in cut.pieces)

    def _rows(self, kind: str) -> Iterator[tuple[int, Row]]:
        """Of every row of a head that is given or pushed in a call."""
        if kind not in KEPT + "s":
            for reader, piece in self.made.gifts[kind in BACK] or ():
                cut = self.made.cuts_of_readers[reader][kind in BACK]
                ends = self.transport._ends(reader, cut, piece, (self.k, self.v))
                for of, own, there, here in zip("kv", (self.k, self.v), *ends, strict=True):
                    yield from _pairs(f"give {reader} {piece}", of, there, here, own.data_ptr())
        if kind not in BACK or self._gives(kind):
            return
        cut, plan = self.cut_of(kind), self.plans[self.rank]
        slots = {slot.chunk: slot for slot in plan.slots}
        left = torch.empty(1, self.case.heads[1], self.made._results[0].rows, DIM)  # of dK and dV, as a kernel leaves them
        for number, departure in enumerate(self.departures(cut)):
            for piece in departure.pieces:
                for chunk in cut.plan.slot_of(piece).chunks:
                    at, heads = self.made.result_rows(slots[chunk]), cut.heads_of(piece)
                    there = self.transport._places(departure.owner, chunk, heads, at.stop - at.start)
                    for of, to in zip(("dk", "dv"), there, strict=True):
                        yield from _pairs(f"push {number}", of, to, left[:, heads, at], left.data_ptr())


def _pairs(what: str, of: str, there: torch.Tensor, here: torch.Tensor, base: int) -> Iterator[tuple[int, Row]]:
    size = DIM * there.element_size()
    yield from ((to, Row(what, of, at - base, size)) for to, at in zip(_each(there), _each(here), strict=True))


def _each(t: torch.Tensor) -> list[int]:
    """Addresses of the rows of D elements."""
    sizes, width = t.shape[:-1], t.element_size()
    at = sum(
        torch.arange(n).view([-1 if i == d else 1 for i in range(len(sizes))]) * t.stride(d) * width for d, n in enumerate(sizes)
    )
    base = t.data_ptr()
    return [base + int(a) for a in at.expand(sizes).flatten().tolist()]  # type: ignore[union-attr]


def _text(word: Word) -> str:
    return f"{word.kind} {word.holder} {word.by}"
