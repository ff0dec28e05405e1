"""Ranks of two nodes of four, a node on each GPU, its ranks in turn: what crosses between nodes goes through host memory.

    python -m benchmarks.overlap_nodes [--timeout 60] [--out benchmarks/results/overlap_gpus.json]

Every mask with routing flat or hierarchical, pruned or not, over a link of pinned host memory as it is (about 50 GB/s a
rank) and of half its rate: chunks that cross are copied twice. Gated, forward and backward, one layer; a step is that of the
slowest rank of both nodes, which load the host's memory together. Rows go to "nodes" of the file, the rest of it is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import maskc
from benchmarks.digest import digests
from benchmarks.kernels import compile_all
from benchmarks.masks import mask_case
from benchmarks.overlap_cells import HEAD_DIM, MASKS
from benchmarks.overlap_gpus import sources_of
from benchmarks.overlap_ways import ON_GPUS, exit_codes
from benchmarks.train_ablation import INSIDE, LINK_RATE
from benchmarks.train_link import Link, Memory, part_of
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Overlapped
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.transport import CudaQueues, HostQueues, KeyShape

NODES, PER_NODE = 2, 4
ROWS = 8192
HEADS = 32
REPEATS = 3
LINKS = (1, 2)
"""Copies of every chunk that crosses."""


class SlowLink(Link):
    """What crosses between nodes is copied `times` over."""

    times = 1

    def _copied(self, chunk: int, *rest: Any, **named: Any) -> None:
        far = chunk in self.part.across or chunk in self.part.carried
        for _ in range(self.times if far else 1):
            super()._copied(chunk, *rest, **named)


def seconds_of(spec: maskc.BoundMask, p: AttentionPlan, rank: int, memory: Memory, device: torch.device) -> list[float]:
    """Median of one layer, forward and backward, of a rank, over each link of LINKS."""
    part = part_of(p, rank)
    link = SlowLink(part, p.keys, memory, INSIDE)
    queues = CudaQueues(device) if ON_GPUS else HostQueues()
    readers = tuple(reader for reader, _ in part.plan.lends)
    over = Overlapped(
        part.plan, p.keys, memory.shape, link, queues, device, readers=readers, timeout=5.0, rate=INSIDE * LINK_RATE
    )
    link.carry_behind(over.forward_cut, over.backward_cut)
    vectors = spec.vectors(p.rows.length, p.keys.length, device)
    local = localize(vectors, p.rows, p.rows.chunks_of(rank), p.keys, part.plan.columns, device)
    g = torch.Generator(device).manual_seed(rank)
    shapes = (local.nq, HEADS), *((p.keys.local_length(rank), memory.shape.heads),) * 2, (local.nq, HEADS)
    q, k, v, dout = (torch.randn(1, n, h, HEAD_DIM, generator=g, device=device).to(memory.shape.dtype) for n, h in shapes)

    def layer() -> float:
        started = time.perf_counter()
        out, lse = over.forward(local, q, k, v, HEAD_DIM**-0.5, "gated")
        over.backward(local, q, k, v, out, lse, dout, HEAD_DIM**-0.5, "gated")
        over.finish()
        return time.perf_counter() - started

    layer()
    found = []
    for link.times in LINKS:
        layer()
        found.append(statistics.median(layer() for _ in range(REPEATS)))
    return found


def across(p: AttentionPlan) -> int:
    """Bytes from node to node, forward and backward."""
    tables = [p.traffic("all-gather", 0, d) for d in ("forward", "backward")]  # type: ignore[arg-type]
    pairs = [(a, b) for a in range(p.world) for b in range(p.world) if a // PER_NODE != b // PER_NODE]
    return sum(t[a][b] for t in tables for a, b in pairs)


def rows(node: int, device: torch.device, rows_per_rank: int, heads_kv: int, group: Any = None) -> Iterator[dict[str, Any]]:
    """A row per mask, link, routing and pruning; all nodes take part in each."""
    world = NODES * PER_NODE
    length = rows_per_rank * world
    dtype = torch.bfloat16 if ON_GPUS else torch.float32
    memory = Memory(length, KeyShape(1, heads_kv, HEAD_DIM, HEAD_DIM, dtype), device)
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
        mine = [seconds_of(spec, p, r, memory, device) for r in range(node * PER_NODE, (node + 1) * PER_NODE)]
        slowest = torch.tensor([max(of_ranks) for of_ranks in zip(*mine, strict=True)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        for times, seconds in zip(LINKS, slowest.tolist(), strict=True):
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
                "step_ms": 1e3 * seconds,
                "bytes_across": across(p),
            }


def serve(node: int, meet: str, until: float, out: Path, shrink: int) -> None:
    device = torch.device("cuda", node) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=node, world_size=NODES, timeout=timedelta(seconds=40))
    found: list[dict[str, Any]] = []
    sources = digests()
    for row in rows(node, device, ROWS // shrink, 8):
        found.append(row)
        if node == 0:
            record = json.loads(out.read_text()) if out.exists() else {}
            kept = record if record.items() >= sources.items() else sources
            out.write_text(json.dumps({**kept, "nodes": found}, indent=1) + "\n")
            what = f"{row['mask']:18} {row['routing']:12} {'pruned' if row['prune'] else 'all':6} {row['link_gb_s']:.0f} GB/s"
            print(f"{what}  {row['step_ms']:.2f} ms  {row['bytes_across'] / 2**20:.1f} MiB", flush=True)
        over = torch.tensor([float(time.time() > until)])
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over.item():
            break
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overlap_gpus.json")
    parser.add_argument("--shrink", type=int, default=1, help="so much shorter, for a rehearsal")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node is not None:
        serve(args.node, args.meet, args.until, args.out, args.shrink)
        return 0
    if ON_GPUS and torch.cuda.device_count() < NODES:
        print(f"needs {NODES} GPUs")
        return 2
    until = time.time() + args.timeout
    if ON_GPUS:
        compile_all(sources_of(MASKS, NODES * PER_NODE))
    command = [sys.executable, "-m", "benchmarks.overlap_nodes", *sys.argv[1:]]
    command += ["--meet", tempfile.mktemp(prefix="maskc-nodes-"), "--until", str(until)]
    nodes = [subprocess.Popen([*command, "--node", str(n)]) for n in range(NODES)]
    return int(any(exit_codes(nodes, until + 20)))


if __name__ == "__main__":
    raise SystemExit(main())
