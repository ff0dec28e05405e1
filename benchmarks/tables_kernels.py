"""Figures of kernels on one GPU, and of the conformance run, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from benchmarks.records import NoData, Row, gmean, length, origin, results, rows_of, spread, table

YARDSTICK = "flex"
TIMES = ("mask", "peer", "seqlen", "fwd_ms", "bwd_ms")
KERNELS = ("flex-flash", "flashmask", "magi", "fa4", "fa3", "cudnn")
"""Peers beside the yardstick, in the order of tables."""


def _cells(seqlen: int) -> dict[str, dict[str, Row]]:
    """Mask -> peer -> row, of cells that maskc and FlexAttention both ran."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for r in rows_of("attention", *TIMES):
        if r["seqlen"] == seqlen:
            found[r["mask"]][r["peer"]] = r
    return {mask: cell for mask, cell in found.items() if {"maskc", YARDSTICK} <= set(cell)}


def _lengths() -> list[int]:
    return sorted({r["seqlen"] for r in rows_of("attention", *TIMES)})


def _both(row: Row) -> float:
    return float(row["fwd_ms"] + row["bwd_ms"])


def gains(seqlen: int = 8192) -> dict[str, float]:
    """Mask -> time of FlexAttention over time of maskc, forward and backward together, in one process."""
    return {mask: _both(cell[YARDSTICK]) / _both(cell["maskc"]) for mask, cell in _cells(seqlen).items()}


def _every_gain() -> list[float]:
    """Over all masks and lengths."""
    found = [g for n in _lengths() for g in gains(n).values()]
    if not found:
        raise NoData("attention")
    return found


def _rates(row: Row) -> str:
    flop = 4 * row["batch"] * row["heads"] * row["seqlen"] ** 2 * row["head_dim"] * row["density"] / 1e9
    return f"{flop / row['fwd_ms']:.0f} / {2.5 * flop / row['bwd_ms']:.0f} / {3.5 * flop / _both(row):.0f}"


def _best_peers(seqlen: int) -> dict[str, tuple[str, float]]:
    """Mask -> (the fastest other kernel, its rate over FlexAttention's), in the run itself or in that of peers alone."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    with suppress(NoData):
        for r in rows_of("peers", "both_tflops"):
            if r["seqlen"] == seqlen:
                rates[r["mask"]][f"{r['peer']}, earlier" if r["peer"] != YARDSTICK else YARDSTICK] = r["both_tflops"]
    for mask, cell in _cells(seqlen).items():
        if any(peer in KERNELS for peer in cell):
            rates[mask] = {peer: 1 / _both(r) for peer, r in cell.items() if peer != "maskc"}
    found = {m: (max((p for p in f if p != YARDSTICK), key=f.__getitem__, default=None), f) for m, f in rates.items()}
    return {m: (p, f[p] / f[YARDSTICK]) for m, (p, f) in found.items() if p is not None and YARDSTICK in f}


def kernels(seqlen: str = "8192") -> str:
    """Every mask at one length."""
    n = int(seqlen)
    cells, found, peers = _cells(n), gains(n), _best_peers(n)
    if not cells:
        raise NoData("attention", f"{length(n)} tokens")
    body: list[Sequence[object]] = []
    for mask, cell in cells.items():
        ours, flex = cell["maskc"], cell[YARDSTICK]
        times = [f"{r['fwd_ms']:.2f} / {r['bwd_ms']:.2f}" for r in (ours, flex)]
        best = "{1:.2f} ({0})".format(*peers[mask]) if mask in peers else ""
        body.append([mask, f"{ours['density']:.3f}", *times, _rates(ours), f"**{found[mask]:.2f}**", best])
    compared = [peers[m][1] for m in cells if m in peers]
    mean = f"{gmean(compared):.3f}" if len(compared) == len(cells) else ""
    body.append(["geometric mean", "", "", "", "", f"**{gmean(found.values()):.3f}**", mean])
    return table(["mask", "density", "maskc ms", "FlexAttention ms", "maskc TFLOP/s", "gain", "best other gain"], body)


def gain(what: str) -> str:
    """mean, least, greatest, count at 8K; or the gain of one mask there."""
    return _summary(gains(), what)


def gain_all(what: str) -> str:
    """mean, least, greatest, count, lengths over all masks and lengths."""
    return str(len(_lengths())) if what == "lengths" else _summary(dict(enumerate(_every_gain())), what)


def _summary(found: dict[str, float] | dict[int, float], what: str) -> str:
    match what:
        case "mean":
            return f"{gmean(found.values()):.3f}"
        case "least":
            return f"{min(found.values()):.2f}"
        case "greatest":
            return f"{max(found.values()):.2f}"
        case "count":
            return str(len(found))
    return f"{found[what]:.2f}"  # type: ignore[index]


def by_length() -> str:
    """Time of every peer over maskc's, forward and backward together, per length and over all."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n in _lengths():
        for cell in _cells(n).values():
            for peer, r in cell.items():
                if peer != "maskc":
                    found[peer][n].append(_both(r) / _both(cell["maskc"]))
    if not found:
        raise NoData("attention")
    lengths = sorted({n for by in found.values() for n in by})

    def cell(values: list[float]) -> str:
        return f"{spread(values)}, {len(values)}" if values else ""

    order = [p for p in (YARDSTICK, *KERNELS) if p in found] + sorted(set(found) - {YARDSTICK, *KERNELS})
    body = [
        [p, *(cell(found[p].get(n, [])) for n in lengths), cell([g for n in lengths for g in found[p].get(n, [])])] for p in order
    ]
    return table(["over", *map(length, lengths), "all"], body)


def unmeasured() -> str:
    """A sentence: which masks are missing at which of the recorded lengths."""
    from benchmarks.masks import NAMES

    parts = []
    for n in sorted({*_lengths(), 8192, 32768, 131072}):
        missing = [m for m in NAMES if m not in _cells(n)]
        if missing:
            which = "every mask" if len(missing) == len(NAMES) else ", ".join(missing)
            parts.append(f"{length(n)}: {which}")
    return f"**Not measured yet**: {'; '.join(parts)}." if parts else "Every mask is measured at every length of the table."


def rounds() -> str:
    """What the spread of the recorded run can say."""
    spreads = [r[f"{way}_spread"] for r in rows_of("attention", "fwd_spread", "bwd_spread") for way in ("fwd", "bwd")]
    if not any(spreads):
        return (
            "The recorded run had one round: its medians are over the repetitions within a round and say nothing about the"
            " spread between rounds."
        )
    return f"The medians of rounds differ by at most {100 * max(spreads):.1f} %."


def peers(seqlen: str) -> str:
    """Peers in their own run."""
    names = ("flex", "flex-flash", "flashmask", "fa4", "fa3", "cudnn")
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for r in rows_of("peers"):
        if r["seqlen"] == int(seqlen):
            found[r["mask"]][r["peer"]] = r
    cells = [
        [mask, *(f"{r['fwd_tflops']} / {r['bwd_tflops']} / {r['both_tflops']}" if (r := f.get(p)) else "" for p in names)]
        for mask, f in found.items()
    ]
    means = [gmean(f[p]["both_tflops"] for f in found.values()) if all(p in f for f in found.values()) else None for p in names]
    cells.append(["geometric mean, both", *(f"{m:.0f}" if m is not None else "" for m in means)])
    return table(["mask", *names], cells)


def peer_gain(which: str) -> str:
    """`flashmask,8192`: mean and range of a peer's gain over FlexAttention, in the peers' run, of masks that maskc ran."""
    peer, seqlen = which.split(",")
    rates: dict[str, dict[str, int]] = defaultdict(dict)
    for r in rows_of("peers"):
        if r["seqlen"] == int(seqlen) and r["mask"] in gains(int(seqlen)):
            rates[r["mask"]][r["peer"]] = r["both_tflops"]
    return spread(f[peer] / f["flex"] for f in rates.values() if peer in f)


def peer_rate(which: str) -> str:
    """`flashmask,full,8192`: forward / backward / both of a peer in the run of peers alone."""
    peer, mask, seqlen = which.split(",")
    r = next(r for r in rows_of("peers") if r["peer"] == peer and r["mask"] == mask and r["seqlen"] == int(seqlen))
    return f"{r['fwd_tflops']} / {r['bwd_tflops']} / {r['both_tflops']}"


def rate(which: str) -> str:
    """`full,8192`: maskc's forward / backward / both, or that it is not measured."""
    mask, seqlen = which.split(",")
    cell = _cells(int(seqlen)).get(mask)
    return _rates(cell["maskc"]) if cell else "not measured yet"


def first_step() -> str:
    by: dict[str, list[float]] = defaultdict(list)
    for r in rows_of("attention", "first_step_s"):
        by[r["peer"]].append(r["first_step_s"])
    return table(["", "first step, s"], [[p, f"{min(s):.1f} to {max(s):.1f}"] for p, s in by.items()])


def new_mask() -> str:
    """Milliseconds of a new mask, least to greatest over the masks, by length."""
    columns = (
        ("maskc: tables on the GPU", "maskc", "tables_gpu_ms"),
        ("with binding", "maskc", "step_gpu_ms"),
        ("host, unchecked", "maskc", "step_host_ms"),
        ("host, checked", "maskc", "checked_host_ms"),
        ("FlexAttention on the GPU", "flex", "step_gpu_ms"),
        ("host", "flex", "step_host_ms"),
    )
    found: dict[int, list[Row]] = defaultdict(list)
    for r in rows_of("new_mask", "peer", "seqlen"):
        found[r["seqlen"]].append(r)

    def cell(values: list[float]) -> str:
        return f"{min(values):.2g} to {max(values):.2g} ({len(values)})" if values else ""

    body = [
        [length(n), *(cell([r[c] for r in found[n] if r["peer"] == peer and c in r]) for _, peer, c in columns)]
        for n in sorted(found)
    ]
    return table(["tokens", *(name for name, _, _ in columns)], body)


def syncs() -> str:
    """How often a new mask waits for the GPU, unchecked / checked, at most."""
    found = rows_of("new_mask", "step_syncs", "checked_syncs")
    return f"{max(r['step_syncs'] for r in found)} / {max(r['checked_syncs'] for r in found)}"


# ---------------------------------------------------------------- inside the kernel


def waits() -> str:
    """Shares of time of each role and state in the forward kernel."""
    shares: dict[str, dict[str, dict[str, float]]] = results("trace").get("shares", {})
    columns = list(dict.fromkeys((role, s) for roles in shares.values() for role, states in roles.items() for s in states))
    if not columns:
        raise NoData("trace")
    body = [[m, *(f"{roles[r][s]:.1%}" if s in roles.get(r, {}) else "" for r, s in columns)] for m, roles in shares.items()]
    return table(["mask", *(f"{role}: {state}" for role, state in columns)], body)


def schedulers() -> str:
    """TFLOP/s of every scheduler, geometric mean over the masks; in brackets its share of its own at the most heads."""
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in rows_of("scheduler", "direction", "scheduler", "batch_heads", "tflops"):
        found[r["direction"], r["scheduler"]][r["batch_heads"]].append(r["tflops"])
    heads = sorted({h for by in found.values() for h in by})
    body = []
    for (direction, scheduler), by in found.items():
        means = {h: gmean(x) for h, x in by.items()}
        cells = [f"{means[h]:.0f} ({means[h] / means[max(means)]:.0%})" if h in means else "" for h in heads]
        body.append(["forward" if direction == "fwd" else "backward", scheduler, *cells])
    return table(["", "scheduler", *(f"{h} heads" for h in heads)], body)


# ---------------------------------------------------------------- conformance


def attention_origin() -> str:
    return origin("attention")


def conformance() -> str:
    groups: dict[str, Counter[bool]] = defaultdict(Counter)
    for c in rows_of("gpu_tests", key="cases"):
        kind = c["name"].split("/")[0].replace("fwd-", "forward ").replace("bwd-", "backward ")
        groups["special" if c["name"].startswith("special") else kind][not c["problem"]] += 1
    body = [[kind, n[True] + n[False], n[True], n[False]] for kind, n in sorted(groups.items())]
    return table(["cases", "ran", "passed", "failed"], body)


def passed() -> str:
    g = results("gpu_tests")
    return f"{g['passed']} passed, {g['failed']} failed"


def failed() -> str:
    names = [f"`{c['name']}`" for c in results("gpu_tests")["cases"] if c["problem"]]
    return ", ".join(names) or "none"


def conformance_origin() -> str:
    return f"{origin('gpu_tests')}, {results('gpu_tests')['seconds']:.0f} s"


PLACES: tuple[Callable[..., str], ...] = (
    kernels, gain, gain_all, by_length, unmeasured, rounds, peers, peer_gain, peer_rate, rate, first_step, new_mask, syncs,
    waits, schedulers, attention_origin, conformance, passed, failed, conformance_origin,
)  # fmt: skip
