"""Weak scaling of context parallelism: 8192 rows a rank, every rank's local kernel timed in turn on one GPU.

    python -m benchmarks.scaling [--worlds 4 8 16 32] [--masks causal ...] [--ways contiguous ...] [--out FILE]

Ranks hold the rows that the plan gives them; their keys are gathered beforehand, so the times are those of the kernels
alone. Reported: the slowest rank over the mean, forward and backward; the rate over visible cells against the whole mask
on one GPU ("P = 1"); and TFLOP/s per GPU with the exchange added by the printed model of the links. Without a Hopper GPU
the times are the model's (tile costs at a constant rate): the table then compares assignments, not kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import maskc
from benchmarks.masks import mask_case
from maskc.boundary import BoundaryVectors
from maskc.pictures import visible_pairs
from maskc.runtime import ops
from maskc.runtime.balance import RUN_TIME, balance, greedy
from maskc.runtime.localize import localize
from maskc.runtime.machine import BACKWARD_FACTOR, DEFAULT_MACHINE, FORWARD_FLOPS
from maskc.runtime.plan import AttentionPlan, assigned, plan
from maskc.runtime.plan_report import received
from maskc.runtime.tile_work import TileCosts, tile_work

ROWS = 8192
MASKS = ("causal", "causal_document", "prefix_lm_document", "share_question", "sliding_window")
WAYS = ("contiguous", "dual chunk", "heap", "LPT", "HCC-IPO")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    heads_kv: int
    head_dim: int

    def flops(self, cells: int) -> float:
        """Forward floating-point operations for so many visible cells of one batch item and head."""
        return FORWARD_FLOPS * cells * self.batch * self.heads * self.head_dim


@dataclass(frozen=True)
class Times:
    """Seconds of one call."""

    forward: float
    backward: float


def plans(spec: Any, world: int, names: Sequence[str]) -> dict[str, AttentionPlan]:
    aware = plan(spec, world_size=world, chunk=ROWS // 8)
    loads = aware.parts[0].workloads
    makers: dict[str, Callable[[], AttentionPlan]] = {
        "contiguous": lambda: plan(spec, world_size=world, order="contiguous", chunk=ROWS // 8),
        "dual chunk": lambda: plan(spec, world_size=world, order="zigzag", chunk=ROWS // 8),
        "heap": lambda: assigned(aware, greedy(loads, world), "heap"),
        "LPT": lambda: assigned(aware, balance(loads, world, pairs=False), "LPT"),
        "HCC-IPO": lambda: assigned(aware, balance(loads, world, RUN_TIME), "HCC-IPO"),
    }
    return {name: makers[name]() for name in names}


# ---------------------------------------------------------------- times


def measured(v: BoundaryVectors, shape: Shape, repeats: int) -> Times:
    """Median times of the local kernels on the GPU, mask tables made beforehand."""
    q, k, val, dout = (
        torch.randn(shape.batch, n, h, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        for n, h in ((v.nq, shape.heads), (v.nk, shape.heads_kv), (v.nk, shape.heads_kv), (v.nq, shape.heads))
    )
    scale = shape.head_dim**-0.5
    tables = ops.backend_module("hopper").schedule(v, shape.head_dim)
    out, lse = ops.forward(v, q, k, val, scale, schedule=tables)

    def backward() -> Any:
        return ops.backward(v, q, k, val, out, lse, dout, None, scale, schedule=tables)

    return Times(_seconds(lambda: ops.forward(v, q, k, val, scale, schedule=tables), repeats), _seconds(backward, repeats))


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def modelled(work: int, p: AttentionPlan, shape: Shape) -> Times:
    """Seconds for a workload in tile costs (of one batch item and head)."""
    forward = DEFAULT_MACHINE.compute_seconds(work * shape.batch, p.costs, p.tile, shape.heads, shape.head_dim)
    return Times(forward, forward * BACKWARD_FACTOR)


# ---------------------------------------------------------------- one row of the table


def row(
    name: str, way: str, p: AttentionPlan, v: BoundaryVectors, shape: Shape, alone: Times | None, repeats: int
) -> dict[str, Any]:
    """One assignment: `alone` are the times of the whole mask on one GPU, None where nothing is measured."""
    cells = visible_pairs(v) // (v.batch * v.heads)
    times = []
    samples = []
    for rank in range(p.world):
        if alone is None:
            times.append(modelled(p.workloads[rank], p, shape))
            continue
        columns = tuple(sorted(p.needed(rank)))
        local = localize(v, p.rows, p.rows.chunks_of(rank), p.keys, columns)
        local = BoundaryVectors(
            local.nq, local.nk, local.batch, local.heads, False, *(None if t is None else t.cuda() for t in local.tensors)
        )
        times.append(measured(local, shape, repeats))
        samples.append((rank, times[-1].forward))
    exchange = (
        max(received(p)) * DEFAULT_MACHINE.bytes_per_row(shape.heads_kv, shape.head_dim) * shape.batch / DEFAULT_MACHINE.intra
    )
    flops = {"forward": shape.flops(cells), "backward": shape.flops(cells) * BACKWARD_FACTOR}
    out: dict[str, Any] = {"mask": name, "world": p.world, "way": way, "batch": shape.batch, "measured": alone is not None}
    for direction in ("forward", "backward"):
        per_rank = [getattr(t, direction) for t in times]
        moved = exchange * (1 if direction == "forward" else 2)
        slowest = max(per_rank)
        out |= {
            f"{direction}_peak_over_mean": slowest / statistics.mean(per_rank),
            f"{direction}_ms_max": 1e3 * slowest,
            f"{direction}_exchange_ms": 1e3 * moved,
            f"{direction}_tflops_per_gpu": flops[direction] / p.world / (slowest + moved) / 1e12,
            f"{direction}_tflops_per_gpu_hidden": flops[direction] / p.world / max(slowest, moved) / 1e12,
        }
        if alone is not None:
            out[f"{direction}_rate_against_one"] = getattr(alone, direction) / sum(per_rank)
    if len(samples) >= 8:
        out["fit"] = fit(samples, v, p)
    return out


def fit(samples: Sequence[tuple[int, float]], v: BoundaryVectors, p: AttentionPlan) -> dict[str, int] | str:
    """Tile costs by least squares over the ranks' forward times, or why they cannot be told."""
    work = tile_work(v, p.rows, p.keys)
    rows_of = [list(p.rows.chunks_of(rank)) for rank, _ in samples]
    counts = [tuple(int(x[chunks].sum()) for x in (work.partial, work.unmasked, work.rows)) for chunks in rows_of]
    try:
        return asdict(TileCosts.fit([(*c, seconds) for c, (_, seconds) in zip(counts, samples, strict=True)]))
    except ValueError as e:
        return str(e)


def line(r: dict[str, Any]) -> str:
    cells = [f"{r['mask']:20} P={r['world']:2} B={r['batch']} {r['way']:11}"]
    for d in ("forward", "backward"):
        rate = f" rate {r[f'{d}_rate_against_one']:.3f}" if r["measured"] else ""
        cells.append(
            f"{d}: peak/mean {r[f'{d}_peak_over_mean']:.3f}, {r[f'{d}_ms_max']:8.2f} ms + {r[f'{d}_exchange_ms']:6.2f} ms, "
            f"{r[f'{d}_tflops_per_gpu']:4.0f} TFLOP/s{rate}"
        )
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--masks", nargs="+", default=list(MASKS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--heads-kv", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    args = parser.parse_args()
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.cuda.get_device_name() if gpu else "no Hopper GPU: times are the model's, not measured"
    print(device)
    print(f"links: {DEFAULT_MACHINE}")
    rows = []
    for name in args.masks:
        for world in args.worlds:
            case = mask_case(name, ROWS * world)
            spec = maskc.compile(case.mask).bind(nq=case.seqlen, nk=case.seqlen, **case.inputs)
            v = spec.vectors(case.seqlen, case.seqlen)
            shape = Shape(max(1, 32 // world), args.heads, args.heads_kv, args.head_dim)
            alone = measured(spec.vectors(case.seqlen, case.seqlen, "cuda"), shape, args.repeats) if gpu else None
            for way, p in plans(spec, world, args.ways).items():
                rows.append(row(name, way, p, v, shape, alone, args.repeats))
                print(line(rows[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"device": device, "machine": asdict(DEFAULT_MACHINE), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
