"""The measurements as one page: benchmarks/results/*.json -> HTML that stands alone.

    python -m benchmarks.report [--results DIR] [--out FILE]

Every figure names the file that it comes from; one without data says so and how to get them. Gains are times of the peer
over times of maskc, forward and backward together, in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.charts import Interval, bars, lines, number, table, whiskers

RESULTS = Path(__file__).parent / "results"
Data = dict[str, Any]
Row = dict[str, Any]


class NoData(Exception):
    """What a figure needs and the file does not hold."""


@dataclass(frozen=True)
class Figure:
    """A section of the page: `draw` makes its body of the contents of `file` in the folder of results."""

    id: str
    short: str
    title: str
    lead: str
    file: str
    command: str
    draw: Callable[[Data], str]


@dataclass(frozen=True)
class Section:
    id: str
    short: str
    title: str
    lead: str
    body: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS / "report.html")
    a = parser.parse_args()
    text = page(a.results)
    a.out.write_text(text, encoding="utf-8")
    print(f"{a.out}: {len(text) / 1e6:.2f} MB")
    return 0


def page(folder: Path) -> str:
    from maskc.report.page import render

    sections = [section(f, folder) for f in FIGURES]
    return render(
        "plain.html.j2",
        title="maskc, measured",
        lead="What the benchmarks wrote, drawn. Hover a mark for its value. Times of different runs are never put side by side.",
        sections=sections,
        footer="Made by python -m benchmarks.report. Densities and floating-point operations count visible cells exactly.",
    )


def section(figure: Figure, folder: Path) -> Section:
    path = folder / figure.file
    try:
        if not path.exists():
            raise NoData(f"{figure.file} is not there")
        data = _read(path)
        body = figure.draw(data) + f'<p class="quiet">{_origin(data, figure.file)}</p>'
    except NoData as e:
        body = f'<p class="empty">No data: {e}. To make them: <code>{figure.command}</code></p>'
    return Section(figure.id, figure.short, figure.title, figure.lead, body)


def _read(path: Path) -> Data:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise SystemExit(f"{path}: not JSON ({e})") from None
    if not isinstance(data, dict):
        raise SystemExit(f"{path}: expected an object")
    return data


def _origin(data: Data, file: str) -> str:
    known = [
        f"{name} {str(data[name])[:16] if name == 'digest' else data[name]}"
        for name in ("device", "torch", "nvrtc", "digest")
        if name in data
    ]
    return "; ".join([file, *known])


def _rows(data: Data, needed: Sequence[str], key: str = "rows") -> list[Row]:
    """The rows of a file that have all the values a figure needs; NoData where there is none."""
    rows = [r for r in data.get(key, []) if all(r.get(n) is not None for n in needed)]
    if not rows:
        raise NoData(f"no row with {', '.join(needed)}")
    return rows


def gmean(values: Iterable[float]) -> float:
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))


def length(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


# ---------------------------------------------------------------- kernels

TIMES = ("peer", "mask", "seqlen", "batch", "heads", "kv_heads", "head_dim", "fwd_ms", "bwd_ms")


def gains(data: Data) -> dict[str, dict[tuple[int, str], float]]:
    """Per peer and (length, mask): its time over maskc's, forward and backward together, of cells that both ran."""
    cells: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for r in _rows(data, TIMES):
        cells[tuple(r[n] for n in TIMES[1:7])][r["peer"]] = r["fwd_ms"] + r["bwd_ms"]
    out: dict[str, dict[tuple[int, str], float]] = defaultdict(dict)
    for (mask, seqlen, *_), times in cells.items():
        for peer, ms in times.items():
            if peer != "maskc" and "maskc" in times:
                out[peer][seqlen, mask] = ms / times["maskc"]
    if not out:
        raise NoData("no cell that maskc and a peer both ran")
    return dict(out)


def gain_whiskers(data: Data) -> str:
    """Geometric mean, least and greatest gain over all masks and lengths, per peer and per mask."""
    found = gains(data)
    peers = {p: Interval(min(g.values()), gmean(g.values()), max(g.values())) for p, g in found.items()}
    by_mask: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for peer, cells in found.items():
        for (_, mask), gain in cells.items():
            by_mask[mask][peer].append(gain)
    names = list(found)
    body = [[mask, *(gmean(g[p]) if p in g else None for p in names)] for mask, g in by_mask.items()]
    return whiskers(peers, "times faster", 1.0) + table(["mask, all lengths", *(f"over {p}" for p in names)], body)


def gain_by_length(data: Data) -> str:
    series = {}
    for peer, cells in gains(data).items():
        by_length: dict[int, list[float]] = defaultdict(list)
        for (seqlen, _), gain in cells.items():
            by_length[seqlen].append(gain)
        series[f"over {peer}"] = {length(n): gmean(by_length[n]) for n in sorted(by_length)}
    return lines(series, "times faster")


def rates(data: Data) -> str:
    """TFLOP/s by exact density, forward / backward, a table per length."""
    rows = _rows(data, (*TIMES, "density"))
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    out = []
    for seqlen in sorted({r["seqlen"] for r in rows}):
        here: dict[str, dict[str, str]] = defaultdict(dict)
        for r in (r for r in rows if r["seqlen"] == seqlen):
            flop = 4 * r["batch"] * r["heads"] * seqlen**2 * r["head_dim"] * r["density"]
            here[r["mask"]][r["peer"]] = f"{flop / r['fwd_ms'] / 1e9:.0f} / {2.5 * flop / r['bwd_ms'] / 1e9:.0f}"
        body = [[mask, *(cells.get(p, "–") for p in peers)] for mask, cells in here.items()]
        out.append(f"<h3>{length(seqlen)} tokens</h3>" + table(["mask", *peers], body))
    return "".join(out)


def reference(data: Data) -> str:
    """Rates of peers measured by themselves, forward / backward, a table per length."""
    rows = _rows(data, ("peer", "mask", "seqlen", "fwd_tflops", "bwd_tflops"))
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    out = [f'<p class="quiet">{escape(data["note"])}</p>'] if "note" in data else []
    for seqlen in sorted({r["seqlen"] for r in rows}):
        here: dict[str, dict[str, str]] = defaultdict(dict)
        for r in (r for r in rows if r["seqlen"] == seqlen):
            here[r["mask"]][r["peer"]] = f"{r['fwd_tflops']:.0f} / {r['bwd_tflops']:.0f}"
        body = [[mask, *(cells.get(p, "–") for p in peers)] for mask, cells in here.items()]
        out.append(f"<h3>{length(seqlen)} tokens</h3>" + table(["mask", *peers], body))
    return "".join(out)


def waiting(data: Data) -> str:
    """Share of their time that the roles of the forward kernel spend in each state."""
    shares: Row = data.get("shares", {})
    columns = list(
        dict.fromkeys((role, state) for roles in shares.values() for role, states in roles.items() for state in states)
    )
    if not columns:
        raise NoData("no shares")
    body = [
        [mask, *(f"{roles[role][state]:.1%}" if state in roles.get(role, {}) else None for role, state in columns)]
        for mask, roles in shares.items()
    ]
    return table(["mask", *(f"{role}: {state}" for role, state in columns)], body)


def new_mask(data: Data) -> str:
    rows = _rows(data, ("peer", "mask", "seqlen", "new_mask_ms"))
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in rows:
        found[r["peer"]][r["seqlen"]].append(r["new_mask_ms"])
    lengths = sorted({r["seqlen"] for r in rows})
    body = [
        [peer, *(f"{number(min(x))} – {number(max(x))}" if (x := by.get(n)) else None for n in lengths)]
        for peer, by in found.items()
    ]
    return table(["ms a step beside the forward", *map(length, lengths)], body)


def schedulers(data: Data) -> str:
    """TFLOP/s over the best scheduler's of the same cell, geometric mean over the masks."""
    rows = _rows(data, ("direction", "scheduler", "mask", "batch_heads", "tflops"))
    best: dict[tuple[Any, ...], float] = defaultdict(float)
    for r in rows:
        cell = r["direction"], r["mask"], r["batch_heads"]
        best[cell] = max(best[cell], r["tflops"])
    out = []
    for direction in dict.fromkeys(r["direction"] for r in rows):
        share: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for r in (r for r in rows if r["direction"] == direction):
            share[f"{r['batch_heads']} heads in all"][r["scheduler"]].append(
                r["tflops"] / best[direction, r["mask"], r["batch_heads"]]
            )
        groups = {g: {s: Interval(min(x), gmean(x), max(x)) for s, x in found.items()} for g, found in share.items()}
        out.append(f"<h3>{'forward' if direction == 'fwd' else 'backward'}</h3>" + bars(groups, "of the best scheduler", 1.0))
    return "".join(out)


# ---------------------------------------------------------------- context parallelism


def by_degree(data: Data) -> str:
    """TFLOP/s per GPU, geometric mean over the masks, by number of ranks; exchange not hidden and fully hidden."""
    out = []
    rows = _rows(data, ("mask", "world", "way", "forward_tflops_per_gpu", "backward_tflops_per_gpu"))
    for direction in ("forward", "backward"):
        series: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for r in sorted(rows, key=lambda r: r["world"]):
            series[r["way"]][f"P = {r['world']}"].append(r[f"{direction}_tflops_per_gpu"])
        means = {way: {p: gmean(x) for p, x in found.items()} for way, found in series.items()}
        out.append(f"<h3>{direction}</h3>" + lines(means, "TFLOP/s per GPU"))
    if not all(r.get("measured", True) for r in rows):
        out.insert(0, '<p class="empty">Times of this file are the model’s, not measured: no Hopper GPU was there.</p>')
    return "".join(out)


def efficiency(data: Data) -> str:
    rows = _rows(data, ("mask", "direction", "executor", "e", "e_low", "e_high"))
    out = []
    for direction in ("forward", "backward"):
        groups: dict[str, dict[str, Interval]] = defaultdict(dict)
        for r in (r for r in rows if r["direction"] == direction):
            label = f"{r['mask']} {length(r['seqlen'])} Hk={r['kv_heads']}" if "seqlen" in r and "kv_heads" in r else r["mask"]
            groups[label][r["executor"]] = Interval(r["e_low"], r["e"], r["e_high"])
        if groups:
            out.append(f"<h3>{direction}</h3>" + bars(groups, "E", 1.0))
    return "".join(out)


def peaks(data: Data) -> str:
    """Mean peak / average over the layouts, whisker to the largest."""
    rows = [
        r for r in _rows(data, ("mask", "world", "way", "imbalance_mean", "imbalance_max"), "balance") if r.get("nodes", 1) == 1
    ]
    if not rows:
        raise NoData("no row of a single node")
    out = []
    for world in sorted({r["world"] for r in rows}):
        groups: dict[str, dict[str, Interval]] = defaultdict(dict)
        for r in (r for r in rows if r["world"] == world):
            groups[r["mask"]][r["way"]] = Interval(r["imbalance_mean"], r["imbalance_mean"], r["imbalance_max"])
        out.append(f"<h3>P = {world}</h3>" + bars(groups, "peak / average", 1.0))
    return "".join(out)


def pruned(data: Data) -> str:
    rows = _rows(data, ("mask", "world", "pruned"), "pruned")
    worlds = sorted({r["world"] for r in rows})
    found = {(r["mask"], r["world"]): r["pruned"] for r in rows}
    masks = list(dict.fromkeys(r["mask"] for r in rows))
    body = [[m, *(f"{found[m, w]:.0%}" if (m, w) in found else None for w in worlds)] for m in masks]
    return table(["never sent, of a full gather", *(f"P = {w}" for w in worlds)], body)


def balancer(data: Data) -> str:
    rows = _rows(data, ("config", "generator", "method", "above_lb", "gap_mean", "gap_max", "ms_median"))
    head = [
        "(N, P, κ, w max), weights",
        "method",
        "instances",
        "above lower bound",
        "above optimum",
        "gap mean",
        "gap max",
        "median",
    ]
    body = [
        [
            f"({', '.join(f'{x:,}' for x in r['config'])}) {r['generator']}",
            r["method"],
            r.get("instances"),
            f"{r['above_lb']:.1%}",
            f"{r['above_optimum']:.1%}" if r.get("above_optimum") is not None else None,
            f"{r['gap_mean']:.3f} %",
            f"{r['gap_max']:.3f} %",
            f"{number(r['ms_median'])} ms",
        ]
        for r in rows
    ]
    return table(head, body)


# ---------------------------------------------------------------- training and tests


def training(data: Data) -> str:
    """Whatever columns the rows have, in the order of their first appearance."""
    rows = _rows(data, ())
    head = list(dict.fromkeys(name for r in rows for name in r))
    return table([h.replace("_", " ") for h in head], [[r.get(h) for h in head] for r in rows])


def tests(data: Data) -> str:
    if "cases" not in data:
        raise NoData("no cases")
    groups: dict[str, list[Row]] = defaultdict(list)
    for c in data["cases"]:
        groups[c["name"].split("/")[0]].append(c)
    body = [[g, len(cs), sum(not c["problem"] for c in cs), sum(bool(c["problem"]) for c in cs)] for g, cs in groups.items()]
    failed = [[c["name"], c["problem"][:200]] for c in data["cases"] if c["problem"]]
    return table(["cases", "ran", "passed", "failed"], body) + (table(["failed", "because"], failed) if failed else "")


ATTENTION = "python -m benchmarks.attention"
FIGURES: tuple[Figure, ...] = (
    Figure(
        "gains",
        "gains",
        "Gain over peers",
        "Time of the peer over time of maskc, forward and backward: geometric mean, least and greatest over masks and lengths.",
        "attention.json",
        ATTENTION,
        gain_whiskers,
    ),
    Figure(
        "lengths", "by length", "Gain by length", "Geometric mean over the masks.", "attention.json", ATTENTION, gain_by_length
    ),
    Figure(
        "rates",
        "rates",
        "TFLOP/s of every mask",
        "Forward / backward, counting visible cells only.",
        "attention.json",
        ATTENTION,
        rates,
    ),
    Figure(
        "new-mask",
        "new mask",
        "A new mask in every step",
        "What building the mask adds to a step; least and greatest over the masks.",
        "attention.json",
        ATTENTION,
        new_mask,
    ),
    Figure(
        "peers",
        "peers",
        "Peers by themselves",
        "TFLOP/s of other kernels on the same masks, in runs of their own: a yardstick, not a comparison.",
        "peers.json",
        "see docs/performance.md",
        reference,
    ),
    Figure(
        "waiting",
        "waiting",
        "Where the forward kernel's roles spend their time",
        "From a trace of every role and tile; the loader waits for the queue, consumers for tiles.",
        "trace.json",
        "python -m benchmarks.trace",
        waiting,
    ),
    Figure(
        "schedulers",
        "schedulers",
        "Schedulers",
        "Rate over that of the best scheduler in each cell: geometric mean over the masks, whiskers from least to greatest.",
        "scheduler.json",
        "python -m benchmarks.scheduler",
        schedulers,
    ),
    Figure(
        "degree",
        "CP degree",
        "TFLOP/s by context-parallel degree",
        "8K rows a rank; the slowest rank and its exchange decide. Links are a model.",
        "scaling.json",
        "python -m benchmarks.scaling",
        by_degree,
    ),
    Figure(
        "overlap",
        "overlap",
        "Overlap efficiency E",
        "1 − exposed communication / communication, with its confidence interval; 1 hides everything.",
        "overlap.json",
        "python -m benchmarks.overlap",
        efficiency,
    ),
    Figure(
        "peaks",
        "peak / average",
        "Peak over average workload",
        "Real document layouts at 128K: mean over the layouts, whisker to the worst.",
        "balance_masks.json",
        "python -m benchmarks.balance",
        peaks,
    ),
    Figure(
        "pruned",
        "pruned",
        "What is never sent",
        "Share of a full gather that no row of the receiver sees.",
        "balance_masks.json",
        "python -m benchmarks.balance",
        pruned,
    ),
    Figure(
        "balancer",
        "balancer",
        "Balancer on random workloads",
        "LPT, then exact pairs (P2), then exact covers (P3); gaps are over the lower bound.",
        "balance.json",
        "python -m benchmarks.balance",
        balancer,
    ),
    Figure(
        "training",
        "training",
        "Training steps",
        "Whole steps of a small model, optimizer included.",
        "train.json",
        "python -m benchmarks.train",
        training,
    ),
    Figure(
        "tests",
        "GPU tests",
        "Conformance on the GPU",
        "Every case against dense fp64.",
        "gpu_tests.json",
        "python -m tests.gpu",
        tests,
    ),
)
"""In the order of the page."""

if __name__ == "__main__":
    raise SystemExit(main())
