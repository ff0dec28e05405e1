"""Figures of kernels on one GPU, and of the conformance run, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeAlias

from benchmarks.masks import NAMES, mask_case, tile_density
from benchmarks.records import NoData, Row, both, gmean, length, origin, results, rows_of, spread, standard, table, tflops

YARDSTICK = "flex"
TIMES = ("mask", "peer", "seqlen", "batch", "heads", "kv_heads", "head_dim", "density", "fwd_ms", "bwd_ms")
ORDER = (YARDSTICK, "flashmask", "flex-flash", "fa4", "fa3", "cudnn", "magi")
"""Peers in the order of tables."""
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Of the whole table."""
HEADLINE = (8192, 32768, 131072)


Cells: TypeAlias = dict[str, dict[str, Row]]
"""Mask -> peer -> row of cells that maskc ran, in the order of the masks."""


def cells(seqlen: int) -> Cells:
    """The standard cells of one length."""
    return _cells(lambda r: standard(r) and r["seqlen"] == seqlen)


def cells_of(head_dim: int) -> Cells:
    """Those of another head dim."""
    return _cells(lambda r: bool(r["head_dim"] == head_dim))


def _cells(wanted: Callable[[Row], bool]) -> Cells:
    found: Cells = {mask: {} for mask in NAMES}
    for r in filter(wanted, rows_of("attention", *TIMES)):
        found[r["mask"]][r["peer"]] = r
    return {mask: cell for mask, cell in found.items() if "maskc" in cell}


def _lengths() -> list[int]:
    return sorted({r["seqlen"] for r in rows_of("attention", *TIMES) if standard(r)})


def gains(seqlen: int = 8192) -> dict[str, float]:
    """Mask -> time of FlexAttention over time of maskc, forward and backward together, in one process."""
    return _gains(cells(seqlen))


def gains_of(head_dim: int) -> dict[str, float]:
    """The same at another head dim."""
    return _gains(cells_of(head_dim))


def _gains(of: Cells) -> dict[str, float]:
    return {mask: both(cell[YARDSTICK]) / both(cell["maskc"]) for mask, cell in of.items() if YARDSTICK in cell}


def _every_gain() -> list[float]:
    """Over all masks and lengths."""
    found = [g for n in _lengths() for g in gains(n).values()]
    if not found:
        raise NoData("attention")
    return found


def _rates(row: Row) -> str:
    return "{:.0f} / {:.0f} / {:.0f}".format(*tflops(row))


def _times(row: Row | None, absent: str = "") -> str:
    return f"{row['fwd_ms']:.2f} / {row['bwd_ms']:.2f}" if row else absent


def earlier(seqlen: int) -> dict[str, dict[str, float]]:
    """Mask -> peer -> its gain over FlexAttention in the run of peers alone."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for r in rows_of("peers", "both_tflops"):
        if r["seqlen"] == seqlen:
            found[r["mask"]][r["peer"]] = r["both_tflops"]
    return {m: {p: x / f[YARDSTICK] for p, x in f.items() if p != YARDSTICK} for m, f in found.items() if YARDSTICK in f}


def best_peers(seqlen: int) -> dict[str, tuple[str, float]]:
    """Mask -> (the fastest other kernel, its gain over FlexAttention), of the run itself and that of peers alone."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with suppress(NoData):
        for mask, gain in earlier(seqlen).items():
            found[mask] = {f"{peer}, earlier": x for peer, x in gain.items()}
    for mask, cell in cells(seqlen).items():
        if YARDSTICK in cell:
            found[mask] |= {p: both(cell[YARDSTICK]) / both(r) for p, r in cell.items() if p not in ("maskc", YARDSTICK)}
    return {mask: max(f.items(), key=lambda x: x[1]) for mask, f in found.items() if f}


@cache
def _by_tiles(mask: str, seqlen: int) -> float:
    return tile_density(mask_case(mask, seqlen, heads=1))


def kernels(seqlen: str = "8192") -> str:
    """Every mask at one length."""
    n = int(seqlen)
    there, found, peers = cells(n), gains(n), best_peers(n)
    if not there:
        raise NoData("attention", f"{length(n)} tokens")
    body: list[Sequence[object]] = []
    for mask, cell in there.items():
        ours, flex = cell["maskc"], cell.get(YARDSTICK)
        times = [_times(r, "cannot") for r in (ours, flex)]
        tiles = _by_tiles(mask, n)
        density = f"{ours['density']:.3f} ({tiles:.3f})"
        rate = f"{_rates(ours)} ({tflops(ours)[2] * tiles / ours['density']:.0f})"
        best = "{1:.2f} ({0})".format(*peers[mask]) if mask in peers else ""
        over = f"{found[mask] / peers[mask][1]:.2f}" if mask in found and mask in peers else ""
        body.append([mask, density, *times, rate, f"**{found[mask]:.2f}**" if mask in found else "", best, over])
    compared = {m: peers[m][1] for m in found if m in peers}
    mean = [f"{gmean(x):.3f}" if compared else "" for x in (compared.values(), [found[m] / x for m, x in compared.items()])]
    body.append(["geometric mean", "", "", "", "", f"**{gmean(found.values()):.3f}**" if found else "", *mean])
    head = [
        "mask",
        "density (by tiles)",
        "maskc ms",
        "FlexAttention ms",
        "maskc TFLOP/s (by tiles)",
        "gain",
        "best other gain",
        "over it",
    ]
    return table(head, body)


def head_dims() -> str:
    """Head dims other than 128, at 8K."""
    body: list[Sequence[object]] = []
    for dim in sorted({r["head_dim"] for r in rows_of("attention", *TIMES)} - {128}):
        found = gains_of(dim)
        for mask, cell in cells_of(dim).items():
            times = [_times(cell.get(p)) for p in ("maskc", YARDSTICK, "cudnn")]
            gain = f"**{found[mask]:.2f}**" if mask in found else ""
            over = f"{both(cell['cudnn']) / both(cell['maskc']):.2f}" if "cudnn" in cell else ""
            body.append([dim, mask, *times, _rates(cell["maskc"]), gain, over])
        body.append([dim, "geometric mean", "", "", "", "", f"**{gmean(found.values()):.3f}**" if found else "", ""])
    if not body:
        raise NoData("attention", "other head dims")
    head = ["head dim", "mask", "maskc ms", "FlexAttention ms", "cudnn ms", "maskc TFLOP/s", "gain", "over cudnn"]
    return table(head, body)


def headline() -> str:
    """Gains at three lengths, and over how many masks."""
    found = {n: g for n in HEADLINE if (g := gains(n))}
    if not found:
        raise NoData("attention")
    counts = sorted({len(g) for g in found.values()})
    masks = f"{counts[0]} masks" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} masks"
    mean, tokens = (" / ".join(parts) for parts in ([f"{gmean(g.values()):.2f}" for g in found.values()], map(length, found)))
    return f"**{mean} times as fast as FlexAttention at {tokens} tokens** (forward and backward, geometric mean of {masks})"


def gain_at(head_dim: str) -> str:
    """Mean, least, greatest and count of the gains at another head dim."""
    found = gains_of(int(head_dim))
    if not found:
        raise NoData("attention")
    return f"{spread(found.values())} on {len(found)} masks"


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
    """Time of every peer over maskc's, forward and backward together, per length and over all.

    Peers of the earlier run by way of FlexAttention: maskc's gain over it divided by theirs.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n in _lengths():
        for cell in cells(n).values():
            for peer, r in cell.items():
                if peer != "maskc":
                    found[peer][n].append(both(r) / both(cell["maskc"]))
        with suppress(NoData):
            theirs = earlier(n)
            for mask, gain in gains(n).items():
                for peer, x in theirs.get(mask, {}).items():
                    found[f"{peer}, earlier"][n].append(gain / x)
    if not found:
        raise NoData("attention")
    lengths = sorted({n for by in found.values() for n in by})

    def cell(values: list[float]) -> str:
        return f"{spread(values)}, {len(values)}" if values else ""

    order = sorted(found, key=lambda p: (p.endswith("earlier"), ORDER.index(p.removesuffix(", earlier"))))
    body = [
        [p, *(cell(found[p].get(n, [])) for n in lengths), cell([g for n in lengths for g in found[p].get(n, [])])] for p in order
    ]
    return table(["over", *map(length, lengths), "all"], body)


def unmeasured() -> str:
    """A sentence: which masks are missing at which of the recorded lengths."""
    parts = []
    for n in LENGTHS:
        missing = [m for m in NAMES if m not in cells(n)]
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
    cell = cells(int(seqlen)).get(mask)
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
    left = f", {g['not_run']} not run" if g.get("not_run") else ""
    return f"{g['passed']} passed, {g['failed']} failed{left}"


def failed() -> str:
    names = [f"`{c['name']}`" for c in results("gpu_tests")["cases"] if c["problem"]]
    return ", ".join(names) or "none"


def conformance_origin() -> str:
    return f"{origin('gpu_tests')}, {results('gpu_tests')['seconds']:.0f} s"


PLACES: tuple[Callable[..., str], ...] = (
    headline, kernels, head_dims, gain, gain_at, gain_all, by_length, unmeasured, rounds, peers, peer_gain, peer_rate, rate,
    first_step, new_mask, syncs, waits, schedulers, attention_origin, conformance, passed, failed, conformance_origin,
)  # fmt: skip
