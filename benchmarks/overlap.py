"""What of the exchange of keys and gradients hides behind attention: one rank on one GPU, others in pinned host memory.

    python -m benchmarks.overlap [--timeout 110] [--out benchmarks/results/overlap.json] [--dry]

Per cell (mask, length, key heads, ranks, link): the rank that receives most, under the balanced plan. In turn, in random
order, forward and backward: attention alone (the gated kernel, every chunk there), the same with flags to look at, the
kernel without a gate, the planned copies alone, both one after the other, both beside each other by copy engines
("gated") and with a copy kernel ("sm-copy"), and two baselines: the whole sequence gathered under the dual-chunk (zigzag)
assignment, then attended to, and (forward) chunks of one peer after another with merged results.

Backward, the copies are those of keys and of the gradients of others in one direction, own gradients for others in the
other direction at the same time, and the sum. E = 1 - exposed / copies with exposed = overlapped - attention, of medians,
never clamped, with a 95 % interval from resampling; hidden / min = (attention + copies - overlapped) /
min(attention, copies). The own keys' way into the buffer counts as exposed. A link of half the rate copies every chunk
twice. --dry lists the cells with the model's times. --gpus N runs `benchmarks.overlap_gpus` instead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import maskc
from benchmarks.digest import digest
from benchmarks.masks import mask_case
from maskc.boundary import BoundaryVectors
from maskc.codegen.exchange import exchange_source
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.spec import OutDtype
from maskc.codegen.spec_bwd import select_backward
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper, ops
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.merge import merge
from maskc.runtime.overlap import Gradients, Overlapped
from maskc.runtime.overlap_model import backward_times, flows, forward_times
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan, visit_order
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.plan_arguments import Order
from maskc.runtime.protocol import Kind, Stream, Word
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair, head_major, write_word

MASKS = ("causal", "causal_document", "prefix_lm_document", "share_question", "sliding_window")
HEAD_DIM = 128
LINK_RATE = 50e9
"""Bytes per second of pinned host memory, as the model and the order of the backward's work expect it."""
CLOCK = 1.98e9
"""Cycles per second of the GPU."""
FORWARD_SHARE = 0.5
"""Of the time, after which no forward cell is begun."""
FEWEST, MOST = 7, 40
"""Rounds of a cell."""


@dataclass(frozen=True)
class Cell:
    """link: copies of every chunk; 1 is the link as it is, 2 one of half its rate."""

    mask: str
    seqlen: int
    heads: int
    heads_kv: int
    world: int
    link: int

    def __str__(self) -> str:
        return f"{self.mask:20} S={self.seqlen:6} Hq={self.heads} Hk={self.heads_kv:2} P={self.world} link/{self.link}"


def cells() -> Iterator[Cell]:
    """The grid, what says most first: the time may not reach for all of it."""
    paper = (65_536, 64, 1, 8, 1)  # 8192 rows a device, 64 query heads on one key head
    sizes = [(32_768, 32, 32, 2, 1), (65_536, 32, 8, 8, 1), (65_536, 32, 32, 2, 1), (131_072, 32, 8, 2, 2), paper]
    sizes += [(32_768, 32, 8, 8, 1), (65_536, 32, 8, 8, 2), (131_072, 32, 8, 8, 1), (65_536, 32, 1, 8, 2), (262_144, 32, 8, 8, 1)]
    slow = [c for size in sizes for c in (Cell("causal", *size),) if c.seqlen // c.world >= 1 << 15]
    yield from (c for size in sizes for m in MASKS if (c := Cell(m, *size)) not in slow)
    yield from slow


@dataclass(frozen=True)
class Problem:
    """A cell's mask, plan, and the rank that is looked at."""

    cell: Cell
    v: BoundaryVectors
    p: AttentionPlan
    order: OverlapPlan


def problem(cell: Cell, order: Order = "balanced") -> Problem:
    case = mask_case(cell.mask, cell.seqlen, heads=cell.heads)
    v = maskc.compile(case.mask).bind(nq=case.seqlen, nk=case.seqlen, **case.inputs).vectors(case.seqlen, case.seqlen)
    chunk = min(2048, max(128, cell.seqlen // cell.world // 8))
    p = plan(
        v,
        world_size=cell.world,
        chunk=chunk,
        order=order,
        heads=cell.heads,
        heads_kv=cell.heads_kv,
        head_dim=HEAD_DIM,
    )
    orders = [overlap_plan(p, r) for r in range(cell.world)]
    return Problem(cell, v, p, max(orders, key=lambda o: sum(s.rows for s in o.pulls)))


# ---------------------------------------------------------------- one rank on the GPU


class Link(Loopback):
    """Peers whose keys never change and whose gradients, on the GPU, come over the link that brings the keys."""

    def __init__(self, keys: Layout, order: OverlapPlan, shape: KeyShape, device: torch.device, slowness: int) -> None:
        super().__init__(keys, order.rank, order.sources, shape, device.type == "cuda", slowness, order.lends, halves=1)
        longest = max((keys.size_of(c) for c in range(keys.chunk_count)), default=0)
        self.left, self.theirs = (shape.gradients(longest, "cpu", self.pinned) for _ in range(2))
        self.here = {(r, c): shape.gradients(keys.size_of(c), device) for r, chunks in order.lends for c in chunks}
        for pair in (*self.here.values(), self.left, self.theirs):
            for t in pair:
                t.zero_()

    def staged(self, reader: int, chunk: int) -> Pair:
        return self.here[reader, chunk]

    def pushed(self, chunk: int) -> Pair:
        """One piece of memory for all of them: nobody reads it."""
        k, v = (t[:, :, : self.keys.size_of(chunk)] for t in self.left)
        return k, v

    def receive(self) -> None:
        """The gradients of others, on torch's current stream."""
        for (_, chunk), pair in self.here.items():
            for mine, their in zip(pair, self.theirs, strict=True):
                for into, source in zip(mine, their[:, :, : self.keys.size_of(chunk)], strict=True):
                    self._copy(into, source)


class Beside(Overlapped):
    """A rank whose peers send their gradients once its own keys are there."""

    transport: Link
    receiving = False

    def attend_backward(self, *args: Any, **named: Any) -> Gradients:
        made = super().attend_backward(*args, **named)
        if self.receiving:
            with self.queues.on("copy"):
                self.transport.receive()
            for reader in self.transport.lends:
                self.queues.put("copy", self.transport.address(Word("sent", self.plan.rank, reader)), self.epoch)
        return made


class Rank:
    """The rank of a problem with its buffers."""

    def __init__(self, made: Problem, order: OverlapPlan, device: torch.device) -> None:
        cell, p = made.cell, made.p
        self.order, self.p, self.device = order, p, device
        shape = KeyShape(1, cell.heads_kv, HEAD_DIM, HEAD_DIM, torch.bfloat16)
        self.link = Link(p.keys, order, shape, device, cell.link)
        self.queues = CudaQueues(device)
        self.rank = Beside(order, p.keys, shape, self.link, self.queues, device, rate=LINK_RATE / cell.link, timeout=1.0)
        self.vectors = replace(made.v, **{n: t.to(device) for n, t in _named(made.v)})  # type: ignore[arg-type]
        self.rows = p.rows.chunks_of(order.rank)
        self.local = localize(self.vectors, p.rows, self.rows, p.keys, order.columns, device)
        self._parts: dict[tuple[int, ...], tuple[BoundaryVectors, tuple[Tensor, ...]]] = {}
        self.scale = HEAD_DIM**-0.5
        self.q, self.dout = (torch.randn(1, self.local.nq, cell.heads, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        own = p.keys.local_length(order.rank)
        self.k, self.v = (torch.randn(1, own, cell.heads_kv, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        for peer in order.sources:
            self.link.post(peer, 1, partial(_fill, device, peer))
        self.result = self.forward("copy-then-attend")
        self.grads = self.attention_backward()

    def forward(self, executor: str) -> tuple[Tensor, Tensor]:
        self._let("ready", self.rank.epoch + 1)  # the keys of others never change
        return self.rank.forward(self.local, self.q, self.k, self.v, self.scale, executor)  # type: ignore[arg-type]

    def backward(self, executor: str) -> tuple[Tensor, Tensor, Tensor]:
        self._let("ready", self.rank.epoch + 1)
        self._let("free", self.rank.epoch)  # nobody reads what was pushed
        self.rank.receiving = True
        given = (self.q, self.k, self.v, *self.result, self.dout, self.scale)
        got = self.rank.backward(self.local, *given, executor)  # type: ignore[arg-type]
        self.rank.receiving = False
        return got

    def _let(self, kind: Kind, epoch: int) -> None:
        for source in self.order.sources:
            write_word(self.link.address(Word(kind, self.order.rank, source)), epoch)

    def attention(self, gated: bool = True, there: bool = True) -> tuple[Tensor, Tensor]:
        return self.rank.attend(self.local, self.q, self.scale, gated=gated, there=there)

    def attention_backward(self, gated: bool = True, there: bool = True) -> Gradients:
        given = (self.q, *self.result, self.dout, self.scale)
        return self.rank.attend_backward(self.local, *given, gated=gated, there=there)

    def copies(self) -> None:
        """The planned copies of keys with their flags, and the compute stream behind them."""
        self._pull()
        self.queues.follow("compute", "copy")

    def exchange(self) -> None:
        """All that is copied for a backward call, both directions at once, and the sum."""
        self._pull()
        with self.queues.on("copy"):
            self.link.receive()
        with self.queues.on("send"):
            for piece in self.rank.plan.pieces(self.rank.groups):
                if piece // len(self.rank.plan.slots) % self.rank.together == 0:
                    self.rank.push(piece, self.grads, self.rank.together)
        for stream in ("copy", "send"):
            self.queues.follow("compute", stream)
        self.rank.add_up(self.grads, (torch.empty_like(self.k), torch.empty_like(self.v)))

    def fill(self) -> None:
        self.rank.offer(0, self.k, self.v)
        self.rank.settle(self.k, self.v)

    def _pull(self) -> None:
        for piece in self.rank.plan.pieces(self.rank.groups):
            with self.queues.on("copy"):
                self.rank.pull(piece, 0)
            self.queues.put("copy", self.rank.words.flags.data_ptr() + 4 * piece, self.rank.epoch)

    def peer_by_peer(self) -> tuple[Tensor, Tensor]:
        """Chunks of one peer after another; each part is attended to when it is there, results are merged."""
        events = []
        parts = [tuple(s for s in self.rank.plan.slots if s.source == r) for r in (self.order.rank, *self.order.sources)]
        for part in parts[1:]:
            with self.queues.on("copy"):
                for piece in self.rank.plan.pieces(self.rank.groups):
                    if self.rank.plan.slot_of(piece) in part:
                        self.rank.pull(piece, 0)
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record()
        total = None
        for i, part in enumerate(parts):
            if i:
                torch.cuda.current_stream().wait_event(events[i - 1])
            if part:
                total = self._merged(total, part)
        assert total is not None
        return total[0].to(self.q.dtype), total[1]

    def _merged(self, total: Any, part: Any) -> Any:
        columns = tuple(c for s in reversed(part) for c in s.chunks)
        if columns not in self._parts:
            local = localize(self.vectors, self.p.rows, self.rows, self.p.keys, columns, self.device)
            self._parts[columns] = local, hopper.schedule(local, HEAD_DIM)
        local, tables = self._parts[columns]
        rows = slice(part[-1].start, part[0].start + part[0].rows)
        keys, values = (head_major(x[:, rows]) for x in (self.rank.keys, self.rank.values))
        new = ops.forward(local, self.q, keys, values, self.scale, schedule=tables, out_dtype=torch.float32)
        return new if total is None else merge(total, new)


def _fill(device: torch.device, peer: int, pair: Pair) -> None:
    g = torch.Generator(device).manual_seed(peer)
    for half in pair:
        half.copy_(torch.randn(half.shape, device=device, generator=g))


def _named(v: BoundaryVectors) -> list[tuple[str, Tensor]]:
    named = zip(("lts", "lte", "uts", "ute", "diag"), v.tensors, strict=True)
    return [(n, t) for n, t in named if t is not None]


def everything_gathered(cell: Cell) -> tuple[Problem, OverlapPlan]:
    """Dual-chunk assignment; every rank gets every chunk."""
    made = problem(cell, "zigzag")
    everything = [frozenset(range(made.p.keys.chunk_count))] * cell.world
    return made, visit_order(made.p.keys, everything, made.order.rank, cell.world)


EXECUTORS = ("gated", "sm-copy", "copy-then-attend")
BASELINES = ("dual-chunk gather", "peer by peer")
SIDES: tuple[Stream, Stream] = ("copy", "send")
Runs = dict[str, Callable[[], Any]]


def measure(cell: Cell, device: torch.device, seconds: float, direction: str) -> list[dict[str, Any]]:
    """The rows of one cell and direction. seconds: that it may take to be measured."""
    made = problem(cell)
    ours = Rank(made, made.order, device)
    queues = [ours.queues]
    whole: Rank | None = None
    if cell.seqlen * cell.heads_kv <= 1 << 20:  # both ranks' buffers at once
        whole = Rank(*everything_gathered(cell), device)
        queues.append(whole.queues)
    runs: Runs
    if direction == "forward":
        runs = {
            "attention": ours.attention,
            "flags set": partial(ours.attention, there=False),
            "no gate": partial(ours.attention, gated=False),
            "copies": ours.copies,
            "own keys": ours.fill,
            **{name: partial(ours.forward, name) for name in EXECUTORS},
            "peer by peer": ours.peer_by_peer,
        }
    else:
        runs = {
            "attention": ours.attention_backward,
            "flags set": partial(ours.attention_backward, there=False),
            "no gate": partial(ours.attention_backward, gated=False),
            "copies": ours.exchange,
            "own keys": ours.fill,
            **{name: partial(ours.backward, name) for name in EXECUTORS},
        }
    if whole is not None:
        runs["dual-chunk gather"] = partial(whole.forward if direction == "forward" else whole.backward, "copy-then-attend")
    results, times = _times(runs, queues, seconds, ours.rank.finish)
    pairs = (p for name in EXECUTORS for p in _bits(direction, results[name], results["copy-then-attend"]))
    same = all(torch.equal(a, b) for a, b in pairs)
    return _rows(made, direction, times, len(ours.rank.plan.pieces(ours.rank.groups)), same)


def _bits(direction: str, a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What two executors must agree on to the bit: backward, not dQ, which is added up in any order."""
    return zip(a, b, strict=True) if direction == "forward" else zip(a[1:], b[1:], strict=True)


def _rows(made: Problem, direction: str, times: dict[str, list[float]], pieces: int, same: bool) -> list[dict[str, Any]]:
    cell = made.cell
    medians = {name: statistics.median(t) for name, t in times.items()}
    row_bytes = DEFAULT_MACHINE.bytes_per_row(cell.heads_kv, HEAD_DIM)
    pulled = sum(s.rows for s in made.order.pulls) * row_bytes
    lent = sum(made.p.keys.size_of(c) for _, chunks in made.order.lends for c in chunks) * row_bytes
    shared = {
        "mask": cell.mask,
        "seqlen": cell.seqlen,
        "heads": cell.heads,
        "kv_heads": cell.heads_kv,
        "world": cell.world,
        "link": cell.link,
        "rank": made.order.rank,
        "bytes_in": pulled + (2 * lent if direction == "backward" else 0),
        "bytes_out": 2 * pulled if direction == "backward" else 0,
        "pieces": pieces,
        "repeats": len(times["attention"]),
        "same_bits": same,
        "t_attention_ms": medians["attention"],
        "t_comm_ms": medians["copies"],
        "t_no_gate_ms": medians["no gate"],
        "t_own_keys_ms": medians["own keys"],
        "gate_overhead": medians["flags set"] / medians["attention" if direction == "backward" else "no gate"] - 1,
        "direction": direction,
    }
    machine = replace(DEFAULT_MACHINE, intra=LINK_RATE / cell.link)
    times_of = forward_times if direction == "forward" else backward_times
    t = times_of(flows(made.p, 0, machine)[made.order.rank])
    model = {"gated": 1e3 * t.beside, "copy-then-attend": 1e3 * t.apart}
    rows = []
    for name in (*EXECUTORS, *BASELINES):
        if name in times:
            low, high = interval(times, name)
            predicted = model.get(name)
            timed = {"executor": name, "t_overlap_ms": medians[name], "t_model_ms": predicted, **figures(medians, name)}
            rows.append({**shared, **timed, "e_low": low, "e_high": high})
    return rows


def compile_all(masks: list[str]) -> None:
    """Every variant that is going to run, compiled side by side."""
    forms = set()
    for name in masks:
        made = problem(Cell(name, 8192, 32, 8, 2, 1))
        rows, keys = made.p.rows, made.p.keys
        forms.add(hopper.mask_form(localize(made.v, rows, rows.chunks_of(made.order.rank), keys, made.order.columns)))
    specs = [forward_spec(form, HEAD_DIM, "bf16", out) for form in forms for out in get_args(OutDtype)]
    sources = [exchange_source(), *(forward_source(replace(s, gated=gated)) for s in specs for gated in (False, True))]
    sources += [replace(select_backward(f, HEAD_DIM, "bf16"), gated=gated).source() for f in forms for gated in (False, True)]
    sources += [schedule_source(schedule_spec(form, HEAD_DIM)) for form in forms if form.closed is None]
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_cubin, sources))


def _times(
    runs: Runs, queues: Sequence[CudaQueues], seconds: float, finish: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """What each run gave, and its milliseconds in every round of all of them in random order.

    As many rounds as fit `seconds`. The GPU sleeps before each run until the host has enqueued it, as in a model, where
    the host is ahead; copies start no earlier than the clock. Raises MaskcError M721 where a chunk did not arrive.
    """
    rng = random.Random(0)
    results, issue = {}, {}
    for again in range(2):
        for name, run in runs.items():
            started = time.monotonic()
            results[name] = run()
            issue[name] = time.monotonic() - started
            torch.cuda.synchronize()
            finish()
            if again:
                issue[name] = min(issue[name], 5e-3)
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    until, rounds = time.monotonic() + seconds, 0
    while rounds < FEWEST or (time.monotonic() < until and rounds < MOST):
        rounds += 1
        for name in rng.sample(list(runs), len(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(int(issue[name] * 1.3 * CLOCK))  # type: ignore[no-untyped-call]
            start.record()
            for of, stream in product(queues, SIDES):
                of.follow(stream, "compute")
            runs[name]()
            for of, stream in product(queues, SIDES):
                of.follow("compute", stream)
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        finish()
    out: dict[str, list[float]] = {name: [] for name in runs}
    for name, start, end in events:
        out[name].append(start.elapsed_time(end))
    return results, out


def figures(t: dict[str, float], name: str) -> dict[str, float | None]:
    """E and hidden / min of the medians; None where nothing is copied."""
    attention, copies, overlapped = t["attention"], t["copies"], t[name]
    if copies <= 0:
        return {"e": None, "hidden": None}
    return {
        "e": 1 - (overlapped - attention) / copies,
        "hidden": (attention + copies - overlapped) / min(attention, copies),
    }


def interval(times: dict[str, list[float]], name: str) -> tuple[float, float]:
    """95 % of E over resampled medians."""
    rng = np.random.default_rng(0)
    names = ("attention", "copies", name)
    drawn = {n: np.median(rng.choice(np.array(times[n]), (1000, len(times[n]))), axis=1) for n in names}
    e = 1 - (drawn[name] - drawn["attention"]) / drawn["copies"]
    low, high = np.percentile(e, (2.5, 97.5))
    return float(low), float(high)


# ---------------------------------------------------------------- the table


def line(cell: Cell, rows: list[dict[str, Any]]) -> str:
    """One line per direction."""
    out = []
    for direction in ("forward", "backward"):
        of = [r for r in rows if r["direction"] == direction]
        if not of:
            continue
        first = of[0]
        attention, copies = first["t_attention_ms"], first["t_comm_ms"]
        times = "  ".join(f"{r['executor']} {r['t_overlap_ms']:.3f}" for r in of)
        e = "none" if first["e"] is None else f"E {first['e']:.3f} [{first['e_low']:.3f}, {first['e_high']:.3f}]"
        hidden = "" if first["hidden"] is None else f" hidden/min {first['hidden']:.3f}"
        bits = "" if first["same_bits"] else "  BITS DIFFER"
        out.append(
            f"{cell} {direction:8} attention {attention:.3f} copies {copies:.3f} ({copies / attention:.2f})  {times} ms"
            f"  {e}{hidden}  gate {first['gate_overhead']:+.2%} own keys {first['t_own_keys_ms']:.3f}{bits}"
        )
    return "\n".join(out)


def dry(cell: Cell) -> str:
    """The model's times at the rate of the loopback link."""
    made = problem(cell)
    machine = replace(DEFAULT_MACHINE, intra=LINK_RATE / cell.link)
    t = forward_times(flows(made.p, 0, machine)[made.order.rank])
    e = "none" if not t.transfer else f"{1 - (t.beside - t.attention) / t.transfer:.3f}"
    chunks = f"{len(made.order.pulls)} of {made.p.keys.chunk_count} chunks copied to rank {made.order.rank}"
    return (
        f"{cell}  {chunks}; model: attention {1e3 * t.attention:.3f} copies {1e3 * t.transfer:.3f} "
        f"apart {1e3 * t.apart:.3f} beside {1e3 * t.beside:.3f} ms  E {e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--timeout", type=float, default=110.0, help="seconds; cells that are not reached are named")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measurement per cell and direction")
    parser.add_argument("--cells", type=int, nargs="+", help="numbers of the cells to run, from 0")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--longest", type=int, default=262_144, help="leave out longer sequences")
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=("forward", "backward"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    parser.add_argument("--gpus", type=int, default=1, help="more than one: benchmarks.overlap_gpus")
    args = parser.parse_args()
    if args.gpus > 1:
        from benchmarks import overlap_gpus

        raise SystemExit(overlap_gpus.main(["--gpus", str(args.gpus), "--timeout", str(args.timeout)]))
    numbered = [(i, c) for i, c in enumerate(cells()) if c.mask in args.masks and c.seqlen <= args.longest]
    chosen = [c for i, c in numbered if args.cells is None or i in args.cells]
    if args.dry:
        for cell in chosen:
            print(dry(cell), flush=True)
        return
    deadline = time.monotonic() + args.timeout
    compile_all(args.masks)
    device = torch.device("cuda", torch.cuda.current_device())
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "digest": digest(), "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    left = []
    wanted = [c for c in chosen if problem(c).order.pulls]  # elsewhere no rank needs keys of another
    for direction, cell in product(args.directions, wanted):
        until = deadline if direction == args.directions[-1] else deadline - args.timeout * (1 - FORWARD_SHARE)
        if time.monotonic() > until:
            left.append(f"{cell} {direction}")
            continue
        started = time.monotonic()
        try:
            rows = measure(cell, device, args.seconds, direction)
        except MaskcError as problem_found:
            print(f"{cell} {direction}: {problem_found}", flush=True)
            rows = []
        torch.cuda.empty_cache()
        record["rows"] += rows
        if rows:
            print(f"{line(cell, rows)}  ({time.monotonic() - started:.1f} s)", flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if left:
        print(f"not reached in {args.timeout:.0f} s: {len(left)}, from {left[0]}")


if __name__ == "__main__":
    main()
