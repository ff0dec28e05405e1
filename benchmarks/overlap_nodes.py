"""Ranks of two nodes of four, all in turn on one GPU: what crosses between nodes goes through host memory.

    python -m benchmarks.overlap_nodes [--timeout 90] [--out benchmarks/results/overlap_nodes.json]

Every mask with routing flat or hierarchical, pruned or not, over a link of pinned host memory as it is (about 50 GB/s a
rank) and of half its rate: chunks that cross are copied twice. Gated, forward and backward, one layer; a step is that of the
slowest rank, whose host is ahead. same_bits: every rank got the keys that it sees, and the results of copying first. With two
GPUs a node is on each, and both load the host's memory together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import maskc
from benchmarks.digest import digests
from benchmarks.kernels import compile_all
from benchmarks.machine import machine
from benchmarks.masks import mask_case
from benchmarks.overlap_cells import HEAD_DIM, MASKS
from benchmarks.overlap_gpus import sources_of
from benchmarks.overlap_times import Stopwatch
from benchmarks.overlap_ways import ON_GPUS, exit_codes
from benchmarks.train_ablation import INSIDE, LINK_RATE
from benchmarks.train_link import Link, Memory, part_of, starts
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.transport import CudaQueues, HostQueues, KeyShape, Pair

NODES, PER_NODE = 2, 4
ROWS = 8192
HEADS = 32
REPEATS, MORE, NEAR = 5, 0.4, 0.02
"""Rounds, seconds of a rank that may be spent on more, and how far apart quartiles may lie without them."""
THREADS = 4
"""Of torch on the host, for each process."""
LINKS = (1, 2)
"""Copies of every chunk that crosses."""


class SlowLink(Link):
    """What crosses between nodes is copied `times` over."""

    times = 1

    def _copied(self, chunk: int, *rest: Any, **named: Any) -> None:
        far = chunk in self.part.across or chunk in self.part.carried
        for _ in range(self.times if far else 1):
            super()._copied(chunk, *rest, **named)


def measured(
    spec: maskc.BoundMask, p: AttentionPlan, rank: int, memory: Memory, all_keys: Pair, meet: Callable[[], object]
) -> tuple[list[list[float]], bool]:
    """Of a rank: ms of one layer, forward and backward, over each link of LINKS; and whether its results are right.

    all_keys: those of the memory, on the device. meet: waits until every process is as far.
    """
    device = memory.device
    part = part_of(p, rank)
    link = SlowLink(part, p.keys, memory, INSIDE)
    queues = CudaQueues(device) if ON_GPUS else HostQueues()
    over = Overlapped(part.plan, p.keys, memory.shape, link, queues, device, timeout=5.0, rate=INSIDE * LINK_RATE)
    link.carry_behind(over.forward_cut, over.backward_cut)
    vectors = spec.vectors(p.rows.length, p.keys.length, device)
    local = localize(vectors, p.rows, p.rows.chunks_of(rank), p.keys, part.plan.columns, device)
    g = torch.Generator(device).manual_seed(rank)
    shapes = (local.nq, HEADS), *((p.keys.local_length(rank), memory.shape.heads),) * 2, (local.nq, HEADS)
    q, k, v, dout = (torch.randn(1, n, h, HEAD_DIM, generator=g, device=device).to(memory.shape.dtype) for n, h in shapes)

    def layer(executor: Executor = "gated") -> tuple[Tensor, ...]:
        out, lse = over.forward(local, q, k, v, HEAD_DIM**-0.5, executor)
        _, dk, dv = over.backward(local, q, k, v, out, lse, dout, HEAD_DIM**-0.5, executor)  # dq is added up as it comes
        return out, lse, dk, dv

    def over_link(times: int) -> tuple[Tensor, ...]:
        link.times = times
        return layer()

    def timed(times: int) -> float:
        started = time.perf_counter()
        over_link(times)
        over.finish()
        return 1e3 * (time.perf_counter() - started)

    for near, _ in foreign(over, all_keys):
        near.fill_(torch.nan)
    results = layer()
    over.finish()
    arrived = all(torch.equal(near, far) for near, far in foreign(over, all_keys))
    if ON_GPUS:
        link.row_by_row()
    same = all(torch.equal(a, b) for a, b in zip(results, layer("copy-then-attend"), strict=True))
    over.finish()
    meet()
    if not isinstance(queues, CudaQueues):
        return [[timed(times) for _ in range(REPEATS)] for times in LINKS], arrived and same
    clock = Stopwatch({str(times): partial(over_link, times) for times in LINKS}, (queues,), over.finish, one_by_one=True)
    taken = clock.rounds(lambda so_far: MORE if max(map(apart, so_far.values())) > NEAR else 0.0, fewest=REPEATS)
    return [taken[str(times)] for times in LINKS], arrived and same


def quartiles(ms: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(ms, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def apart(ms: Sequence[float]) -> float:
    """The quartiles, of the median."""
    low, middle, high = quartiles(ms)
    return (high - low) / middle


def foreign(over: Overlapped, all_keys: Pair) -> Iterator[Pair]:
    """Keys and values of others, in the buffer of a rank and in the whole of them."""
    begins = starts(over.layout)
    for slot in over.plan.pulls:
        for near, far in zip((over.keys, over.values), all_keys, strict=True):
            begin = begins[slot.chunk]
            yield near[:, slot.start : slot.start + slot.rows], far[:, begin : begin + slot.rows]


def across(p: AttentionPlan) -> int:
    """Bytes from node to node, forward and backward."""
    tables = [p.traffic("all-gather", 0, d) for d in ("forward", "backward")]  # type: ignore[arg-type]
    pairs = [(a, b) for a in range(p.world) for b in range(p.world) if a // PER_NODE != b // PER_NODE]
    return sum(t[a][b] for t in tables for a, b in pairs)


def rows(
    nodes: Sequence[int], device: torch.device, rows_per_rank: int, heads_kv: int, group: Any = None
) -> Iterator[dict[str, Any]]:
    """A row per mask, link, routing and pruning. nodes: of this process; where not all, the others take part in each."""
    world = NODES * PER_NODE
    length = rows_per_rank * world
    dtype = torch.bfloat16 if ON_GPUS else torch.float32
    memory = Memory(length, KeyShape(1, heads_kv, HEAD_DIM, HEAD_DIM, dtype), device)
    k, v = (t.to(device) for t in memory.keys)
    last = sorted(MASKS, key="causal".__eq__)  # what takes longest comes last
    specs = {mask: mask_case(mask, length, heads=HEADS).spec() for mask in last}
    for mask, prune, hierarchical in product(last, (True, False), (True, False)):
        spec = specs[mask]
        p = plan(
            spec,
            world_size=world,
            nodes=NODES,
            chunk=max(128, rows_per_rank // 8),
            prune=prune,
            hierarchical=hierarchical,
            heads=HEADS,
            heads_kv=heads_kv,
            head_dim=HEAD_DIM,
        )
        alone = len(nodes) == NODES
        meet = partial(most, [0.0], alone, group)
        mine = [measured(spec, p, n * PER_NODE + r, memory, (k, v), meet) for n, r in product(nodes, range(PER_NODE))]
        wrong = most([float(not all(right for _, right in mine))], alone, group)[0]
        for times, of_ranks in zip(LINKS, zip(*(ms for ms, _ in mine), strict=True), strict=True):
            low, ms, high = most([max(x) for x in zip(*map(quartiles, of_ranks), strict=True)], alone, group)
            yield {
                "mask": mask,
                "seqlen": length,
                "heads": HEADS,
                "kv_heads": heads_kv,
                "world": world,
                "nodes": NODES,
                "routing": "hierarchical" if hierarchical else "flat",
                "prune": prune,
                "link_gb_s": 50 / times,
                "step_ms": ms,
                "quartiles_ms": (low, high),
                "rounds": int(most([max(map(len, of_ranks))], alone, group)[0]),
                "same_bits": not wrong,
                "bytes_across": across(p),
            }


def most(values: Sequence[float], alone: bool, group: Any) -> list[float]:
    """The greatest of all processes, when each is here; alone: there is one."""
    found = torch.tensor(values, dtype=torch.float64)
    if not alone:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.tolist()


def serve(nodes: Sequence[int], meet: str, until: float, out: Path, shrink: int) -> None:
    """All rows, as far as the time goes, in the process of these nodes."""
    device = torch.device("cuda", nodes[0]) if ON_GPUS else torch.device("cpu")
    alone = len(nodes) == NODES
    torch.set_num_threads(THREADS if ON_GPUS else 1)
    if ON_GPUS:
        torch.cuda.set_device(device)
    if not alone:
        wait = timedelta(seconds=40)
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=nodes[0], world_size=NODES, timeout=wait)
    found: list[dict[str, Any]] = []
    for row in rows(nodes, device, ROWS // shrink, 8):
        found.append(row)
        if nodes[0] == 0:
            write(out, 1 if alone else NODES, found)
            print(f"{line(row)}  {time.time() - until:+.0f} s", flush=True)
        if most([float(time.time() > until)], alone, None)[0]:
            break
    os._exit(int(not all(row["same_bits"] for row in found)))


def line(row: dict[str, Any]) -> str:
    what = f"{row['mask']:18} {row['routing']:12} {'pruned' if row['prune'] else 'all':6} {row['link_gb_s']:.0f} GB/s"
    spread = " to ".join(f"{x:.2f}" for x in row["quartiles_ms"])
    told = f"{row['step_ms']:.2f} ms  ({spread}, {row['rounds']} rounds)  {row['bytes_across'] / 2**20:.1f} MiB"
    return f"{what}  {told}{'' if row['same_bits'] else '  WRONG'}"


def write(out: Path, gpus: int, rows: list[dict[str, Any]]) -> None:
    out.write_text(json.dumps({**machine(), "gpus": gpus, **digests(), "rows": rows}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overlap_nodes.json")
    parser.add_argument("--shrink", type=int, default=1, help="so much shorter, for a rehearsal")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node is not None:
        serve([args.node], args.meet, args.until, args.out, args.shrink)
        return 0
    until = time.time() + args.timeout
    if ON_GPUS:
        compile_all(sources_of(MASKS, NODES * PER_NODE))
    if torch.cuda.device_count() < NODES:
        serve(range(NODES), args.meet, until, args.out, args.shrink)
    command = [sys.executable, "-m", "benchmarks.overlap_nodes", *sys.argv[1:]]
    command += ["--meet", tempfile.mktemp(prefix="maskc-nodes-"), "--until", str(until)]
    nodes = [subprocess.Popen([*command, "--node", str(n)]) for n in range(NODES)]
    return int(any(exit_codes(nodes, until + 20)))


if __name__ == "__main__":
    raise SystemExit(main())
