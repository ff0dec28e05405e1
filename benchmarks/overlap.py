"""What of the exchange of keys and gradients hides behind attention: one rank on one GPU, others in pinned host memory.

    python -m benchmarks.overlap [--timeout 110] [--out benchmarks/results/overlap.json] [--resume] [--dry]

Per cell (mask, length, key heads, ranks, link): the rank that receives most, under the balanced plan. In turn, in random
order, forward and backward: attention alone (the gated kernel, every chunk there), the same with flags to look at, the
kernel without a gate, the planned copies alone, both one after the other, both beside each other by copy engines
("gated") and with a copy kernel ("sm-copy"), and two baselines: the whole sequence gathered under the dual-chunk (zigzag)
assignment, then attended to, and (forward) chunks of one peer after another with merged results.

Backward, the copies are those of keys and of the gradients of others in one direction, own gradients for others in the
other direction at the same time, and the sum. E = 1 - exposed / copies with exposed = overlapped - attention, of medians,
never clamped, with a 95 % interval from resampling of rounds; hidden / min = (attention + copies - overlapped) /
min(attention, copies). Rounds go on while an interval is wide, and longest where what is asked for lies in it. The way of own
keys into the buffer counts as exposed, where the kernel does not read them in place. e_possible, hidden_possible: what no order
of work could beat (`benchmarks.overlap_bounds`). What the gate costs: with flags that are all there, against none looked at
(gate_overhead, in pairs behind each other, with its interval), and against the kernel without a gate, which takes its tiles in
another order (against_no_gate). against_copy_first: the step over that of "copy-then-attend", in pairs where they are close. A
link of half the rate copies every chunk twice. --dry lists the cells with the model's times. With more than one GPU, a process
for each with the same --claims and an --out of its own, then --merge. --gpus N runs `benchmarks.overlap_gpus` instead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.digest import digests
from benchmarks.kernels import attention, compile_all
from benchmarks.overlap_bars import GATE, HALF, HIDDEN, MOST_HIDDEN, WHOLE
from benchmarks.overlap_bounds import best, soonest_end
from benchmarks.overlap_cells import HEAD_DIM, LINK_RATE, MASKS, Cell, Problem, cells, everything_gathered, problem
from benchmarks.overlap_rank import Rank
from benchmarks.overlap_record import Record, claim, merged
from benchmarks.overlap_times import Runs, Stopwatch, Times, figures, interval, middle_of
from maskc.codegen.exchange import exchange_source
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import OutDtype
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.overlap_model import backward_times, flows, forward_times

EXECUTORS = ("gated", "sm-copy", "copy-then-attend")
KEPT = 48 << 30
"""Bytes that the allocator may keep from one cell to the next: memory grows slowly."""
BASELINES = ("dual-chunk gather", "peer by peer")
ASIDE = ("flags set", "no gate", "own keys", "keys", "sends", "sum", *EXECUTORS[1:], *BASELINES)
"""What E of the gated executor does not need."""
NARROW = 0.03
"""Width of an interval from which it need not become narrower."""
CLOSE = 0.9
"""Share of the time of "copy-then-attend" from which the two are compared in pairs."""


class Pairing:
    """The rank of a cell, and where there is room for its buffers the same rank under the baseline that gathers all."""

    def __init__(self, made: Problem, device: torch.device) -> None:
        cell = made.cell
        self.made, self.ours = made, Rank(made, made.order, device)
        room = cell.seqlen * cell.heads_kv <= 1 << 20
        self.whole = Rank(*everything_gathered(cell), device) if room else None


def measure(pairing: Pairing, seconds: float, direction: str) -> list[dict[str, Any]]:
    """The rows of one cell and direction. seconds: that it may take to be measured."""
    ours, whole = pairing.ours, pairing.whole
    queues = [ours.queues] if whole is None else [ours.queues, whole.queues]
    attend: Callable[..., Any]
    if direction == "forward":
        attend, copies, cut = ours.attention, ours.copies, ours.rank.forward_cut
    else:
        attend, copies, cut = ours.attention_backward, ours.exchange, ours.rank.backward_cut
        ours.exchange()  # its flags are those that "flags set" looks at
    runs: Runs = {
        "attention": attend,
        "flags set": partial(attend, there=False),
        "no gate": partial(attend, gated=False),
        "copies": copies,
        "own keys": partial(ours.own_keys, direction),
        **{name: partial(getattr(ours, direction), name) for name in EXECUTORS},
    }
    if direction == "forward":
        runs["peer by peer"] = ours.peer_by_peer
    else:
        runs |= {"keys": partial(ours.copies, direction), "sends": ours.sends, "sum": ours.sum}
    if whole is not None:
        runs["dual-chunk gather"] = partial(getattr(whole, direction), "copy-then-attend")
    watch = Stopwatch(runs, queues, ours.rank.finish)
    times = watch.rounds(partial(worth, direction, seconds), ASIDE)
    copies()  # its flags are those that "flags set" looks at
    ratios = {"gate": watch.ratios("attention", "flags set", seconds / 2, 1 + GATE)}
    if statistics.median(times["gated"]) > CLOSE * statistics.median(times["copy-then-attend"]):
        ratios["first"] = watch.ratios("copy-then-attend", "gated", seconds / 2, 1.0)
    results = watch.results
    pairs = (p for name in EXECUTORS for p in _bits(direction, results[name], results["copy-then-attend"]))
    same = all(torch.equal(a, b) for a, b in pairs)
    return _rows(pairing, direction, times, ratios, len(cut.pieces), same)


def worth(direction: str, seconds: float, times: Times) -> float:
    """Seconds that rounds of a cell may take.

    None once its figure is known well enough, twice as many where it is not known whether the bar is reached.
    """
    attention, copies = (statistics.median(times[n]) for n in ("attention", "copies"))
    if copies <= 0:
        return seconds
    ratio, (low, high) = copies / attention, interval(times, "gated")
    if ratio > WHOLE:  # hidden / attention is E * copies / attention
        bar, low, high = MOST_HIDDEN, low * ratio, high * ratio
    else:
        bar = HIDDEN[direction] if ratio >= HALF else math.inf
    if low <= bar <= high:
        return 2 * seconds
    return 0.0 if high - low <= NARROW else seconds


def _bits(direction: str, a: Any, b: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What two executors must agree on to the bit: backward, not dQ, which is added up in any order."""
    return zip(a, b, strict=True) if direction == "forward" else zip(a[1:], b[1:], strict=True)


def _rows(
    pairing: Pairing,
    direction: str,
    times: Times,
    ratios: dict[str, list[float]],
    pieces: int,
    same: bool,
) -> list[dict[str, Any]]:
    made, cell = pairing.made, pairing.made.cell
    medians = {name: statistics.median(t) for name, t in times.items()}
    row_bytes = DEFAULT_MACHINE.bytes_per_row(cell.heads_kv, HEAD_DIM)
    pulled = sum(s.rows for s in made.order.pulls) * row_bytes
    lent = sum(made.p.keys.size_of(c) for _, chunks in made.order.lends for c in chunks) * row_bytes
    gate, gate_low, gate_high = (x - 1 for x in middle_of(ratios["gate"]))
    first = middle_of(ratios["first"])[0] if "first" in ratios else medians["gated"] / medians["copy-then-attend"]
    ends = [medians[n] for n in (("attention", "keys", "sends", "sum") if direction == "backward" else ("attention", "copies"))]
    soonest = soonest_end(pairing.ours.needs(direction), hopper.multiprocessors(pairing.ours.device), *ends)
    possible = best(medians["attention"], medians["copies"], max(soonest, medians["copies"]))
    shared = {
        "mask": cell.mask,
        "seqlen": cell.seqlen,
        "heads": cell.heads,
        "kv_heads": cell.heads_kv,
        "world": cell.world,
        "link": cell.link,
        "rank": made.order.rank,
        "bytes_in": pulled + (2 * lent if direction == "backward" else 0),
        "bytes_out": 2 * pulled if direction == "backward" else 0,
        "pieces": pieces,
        "repeats": len(times["attention"]),
        "same_bits": same,
        "t_attention_ms": medians["attention"],
        "t_comm_ms": medians["copies"],
        "t_no_gate_ms": medians["no gate"],
        "t_own_keys_ms": medians["own keys"],
        "gate_overhead": gate,
        "gate_low": gate_low,
        "gate_high": gate_high,
        "against_no_gate": medians["attention"] * (1 + gate) / medians["no gate"] - 1,
        "direction": direction,
        **{f"t_{name}_ms": medians[name] for name in ("keys", "sends", "sum") if name in medians},
    }
    machine = replace(DEFAULT_MACHINE, intra=LINK_RATE / cell.link)
    times_of = forward_times if direction == "forward" else backward_times
    t = times_of(flows(made.p, 0, machine)[made.order.rank])
    model = {"gated": 1e3 * t.beside, "copy-then-attend": 1e3 * t.apart}
    rows = []
    for name in (*EXECUTORS, *BASELINES):
        if name in times:
            low, high = interval(times, name)
            predicted = model.get(name)
            timed = {"executor": name, "t_overlap_ms": medians[name], "t_model_ms": predicted, **figures(medians, name)}
            bounds = {"e_possible": possible[0], "hidden_possible": possible[1], "against_copy_first": first}
            rows.append({**shared, **timed, "e_low": low, "e_high": high, **(bounds if name == "gated" else {})})
    return rows


def missed(row: dict[str, Any]) -> list[str]:
    """Which bars a row of the gated executor misses, with what was possible."""
    ratio, wanted = row["t_comm_ms"] / row["t_attention_ms"], HIDDEN[row["direction"]]
    out = []
    if HALF <= ratio <= WHOLE and row["e"] < wanted:
        out.append(f"E {row['e']:.3f} < {wanted:.2f}, possible {row['e_possible']:.3f}")
    if ratio > WHOLE and row["hidden"] < MOST_HIDDEN:
        out.append(f"hidden/min {row['hidden']:.3f} < {MOST_HIDDEN:.2f}, possible {row['hidden_possible']:.3f}")
    if row["against_copy_first"] > 1:
        out.append(f"{row['against_copy_first'] - 1:+.1%} against copying first")
    if row["gate_overhead"] >= GATE:
        out.append(f"gate {row['gate_overhead']:+.2%} [{row['gate_low']:+.2%}, {row['gate_high']:+.2%}]")
    return out


def sources(masks: list[str]) -> list[CudaSource]:
    """Of every variant that is going to run."""
    forms = set()
    for name in masks:
        made = problem(Cell(name, 8192, 32, 8, 2, 1))
        rows, keys = made.p.rows, made.p.keys
        forms.add(hopper.mask_form(localize(made.v, rows, rows.chunks_of(made.order.rank), keys, made.order.columns)))
    kernels = [attention(form, HEAD_DIM, outs=get_args(OutDtype), gated=(False, True)) for form in forms]
    return [*chain.from_iterable(kernels), exchange_source()]


# ---------------------------------------------------------------- the table


def line(cell: Cell, rows: list[dict[str, Any]]) -> str:
    """One line per direction."""
    out = []
    for direction in ("forward", "backward"):
        of = [r for r in rows if r["direction"] == direction]
        if not of:
            continue
        first = of[0]
        attention, copies = first["t_attention_ms"], first["t_comm_ms"]
        times = "  ".join(f"{r['executor']} {r['t_overlap_ms']:.3f}" for r in of)
        e = "none" if first["e"] is None else f"E {first['e']:.3f} [{first['e_low']:.3f}, {first['e_high']:.3f}]"
        hidden = "" if first["hidden"] is None else f" hidden/min {first['hidden']:.3f}"
        bits = "" if first["same_bits"] else "  BITS DIFFER"
        gate = f"gate {first['gate_overhead']:+.2%}, against none {first['against_no_gate']:+.2%}"
        if first["e"] is not None:
            e += f" of {first['e_possible']:.3f} possible"
            gate += "".join(f"  BELOW: {miss}" for miss in missed(first))
        out.append(
            f"{cell} {direction:8} attention {attention:.3f} copies {copies:.3f} ({copies / attention:.2f})  {times} ms"
            f"  {e}{hidden}  {gate} own keys {first['t_own_keys_ms']:.3f}{bits}"
        )
    return "\n".join(out)


def dry(cell: Cell) -> str:
    """The model's times at the rate of the loopback link."""
    made = problem(cell)
    machine = replace(DEFAULT_MACHINE, intra=LINK_RATE / cell.link)
    t = forward_times(flows(made.p, 0, machine)[made.order.rank])
    e = "none" if not t.transfer else f"{1 - (t.beside - t.attention) / t.transfer:.3f}"
    chunks = f"{len(made.order.pulls)} of {made.p.keys.chunk_count} chunks copied to rank {made.order.rank}"
    return (
        f"{cell}  {chunks}; model: attention {1e3 * t.attention:.3f} copies {1e3 * t.transfer:.3f} "
        f"apart {1e3 * t.apart:.3f} beside {1e3 * t.beside:.3f} ms  E {e}"
    )


def main() -> None:
    gpus = argparse.ArgumentParser(add_help=False)
    gpus.add_argument("--gpus", type=int, default=1, help="more than one: benchmarks.overlap_gpus, which takes all other options")
    found, rest = gpus.parse_known_args()
    if found.gpus > 1:
        from benchmarks import overlap_gpus

        raise SystemExit(overlap_gpus.main(["--gpus", str(found.gpus), *rest]))
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=about, parents=[gpus])
    parser.add_argument("--timeout", type=float, default=110.0, help="seconds; cells that are not reached are named")
    parser.add_argument(
        "--seconds", type=float, default=0.6, help="of rounds per cell and direction, twice that where it is close"
    )
    parser.add_argument("--cells", type=int, nargs="+", help="numbers of the cells to run, from 0, in this order")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--longest", type=int, default=262_144, help="leave out longer sequences")
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=("forward", "backward"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overlap.json"))
    parser.add_argument("--resume", action="store_true", help="run only what OUT does not have of these kernels")
    parser.add_argument("--claims", type=Path, help="a file by which several processes, one per GPU, deal cells among them")
    parser.add_argument("--merge", type=Path, nargs="+", help="write the rows of these files to OUT; nothing is run")
    args = parser.parse_args()
    if args.merge:
        merged(args.out, args.merge).write()
        return
    every = list(cells())
    chosen = [every[i] for i in (args.cells or range(len(every)))]
    chosen = [c for c in chosen if c.mask in args.masks and c.seqlen <= args.longest]
    if args.dry:
        for cell in chosen:
            print(dry(cell), flush=True)
        return
    deadline = time.monotonic() + args.timeout
    record = Record(args.out, {"device": torch.cuda.get_device_name(), **digests()})
    if args.resume:
        record.resume()
    compile_all(sources(args.masks))
    left = []
    for cell in chosen:
        wanted = [d for d in args.directions if not record.has(cell, d)]
        if wanted and claim(args.claims, cell):
            left += run(cell, wanted, record, args.seconds, deadline)
    if left:
        print(f"not reached in {args.timeout:.0f} s: {len(left)}, from {left[0]}")


def run(cell: Cell, directions: list[str], record: Record, seconds: float, deadline: float) -> list[str]:
    """Puts the rows of a cell into the record; what was not reached."""
    started = time.monotonic()
    if started > deadline:
        return [f"{cell} {direction}" for direction in directions]
    made = problem(cell)
    if not made.order.pulls:
        return []  # no rank needs keys of another
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
    pairing, left = Pairing(made, device), []
    for direction in directions:
        if time.monotonic() > deadline:
            left.append(f"{cell} {direction}")
            continue
        try:
            rows = measure(pairing, seconds, direction)
        except MaskcError as found:
            print(f"{cell} {direction}: {found} {getattr(found, '__notes__', '')}", flush=True)
            continue
        record.put(rows)
        print(f"{line(cell, rows)}  ({time.monotonic() - started:.1f} s)", flush=True)
    return left


if __name__ == "__main__":
    main()
