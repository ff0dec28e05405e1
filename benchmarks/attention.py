"""The FlashMask family's kernel benchmark, rebuilt: 12 masks, forward and backward apart, every peer of a cell in one process.

    python -m benchmarks.attention --seqlens 8192 32768 --out benchmarks/results/attention.json

One worker process a mask compiles everything first (in parallel); then the workers are timed one after another, peers
interleaved in rounds, medians over all repetitions. new_mask_ms: what a step with a new
mask costs beyond a step with a known one. TFLOP/s = 4 B H S^2 D density (forward), 2.5 times that (backward),
by exact density; a second figure counts every touched 128 x 128 tile as full, as the FlashMask papers do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any

TOKENS = 131072  # batch * seqlen of every cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--masks", nargs="+", default=None)
    parser.add_argument("--peers", nargs="+", default=["maskc", "flex", "flex-flash", "cudnn", "flashmask", "magi"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch-heads", type=int, default=None, help="batch * heads of a cell instead of 131072 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=12, help="workers that compile at the same time")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _worker(args)
    from benchmarks.digest import digest
    from benchmarks.masks import NAMES

    deadline = time.monotonic() + args.timeout
    rows: list[dict[str, Any]] = []
    info: dict[str, Any] = {"digest": digest()}
    cells = [(name, seqlen) for seqlen in args.seqlens for name in args.masks or NAMES]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for reply in _run_cells(cells, args, deadline):  # written after every cell: what is measured stays
        rows += reply.get("rows", [])
        info.update(reply.get("info", {}))
        args.out.write_text(json.dumps({**info, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return 0


def _run_cells(cells: list[tuple[str, int]], args: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Compile in parallel, time one by one. A worker that fails or hangs costs its own cell only."""
    options = ["--heads", str(args.heads), "--head-dim", str(args.head_dim), "--rounds", str(args.rounds), "--peers", *args.peers]
    if args.kv_heads:
        options += ["--kv-heads", str(args.kv_heads)]
    if args.batch_heads:
        options += ["--batch-heads", str(args.batch_heads)]
    waiting = list(cells)
    running: list[tuple[str, subprocess.Popen[str]]] = []
    ready: list[tuple[str, subprocess.Popen[str]]] = []
    while waiting or running:
        while waiting and len(running) < args.parallel:
            name, seqlen = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.attention", "--worker", f"{name},{seqlen}", *options]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},  # the workers are the parallelism
            )
            running.append((f"{name},{seqlen}", process))
        label, process = running.pop(0)
        line = _read_line(process.stdout, deadline, process)
        if line == "ready":
            ready.append((label, process))
        else:
            print(f"{label}: failed while compiling: {_tail(process)}", flush=True)
    for label, process in ready:
        assert process.stdin is not None
        process.stdin.write("time\n")
        process.stdin.flush()
        line = _read_line(process.stdout, deadline, process)
        if line.startswith("{"):
            yield json.loads(line)
        else:
            print(f"{label}: failed while timing: {_tail(process)}", flush=True)
        process.wait(timeout=30)


def _read_line(stream: IO[str] | None, deadline: float, process: subprocess.Popen[str]) -> str:
    """The next line that a worker prints, or "" when it ended or ran out of time (then it is killed)."""
    import threading

    assert stream is not None
    timer = threading.Timer(max(1.0, deadline - time.monotonic()), process.kill)
    timer.start()
    try:
        return stream.readline().strip()
    finally:
        timer.cancel()


def _tail(process: subprocess.Popen[str]) -> str:
    process.kill()
    _, err = process.communicate()
    return " ".join(err.strip().splitlines()[-3:])[-400:] or f"exit {process.returncode}"


# ---------------------------------------------------------------- in a worker process


def _worker(args: argparse.Namespace) -> int:
    import torch

    from benchmarks.masks import density, mask_case
    from benchmarks.peers import PEERS

    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print; only replies may reach the parent
    name, seqlen = args.worker.split(",")
    case = mask_case(name, int(seqlen), heads=args.heads)
    batch = max(1, TOKENS // case.seqlen) if args.batch_heads is None else max(1, args.batch_heads // args.heads)
    kv_heads = args.kv_heads or args.heads
    peers = [p for p in PEERS if p.name in args.peers and p.probe() is None and p.supports(case)]
    prepared: dict[str, Callable[..., torch.Tensor]] = {}
    extra: dict[str, dict[str, Any]] = {}
    for peer in list(peers):
        try:
            started = time.perf_counter()
            prepared[peer.name] = peer.prepare(case, batch)
            _step(prepared[peer.name], _tensors(peer.layout, batch, case.seqlen, args.heads, kv_heads, args.head_dim))
            torch.cuda.synchronize()
            extra[peer.name] = {"first_step_s": round(time.perf_counter() - started, 3)}
        except Exception as problem:
            if peer.name == "maskc":
                raise
            print(f"{peer.name} cannot do {name}: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
            peers.remove(peer)
        torch.cuda.empty_cache()
    exact = density(case)
    print("ready", file=reply_to, flush=True)
    if sys.stdin.readline().strip() != "time":
        return 1
    rows = _time_peers(peers, prepared, case, batch, kv_heads, args)
    for row in rows:
        row.update(extra[row["peer"]], density=exact)
    info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nvrtc": _nvrtc()}
    print(json.dumps({"info": info, "rows": rows}), file=reply_to, flush=True)
    return 0


def _nvrtc() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])


def _tensors(layout: str, batch: int, seqlen: int, heads: int, kv_heads: int, dim: int) -> tuple[Any, Any, Any, Any]:
    """The same random q, k, v, dout for every peer, contiguous in the peer's layout."""
    import torch

    torch.manual_seed(0)

    def make(n: int) -> torch.Tensor:
        x = torch.randn((batch, seqlen, n, dim), device="cuda", dtype=torch.bfloat16)
        return x if layout == "bshd" else x.transpose(1, 2).contiguous()

    q, k, v, dout = make(heads), make(kv_heads), make(kv_heads), make(heads)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def _step(forward: Callable[..., Any], tensors: tuple[Any, Any, Any, Any]) -> None:
    import torch

    q, k, v, dout = tensors
    torch.autograd.grad(forward(q, k, v), (q, k, v), dout)


def _time_peers(
    peers: Any, prepared: Any, case: Any, batch: int, kv_heads: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Peers interleaved in rounds; medians over every repetition, spread = (max - min) / median of the round medians.

    `differs`: relative distance of a peer's output from the first peer's on a sample of rows.
    """
    import torch

    shape = (batch, case.seqlen, args.heads, kv_heads, args.head_dim)
    tensors = {layout: _tensors(layout, *shape) for layout in {p.layout for p in peers}}
    reference: torch.Tensor | None = None
    samples: dict[tuple[str, str], list[list[float]]] = {(p.name, way): [] for p in peers for way in ("fwd", "bwd")}
    agreement: dict[str, float] = {}
    for peer in peers:  # warm, and agree with the first peer before anything is timed
        q, k, v, dout = tensors[peer.layout]
        out = prepared[peer.name](q, k, v).detach()
        rows = out if peer.layout == "bshd" else out.transpose(1, 2)
        picked = rows[:, :: max(1, case.seqlen // 256)].float()
        if reference is None:
            reference = picked
        agreement[peer.name] = ((picked - reference).norm() / reference.norm()).item()
        _step(prepared[peer.name], tensors[peer.layout])
    for _ in range(args.rounds):
        for peer in peers:
            q, k, v, dout = tensors[peer.layout]
            forward = prepared[peer.name]
            with torch.no_grad():
                samples[peer.name, "fwd"].append(_events(lambda _, f=forward, a=q, b=k, c=v: f(a, b, c)))
            samples[peer.name, "bwd"].append(
                _events(
                    lambda out, a=q, b=k, c=v, d=dout: torch.autograd.grad(out, (a, b, c), d),
                    before=lambda f=forward, a=q, b=k, c=v: f(a, b, c),
                )
            )
    table_rows = []
    for peer in peers:
        row: dict[str, Any] = {
            "peer": peer.name, "mask": case.name, "seqlen": case.seqlen, "batch": batch, "heads": args.heads,
            "kv_heads": kv_heads, "head_dim": args.head_dim, "differs": agreement[peer.name],
        }  # fmt: skip
        for way in ("fwd", "bwd"):
            rounds = [median(r) for r in samples[peer.name, way]]
            row[f"{way}_ms"] = median(x for r in samples[peer.name, way] for x in r)
            row[f"{way}_spread"] = (max(rounds) - min(rounds)) / row[f"{way}_ms"]
        row["new_mask_ms"] = _new_mask_ms(peer, case, batch, tensors[peer.layout]) - row["fwd_ms"]
        table_rows.append(row)
    return table_rows


def _events(call: Callable[[Any], Any], before: Callable[[], Any] = lambda: None, seconds: float = 0.15) -> list[float]:
    """Milliseconds of single calls by CUDA events, each after an untimed `before`: 2 warm, then 3 to 20 in about `seconds`."""
    import torch

    call(before())
    torch.cuda.synchronize()
    started = time.perf_counter()
    call(before())
    torch.cuda.synchronize()
    count = max(3, min(20, int(seconds / max(time.perf_counter() - started, 1e-6))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in pairs:
        given = before()
        start.record()
        call(given)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _new_mask_ms(peer: Any, case: Any, batch: int, tensors: tuple[Any, Any, Any, Any]) -> float:
    """A step with a new mask of known shape: wall time of preparation and one forward, median of 3."""
    import torch

    times = []
    with torch.no_grad():
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            peer.prepare(case, batch)(*tensors[:3])
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
    return median(times)


# ---------------------------------------------------------------- the printed table


def table(rows: list[dict[str, Any]]) -> str:
    """Text: per length and mask, TFLOP/s by exact density of every peer, and maskc's ratio to FlexAttention."""
    lines = []
    names = [p for p in ("maskc", "flex", "flex-flash", "cudnn", "flashmask", "magi") if any(r["peer"] == p for r in rows)]
    for seqlen in sorted({r["seqlen"] for r in rows}):
        lines.append(f"S = {seqlen}: TFLOP/s forward / backward / both" + " " * 12 + "maskc / flex")
        ratios = []
        for mask in dict.fromkeys(r["mask"] for r in rows if r["seqlen"] == seqlen):
            cell = {r["peer"]: r for r in rows if r["seqlen"] == seqlen and r["mask"] == mask}
            text = "  ".join(f"{p} {_rates(cell[p])}" for p in names if p in cell)
            if "maskc" in cell and "flex" in cell:
                ratio = _both(cell["flex"]) / _both(cell["maskc"])
                ratios.append(ratio)
                text += f"  {ratio:5.2f}"
            lines.append(f"  {mask:22s} {text}")
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"  geometric mean {mean:.3f}, min {min(ratios):.2f}, max {max(ratios):.2f} over {len(ratios)} masks")
    return "\n".join(lines)


def _both(row: dict[str, Any]) -> float:
    return float(row["fwd_ms"] + row["bwd_ms"])


def _rates(row: dict[str, Any]) -> str:
    flop = 4 * row["batch"] * row["heads"] * row["seqlen"] ** 2 * row["head_dim"] * row["density"] / 1e9
    forward, backward = flop / row["fwd_ms"], 2.5 * flop / row["bwd_ms"]
    return f"{forward:4.0f}/{backward:4.0f}/{3.5 * flop / _both(row):4.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
