"""What the figures of the page of measurements draw: the contents of one file in, HTML out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from benchmarks.charts import Interval, bars, lines, number, table, whiskers
from benchmarks.masks import NAMES
from benchmarks.records import RATIOS, both, gmean, length, standard, tflops

Data = dict[str, Any]
Row = dict[str, Any]


class NoData(Exception):
    """What a figure needs and the file does not hold."""


def rows_of(data: Data, needed: Sequence[str], key: str = "rows") -> list[Row]:
    """The rows of a file that have all the values a figure needs; NoData where there is none."""
    rows = [r for r in data.get(key, []) if all(r.get(n) is not None for n in needed)]
    if not rows:
        raise NoData(f"no row with {', '.join(needed)}")
    return sorted(rows, key=lambda r: NAMES.index(r["mask"]) if r.get("mask") in NAMES else len(NAMES))


# ---------------------------------------------------------------- kernels

TIMES = ("peer", "mask", "seqlen", "batch", "heads", "kv_heads", "head_dim", "fwd_ms", "bwd_ms")


def gains(data: Data) -> dict[str, dict[tuple[int, str], float]]:
    """Per peer and (length, mask): its time over maskc's, forward and backward together, of standard cells that both ran."""
    cells: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for r in filter(standard, rows_of(data, TIMES)):
        cells[tuple(r[n] for n in TIMES[1:7])][r["peer"]] = both(r)
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
    """TFLOP/s by exact density, forward / backward, a table per head dim, heads and length."""
    rows = rows_of(data, (*TIMES, "density"))
    peers = list(dict.fromkeys(r["peer"] for r in rows))
    out = []
    for kind in sorted({_kind(r) for r in rows}, key=lambda k: (k[0] != 128, k)):
        here: dict[str, dict[str, str]] = defaultdict(dict)
        for r in (r for r in rows if _kind(r) == kind):
            here[r["mask"]][r["peer"]] = "{:.0f} / {:.0f}".format(*tflops(r))
        body = [[mask, *(cells.get(p, "–") for p in peers)] for mask, cells in here.items()]
        dim, seqlen, heads = kind
        others = "" if dim == 128 and heads == 32 * 131072 // seqlen else f", head dim {dim}, {heads} heads in all"
        out.append(f"<h3>{length(seqlen)} tokens{others}</h3>" + table(["mask", *peers], body))
    return "".join(out)


def _kind(r: Row) -> tuple[int, int, int]:
    return r["head_dim"], r["seqlen"], r["batch"] * r["heads"]


def reference(data: Data) -> str:
    """Rates of peers measured by themselves, forward / backward, a table per length."""
    rows = rows_of(data, ("peer", "mask", "seqlen", "fwd_tflops", "bwd_tflops"))
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
    """Milliseconds, least to greatest over the masks, by length."""
    names = {
        ("maskc", "tables_gpu_ms"): "maskc, tables, GPU",
        ("maskc", "step_gpu_ms"): "with binding, GPU",
        ("maskc", "step_host_ms"): "host, unchecked",
        ("maskc", "checked_host_ms"): "host, checked",
        ("flex", "step_gpu_ms"): "flex, GPU",
        ("flex", "step_host_ms"): "flex, host",
    }
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in rows_of(data, ("peer", "mask", "seqlen")):
        for peer, name in names:
            if r["peer"] == peer and r.get(name) is not None:
                found[peer, name][r["seqlen"]].append(r[name])
    lengths = sorted({n for by in found.values() for n in by})
    body = [
        [names[name], *(f"{number(min(x))} – {number(max(x))}" if (x := found[name].get(n)) else None for n in lengths)]
        for name in names
        if name in found
    ]
    return table(["ms", *map(length, lengths)], body)


def schedulers(data: Data) -> str:
    """TFLOP/s over the best scheduler's of the same cell, geometric mean over the masks."""
    rows = rows_of(data, ("direction", "scheduler", "mask", "batch_heads", "tflops"))
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
    rows = rows_of(data, ("mask", "world", "way", "forward_tflops_per_gpu", "backward_tflops_per_gpu"))
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
    """E of every executor by time of copies over time of attention, then every cell of the executors with a whisker."""
    rows = rows_of(data, ("mask", "direction", "executor", "t_attention_ms", "t_comm_ms", "e"))
    out = []
    for direction in ("forward", "backward"):
        here = [r for r in rows if r["direction"] == direction]
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for low, high in RATIOS:
            name = f"copies / attention {low:g} to {high:g}" if high < float("inf") else f"copies / attention over {low:g}"
            for r in here:
                if low <= r["t_comm_ms"] / r["t_attention_ms"] < high:
                    found[name][r["executor"]].append(r["e"])
        groups = {
            name: {x: Interval(min(e), sum(e) / len(e), max(e)) for x, e in executors.items()}
            for name, executors in found.items()
        }
        if groups:
            out.append(f"<h3>{direction}</h3>" + bars(groups, "E", 1.0))
    body = [
        [
            " ".join(str(r[n]) for n in ("mask", "direction", "executor")),
            *(
                r.get(n)
                for n in (
                    "seqlen",
                    "kv_heads",
                    "world",
                    "link",
                    "t_attention_ms",
                    "t_comm_ms",
                    "t_overlap_ms",
                    "e",
                    "e_low",
                    "e_high",
                )
            ),
        ]
        for r in rows
    ]
    head = ["cell", "tokens", "Hk", "P", "link / n", "attention ms", "copies ms", "overlapped ms", "E", "from", "to"]
    return "".join(out) + f"<details><summary>{len(body)} cells</summary>{table(head, body)}</details>"


def between_gpus(data: Data) -> str:
    """Milliseconds forward and backward together, of the slowest GPU, by the way keys travel."""
    rows = rows_of(data, ("mask", "way", "seqlen"))
    groups: dict[str, dict[str, Interval]] = defaultdict(dict)
    for r in rows:
        if r.get("step_ms") is not None:
            label = f"{r['mask']} {length(r['seqlen'])} Hk={r['kv_heads']}"
            groups[label][r["way"]] = Interval(r["step_ms"], r["step_ms"], r["step_ms"])
    columns = ("step_ms", "forward_ms", "backward_ms", "e_forward", "e_backward", "bytes_forward", "bytes_backward", "why")
    body = [[f"{r['mask']} {length(r['seqlen'])}, {r['way']}", *(r.get(c) for c in columns)] for r in rows]
    head = ["", "ms", "forward", "backward", "E forward", "E backward", "bytes forward", "bytes backward", "not run, because"]
    return (bars(groups, "ms") if groups else "") + table(head, body)


def peaks(data: Data) -> str:
    """Mean peak / average over the layouts, whisker to the largest."""
    rows = [
        r for r in rows_of(data, ("mask", "world", "way", "imbalance_mean", "imbalance_max"), "balance") if r.get("nodes", 1) == 1
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
    rows = rows_of(data, ("mask", "world", "pruned"), "pruned")
    worlds = sorted({r["world"] for r in rows})
    found = {(r["mask"], r["world"]): r["pruned"] for r in rows}
    masks = list(dict.fromkeys(r["mask"] for r in rows))
    body = [[m, *(f"{found[m, w]:.0%}" if (m, w) in found else None for w in worlds)] for m in masks]
    return table(["never sent, of a full gather", *(f"P = {w}" for w in worlds)], body)


def balancer(data: Data) -> str:
    rows = rows_of(data, ("config", "generator", "method", "above_lb", "gap_mean", "gap_max", "ms_median"))
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
    """Step times with one standard deviation, and what else was taken."""
    rows = rows_of(data, ("model", "attention", "seqlen"))
    groups: dict[str, dict[str, Interval]] = defaultdict(dict)
    for r in rows:
        if "step_ms" in r:
            groups[f"{r['model']}, {length(r['seqlen'])}"][r["attention"]] = _deviation(r)
    columns = {
        "step_ms": "step ms",
        "step_std_ms": "±",
        "tokens_per_s": "tokens/s",
        "attention_forward_ms": "attention forward ms",
        "attention_backward_ms": "backward ms",
        "attention_share": "share",
        "problem": "not run, because",
    }
    body = [[f"{r['model']}, {length(r['seqlen'])}, {r['attention']}", *(r.get(c) for c in columns)] for r in rows]
    chart = bars(groups, "ms a step") if groups else ""
    return chart + table(["model, tokens, attention", *columns.values()], body)


def ablation(data: Data) -> str:
    """Step times of the simulated rank with one standard deviation, per set of documents."""
    return _steps(rows_of(data, ("row", "sparsity"), "ablation"), lambda r: f"{r['sparsity']:.0%} hidden")


def training_gpus(data: Data) -> str:
    """Step times over several GPUs with one standard deviation."""
    rows = rows_of(data, ("row", "model", "gpus", "seqlen"))
    return _steps(rows, lambda r: f"{r['model']}, {length(r['seqlen'])} over {r['gpus']} GPUs")


def _steps(rows: Sequence[Row], group: Callable[[Row], str]) -> str:
    groups: dict[str, dict[str, Interval]] = defaultdict(dict)
    for r in rows:
        if "step_ms" in r:
            groups[group(r)][r["row"]] = _deviation(r)
    columns = {"step_ms": "step ms", "step_std_ms": "±", "tokens_per_s": "tokens/s", "problem": "not run, because"}
    body = [[f"{group(r)}: {r['row']}", *(r.get(c) for c in columns)] for r in rows]
    return (bars(groups, "ms a step") if groups else "") + table(["", *columns.values()], body)


def _deviation(r: Row) -> Interval:
    return Interval(r["step_ms"] - r["step_std_ms"], r["step_ms"], r["step_ms"] + r["step_std_ms"])


def tests(data: Data) -> str:
    if "cases" not in data:
        raise NoData("no cases")
    groups: dict[str, list[Row]] = defaultdict(list)
    for c in data["cases"]:
        groups[c["name"].split("/")[0]].append(c)
    body = [[g, len(cs), sum(not c["problem"] for c in cs), sum(bool(c["problem"]) for c in cs)] for g, cs in groups.items()]
    failed = [[c["name"], c["problem"][:200]] for c in data["cases"] if c["problem"]]
    return table(["cases", "ran", "passed", "failed"], body) + (table(["failed", "because"], failed) if failed else "")
