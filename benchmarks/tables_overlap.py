"""Attention beside the copies of its keys on one GPU, cell by cell: what was hidden, what was possible, and which bars hold."""

from __future__ import annotations

from benchmarks.overlap_bars import GATE, HALF, HIDDEN, MOST_HIDDEN, WHOLE
from benchmarks.records import Row, length, rows_of, table


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


PLACES = (one_gpu_cells, one_gpu_bars)
