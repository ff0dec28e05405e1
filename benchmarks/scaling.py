"""Weak scaling of context parallelism: 8192 rows a rank, every rank's local kernel timed in turn on one GPU.

    python -m benchmarks.scaling [--seconds 90] [--worlds 4 8 16 32] [--masks causal ...] [--ways contiguous ...] [--out FILE]
    python -m benchmarks.scaling --tiles [--out FILE]    afterwards, without a GPU: counts tiles and fits what they cost

Ranks hold the rows that the plan gives them; their keys are gathered beforehand, so the times are those of the kernels
alone. Reported: the slowest rank over the mean, forward and backward; the rate over visible cells against the whole mask
on one GPU ("P = 1"), and that of the whole mask itself as vectors alone and on a P-th of the batch; TFLOP/s per GPU with
the exchange added by the printed model of the links. Without a Hopper GPU the times are the model's (tile costs at a
constant rate): the table then compares assignments, not kernels.

Chunks are an eighth of a rank's rows, but those of the plan that `maskc.plan` makes by default: rows there are arcs, or
chunks, and where contiguous or zigzag owners of chunks are as even, it takes them (`method` of a row).

The ranks of all ways and the whole mask stand in one shuffled order, several rounds of it, so that a GPU that slows down
as it gets warm slows all of them; forwards and backwards have rounds of their own. Cells come in the order of their
weight, and the file is written after each: with `--seconds`, what does not fit is named and left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import attention, compile_all
from benchmarks.masks import mask_case, vectors_of
from maskc.binding.bound import BoundMask
from maskc.boundary import BoundaryVectors
from maskc.codegen.render import CudaSource
from maskc.pictures import visible_pairs
from maskc.runtime import hopper, ops
from maskc.runtime.balance import balance, greedy
from maskc.runtime.kernel_tiles import kernel_tiles
from maskc.runtime.localize import fold_causal, localize
from maskc.runtime.machine import BACKWARD_FACTOR, DEFAULT_MACHINE, FORWARD_FLOPS
from maskc.runtime.plan import AttentionPlan, assigned, plan
from maskc.runtime.tile_work import fitted_seconds, tile_work
from maskc.tiles import TileClass, classify

ROWS = 8192
"""Rows of a rank."""
WORLDS = (4, 8, 16, 32)
MASKS = ("causal_document", "prefix_lm_document", "share_question", "sliding_window", "causal")
WAYS = ("contiguous", "dual chunk", "heap", "LPT", "default")
BALANCED = WAYS[-1]
HEADS = 64
"""Query heads of the paper."""
FEW_HEADS = 16
"""Those of the causal mask, up to LARGE ranks, and twice as many above: 64 take as long as all other masks together."""
SETTLED = 1.1
"""Predicted imbalance from which one round shows it well enough."""
LARGE = 8
"""Ranks above which the whole mask as vectors alone is not timed."""
LONG = 16
"""Ranks above which a round is so long that one is enough, and two for the default plan and the whole mask."""
SETTLE = 0.06
"""Seconds after which the clock of the GPU is that of the kernels that run."""
FEW_SAMPLES = 8
"""Fewer samples than this are not fitted."""


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
class Cell:
    """One mask on so many ranks of so many rows."""

    mask: str
    world: int
    shape: Shape

    @property
    def length(self) -> int:
        return ROWS * self.world

    def spec(self) -> BoundMask:
        return mask_case(self.mask, self.length).spec()


@dataclass(frozen=True)
class Times:
    """Seconds of one call."""

    forward: float
    backward: float


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Small groups first; of each, causal documents first."""
    for world in args.worlds:
        for mask in args.masks:
            few = FEW_HEADS * (1 if world <= LARGE else 2) if mask == "causal" else HEADS
            yield Cell(mask, world, Shape(max(1, 32 // world), args.heads or few, args.heads_kv, args.head_dim))


def plans(spec: Any, world: int, names: Sequence[str]) -> dict[str, AttentionPlan]:
    chunk = ROWS // 8
    eighths = plan(spec, world_size=world, chunk=chunk)
    loads = eighths.parts[0].workloads
    makers: dict[str, Callable[[], AttentionPlan]] = {
        "contiguous": lambda: plan(spec, world_size=world, order="contiguous", chunk=chunk),
        "dual chunk": lambda: plan(spec, world_size=world, order="zigzag", chunk=chunk),
        "heap": lambda: assigned(eighths, greedy(loads, world), "heap"),
        "LPT": lambda: assigned(eighths, balance(loads, world, pairs=False), "LPT"),
        "default": lambda: plan(spec, world_size=world),
    }
    return {name: makers[name]() for name in names}


# ---------------------------------------------------------------- times


@dataclass(frozen=True)
class Job:
    """A mask to run in so many of the rounds, on so many batch items (None: all)."""

    mask: BoundaryVectors
    rounds: int
    batch: int | None = None


class Bench:
    """Times of local kernels on the GPU, by label. Inputs are slices of one set of tensors as large as the whole sequence.

    Jobs run in shuffled rounds, first all forwards, then all backwards, each behind SETTLE seconds of its own kind: a
    call of a few milliseconds starts with the clock that the one before it left, and backwards leave another clock.
    """

    def __init__(self, shape: Shape, length: int, device: torch.device) -> None:
        def random_values(heads: int) -> torch.Tensor:
            return torch.randn(shape.batch, length, heads, shape.head_dim, dtype=torch.bfloat16, device=device)

        self.q, self.dout = random_values(shape.heads), random_values(shape.heads)
        self.k, self.val = random_values(shape.heads_kv), random_values(shape.heads_kv)
        self.scale = shape.head_dim**-0.5
        self.out = self.dout  # until the whole mask has run

    def run(self, jobs: dict[str, Job], rounds: int) -> dict[str, Times]:
        """Median times per job. The first job is the whole mask."""
        tables = {label: hopper.schedule(job.mask, self.q.shape[3]) for label, job in jobs.items()}
        lse: dict[str, torch.Tensor] = {}

        def forward(label: str) -> None:
            job = jobs[label]
            out, lse[label] = ops.forward(job.mask, *self._inputs(job), self.scale, schedule=tables[label])
            if out.shape == self.out.shape:
                self.out = out  # the ranks' backwards read its first rows: of their own, they need the sizes alone

        def backward(label: str) -> None:
            job = jobs[label]
            out, dout = (x[: job.batch, : job.mask.nq] for x in (self.out, self.dout))
            ops.backward(job.mask, *self._inputs(job), out, lse[label], dout, None, self.scale, schedule=tables[label])

        passes = {"forward": forward, "backward": backward}
        found: dict[str, dict[str, list[float]]] = {name: {label: [] for label in jobs} for name in passes}
        largest, smallest = next(iter(jobs)), next(reversed(jobs))
        for call in passes.values():
            call(largest)  # takes the memory that later calls use again
        rng = random.Random(0)
        for at in range(rounds):
            order = [label for label, job in jobs.items() if at < job.rounds]
            rng.shuffle(order)
            for name, call in passes.items():
                _settle(partial(call, smallest))
                for label, seconds in zip(order, _timed([partial(call, label) for label in order]), strict=True):
                    found[name][label].append(seconds)
        return {label: Times(*(statistics.median(found[name][label]) for name in passes)) for label in jobs}

    def _inputs(self, job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nq, nk, items = job.mask.nq, job.mask.nk, slice(job.batch)
        return self.q[items, :nq], self.k[items, :nk], self.val[items, :nk]


def _settle(call: Callable[[], None]) -> None:
    """Calls until the clock is theirs."""
    (seconds,) = _timed([call])
    for _ in range(int(SETTLE / seconds)):
        call()


def _timed(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each, enqueued one behind the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in pairwise(marks)]


def modelled(work: int, p: AttentionPlan, shape: Shape) -> Times:
    """Seconds for a workload in tile costs (of one batch item and head)."""
    forward = DEFAULT_MACHINE.compute_seconds(work * shape.batch, p.costs, p.tile, shape.heads, shape.head_dim)
    return Times(forward, forward * BACKWARD_FACTOR)


def sources(masks: Sequence[str], head_dim: int) -> list[CudaSource]:
    """The kernels of every form."""
    whole = [vectors_of(mask_case(name, ROWS)) for name in masks]
    forms = {hopper.mask_form(v) for one in whole for v in (one, fold_causal(one))}
    return [source for form in forms for source in attention(form, head_dim)]


# ---------------------------------------------------------------- one cell of the table


ALONE = "alone"
FOLDED = "folded"
"""The whole mask as vectors alone, which is what the ranks' kernels are made for."""
SHORT = "short"
"""The whole mask on one P-th of the batch: as much work as a rank has."""


def cell_rows(cell: Cell, ways: Sequence[str], rounds: int, device: torch.device | None) -> list[dict[str, Any]]:
    """A row per way of dealing out the chunks; without a device the times are the model's."""
    spec, length = cell.spec(), cell.length
    v = spec.vectors(length, length)
    found = plans(spec, cell.world, ways)
    times: dict[str, Times] = {}
    rounds = min(rounds, 2) if cell.world > LONG else rounds
    taken = {way: 1 if p.imbalance > SETTLED or cell.world > LONG else rounds for way, p in found.items()}
    taken |= {BALANCED: rounds} if BALANCED in taken else {}
    if device is not None:
        whole = spec.vectors(length, length, device)
        jobs = {ALONE: Job(whole, rounds)}
        if v.causal and cell.world <= LARGE:
            jobs[FOLDED] = Job(fold_causal(whole, device), min(rounds, 2))
        if cell.shape.batch % cell.world == 0:
            jobs[SHORT] = Job(whole, rounds, cell.shape.batch // cell.world)
        for way, p in found.items():
            for rank in range(p.world):
                local = localize(whole, p.rows, p.rows.chunks_of(rank), p.keys, tuple(sorted(p.needed(rank))), device)
                jobs[f"{way} {rank}"] = Job(local, taken[way])
        times = Bench(cell.shape, length, device).run(jobs, rounds)
    visible = visible_pairs(v) // (v.batch * v.heads)
    return [_row(cell, way, p, v, visible, times, taken[way]) for way, p in found.items()]


def counted(cell: Cell) -> dict[str, Any]:
    """What balanced ranks have (COUNTS), and what their kernels visit over one kernel; see `maskc.runtime.kernel_tiles`."""
    spec, length = cell.spec(), cell.length
    p, v = plans(spec, cell.world, (BALANCED,))[BALANCED], spec.vectors(length, length)
    found = kernel_tiles(v, p, cell.shape.head_dim)
    assert found is not None
    over_one = {"forward": found.forward, "backward": found.backward, "key": found.keys}
    return {"ranks_tiles": ranks_tiles(v, p)} | {f"{kind}_tiles_over_one": x for kind, x in over_one.items()}


def _row(
    cell: Cell, way: str, p: AttentionPlan, v: BoundaryVectors, visible: int, times: dict[str, Times], rounds: int
) -> dict[str, Any]:
    shape = cell.shape
    if times:
        ranks = [times[f"{way} {rank}"] for rank in range(p.world)]
    else:
        ranks = [modelled(work, p, shape) for work in p.workloads]
    row_bytes = DEFAULT_MACHINE.bytes_per_row(shape.heads_kv, shape.head_dim)
    exchange = max(p.received()) * row_bytes * shape.batch / DEFAULT_MACHINE.intra
    flops = {"forward": shape.flops(visible), "backward": shape.flops(visible) * BACKWARD_FACTOR}
    out: dict[str, Any] = {"mask": cell.mask, "world": cell.world, "way": way, **asdict(shape), "measured": bool(times)}
    out |= {"rows_per_rank": ROWS, "chunk": p.rows.chunk, "method": p.method, "rounds": rounds}
    out |= {"predicted_peak_over_mean": p.imbalance}
    for direction in ("forward", "backward"):
        per_rank = [getattr(t, direction) for t in ranks]
        moved = exchange * (1 if direction == "forward" else 2)
        slowest = max(per_rank)
        out |= {
            f"{direction}_peak_over_mean": slowest / statistics.mean(per_rank),
            f"{direction}_ms_max": 1e3 * slowest,
            f"{direction}_exchange_ms": 1e3 * moved,
            f"{direction}_tflops_per_gpu": flops[direction] / p.world / (slowest + moved) / 1e12,
            f"{direction}_tflops_per_gpu_hidden": flops[direction] / p.world / max(slowest, moved) / 1e12,
        }
        if times:
            alone = getattr(times[ALONE], direction)
            out[f"{direction}_rate_against_one"] = alone / sum(per_rank)
            out[f"{direction}_tflops_one"] = flops[direction] / alone / 1e12
            if FOLDED in times:
                out[f"{direction}_rate_folded"] = alone / getattr(times[FOLDED], direction)
            if SHORT in times:
                out[f"{direction}_rate_short"] = alone / p.world / getattr(times[SHORT], direction)
    if times:
        out["ranks_ms"] = [[round(1e3 * t.forward, 4), round(1e3 * t.backward, 4)] for t in ranks]
    return out


def ranks_tiles(v: BoundaryVectors, p: AttentionPlan) -> list[list[int]]:
    """What each rank has for one batch item and head: COUNTS."""
    work = tile_work(v, p.rows, p.keys)
    seen = (classify(v, *work.tile) != TileClass.SKIP.value).any(0).any(0)
    tile, out = work.tile[0], []
    for rank in range(p.world):
        own = p.rows.chunks_of(rank)
        keys = torch.cat([seen[start // tile : -(-stop // tile)] for start, stop in p.rows.ranges(own)]).any(0)
        out.append([*(int(x[list(own)].sum()) for x in (work.partial, work.unmasked, work.rows)), int(keys.sum())])
    return out


COUNTS = ("partial", "unmasked", "row", "keys")
"""PARTIAL tiles, UNMASKED tiles, rows of tiles that have any, columns of tiles (key tiles) that have any."""


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What tiles and their rows and columns cost, by least squares over the times of all balanced ranks, per direction.

    Seconds of a call and of an UNMASKED tile with the whole GPU at work, what else costs in such tiles, and the median
    deviation of a rank's time from their sum: what else there is to its time.
    """
    out: dict[str, dict[str, float]] = {}
    for i, direction in enumerate(("forward", "backward")):
        samples = [
            (*(n * r["batch"] * r["heads"] for n in tiles), 1e-3 * ms[i])
            for r in rows
            if r["measured"] and "ranks_tiles" in r
            for tiles, ms in zip(r["ranks_tiles"], r["ranks_ms"], strict=True)
        ]
        if len(samples) < FEW_SAMPLES:
            continue
        call, *costs = fitted_seconds(samples)
        unmasked = costs[COUNTS.index("unmasked")]
        errors = [abs((call + sum(c * n for c, n in zip(costs, counts, strict=True))) / t - 1) for *counts, t in samples]
        out[direction] = {"call_s": call, "unmasked_s": unmasked}
        out[direction] |= {name: cost / unmasked for name, cost in zip(COUNTS, costs, strict=True) if name != "unmasked"}
        out[direction] |= {"deviation": statistics.median(errors), "samples": len(samples)}
    return out


def line(r: dict[str, Any]) -> str:
    cells = [f"{r['mask']:18} P={r['world']:2} B={r['batch']} H={r['heads']:2} {r['way']:10}"]
    for d in ("forward", "backward"):
        rate = f" rate {r[f'{d}_rate_against_one']:.3f}" if r["measured"] else ""
        for kind in (FOLDED, SHORT):
            rate += f" ({kind} {r[f'{d}_rate_{kind}']:.3f})" if f"{d}_rate_{kind}" in r else ""
        cells.append(
            f"{d}: peak/mean {r[f'{d}_peak_over_mean']:.3f}, {r[f'{d}_ms_max']:7.2f} + {r[f'{d}_exchange_ms']:5.2f} ms, "
            f"{r[f'{d}_tflops_per_gpu']:4.0f} TFLOP/s{rate}"
        )
    return "  ".join(cells)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line a cell: slowest over mean by every way, forward/backward, and the rates of balanced ranks against one GPU."""
    lines = []
    for cell, found in groupby(rows, lambda r: (r["mask"], r["world"])):
        ways = {r["way"]: r for r in found}
        peaks = [
            f"{ways[w]['forward_peak_over_mean']:.2f}/{ways[w]['backward_peak_over_mean']:.2f}" if w in ways else "-"
            for w in WAYS
        ]
        best = ways.get(BALANCED, {})
        rates = [f"{best[key]:.3f}" for d in ("forward", "backward") if (key := f"{d}_rate_against_one") in best]
        lines.append(f"{cell[0][:12]:12}{cell[1]:3} {' '.join(f'{x:9}' for x in peaks)} {' '.join(rates)}")
    return "\n".join([f"mask          P {' '.join(f'{w[:9]:9}' for w in WAYS)} rate", *lines])


def write(path: Path, info: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """The results as JSON, a row a line."""
    head = json.dumps({**info, "fit": fits(rows)}, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `write` was given."""
    data = json.loads(path.read_text())
    rows = data.pop("rows")
    return {name: value for name, value in data.items() if name != "fit"}, rows


def count_tiles(path: Path) -> None:
    """Put what is counted into the balanced rows of a file, and fit costs to it."""
    info, rows = read(path)
    for r in rows:
        if r["way"] == BALANCED:
            shape = Shape(*(r[f.name] for f in fields(Shape)))
            r |= counted(Cell(r["mask"], r["world"], shape))
    write(path, info, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--heads", type=int, default=None, help=f"default: {HEADS}; causal {FEW_HEADS} or twice that")
    parser.add_argument("--heads-kv", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=None, help="start no cell after so many seconds")
    parser.add_argument(
        "--tiles", action="store_true", help="time nothing: count tiles for the rows of --out, which takes minutes"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    args = parser.parse_args()
    if args.tiles:
        count_tiles(args.out)
        return
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    began = time.monotonic()
    info: dict[str, Any] = {"device": "no Hopper GPU: times are the model's, not measured"}
    if gpu:
        from benchmarks.digest import digest

        info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "digest": digest()}
        compile_all(sources(args.masks, args.head_dim))
    info |= {"machine": asdict(DEFAULT_MACHINE), "not_run": []}
    print(f"{info['device']}; links and rates of the model: {DEFAULT_MACHINE}")
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells(args):
        if args.seconds is not None and time.monotonic() - began > args.seconds:
            info["not_run"].append(asdict(cell))
            continue
        made = cell_rows(cell, args.ways, args.rounds, torch.device("cuda") if gpu else None)
        rows += made
        print("\n".join(map(line, made)), flush=True)
        write(args.out, info, rows)
    write(args.out, info, rows)
    print(summary(rows))
    if info["not_run"]:
        print("no time left for " + ", ".join(f"{c['mask']} P={c['world']}" for c in info["not_run"]))


if __name__ == "__main__":
    main()
