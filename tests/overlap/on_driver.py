"""`python -m tests.overlap.on_driver`: warm calls of a rank, as they reach the driver, and as the protocol says, as JSON.

What is enqueued is told from addresses alone: which word, which rows of whose buffer, whose staging.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from maskc.runtime.link import KINDS, Link
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Overlapped
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
from tests.gpu2.ways import Leaving, leaving
from tests.overlap.stand_in import GPU, STREAMS, install, on_gpu, vectors_on_gpu

NAMES = {handle: name for name, handle in STREAMS.items()}
DIM = 64
Enqueued = list[tuple[str, str]]
"""(stream, what), in order."""
Rows = dict[int, tuple[int, str]]
"""By address of what is written: what is read, and for whom."""


@dataclass(frozen=True)
class Case:
    """world: ranks. order, prune, chunk: of the plan. heads: of queries and keys. calls: f: forward, b: backward, k: over the
    keys of the call before; c, d: forward and backward that copy first. way: of gradients. groups: of heads, which come one
    after another."""

    world: int
    order: str
    heads: tuple[int, int]
    calls: str
    way: Leaving = "given"
    prune: bool = True
    chunk: int = 128
    groups: int | None = None

    @property
    def name(self) -> str:
        shape = f"{self.heads[0]} on {self.heads[1]}, chunks of {self.chunk}"
        return f"{self.calls}, {self.world} ranks, {self.order}, {shape}, {self.groups or 'chosen'} groups, {self.way}"


CASES = [
    Case(2, "zigzag", (2, 2), "fb"),
    Case(3, "zigzag", (2, 2), "fbk"),
    Case(3, "zigzag", (2, 2), "fbk", "at once"),
    Case(3, "zigzag", (2, 2), "fbkb", "by pieces"),
    Case(3, "contiguous", (2, 1), "fb", "at once", False),
    Case(4, "zigzag", (4, 2), "fb", "by pieces"),
    Case(3, "contiguous", (2, 2), "fb", "given", False, 96),
    Case(3, "zigzag", (2, 2), "cdf", "by pieces"),
    Case(4, "zigzag", (2, 2), "fbk", "at once", groups=2),
    Case(3, "contiguous", (2, 2), "fbb", "by pieces", False, 64, 2),
]
RANKS = (0, 1)
BACK, FIRST = "bkd", "cd"


class Rank:
    """One of them; of the others there is the memory."""

    def __init__(self, case: Case, rank: int) -> None:
        import maskc

        self.case, self.rank = case, rank
        n = 256 * case.world
        spec = maskc.compile("std:causal").bind(nq=n, nk=n)
        made = plan(spec, world_size=case.world, order=case.order, chunk=case.chunk, prune=case.prune)  # type: ignore[arg-type]
        self.keys = keys = made.keys
        needed = [frozenset(made.needed(r, 0) if made.prune else range(keys.chunk_count)) for r in range(case.world)]
        self.plans = [plan_visits(keys, needed, r, case.world) for r in range(case.world)]
        shape = KeyShape(1, case.heads[1], DIM, DIM, torch.bfloat16)
        room = room_of(keys, max(p.rows for p in self.plans), shape)
        self.memory = tuple(on_gpu(torch.zeros(room.total(case.world), dtype=torch.uint8)) for _ in range(case.world))
        self.words = torch.zeros(len(KINDS) * case.world**2, dtype=torch.int32)
        self.epochs = Epochs()
        link: Any = SimpleNamespace(room=room, memory=self.memory, begin=self.epochs.begin, address=self.address)
        link.flags, link.told = partial(Link.flags, link), partial(Link.told, link)
        self.link, own = link, self.plans[rank]
        self.transport = Symmetric(link, own, keys, shape, 1)
        readers = {r: self.plans[r] for r, _ in own.lends}
        self.made = Overlapped(own, keys, shape, self.transport, CudaQueues(GPU), GPU, readers=readers, groups=case.groups)
        whole = spec.vectors(n, n)
        self.local = vectors_on_gpu(localize(whole, made.rows, made.rows.chunks_of(rank), keys, own.columns))
        rows, held = made.rows.local_length(rank), keys.local_length(rank)
        sizes = (rows, case.heads[0]), (held, case.heads[1]), (held, case.heads[1]), (rows, case.heads[0])
        self.q, self.k, self.v, self.dout = (on_gpu(torch.zeros(1, m, h, DIM, dtype=torch.bfloat16)) for m, h in sizes)

    def address(self, word: Word) -> int:
        return self.words.data_ptr() + 4 * ((KINDS.index(word.kind) * self.case.world + word.holder) * self.case.world + word.by)

    def call(self, kind: str) -> None:
        how: Any = "copy-then-attend" if kind in FIRST else "gated"
        if kind not in BACK:
            self.out, self.lse = self.made.forward(self.local, self.q, self.k, self.v, 0.1, how)
        else:
            given = self.local, self.q, self.k, self.v, self.out, self.lse, self.dout, 0.1
            self.made.backward(*given, how, gather=kind != "k")

    # ---- what the protocol says

    def wanted(self, kind: str, turn: Turn) -> Enqueued:
        cut, gifts = self._cut(kind), self.made.gifts[kind in BACK]
        if kind not in BACK:
            return self._named(call_steps(cut.plan, turn, cut.groups, gifts), kind, ())
        leaves = self.departures(cut)
        how = kind != "k", leaves, True, self._gives(kind), kind not in FIRST
        return self._named(backward_steps(cut.plan, turn, cut.groups, gifts, *how), kind, leaves)

    def _gives(self, kind: str) -> bool:
        return self.case.way == "given" and kind not in FIRST and not self._shared(kind)

    def _shared(self, kind: str) -> bool:
        """Whether gradients are sums over several CTAs, which a stream of their own makes."""
        return kind in BACK and kind not in FIRST and self.made.splits(self.local, self.q) > 1

    def departures(self, cut: Cut) -> Sequence[Departure]:
        if self.case.way == "at once":
            return at_once(cut.plan, cut.groups)
        return by_pieces(cut.plan, cut.groups, sent_together(cut.plan, cut.groups, 1))

    def _cut(self, kind: str) -> Cut:
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
                    apart = word.kind == "finished" and self._shared(kind)
                    out.append(("sum" if apart else stream, f"wait {_text(word)} {epoch}"))
                case Put(word, epoch):
                    out.append((stream, f"write {_text(word)} {epoch}"))
                case Tell(owner, pieces, epoch):
                    out += [(stream, f"write told {owner} {piece} {epoch}") for piece in pieces]
                case Settle():
                    out += [(stream, "settle")] if self._settles(kind) else []
                case Give(reader, piece):
                    out.append((stream, f"give {reader} {piece}"))
                case Push(pieces):
                    out += [(stream, "follow sum")] if self._shared(kind) else []
                    out.append((stream, f"push {next(i for i, leaving in enumerate(leaves) if leaving.pieces == pieces)}"))
                case Attend():
                    out += self._around(op, kind)
                case Sum():
                    out += [(stream, "sum"), (stream, "spoil")]
                case _:
                    raise AssertionError(op)
        return out if kind in BACK else [*out, ("compute", "spoil")]

    def _around(self, op: Attend, kind: str) -> Enqueued:
        """The kernel; one that waits for nothing starts when all keys are there, and says nothing of its gradients."""
        if kind not in FIRST:
            return [("compute", "attend")]
        gave = [Word("gave", self.rank, source) for source in self.plans[self.rank].sources]
        reports = [Word("finished", self.rank, piece) for piece in self.made.backward_cut.pieces]
        before: Enqueued = [("compute", f"wait {_text(word)} {op.epoch}") for word in gave]
        after: Enqueued = [("send", f"write {_text(word)} {op.epoch}") for word in reports]
        return [*before, ("compute", "attend"), ("send", "follow compute"), *after]

    def _settles(self, kind: str) -> bool:
        """Whether the kernel reads own keys in the buffer."""
        from maskc.runtime.overlap_kernels import backward_block, forward_block

        block = backward_block(self.local, self.q, False) if kind in BACK else forward_block(self.local, self.q)
        own = None if kind in FIRST else self.made.in_place(self.k, self.v, block)
        return bool(self.made._runs if own is None else own.lead)

    # ---- what was enqueued

    def enqueued(self, log: Sequence[str], kind: str) -> Enqueued:
        words, rows = dict(self._words(kind)), dict(self._rows(kind))
        left: dict[str, set[int]] = {}
        for at, (_, what) in rows.items():
            left.setdefault(what, set()).add(at)
        out: Enqueued = []
        recorded: dict[str, tuple[str, int]] = {}
        batch: list[int] = []
        for line in log:
            stream = NAMES[int(found[1])] if (found := re.search(r"stream (\d+)", line)) else ""
            if line.startswith(("push", "pop", "map", "allow", "load")):
                continue
            if found := re.match(r"(\d+) words on", line):
                batch = [int(found[1]), STREAMS[stream]]
            elif found := re.match(r"operation (\d) of (\d+) at (\d+)", line):
                out.append((NAMES[batch[1]], f"{('', 'wait', 'write')[int(found[1])]} {words[int(found[3])]} {found[2]}"))
            elif found := re.match(r"(wait|write) (\d+) at (\d+)", line):
                out.append((stream, f"{found[1]} {words[int(found[3])]} {found[2]}"))
            elif found := re.match(r"launch (\S+)", line):
                out.append((stream, _kernel(found[1])))
                if out[-2:-1] == out[-1:] and out[-1][1] == "attend":  # kernels of one call
                    out.pop()
            elif line.startswith("torch copies"):
                out += [(stream, "settle")] if (stream, "settle") not in out[-1:] else []
            elif line.startswith("copy"):
                for into, source in _copied(line, DIM * (4 if self._is_push(line, rows) else 2)):
                    wanted, what = rows[into]
                    if wanted != source and not (what.startswith("push") and self._shared(kind)):
                        raise AssertionError(f"{what}: {line} reads another place")
                    if (stream, what) not in out[-1:]:
                        if left[what] and len(left[what]) != sum(w == what for _, w in rows.values()):
                            raise AssertionError(f"{self.case.name}: {what} is not in one piece: {out[-4:]}, {line}")
                        out.append((stream, what))
                    left[what].remove(into)
            elif found := re.match(r"record event (\d+)", line):
                recorded[found[1]] = stream, sum(s == stream for s, _ in out)
            elif found := re.match(r"follow event (\d+)", line):
                other, then = recorded[found[1]]
                late = sum(s == other for s, _ in out) - then
                out.append((stream, f"follow {other}" + (f", {late} operations late" if late else "")))
            else:
                raise AssertionError(line)
        if any(left.values()):
            raise AssertionError(f"not copied: {[what for what, some in left.items() if some]}")
        return out

    def _is_push(self, line: str, rows: Rows) -> bool:
        (into, _), *_ = _copied(line, 2 * DIM)
        return rows[into][1].startswith("push")

    def _words(self, kind: str) -> Iterator[tuple[int, str]]:
        world, me, cut = range(self.case.world), self.rank, self._cut(kind)
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

    def _rows(self, kind: str) -> Iterator[tuple[int, tuple[int, str]]]:
        """Of every row of a head that is given or pushed in a call, where it goes, where it lies, and what brings it."""
        if kind != "k":
            for reader, piece in self.made.gifts[kind in BACK] or ():
                ends = self.transport._ends(reader, self.made.cuts_of_readers[reader][kind in BACK], piece, (self.k, self.v))
                for there, here in zip(*ends, strict=True):
                    yield from zip(_each(there), ((at, f"give {reader} {piece}") for at in _each(here)), strict=True)
        if kind not in BACK or self._gives(kind):
            return
        cut, plan = self._cut(kind), self.plans[self.rank]
        slots = {slot.chunk: slot for slot in plan.slots}
        for number, departure in enumerate(self.departures(cut)):
            for piece in departure.pieces:
                for chunk in cut.plan.slot_of(piece).chunks:
                    at = self.made.result_rows(slots[chunk])
                    there = self.transport._places(departure.owner, chunk, cut.heads_of(piece), at.stop - at.start)
                    for to, grads in zip(there, self.results, strict=True):
                        here = grads[0][:, cut.heads_of(piece), at]
                        yield from zip(_each(to), ((a, f"push {number}") for a in _each(here)), strict=True)

    results: tuple[torch.Tensor, torch.Tensor]
    """Gradients that the kernel of the last call left."""


def _each(t: torch.Tensor) -> list[int]:
    """Addresses of the rows of D elements."""
    sizes, width = t.shape[:-1], t.element_size()
    at = sum(
        torch.arange(n).view([-1 if i == d else 1 for i in range(len(sizes))]) * t.stride(d) * width for d, n in enumerate(sizes)
    )
    return [t.data_ptr() + int(a) for a in at.expand(sizes).flatten().tolist()]  # type: ignore[union-attr]


def _copied(line: str, row: int) -> list[tuple[int, int]]:
    """(into, source) of every row that a copy takes."""
    if found := re.match(r"copy (\d+) from (\d+) to (\d+)", line):
        size, source, into = map(int, found.groups())
        pieces, pitches = 1, (0, 0)
    else:
        found = re.match(r"copy (\d+) x (\d+) from (\d+) by (\d+) to (\d+) by (\d+)", line)
        assert found is not None, line
        pieces, size, source, of, into, to = map(int, found.groups())
        pitches = to, of
    return [(into + i * pitches[0] + at, source + i * pitches[1] + at) for i in range(pieces) for at in range(0, size, row)]


def _kernel(name: str) -> str:
    return {"fill": "settle", "sum_gradients": "sum", "spoil": "spoil"}.get(name, "attend" if name.startswith("attn") else name)


def _text(word: Word) -> str:
    return f"{word.kind} {word.holder} {word.by}"


def trace(case: Case, rank: int) -> list[dict[str, Any]]:
    """Calls twice; of the second time what was enqueued and what was to be."""
    log, found = Path(os.environ["STUB_DRIVER_LOG"]), []
    running = Rank(case, rank)
    enqueue = Overlapped._enqueue

    def noted(self: Overlapped, *args: Any) -> Any:
        made = enqueue(self, *args)
        running.results = getattr(made, "pair", running.__dict__.get("results"))
        return made

    Overlapped._enqueue = noted  # type: ignore[method-assign]
    with leaving(case.way):
        for again in range(2):
            for kind in case.calls:
                log.write_text("")
                last = dict(running.epochs._last)
                running.call(kind)
                owners = dict.fromkeys(s.source for s in running.plans[rank].pulls) if kind in BACK else ()
                turn = Turn(running.epochs.epoch, tuple((o, last[o]) for o in owners if o in last))
                if again:
                    lines = log.read_text().splitlines()
                    both = running.enqueued(lines, kind), running.wanted(kind, turn)
                    if running._shared(kind):  # what is summed for the next piece may be enqueued before words of this one
                        both = sorted(both[0], key=itemgetter(0)), sorted(both[1], key=itemgetter(0))
                    found.append({"call": kind, "enqueued": both[0], "wanted": both[1]})
    Overlapped._enqueue = enqueue  # type: ignore[method-assign]
    return found


def main() -> None:
    with install():
        json.dump({f"{case.name}, rank {rank}": trace(case, rank) for case in CASES for rank in RANKS}, sys.stdout)


if __name__ == "__main__":
    main()
