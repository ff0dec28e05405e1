"""What of the copies hides behind attention: one rank on one GPU, other ranks in pinned host memory, forward.

    python -m benchmarks.overlap [--timeout 110] [--out benchmarks/results/overlap.json] [--dry]

Per cell (mask, length, key heads, ranks, link): the rank that receives most, under the balanced plan. In turn, in random
order: attention alone (the gated kernel, every chunk there), the same with flags to look at, the kernel without a gate,
the planned copies alone, both one after the other, both beside each other, and two baselines: the whole sequence gathered
under the dual-chunk (zigzag) assignment, then attended to, and chunks of one peer after another with merged results.

E = 1 - exposed / copies with exposed = overlapped - attention, of medians, never clamped, with a 95 % interval from
resampling; hidden / min = (attention + copies - overlapped) / min(attention, copies). The own keys' way into the buffer
counts as exposed. A link of half the rate copies every chunk twice. --dry lists the cells with the model's times.

Not here: backward (there is no gated backward), a copy kernel on multiprocessors, several GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import maskc
from benchmarks.digest import digest
from benchmarks.masks import mask_case
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.spec import OutDtype
from maskc.runtime import hopper, ops
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.merge import merge
from maskc.runtime.overlap import Overlapped
from maskc.runtime.overlap_model import flows, forward_times
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan, visit_order
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.plan_arguments import Order
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair

MASKS = ("causal", "causal_document", "prefix_lm_document", "share_question", "sliding_window")
HEAD_DIM = 128
LINK_RATE = 50e9
"""Bytes per second of pinned host memory, for the model of a dry run only."""


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
    sizes = [(32_768, 8), (131_072, 8), (65_536, 32), (32_768, 1), (262_144, 1), (262_144, 8), (32_768, 32)]
    for seqlen, heads_kv in sizes:
        for world in (2, 8):
            for link in (1, 2):
                for mask in MASKS:
                    yield Cell(mask, seqlen, 32, heads_kv, world, link)
    for world in (4, 8, 16, 32):  # 8192 rows a device, 64 query heads on one key head
        for mask in MASKS:
            yield Cell(mask, 8192 * world, 64, 1, world, 1)


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


class Rank:
    """The rank of a problem with its buffers."""

    def __init__(self, made: Problem, order: OverlapPlan, device: torch.device) -> None:
        cell, p = made.cell, made.p
        self.order, self.p, self.device = order, p, device
        shape = KeyShape(1, cell.heads_kv, HEAD_DIM, HEAD_DIM, torch.bfloat16)
        self.link = Loopback(p.keys, order.rank, order.sources, shape, slowness=cell.link)
        self.queues = CudaQueues(device)
        self.rank = Overlapped(order, p.keys, shape, self.link, self.queues, device)
        self.vectors = replace(made.v, **{n: t.to(device) for n, t in _named(made.v)})  # type: ignore[arg-type]
        self.rows = p.rows.chunks_of(order.rank)
        self.local = localize(self.vectors, p.rows, self.rows, p.keys, order.columns, device)
        self._parts: dict[tuple[int, ...], tuple[BoundaryVectors, tuple[Tensor, ...]]] = {}
        self.scale = HEAD_DIM**-0.5
        self.q = torch.randn(1, self.local.nq, cell.heads, HEAD_DIM, device=device).bfloat16()
        own = p.keys.local_length(order.rank)
        self.k, self.v = (torch.randn(1, own, cell.heads_kv, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        for peer in order.sources:
            for epoch in (1, 2):  # the same keys in both halves, for good: every call gives the same result
                self.link.post(peer, epoch, partial(_fill, device, peer))

    def call(self, executor: str) -> tuple[Tensor, Tensor]:
        self.link.release(self.rank.epoch + 1)  # the keys of others never change: they are ready for any epoch
        return self.rank.forward(self.local, self.q, self.k, self.v, self.scale, executor)  # type: ignore[arg-type]

    def attention(self, gated: bool = True, there: bool = True) -> tuple[Tensor, Tensor]:
        return self.rank.attend(self.local, self.q, self.scale, gated=gated, there=there)

    def copies(self) -> None:
        """The planned copies with their flags, and the compute stream behind them."""
        for slot in range(self.order.own, len(self.order.slots)):
            with self.queues.on("copy"):
                self.rank.pull(slot, 0)
            self.queues.put("copy", self.rank.flags.data_ptr() + 4 * slot, self.rank.epoch)
        self.queues.copies_ended()

    def peer_by_peer(self) -> tuple[Tensor, Tensor]:
        """Chunks of one peer after another; each part is attended to when it is there, results are merged."""
        events = []
        parts = [tuple(s for s in self.order.slots if s.source == r) for r in (self.order.rank, *self.order.sources)]
        for part in parts[1:]:
            with self.queues.on("copy"):
                for s in part:
                    self.rank.pull(self.order.slots.index(s), 0)
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
        columns = tuple(s.chunk for s in reversed(part))
        if columns not in self._parts:
            local = localize(self.vectors, self.p.rows, self.rows, self.p.keys, columns, self.device)
            self._parts[columns] = local, hopper.schedule(local, HEAD_DIM)
        local, tables = self._parts[columns]
        rows = slice(part[-1].start, part[0].start + part[0].rows)
        keys, values = (x[rows].transpose(0, 1) for x in (self.rank.keys, self.rank.values))
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


def measure(cell: Cell, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The rows of one cell."""
    made = problem(cell)
    ours = Rank(made, made.order, device)
    runs: dict[str, Callable[[], Any]] = {
        "attention": ours.attention,
        "flags set": lambda: ours.attention(there=False),
        "no gate": lambda: ours.attention(gated=False),
        "copies": ours.copies,
        "gated": lambda: ours.call("gated"),
        "copy-then-attend": lambda: ours.call("copy-then-attend"),
        "peer by peer": ours.peer_by_peer,
    }
    if cell.seqlen * cell.heads_kv <= 1 << 20:  # both ranks' buffers and halves at once
        other, order = everything_gathered(cell)
        gathered = Rank(other, order, device)
        runs["dual-chunk gather"] = lambda: gathered.call("copy-then-attend")
    results = {}
    for name, run in runs.items():
        results[name] = run()
        torch.cuda.synchronize()
    ours.rank.finish()
    same = torch.equal(results["gated"][0], results["copy-then-attend"][0])
    times = _times(runs, ours.queues, repeats)
    ours.rank.finish()
    medians = {name: statistics.median(t) for name, t in times.items()}
    copied = sum(s.rows for s in made.order.pulls) * DEFAULT_MACHINE.bytes_per_row(cell.heads_kv, HEAD_DIM)
    shared = {
        "mask": cell.mask,
        "seqlen": cell.seqlen,
        "heads": cell.heads,
        "kv_heads": cell.heads_kv,
        "world": cell.world,
        "link": cell.link,
        "rank": made.order.rank,
        "bytes": copied,
        "same_bits": same,
        "t_attention_ms": medians["attention"],
        "t_comm_ms": medians["copies"],
        "t_no_gate_ms": medians["no gate"],
        "gate_overhead": medians["flags set"] / medians["no gate"] - 1,
        "direction": "forward",
    }
    rows = []
    for name in ("gated", "copy-then-attend", "peer by peer", "dual-chunk gather"):
        if name in times:
            low, high = interval(times, name) if name == "gated" else (None, None)
            rows.append(
                {
                    **shared,
                    "executor": name,
                    "t_overlap_ms": medians[name],
                    **figures(medians, name),
                    "e_low": low,
                    "e_high": high,
                }
            )
    return rows


def compile_all(masks: list[str]) -> None:
    """Every variant that is going to run, compiled side by side."""
    forms = set()
    for name in masks:
        made = problem(Cell(name, 8192, 32, 8, 2, 1))
        rows, keys = made.p.rows, made.p.keys
        forms.add(hopper.mask_form(localize(made.v, rows, rows.chunks_of(made.order.rank), keys, made.order.columns)))
    specs = [forward_spec(form, HEAD_DIM, "bf16", out) for form in forms for out in get_args(OutDtype)]
    sources = [forward_source(replace(s, gated=gated)) for s in specs for gated in (False, True)]
    sources += [schedule_source(schedule_spec(form, HEAD_DIM)) for form in forms if form.closed is None]
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_cubin, sources))


def _times(runs: dict[str, Callable[[], Any]], queues: CudaQueues, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run, in random order in every round; copies start no earlier than the round's clock."""
    rng = random.Random(0)
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(repeats):
        for name in rng.sample(list(runs), len(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            queues.copies.wait_event(start)
            runs[name]()
            queues.copies_ended()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
    out: dict[str, list[float]] = {name: [] for name in runs}
    for name, start, end in events:
        out[name].append(start.elapsed_time(end))
    return out


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
    first = rows[0]
    parts = [f"{cell}  attention {first['t_attention_ms']:.3f} copies {first['t_comm_ms']:.3f}"]
    parts += [f"{r['executor']} {r['t_overlap_ms']:.3f}" for r in rows]
    e = "none" if first["e"] is None else f"{first['e']:.3f} [{first['e_low']:.3f}, {first['e_high']:.3f}]"
    return "  ".join(parts) + f" ms  E {e}  gate {first['gate_overhead']:+.2%}  same bits {first['same_bits']}"


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
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--longest", type=int, default=262_144, help="leave out longer sequences")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    args = parser.parse_args()
    chosen = [c for c in cells() if c.mask in args.masks and c.seqlen <= args.longest]
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
    for cell in chosen:
        if time.monotonic() > deadline:
            left.append(str(cell))
            continue
        if not problem(cell).order.pulls:
            print(f"{cell}  no rank needs keys of another")
            continue
        rows = measure(cell, device, args.repeats)
        record["rows"] += rows
        print(line(cell, rows), flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if left:
        print(f"not reached in {args.timeout:.0f} s: {len(left)} cells, from {left[0]}")


if __name__ == "__main__":
    main()
