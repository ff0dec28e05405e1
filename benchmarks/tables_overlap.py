"""Attention beside the copies of its keys as text, on one GPU and between GPUs: what was hidden, and which bars hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median

from benchmarks.overlap_bars import AT_LEAST, DIRECTIONS, GATE, HALF, HIDDEN, LARGE, MOST_HIDDEN, NEAR, WHOLE
from benchmarks.records import RATIOS, NoData, Row, length, results, rows_of, spread, table

# ---------------------------------------------------------------- on one GPU


def one_gpu_cells() -> str:
    """Cells where copies take half of the time of attention or more; of "possible" the model of `benchmarks.overlap_bounds`."""
    body = []
    for r in _rows():
        ratio = r["t_comm_ms"] / r["t_attention_ms"]
        if ratio < HALF:
            continue
        asked = ("e", HIDDEN[r["direction"]]) if ratio <= WHOLE else ("hidden", MOST_HIDDEN)
        found, possible = r[asked[0]], r[f"{asked[0]}_possible"]
        value = f"{'E' if asked[0] == 'e' else 'of least'} {found:.2f}"
        mark = "" if found >= asked[1] else f"below {asked[1]:.2f}"
        heads = f"{r['heads']} on {r['kv_heads']}"
        where = f"{r['mask'].replace('_', ' ')}, {length(r['seqlen'])}, {heads} heads, P = {r['world']}"
        link = "" if r["link"] == 1 else f", link / {r['link']}"
        times = f"{r['t_attention_ms']:.2f} / {r['t_comm_ms']:.2f} / {r['t_overlap_ms']:.2f}"
        body.append([where + link, r["direction"], times, f"{ratio:.2f}", value, f"{possible:.2f}", mark])
    return table(["cell", "", "attention / copies / both, ms", "ratio", "hidden", "possible", ""], body)


def one_gpu_bars() -> str:
    """How many cells hold each bar."""
    rows = list(_rows())
    ratios = [r["t_comm_ms"] / r["t_attention_ms"] for r in rows]
    body = []
    for direction, wanted in HIDDEN.items():
        here = [(r, x) for r, x in zip(rows, ratios, strict=True) if r["direction"] == direction]
        middle = [r["e"] >= wanted for r, x in here if HALF <= x <= WHOLE]
        above = [r["hidden"] >= MOST_HIDDEN for r, x in here if x > WHOLE]
        body.append([f"E {direction}, ratio {HALF:g} to {WHOLE:g}: {wanted:.2f}", f"{sum(middle)} of {len(middle)}"])
        body.append([f"hidden / least {direction}, ratio over {WHOLE:g}: {MOST_HIDDEN:.2f}", f"{sum(above)} of {len(above)}"])
    body.append(["no slower than copying first", f"{sum(r['against_copy_first'] <= 1 for r in rows)} of {len(rows)}"])
    body.append([f"gate, all flags set: below {GATE:.1%}", f"{sum(r['gate_overhead'] < GATE for r in rows)} of {len(rows)}"])
    return table(["bar", "cells"], body)


def _rows() -> list[Row]:
    needed = ("direction", "e", "hidden", "e_possible", "hidden_possible", "against_copy_first", "gate_overhead")
    return [r for r in rows_of("overlap", *needed) if r["executor"] == "gated"]


def overlap() -> str:
    """What is hidden, by direction, executor and time of copies over time of attention."""
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    together = {_cell(r): r["t_overlap_ms"] for r in rows_of("overlap", "t_overlap_ms") if r["executor"] == "copy-then-attend"}
    for r in rows_of("overlap", "direction", "executor", "t_attention_ms", "t_comm_ms", "t_overlap_ms", "e"):
        groups[r["direction"], _class(r), r["executor"]].append(r)
    body = []
    for (direction, at, executor), found in sorted(groups.items(), key=lambda g: g[0][:2]):
        gain = [together[_cell(r)] / r["t_overlap_ms"] for r in found if _cell(r) in together]
        hidden = [r["hidden"] for r in found if r.get("hidden") is not None]
        body.append(
            [direction, _between(at), executor, len(found), _range([r["e"] for r in found]), _range(hidden), _range(gain)]
        )
    head = ["", "copies / attention", "executor", "cells", "E", "hidden / least", "faster than copy-then-attend"]
    return table(head, body)


def hidden(direction: str) -> str:
    """E of the gated kernel where copies take between half and all of the time of attention, one GPU."""
    found = [r["e"] for r in rows_of("overlap", "e") if r["direction"] == direction and r["executor"] == "gated" and _middle(r)]
    if not found:
        raise NoData("overlap")
    return _range(found)


def _middle(r: Row) -> bool:
    return bool(HALF <= r["t_comm_ms"] / r["t_attention_ms"] <= WHOLE)


def _cell(r: Row) -> tuple[object, ...]:
    return tuple(r.get(n) for n in ("mask", "seqlen", "heads", "kv_heads", "world", "link", "direction"))


def _range(values: Sequence[float]) -> str:
    """Mean, least and greatest."""
    return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def gate() -> str:
    """What the gate costs with every chunk there: mean, least and greatest of the cells."""
    found = [100 * r["gate_overhead"] for r in rows_of("overlap", "gate_overhead") if r["executor"] == "gated"]
    if not found:
        raise NoData("overlap")
    return f"{sum(found) / len(found):.2f} % ({min(found):.2f} to {max(found):.2f} %)"


def model() -> str:
    """Measured times over those of `maskc.runtime.overlap_model`, the one that `maskc plan` prints."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for r in rows_of("overlap", "t_model_ms", "t_overlap_ms", "t_comm_ms", "t_attention_ms"):
        groups[r["direction"], r["executor"], _class(r)].append(r["t_overlap_ms"] / r["t_model_ms"])
    body = [[d, executor, _between(at), len(found), spread(found)] for (d, executor, at), found in sorted(groups.items())]
    return table(["", "executor", "copies / attention", "cells", "measured / predicted"], body)


def _class(r: Row) -> int:
    """Number of the class of copies over attention."""
    ratio = r["t_comm_ms"] / r["t_attention_ms"]
    return next(i for i, (low, high) in enumerate(RATIOS) if low <= ratio < high)


def _between(at: int) -> str:
    low, high = RATIOS[at]
    return f"{low:g} to {high:g}" if high < float("inf") else f"over {low:g}"


# ---------------------------------------------------------------- between GPUs

LEAST = 0.05
"""Of the time of copies over that of attention: with less, E is a difference of two times of attention over next to nothing."""


def hidden_gpus(direction: str) -> str:
    """E of the gated kernel between GPUs where copies take at least a fifth of the time of attention."""
    names = (f"{what}_{direction}{unit}" for what, unit in (("e", ""), ("comm", "_ms"), ("attention", "_ms")))
    e, copies, attention = names
    found = [r for r in rows_of("overlap_gpus", e, copies, attention) if r["way"] == "gated"]
    found = [r for r in found if r[copies] >= r[attention] / 5]
    if not found:
        raise NoData("overlap_gpus")
    return _range([r[e] for r in found])


def overlap_gpus() -> str:
    """Forward and backward together between GPUs, milliseconds of the slowest; E of each direction where copies say something."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for r in rows_of("overlap_gpus", "mask", "way"):
        name = f"{r['mask']}, {length(r['seqlen'])}, {r['heads']} on {r['kv_heads']} heads, {r['world']} GPUs"
        hidden = [r.get(f"e_{d}") if _ratio(r, d) >= LEAST else None for d in DIRECTIONS]
        e = f" ({' / '.join('–' if x is None else f'{x:.2f}' for x in hidden)})" if hidden != [None, None] else ""
        found[name][r["way"]] = f"{r['step_ms']:.2f}{e}" if r.get("step_ms") is not None else "not run"
    ways = list(dict.fromkeys(w for f in found.values() for w in f))
    return table(["ms (E forward / backward)", *ways], [[n, *(f.get(w, "") for w in ways)] for n, f in found.items()])


def _ratio(r: Row, direction: str) -> float:
    """Of the time of copies over that of attention; 0 where it was not taken."""
    copies, attention = (r.get(f"{what}_{direction}_ms") for what in ("comm", "attention"))
    return copies / attention if copies and attention else 0.0


def gpus_gain() -> str:
    """The largest speed-up of a step over dual chunk with NCCL's all-gather."""
    return f"{max(r['value'] for r in _steps('speed-up over dual chunk with all-gather, step')):.1f}"


def gpus_cells() -> str:
    return str(len(_steps("speed-up over dual chunk with all-gather, step")))


def gpus_hidden(direction: str) -> str:
    """E, least to greatest, where copies take half of the time of attention or all of it."""
    found = [r["value"] for r in _steps(f"E {direction}") if r["holds"] is not None]
    if not found:
        raise NoData("overlap_gpus")
    return " to ".join(dict.fromkeys(f"{x:.2f}" for x in (min(found), max(found))))


def gpus_exposed(direction: str) -> str:
    """Microseconds by which a call is longer than its attention alone, in the median cell."""
    whole, alone = f"{direction}_ms", f"attention_{direction}_ms"
    found = [r[whole] - r[alone] for r in rows_of("overlap_gpus", whole, alone) if r["way"] == "gated"]
    if not found:
        raise NoData("overlap_gpus")
    return f"{1e3 * median(found):.0f}"


def gpus_copies() -> str:
    """The largest share of the time of attention that copies take in a direction by plans of `maskc.plan`."""
    return f"{max(_ratio(r, d) for r in rows_of('overlap_gpus', 'way') if r['way'] == 'gated' for d in DIRECTIONS):.2f}"


def gpus_missed(what: str) -> str:
    """Cells that miss a bar, such as `E forward`, with what they reach; level: not by more than what rounds differ by."""
    found = sorted((r for r in _steps(what) if r["holds"] is False), key=lambda r: r["value"])
    return "; ".join(f"{r['cell'].replace('_', ' ')} ({r['value']:.3f}{_level(r)})" for r in found) or "none"


def _level(r: Row) -> str:
    return ", level" if r.get("level") else ""


def _steps(what: str) -> list[Row]:
    found = [r for r in rows_of("overlap_gpus", "what", "value", key="bars") if r["what"] == what]
    if not found:
        raise NoData("overlap_gpus")
    return found


def torch_gpus() -> str:
    """Milliseconds of a step in the cells in which torch's context parallelism was asked for, or why there are none."""
    cell = ("mask", "seqlen", "heads", "kv_heads", "batch", "world")
    rows = rows_of("overlap_gpus", *cell, "way")
    ways = ("torch context parallel", "dual-chunk gather", "gated")
    body = []
    for theirs in (r for r in rows if r["way"] == ways[0]):
        same = {r["way"]: r for r in rows if all(r[n] == theirs[n] for n in cell)}
        found = [same.get(way, {"why": ""}) for way in ways]
        steps = (f"{r['step_ms']:.2f}" if r.get("step_ms") is not None else r["why"] for r in found)
        body.append([f"{theirs['mask']}, {length(theirs['seqlen'])}, {theirs['heads']} on {theirs['kv_heads']} heads", *steps])
    if not body:
        raise NoData("overlap_gpus", "torch's context parallelism, `--torch`")
    return table(["ms a step", *ways], body)


def torch_time(way: str) -> str:
    """`gated`, `dual-chunk gather`: a step of torch's context parallelism over one of this way, in the cells where it ran."""
    rows = rows_of("overlap_gpus", "step_ms", "way")
    cell = ("mask", "seqlen", "heads", "kv_heads", "batch", "world")
    steps = {(r["way"], *(r.get(n) for n in cell)): r["step_ms"] for r in rows}
    found = [ms / steps[way, *where] for (name, *where), ms in steps.items() if name == "torch context parallel"]
    if not found:
        raise NoData("overlap_gpus", "torch's context parallelism, `--torch`")
    return " to ".join(dict.fromkeys(f"{x:.1f}" for x in (min(found), max(found))))


def copying() -> str:
    """Kernels between GPUs that bring keys, take gradients away or add them up, and the CTAs of the largest launch of each."""
    found = results("overlap_gpus").get("copying_ctas")
    if not found:
        raise NoData("overlap_gpus", "the kernels of a profile, `--profile`")
    body = [[way, ", ".join(f"{name} {ctas}" for name, ctas in of.items()) or "none"] for way, of in found.items()]
    return table(["", "kernels beside attention, CTAs"], body)


def overlap_bars() -> str:
    """Per cell between GPUs: E, what is exposed, and speed-ups against what was to be reached; bold where it was not.

    "level": the interval of the rounds holds the bar, so they do not tell.
    """
    cells: dict[str, dict[str, Row]] = defaultdict(dict)
    for r in rows_of("overlap_gpus", "cell", "what", key="bars"):
        cells[r["cell"]][r["what"]] = r

    def shown(r: Row | None) -> str:
        if r is None:
            return ""
        value = f"{r['value']:.2f}{_level(r)}" if r["holds"] is not False or r.get("level") else f"**{r['value']:.2f}**"
        if r["exposed_us"] is None:
            return value
        return f"{value if r['ratio'] >= LEAST else '–'} ({r['ratio']:.2f}, {r['exposed_us']:.0f} us)"

    whats = (
        "E forward",
        "E backward",
        "speed-up over dual chunk with all-gather, step",
        "share of what two losses allow, step",
    )
    head = ["", "E forward (copies / attention, exposed)", "E backward", "dual chunk / gated, step", "of what two losses allow"]
    return table(head, [[cell, *(shown(found.get(what)) for what in whats)] for cell, found in cells.items()])


def gpus_bars() -> str:
    """How many cells hold each bar between GPUs, of these and others how many are level with it; of E every value."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for r in rows_of("overlap_gpus", "what", "holds", key="bars"):
        name, _, of = r["what"].partition(", ")
        found["speed-up" if name.endswith("is allowed") else name, of].append(r)

    def counted(name: str, of: str = "") -> str:
        here = found[name, of]
        level = sum(r.get("level", False) for r in here)
        return f"{of} {sum(r['holds'] for r in here)} of {len(here)}{f' ({level} level)' if level else ''}".strip()

    def each(name: str) -> str:
        return ", ".join(counted(name, of) for of in ("step", *DIRECTIONS))

    over, share = "speed-up over dual chunk with all-gather", "share of what two losses allow"
    if not found[share, "step"]:
        raise NoData("overlap_gpus")
    middle = f"median of steps {median(r['value'] for r in found[share, 'step']):.2f}"
    body = [
        ["no slower than dual chunk with NCCL's all-gather", each(over)],
        [f"{AT_LEAST} times as fast where the two losses of dual chunk allow more than {LARGE}", each("speed-up")],
        [f"{NEAR} of what the two losses allow", f"{each(share)}; {middle}"],
    ]
    for d, wanted in HIDDEN.items():
        values = ", ".join(f"{x:.2f}" for x in sorted((r["value"] for r in found[f"E {d}", ""]), reverse=True))
        body.append([f"E {d} {wanted:.2f}, copies {HALF:g} to {WHOLE:g} of attention", f"{counted(f'E {d}')}: {values}"])
    return table(["bar", "cells"], body)


def routing() -> str:
    """Nodes emulated on one host: what routing over nodes and pruning save."""
    body = [
        [
            f"{r['mask']}, {length(r['seqlen'])}, {r['kv_heads']} key heads",
            r["routing"],
            "yes" if r["prune"] else "no",
            f"{r['link_gb_s']:g}",
            f"{r['step_ms']:.2f}",
            f"{r['bytes_across'] / 2**20:,.1f}",
        ]
        for r in rows_of("overlap_nodes", "routing", "step_ms")
    ]
    return table(["", "routing", "pruned", "link, GB/s", "ms", "MiB across"], body)


def link_power() -> str:
    """A backward beside a link that carries little or much: per kind of traffic, means over the GPUs."""
    body = []
    for (cell, name), of in _traffic().items():
        ms, over = mean(g["ms"] for g in of), _over_alone(cell, name)
        watched = [[g[what] for g in of if g[what] is not None] for what in ("mhz", "asleep")]
        mhz, asleep = (mean(x) if x else None for x in watched)
        clock, links = "" if mhz is None else f"{mhz:.0f}", "" if asleep is None else f"{asleep:.0%}"
        body.append([cell, name, f"{ms:.1f}", f"{over:+.1%}", clock, links])
    head = ["backward of", "what copy engines write to the other GPU", "ms", "over none", "MHz", "samples of links asleep"]
    return table(head, body)


def link_costs(name: str) -> str:
    """By how much a kind of traffic makes the backward longer, least to greatest over its cells."""
    found = [_over_alone(cell, kind) for cell, kind in _traffic() if kind == name]
    if not found:
        raise NoData("link_power")
    return " to ".join(dict.fromkeys(f"{100 * x:.1f}" for x in (min(found), max(found)))) + " %"


def _over_alone(cell: str, name: str) -> float:
    """Of the same GPUs, without copies."""
    found = _traffic()
    return mean(g["ms"] for g in found[cell, name]) / mean(g["ms"] for g in found[cell, "none"]) - 1


def _traffic() -> dict[tuple[str, str], list[Row]]:
    """(cell, kind of traffic): what each GPU measured, in all rounds."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for r in rows_of("link_power", "mask", "name", "ranks", "round"):
        found[f"{r['mask']}, {r['rows_per_device']} rows a GPU, {r['heads']} on {r['kv_heads']} heads", r["name"]] += r["ranks"]
    return found


def routed(which: str) -> str:
    """`causal_document,hierarchical,pruned` or `..., flat, all`: milliseconds over 50 and over 25 GB/s."""
    mask, routing, sent = which.split(",")
    found = [r for r in rows_of("overlap_nodes", "routing", "step_ms") if (r["mask"], r["routing"]) == (mask, routing)]
    found = [r for r in found if r["prune"] == (sent == "pruned")]
    if not found:
        raise NoData("overlap_nodes")
    return " and ".join(f"{r['step_ms']:.1f}" for r in sorted(found, key=lambda r: -r["link_gb_s"]))


PLACES: tuple[Callable[..., str], ...] = (
    one_gpu_cells, one_gpu_bars, overlap, hidden, gate, model, hidden_gpus, overlap_gpus, torch_gpus, copying, overlap_bars,
    gpus_bars, gpus_gain, gpus_cells, gpus_hidden, gpus_exposed, gpus_copies, gpus_missed, torch_time, link_power, link_costs,
    routing, routed,
)  # fmt: skip
