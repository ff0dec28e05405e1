"""The FlashMask family's kernel benchmark, rebuilt: 12 masks, forward and backward apart, every peer of a cell in one process.

    python -m benchmarks.attention --seqlens 4096 8192 16384 32768 65536 131072 --also-head-dims 64 256 --gpus 0 1

First worker processes compile everything side by side, each a few cells (a mask at one length); then every GPU times its
cells one after the other: peers in turn, `--rounds` times, each for `--seconds` or one step. `--settle` seconds of its own
steps come before: the clock follows the power that was drawn some 50 ms ago, so a short step would run at the clock that the
peer before it left. A figure is the median over all timed steps, its spread the distance of the rounds' medians. TFLOP/s =
4 B H S^2 D density (forward), 2.5 times that (backward), by exact density. Cells are written as they come and join those that
the file has of the same kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.masks import NAMES
from benchmarks.records import both, gmean, tflops

TOKENS = 131072
"""batch * seqlen of every cell."""
OTHER_DIMS = ("full", "causal", "sliding_window", "causal_document")
"""Masks that head dims other than 128 are measured with, at 8192."""
GRACE = 20.0
"""Seconds beyond its time for a worker that is in the middle of something."""
PEERS = ("maskc", "flex", "flex-flash", "cudnn", "flashmask", "magi")


@dataclass(frozen=True)
class Cell:
    mask: str
    seqlen: int
    head_dim: int = 128

    @property
    def cost(self) -> float:
        """Time of a step, roughly: by visible cells and by rows."""
        shares = {"full": 1.0, "causal": 0.5, "prefix_lm_causal": 0.63, "qk_sparse": 0.47, "random_eviction": 0.5}
        return self.head_dim * (self.seqlen * shares.get(self.mask, 0.15) + 2048)

    def __str__(self) -> str:
        return f"{self.mask},{self.seqlen},{self.head_dim}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--masks", nargs="+", default=list(NAMES))
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--also-head-dims", type=int, nargs="*", default=[], help=f"at 8192, with {', '.join(OTHER_DIMS)}")
    parser.add_argument("--batch-heads", type=int, default=None, help=f"batch * heads of a cell instead of {TOKENS} tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="for one peer in one round")
    parser.add_argument("--settle", type=float, default=0.12, help="untimed steps of a peer before its round")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--parallel", type=int, default=10, help="workers of one GPU")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for all")
    parser.add_argument("--missing", action="store_true", help="only cells that --out has no row of, with the same kernels")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention.json"))
    args = parser.parse_args()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if names and (absent := [g for g in args.gpus if g > names.count(",")]):
        parser.error(f"--gpus {absent[0]}: GPUs are counted among CUDA_VISIBLE_DEVICES={names}, from 0 to {names.count(',')}")
    by_length = [[Cell(mask, seqlen, args.head_dim) for mask in args.masks] for seqlen in args.seqlens]
    other_dims = [Cell(mask, 8192, dim) for dim in args.also_head_dims for mask in OTHER_DIMS if mask in args.masks]
    cells = [cell for part in (*by_length[:1], other_dims, *by_length[1:]) for cell in part]
    results = Results(args.out)
    if args.missing:
        cells = results.missing(cells)
    deadline = time.monotonic() + args.timeout
    shares = deal(cells, len(args.gpus))
    compiled = threading.Barrier(len(shares))
    with ThreadPoolExecutor(len(shares)) as pool:
        running = [
            pool.submit(run_on_gpu, gpu, share, args, deadline, compiled, results)
            for gpu, share in zip(args.gpus, shares, strict=False)
        ]
    for one in running:
        one.result()
    print(table(results.rows))
    return 0


def deal(cells: Sequence[Cell], parts: int) -> list[list[Cell]]:
    """Cells in so many parts of about equal time (fewer where there are fewer cells), each in the order given."""
    shares: list[list[Cell]] = [[] for _ in range(min(parts, len(cells)))]
    for cell in sorted(cells, key=lambda c: -c.cost):
        min(shares, key=lambda share: sum(c.cost for c in share)).append(cell)
    return [sorted(share, key=cells.index) for share in shares]


class Results:
    """The result file: rows of this run, and those that it had of the same kernels, GPU and torch."""

    def __init__(self, path: Path) -> None:
        from benchmarks.digest import digest

        self.path, self.info, self.rows = path, {"digest": digest()}, []
        self.lock = threading.Lock()
        old = json.loads(path.read_text()) if path.exists() else {}
        if old.get("digest") == self.info["digest"]:
            self.rows = old.pop("rows", [])
            self.info = old

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        there = {(row["mask"], row["seqlen"], row["head_dim"]) for row in self.rows}
        return [cell for cell in cells if (cell.mask, cell.seqlen, cell.head_dim) not in there]

    def add(self, reply: dict[str, Any]) -> None:
        with self.lock:
            if any(self.info.get(name, value) != value for name, value in reply["info"].items()):
                self.rows = []  # of another machine
            self.info.update(reply["info"])
            new = {self._key(row) for row in reply["rows"]}
            self.rows = [row for row in self.rows if self._key(row) not in new] + reply["rows"]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**self.info, "rows": self.rows}, indent=1) + "\n")

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("peer", "mask", "seqlen", "batch", "heads", "kv_heads", "head_dim"))


# ---------------------------------------------------------------- one GPU


def run_on_gpu(
    gpu: int, cells: list[Cell], args: argparse.Namespace, deadline: float, compiled: threading.Barrier, results: Results
) -> None:
    """Workers compile side by side; when those of all GPUs are ready, cells are timed in the order given."""
    started = time.monotonic()
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("heads", "rounds", "seconds", "settle")]
    options += [f"--kv-heads={args.kv_heads or args.heads}", "--peers", *args.peers]
    if args.batch_heads:
        options += [f"--batch-heads={args.batch_heads}"]
    parts = min(args.parallel, len(cells))
    first_phase = 0.45 * (deadline - started)
    with ThreadPoolExecutor(parts) as pool:  # as many cells each: compiling takes alike
        dealt = [cells[i::parts] for i in range(parts)]
        workers = [w for w in pool.map(lambda part: compiling_worker(gpu, part, options, first_phase), dealt) if w is not None]
    can = {cell: worker for worker in workers for cell in worker.ready}
    print(f"{time.monotonic() - started:4.0f} s: GPU {gpu}: {len(can)} of {len(cells)} cells are compiled", flush=True)
    compiled.wait()
    for cell in (c for c in cells if str(c) in can):
        worker = can[str(cell)]
        worker.write(str(cell))
        line = worker.read(deadline)
        reply = json.loads(line) if line.startswith("{") else {"failed": worker.why_ended()}
        if "failed" not in reply:
            results.add(reply)
            print(f"{time.monotonic() - started:4.0f} s: {cell}", flush=True)
            continue
        print(f"{cell}: failed while timing: {reply['failed']}", flush=True)
        worker.close()  # whatever it was may have taken the GPU from the process
        rest = [c for c in worker.cells if str(c) in worker.ready and cells.index(c) > cells.index(cell)]
        successor = compiling_worker(gpu, rest, options, 0.5 * (deadline - time.monotonic()))
        can = {name: w for name, w in can.items() if w is not worker}
        can.update(dict.fromkeys(successor.ready, successor) if successor else {})
        if lost := [str(c) for c in rest if str(c) not in can]:
            print(f"{' '.join(lost)}: lost with it", flush=True)
    for worker in set(can.values()):
        worker.close()


def compiling_worker(gpu: int, cells: list[Cell], options: list[str], seconds: float) -> Worker | None:
    """A worker that has compiled what it could in time. One that dies costs the cell that it was at: another does the rest."""
    until = time.monotonic() + seconds
    while cells and time.monotonic() < until:
        worker = Worker(gpu, cells, [*options, f"--until={until}"])
        at = None
        while line := worker.read(until + GRACE):
            word, *names = line.split()
            if word == "ready":
                worker.ready = names
                return worker
            at = names[0]
        print(f"{at or ' '.join(map(str, cells))}: failed while compiling: {worker.why_ended()}", flush=True)
        cells = [c for c in cells if str(c) != at] if at else []
    return None


class Worker:
    """A process that compiles cells, says which it is at, then `ready` and which it has; it times those it is asked for."""

    def __init__(self, gpu: int, cells: list[Cell], options: list[str]) -> None:
        self.cells, self.ready, self.late = cells, list[str](), False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attention_cell", *options, "--cells", *map(str, cells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": _visible(gpu),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the workers are the parallelism
                "OMP_NUM_THREADS": "1",
            },
        )
        self.errors: list[str] = []
        self.drain = threading.Thread(target=self._drain, daemon=True)
        self.drain.start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-5:], line.strip()]
            if line.startswith("note: "):
                print(line.removeprefix("note: "), end="", flush=True)

    def read(self, deadline: float) -> str:
        """The next line that it prints, or "" when it ended or ran out of time (then it is killed)."""
        assert self.process.stdout is not None

        def end() -> None:
            self.late = True
            self.process.kill()

        timer = threading.Timer(max(1.0, deadline - time.monotonic()), end)
        timer.start()
        try:
            return self.process.stdout.readline().strip()
        finally:
            timer.cancel()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # read says so
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def why_ended(self) -> str:
        """What it said last, and how it ended."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.drain.join(timeout=1)
        how = "no answer in time" if self.late else f"signal {-code}" if code < 0 else f"exit {code}"
        return " ".join([*self.errors, f"({how})"])[-400:]

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _visible(gpu: int) -> str:
    """CUDA_VISIBLE_DEVICES of a worker on GPU number `gpu` of those that are visible here."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",")[gpu] if names else str(gpu)


# ---------------------------------------------------------------- the printed table


def table(rows: list[dict[str, Any]]) -> str:
    """Text: per head dim, length and mask, TFLOP/s by exact density of every peer, and maskc's gain over FlexAttention."""
    lines = []
    for dim, seqlen in sorted({(r["head_dim"], r["seqlen"]) for r in rows}):
        here = [r for r in rows if (r["head_dim"], r["seqlen"]) == (dim, seqlen)]
        lines.append(f"D = {dim}, S = {seqlen}: TFLOP/s forward / backward / both" + " " * 12 + "maskc / flex")
        gains = []
        for mask in (m for m in NAMES if any(r["mask"] == m for r in here)):
            cell = {r["peer"]: r for r in here if r["mask"] == mask}
            rates = {p: "/".join(f"{x:4.0f}" for x in tflops(cell[p])) for p in PEERS if p in cell}
            text = "  ".join(f"{p} {x}" for p, x in rates.items())
            if "maskc" in cell and "flex" in cell:
                gains.append(both(cell["flex"]) / both(cell["maskc"]))
                text += f"  {gains[-1]:5.2f}"
            lines.append(f"  {mask:22s} {text}")
        if gains:
            ends = f"min {min(gains):.2f}, max {max(gains):.2f}"
            lines.append(f"  geometric mean {gmean(gains):.3f}, {ends} over {len(gains)} masks")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
