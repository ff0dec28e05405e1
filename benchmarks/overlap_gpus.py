"""Attention over several GPUs of one host, one process a GPU: keys given into each other's memory against NCCL and peers.

    python -m benchmarks.overlap_gpus [--gpus 2] [--timeout 150] [--out benchmarks/results/overlap_gpus.json] [--match causal]

Per cell (mask, rows a GPU, heads, batch) and way, forward and backward:

    gated                    balanced plan, keys given by copy engines beside the kernel
    gated, chunks            the same by equal chunks, four cells: more keys travel, so that E says more
    gated, keys kept         the same; the backward, right behind the forward, does not pull them again
    copy-then-attend         the same, one after the other
    all-gather, staged       balanced plan, pruned exchange over NCCL; one kernel, or partial results merged
    ring                     zigzag plan, the next keys on their way during compute, steps that see nothing left out
    dual-chunk gather        zigzag plan, NCCL's own all-gather and reduce-scatter of everything (gradients in bf16), one kernel
    torch context parallel   torch's context-parallel FlexAttention with its head-tail balancer (--torch: it compiles for long)

Times are those of `benchmarks.overlap_clock`: of the slowest rank, medians over rounds in which what is compared (gated, dual
chunk, the attention of both alone) follows each other equally often; `faster_`, `share_` and `beyond_` are middles of what each
round says, with their intervals (`benchmarks.overlap_pairs`). E = 1 - (gated - attention) / communication, never clamped,
attention being the gated kernel with every chunk there and gradients in its own memory, communication the copies alone on all
ranks at once (backward: keys in, gradients out, their sum). e_possible is what no order of work could beat
(`benchmarks.overlap_bounds`; the sum of gradients hidden). late: a host was in every round, and no bar counts. The file is
written after every cell.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.digest import digests
from benchmarks.kernels import attention, compile_all
from benchmarks.machine import machine
from benchmarks.masks import mask_case
from benchmarks.overlap_bars import CHUNKED, DIRECTIONS, as_rows, bars
from benchmarks.overlap_bounds import best, soonest_end
from benchmarks.overlap_cells import HEAD_DIM, MASKS
from benchmarks.overlap_clock import MOST_OPEN, OTHERS, Clock, Figure, Key, Round, medians, squares, turns
from benchmarks.overlap_pairs import Interval, of_rounds, undecided
from benchmarks.overlap_ways import (
    ON_GPUS,
    Alone,
    Cell,
    Rank,
    Run,
    alone,
    exchanged,
    exit_codes,
    gathered,
    torch_context_parallel,
)
from maskc.codegen.exchange import exchange_source
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.render import CudaSource
from maskc.runtime import hopper
from maskc.runtime.comm import Peer
from maskc.runtime.localize import localize
from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.plan import plan as make_plan

KEPT = "gated, keys kept"
WAYS = ("gated", KEPT, "copy-then-attend", "all-gather", "staged", "ring", "dual-chunk gather")
EVERYWHERE = ("gated", "dual-chunk gather", "ring")
"""Ways of every cell; for the others see `in_full`."""
COMPARED = ("gated", "dual-chunk gather", "attention", "dual-chunk attention")
"""What bars compare: in equally many rounds, each behind each other one equally often."""
FULL_ROWS = 16_384
PROCESSORS, SUM_RATE = 132, 3.4e12
"""Multiprocessors of a GPU, and bytes per second of its sum of gradients alone."""
MUCH = 64 << 30
"""Bytes that torch keeps, above which they are given back."""
COPYING = ("nccl", "fill", "sum_gradients", "spoil", "copy_chunks")
"""In the names of kernels that bring keys, take gradients away or add them up."""


def cells(world: int) -> Iterator[Cell]:
    """What says most first: the time may not reach for all of it."""
    for heads_kv in (8, 32):
        for mask in MASKS:
            yield Cell(mask, 16_384, 32, heads_kv)
    for mask, rows in (
        ("causal_document", 16_384),
        ("prefix_lm_document", 16_384),
        ("share_question", 16_384),
        ("share_question", 8192),
    ):
        yield Cell(mask, rows, 32, 32, chunks=True)
    paper = 8192, 64, 1, max(1, 32 // world)
    others = (8192, 32, 32), (8192, 32, 8), (8192, 32, 1), (16_384, 32, 1), (32_768, 32, 32), (32_768, 32, 8), (65_536, 32, 8)
    for mask in ("causal_document", "sliding_window", "prefix_lm_document", "share_question", "causal"):  # that takes longest
        for rows, *heads in (*others[:-2], paper, *others[-2:]):
            yield Cell(mask, rows, *heads)


def in_full(cell: Cell) -> bool:
    """Whether a cell is measured in every way."""
    return (cell.rows, cell.heads) == (FULL_ROWS, 32) and cell.heads_kv in (8, 32) and not cell.chunks


def measure(rank: Rank, ways: Sequence[str], seconds: float, most: int = MOST_OPEN) -> list[dict[str, Any]]:
    """The rows of one cell. most: see `squares`."""
    balanced, zigzag = rank.plan("balanced"), rank.plan("zigzag")
    everything = rank.plan("zigzag", prune=False)
    makers: dict[str, Callable[[], Run]] = {
        **{s: partial(exchanged, rank, balanced, s) for s in ("gated", "copy-then-attend", "all-gather", "staged")},
        KEPT: partial(exchanged, rank, balanced, "gated", keep=True),
        "ring": partial(exchanged, rank, zigzag, "ring"),
        "dual-chunk gather": partial(gathered, rank, zigzag),
        "torch context parallel": partial(torch_context_parallel, rank),
    }
    runs: dict[str, Run] = {}
    results: dict[str, Result] = {}
    refused: list[dict[str, Any]] = []
    for name in ways:  # everything is compiled, and tables are made
        made, why = attempt(rank, makers[name])
        if made is None:
            refused.append({**head(rank.cell, rank.peer.world, name), "why": why})
        else:
            runs[name], results[name] = made
    if not runs:
        return refused
    if "gated" in runs:
        apart = alone(rank, balanced)
        runs["attention"], runs["communication"] = apart.attention, apart.communication
    if "dual-chunk gather" in runs:
        runs["dual-chunk attention"] = gathered(rank, zigzag, exchange=False)
    for name in ("attention", "communication", "dual-chunk attention"):
        if name in runs:
            got = runs[name].forward()
            results[name] = results["attention"] if name == "communication" else got
            runs[name].backward(*results[name])
    same, clock = agreement(rank, results), Clock(rank.peer, rank.device)
    rounds = timed(clock, runs, results, seconds, most)
    times, spread = {}, {}
    for name, d in product(runs, DIRECTIONS):
        times[name, d], spread[name, d] = medians([r.calls[name, d] for r in rounds[name]])
    figures = of_rounds(rounds["gated"]) if "gated" in runs else {}
    traffic = {
        **dict.fromkeys(("gated", KEPT, "copy-then-attend", "all-gather", "staged"), (balanced, "all-gather")),
        "ring": (zigzag, "ring"),
        "dual-chunk gather": (everything, "all-gather"),
        "torch context parallel": (everything, "all-gather"),
    }
    rows = []
    for name in (name for name in ways if name in runs):
        told = row(rank, name, *traffic[name], times, figures if name == "gated" else {})
        told |= {"rounds": len(rounds[name]), "late": any(r.late for r in rounds[name])}
        told |= {f"{d}_quartiles_ms": spread[name, d] for d in DIRECTIONS} | host(clock, name)
        rows.append({**told, **same, **possible(rank, apart, times)} if name == "gated" else told)
    return rows + refused


Result = tuple[Tensor, Tensor]
Times = dict[Key, Figure]


def timed(
    clock: Clock, runs: Mapping[str, Run], results: Mapping[str, Result], seconds: float, most: int
) -> dict[str, list[Round]]:
    """The rounds of every way: those of COMPARED are the same."""

    def run(name: str) -> None:
        got = clock.time(name, "forward", runs[name].forward)
        given = results["attention"] if name == "communication" else got
        clock.time(name, "backward", partial(runs[name].backward, *given))

    def doubtful(rounds: Sequence[Round]) -> bool:
        return "gated" in runs and undecided(of_rounds(rounds))

    compared = [name for name in COMPARED if name in runs]
    together = squares(clock, run, compared, seconds, doubtful, most) if compared else []
    others = {name: turns(clock, run, [[name]] * OTHERS) for name in runs if name not in compared}
    return dict.fromkeys(compared, together) | others


def possible(rank: Rank, apart: Alone, times: Times) -> dict[str, float | None]:
    """E that no order of work could beat: keys, then gradients, one copy after another; the sum of those hides as well."""
    keys = times["communication", "forward"].slowest
    found = []
    for d in DIRECTIONS:
        attention, copies, needs = times["attention", d].slowest, times["communication", d].slowest, apart.needs[d]
        leaving = max(0.0, copies - keys - 1e3 * apart.summed / SUM_RATE) if d == "backward" else 0.0
        end = max(keys + leaving, soonest_end(needs, PROCESSORS, attention, keys, leaving)) if len(needs.rows) else 0.0
        found.append(best(attention, copies, end)[0] if end else 0.0)
    lowest = torch.tensor(found, device=rank.device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=rank.peer.group)
    return {f"e_possible_{d}": x or None for d, x in zip(DIRECTIONS, lowest.tolist(), strict=True)}


def attempt(rank: Rank, make: Callable[[], Run]) -> tuple[tuple[Run, Result] | None, str]:
    """A way and its (out, lse), where it runs forward and backward on every rank, else why not."""
    made, reason = None, ""
    try:
        run = make()
        made = run, run.forward()
        run.backward(*made[1])
        if ON_GPUS:
            torch.cuda.synchronize()
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
    failed = torch.tensor([float(bool(reason))], device=rank.device)
    dist.all_reduce(failed, group=rank.peer.group)
    return (None, reason or "another rank failed") if failed.item() else (made, "")


def agreement(rank: Rank, results: dict[str, Result]) -> dict[str, Any]:
    """On all ranks: the bits of copying first, and the greatest difference from what NCCL brought; None where not measured."""
    others = [results.get(name) for name in ("copy-then-attend", "all-gather")]
    if "gated" not in results or None in others:
        return {"same_bits": None, "off_all_gather": None}
    out, copied, sent = (result[0].float() for result in (results["gated"], *others) if result is not None)
    found = torch.stack([(copied != out).any().float(), (sent - out).abs().max()])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=rank.peer.group)
    differ, most = found.tolist()
    return {"same_bits": not differ, "off_all_gather": most}


def host(clock: Clock, way: str) -> dict[str, float]:
    """Milliseconds that enqueueing takes the host of this rank."""
    return {f"host_{d}_ms": statistics.median(clock.host[way, d]) for d in ("forward", "backward") if (way, d) in clock.host}


def head(cell: Cell, world: int, way: str) -> dict[str, Any]:
    return {
        "mask": cell.mask,
        "seqlen": cell.rows * world,
        "rows_per_device": cell.rows,
        "batch": cell.batch,
        "heads": cell.heads,
        "kv_heads": cell.heads_kv,
        "world": world,
        "way": CHUNKED if cell.chunks and way == "gated" else way,
    }


def row(rank: Rank, way: str, p: AttentionPlan, strategy: str, times: Times, figures: Mapping[str, Interval]) -> dict[str, Any]:
    """What the file says of one way. figures: of the gated one, what rounds say of it."""
    kernels = "dual-chunk attention" if way == "dual-chunk gather" else "attention" if way == "gated" else ""
    made: dict[str, Any] = {**head(rank.cell, rank.peer.world, way), "balance": p.imbalance}
    made |= {"chunk": p.rows.size_of(0), "rows_most": max(map(p.rows.local_length, range(p.world)))}
    travels = p.traffic(strategy, 0, "forward") != ((0,) * p.world,) * p.world
    for d in DIRECTIONS:
        made[f"{d}_ms"] = times[way, d].slowest
        attention, comm = times.get((kernels, d)), times.get(("communication", d)) if way == "gated" else None
        made[f"attention_{d}_ms"], made[f"attention_{d}_mean_ms"] = attention or (None, None)
        made[f"comm_{d}_ms"] = comm.slowest if comm else None
        made[f"e_{d}"] = None
        if travels and comm and f"beyond_{d}_ms" in figures:
            e, high, low = (1 - beyond / comm.slowest for beyond in figures[f"beyond_{d}_ms"])
            made |= {f"e_{d}": e, f"e_{d}_interval": (low, high)}
        bytes_to = zip(*p.traffic(strategy, 0, d, rank.cell.batch), strict=True)  # type: ignore[arg-type]
        made[f"bytes_{d}"] = max(map(sum, bytes_to))
    if way == KEPT:
        made["bytes_backward"] -= made["bytes_forward"]
    return {**made, "step_ms": made["forward_ms"] + made["backward_ms"], **figures}


# ---------------------------------------------------------------- processes


def sources_of(masks: Sequence[str], world: int) -> list[CudaSource]:
    """Of every variant that is going to run."""
    forms, sources = set(), [exchange_source()]
    for name in masks:
        spec = mask_case(name, 4096, heads=32).spec()
        sources += [k.source for k in KERNELS["prep"](Request(spec.compiled.fn, spec.compiled.program))]
        v = spec.vectors(4096, 4096)
        for order in ("balanced", "zigzag"):
            p = make_plan(spec, world_size=world, chunk=128, order=order)
            sets = [overlap_plan(p, 0).columns, tuple(range(p.keys.chunk_count)), p.keys.chunks_of(0)]
            forms |= {hopper.mask_form(localize(v, p.rows, p.rows.chunks_of(0), p.keys, c)) for c in sets}
    for form in forms:
        sources += attention(form, HEAD_DIM, gated=(False, True))
        sources += attention(form, HEAD_DIM, directions=("fwd",), outs=("f32",))
    return sources


def serve(rank: int, world: int, path: str, args: argparse.Namespace, deadline: float) -> None:
    """One rank: cells in order until the time is over; rank 0 writes."""
    device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    where = {"init_method": f"file://{path}", "rank": rank, "world_size": world, "timeout": timedelta(seconds=40)}
    dist.init_process_group("nccl" if ON_GPUS else "gloo", **where)  # type: ignore[arg-type]
    peer = Peer.of(dist.group.WORLD)
    rows: list[dict[str, Any]] = []
    if rank == 0:
        digests()  # takes seconds
    everywhere = [w for w in EVERYWHERE if re.search(args.way, w)]
    every = [w for w in (*WAYS, *(["torch context parallel"] if args.torch else [])) if re.search(args.way, w)]
    for cell in sorted(cells(world), key=lambda c: not (args.first and re.search(args.first, str(c)))):
        if not re.search(args.match, str(cell)):
            continue
        left = torch.tensor([deadline - time.time()], device=device)
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if left.item() < 3:
            break
        started = time.monotonic()
        ways = [w for w in everywhere if w == "gated"] if cell.chunks else every if in_full(cell) else everywhere
        cell = replace(cell, rows=cell.rows // args.shrink)
        case = mask_case(cell.mask, cell.rows * world, heads=cell.heads)
        spec = case.spec()
        found = measure(Rank(peer, device, cell, case, spec), ways, left.item() * 2 / 3, args.rounds)
        rows += found
        if rank == 0:
            write(args.out, world, rows)
            print(f"{cell}: {line(found)}  ({time.monotonic() - started:.1f} s)", flush=True)
            print(*(f"    {bar}" for bar in bars(found) if bar.level or bar.holds is not True), sep="\n", flush=True)
        if ON_GPUS and torch.cuda.memory_reserved() > MUCH:  # to grow again takes seconds
            torch.cuda.empty_cache()
    if args.profile and ON_GPUS:
        cell = next(cells(world))
        case = mask_case(cell.mask, cell.rows * world, heads=cell.heads)
        copying = copying_ctas(Rank(peer, device, cell, case, case.spec()), [w for w in every if w in WAYS])
        if rank == 0:
            write(args.out, world, rows, copying)
            print(copying, flush=True)
    os._exit(0)  # peers' memory is mapped here: nothing is closed in any order


def line(found: list[dict[str, Any]]) -> str:
    """Steps of all ways, and what the gated one hid."""

    def step(r: dict[str, Any]) -> str:
        return f"{r['step_ms']:.2f}" + (" (late)" if r["late"] else "") if "step_ms" in r else f": {r['why']}"

    steps = "  ".join(f"{r['way']} {step(r)}" for r in found)
    ours = next((r for r in found if r["way"] in ("gated", CHUNKED) and "step_ms" in r), None)
    if ours is None:
        return steps + " ms"
    e = " / ".join("none" if ours[f"e_{d}"] is None else f"{ours[f'e_{d}']:.3f}" for d in ("forward", "backward"))
    off = "" if ours["off_all_gather"] is None else f"  same bits {ours['same_bits']}, off {ours['off_all_gather']:.1e}"
    us = " / ".join(f"{1e3 * ours.get(f'host_{d}_ms', 0):.0f}" for d in ("forward", "backward"))
    return f"{steps} ms  E {e}{off}  host {us} us  rounds {ours['rounds']}"


def copying_ctas(rank: Rank, ways: Sequence[str]) -> dict[str, dict[str, int]]:
    """Per way, the kernels that a profile of a step shows beside those of attention, and how many CTAs the largest launch has.

    What copies without a kernel takes no multiprocessor. All ranks enter.
    """
    found: dict[str, dict[str, int]] = {}
    for way in ways:
        if way == "dual-chunk gather":
            run = gathered(rank, rank.plan("zigzag"))
        elif way == KEPT:
            continue
        else:
            run = exchanged(rank, rank.plan("zigzag" if way == "ring" else "balanced"), way)
        run.backward(*run.forward())
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run.backward(*run.forward())
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        kernels = found.setdefault(way, {})
        for e in events:
            if e.get("cat") == "kernel" and (name := next((n for n in COPYING if n in e["name"]), None)):
                kernels[name] = max(kernels.get(name, 0), math.prod(e["args"]["grid"]))
    return found


def write(out: Path, world: int, rows: list[dict[str, Any]], copying: dict[str, dict[str, int]] | None = None) -> None:
    """Beside what stands there of other cells and ways, if it was measured with the same sources."""
    sources = digests()
    old = json.loads(out.read_text()) if out.exists() else {}
    kept = old if old.items() >= sources.items() else {}
    fresh = {_name(r) for r in rows}
    everything = [r for r in kept.get("rows", []) if _name(r) not in fresh] + rows
    record = {
        **machine(),
        "gpus": world,
        **sources,
        "rows": everything,
        "bars": as_rows(everything),
        **({"copying_ctas": copying or kept["copying_ctas"]} if copying or "copying_ctas" in kept else {}),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(k) for k in ("mask", "seqlen", "batch", "heads", "kv_heads", "world", "way"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overlap_gpus.json")
    parser.add_argument("--match", default="", help="cells in whose line this regular expression is found")
    parser.add_argument("--first", default="", help="likewise, those that come first")
    parser.add_argument("--rounds", type=int, default=MOST_OPEN, help="at most, where a bar is not decided")
    parser.add_argument("--way", default="", help="ways in whose name this is found (likewise)")
    parser.add_argument("--torch", action="store_true", help="torch's context parallelism too")
    parser.add_argument("--profile", action="store_true", help="at the end, which kernels copy, and by how many CTAs")
    parser.add_argument("--shrink", type=int, default=1, help="so much shorter, for a rehearsal")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        serve(args.rank, args.gpus, args.meet, args, args.until)
        return 0
    if ON_GPUS and torch.cuda.device_count() < args.gpus:
        print(f"{torch.cuda.device_count()} GPUs are here, not {args.gpus}")
        return 2
    until = time.time() + args.timeout
    if ON_GPUS:
        compile_all(sources_of(MASKS, args.gpus))
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    command = [sys.executable, "-m", "benchmarks.overlap_gpus", *(argv if argv is not None else sys.argv[1:])]
    command += ["--meet", tempfile.mktemp(prefix="maskc-bench-"), "--until", str(until)]
    ranks = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(args.gpus)]
    return int(any(exit_codes(ranks, until + 10)))


if __name__ == "__main__":
    raise SystemExit(main())
