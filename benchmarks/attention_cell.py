"""A worker of `benchmarks.attention`: compiles its cells in time, says `ready` and which, times each that stdin names.

Before each cell that it compiles it says which. A cell that cannot be timed is answered with the reason. A step is one forward
and one backward of one peer, timed by three CUDA events, with gradients on for both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from types import FrameType
from typing import Any

import torch

from benchmarks.attention import TOKENS, Cell
from benchmarks.masks import MaskCase, density, mask_case
from benchmarks.peers import PEERS, Forward, Peer

ROWS = 256
"""Rows of the output on which peers are compared."""


@dataclass(frozen=True)
class Prepared:
    """A cell with the forward functions of the peers that can do it, and the seconds until each had made its first step."""

    cell: Cell
    case: MaskCase
    batch: int
    density: float
    forwards: dict[str, tuple[Peer, Forward]]
    first: dict[str, float] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_cell", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", required=True, metavar="MASK,SEQLEN,HEAD_DIM")
    parser.add_argument("--peers", nargs="+", required=True)
    for name in ("heads", "kv-heads", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch-heads", type=int, default=None)
    parser.add_argument(
        "--until", type=float, required=True, help="end of compiling, by the monotonic clock, one for all processes"
    )
    for name in ("seconds", "settle"):
        parser.add_argument(f"--{name}", type=float, required=True)
    args = parser.parse_args()
    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print; only replies may reach the parent
    torch._dynamo.config.recompile_limit = 64  # one function for all cells
    prepared: dict[str, Prepared] = {}
    try:
        with _limit(args.until - time.monotonic()):
            for text in args.cells:
                print("compiling", text, file=reply_to, flush=True)
                try:
                    prepared[text] = _prepare(_cell(text), args)
                except Exception as problem:  # maskc itself: the other cells are worth having
                    print(f"note: {text} failed: {type(problem).__name__}: {str(problem)[:300]!r}", file=sys.stderr)
    except OutOfTimeError:
        for late in args.cells[args.cells.index(text) :]:
            print(f"note: no time to compile {late}", file=sys.stderr)
    print("ready", *prepared, file=reply_to, flush=True)
    for line in sys.stdin:
        try:
            rows = _time(prepared[line.strip()], args)
            info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nvrtc": _nvrtc()}
            reply = {"info": info, "rows": rows}
        except Exception as problem:
            reply = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}"}
        print(json.dumps(reply), file=reply_to, flush=True)
        torch.cuda.empty_cache()
    return 0


class OutOfTimeError(BaseException):
    """No Exception: compilers catch those."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError in the main thread once so many seconds are over."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _cell(text: str) -> Cell:
    mask, seqlen, head_dim = text.split(",")
    return Cell(mask, int(seqlen), int(head_dim))


@cache
def _nvrtc() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])


# ---------------------------------------------------------------- compiling


def _prepare(cell: Cell, args: argparse.Namespace) -> Prepared:
    """One step of every peer. A peer that cannot is left out with a note; maskc must."""
    case = mask_case(cell.mask, cell.seqlen, heads=args.heads)
    batch = max(1, TOKENS // case.seqlen) if args.batch_heads is None else max(1, args.batch_heads // args.heads)
    found = Prepared(cell, case, batch, density(case), {})
    for peer in PEERS:
        if peer.name not in args.peers or peer.probe() is not None or not peer.supports(case):
            continue
        started = time.perf_counter()
        try:
            forward = _first_step(peer, found, args)
        except Exception as problem:
            if peer.name == "maskc":
                raise
            print(f"note: {peer.name} cannot do {cell}: {type(problem).__name__}: {str(problem)[:150]!r}", file=sys.stderr)
            continue
        found.forwards[peer.name] = peer, forward
        found.first[peer.name] = round(time.perf_counter() - started, 3)
    return found


def _first_step(peer: Peer, of: Prepared, args: argparse.Namespace) -> Forward:
    """The forward function after one step. Where other workers have taken the memory it waits for them."""
    for attempt in range(30):
        torch.cuda.empty_cache()
        if attempt:
            time.sleep(1)
        try:
            forward = peer.prepare(of.case, of.batch)
            _step(forward, _tensors(peer.layout, of, args))
            torch.cuda.synchronize()
            break
        except torch.OutOfMemoryError:
            if attempt == 29:
                raise
    torch.cuda.empty_cache()
    return forward


def _tensors(layout: str, of: Prepared, args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """The same random q, k, v, dout for every peer, contiguous in the peer's layout."""
    torch.manual_seed(0)

    def make(heads: int) -> torch.Tensor:
        x = torch.randn((of.batch, of.case.seqlen, heads, of.cell.head_dim), device="cuda", dtype=torch.bfloat16)
        return x if layout == "bshd" else x.transpose(1, 2).contiguous()

    q, k, v, dout = make(args.heads), make(args.kv_heads), make(args.kv_heads), make(args.heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


# ---------------------------------------------------------------- timing


Events = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]


def _step(forward: Forward, tensors: tuple[torch.Tensor, ...]) -> tuple[Events, torch.Tensor]:
    """Events before, between and after the forward and the backward; the output."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    q, k, v, dout = tensors
    start.record()
    out = forward(q, k, v)
    middle.record()
    torch.autograd.grad(out, (q, k, v), dout)
    end.record()
    return (start, middle, end), out.detach()


def _time(of: Prepared, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per peer. `differs`: relative distance of its output from the first peer's on a sample of rows."""
    tensors = {layout: _tensors(layout, of, args) for layout in {peer.layout for peer, _ in of.forwards.values()}}
    steps: dict[str, int] = {}
    settling: dict[str, int] = {}
    samples: dict[str, list[list[Events]]] = {}
    differs: dict[str, float] = {}
    reference: torch.Tensor | None = None
    for name, (peer, forward) in of.forwards.items():  # warm, and agree with the first peer before anything is timed
        for _ in range(2 if of.cell.seqlen <= 8192 else 1):
            events, out = _step(forward, tensors[peer.layout])
        rows = out if peer.layout == "bshd" else out.transpose(1, 2)
        picked = rows[:, :: max(1, of.case.seqlen // ROWS)].float()
        reference = picked if reference is None else reference
        differs[name] = ((picked - reference).norm() / reference.norm()).item()
        seconds = events[0].elapsed_time(events[2]) / 1000
        steps[name] = max(1, min(20, int(args.seconds / seconds)))
        settling[name] = 0 if seconds > 4 * args.settle else math.ceil(args.settle / seconds)  # a long step is settled itself
        samples[name] = []
    for _ in range(args.rounds):
        for name, (peer, forward) in of.forwards.items():
            for _ in range(settling[name]):
                _step(forward, tensors[peer.layout])
            samples[name].append([_step(forward, tensors[peer.layout])[0] for _ in range(steps[name])])
    torch.cuda.synchronize()
    return [_row(of, args, name, samples[name], differs[name]) for name in of.forwards]


def _row(of: Prepared, args: argparse.Namespace, name: str, rounds: list[list[Events]], differs: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "peer": name, "mask": of.cell.mask, "seqlen": of.cell.seqlen, "batch": of.batch, "heads": args.heads,
        "kv_heads": args.kv_heads, "head_dim": of.cell.head_dim, "density": of.density, "differs": differs,
        "first_step_s": of.first[name], "rounds": len(rounds), "steps": sum(map(len, rounds)),
    }  # fmt: skip
    for way, i in (("fwd", 0), ("bwd", 1)):
        times = [[events[i].elapsed_time(events[i + 1]) for events in steps] for steps in rounds]
        row[f"{way}_ms"] = median(t for steps in times for t in steps)
        medians = [median(steps) for steps in times]
        row[f"{way}_spread"] = (max(medians) - min(medians)) / row[f"{way}_ms"]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
