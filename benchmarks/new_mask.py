"""What a new mask costs at every step: binding, preparation kernel and schedule, beside FlexAttention's block mask.

    python -m benchmarks.new_mask [--seqlens 8192 32768 131072] [--masks ...] [--peers maskc flex] [--out FILE]

The data of the mask lie on the GPU, as a packing kernel or a copy of the batch would leave them. One process a mask
compiles everything first, all at the same time; then they are timed one after another. GPU times are those of CUDA
events around work that was issued while the GPU was kept busy, so they hold no launch gaps; host times are those of
issuing it. `tables` is the preparation kernel and the schedule of the attention kernels, `step` binding (without
reading the data back) as well; FlexAttention's is its compiled `create_block_mask` with the same mask.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.masks import NAMES

SEQLENS = (8192, 32768, 131072)
HEAD_DIM = 128
REPEATS = 10
BUSY_CYCLES = 20_000_000
"""About 10 ms, during which everything that is timed gets issued."""
FLEX_CELLS = 1 << 36
"""Cells of all heads beyond which FlexAttention's block mask is not timed: it looks at every cell."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_mask", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=list(SEQLENS))
    parser.add_argument("--masks", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--peers", nargs="+", default=["maskc", "flex"], choices=["maskc", "flex"])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "new_mask.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _worker(args)
    deadline = time.monotonic() + args.timeout
    options = ["--peers", *args.peers, "--seqlens", *map(str, args.seqlens)]
    workers = {name: _start([*options, "--worker", name]) for name in args.masks}
    info: dict[str, Any] = {"head_dim": HEAD_DIM, "repeats": REPEATS}
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    ready = {name: _line(worker, deadline) == "ready" for name, worker in workers.items()}
    for name, worker in workers.items():
        for reply in _timed(worker, deadline) if ready[name] else ():
            info |= reply.pop("info")
            rows.append(reply)
            args.out.write_text(json.dumps({**info, "rows": rows}, indent=1) + "\n")
        worker.kill()
        if worker.wait() and not any(r["mask"] == name for r in rows):
            print(f"{name}: no times within {args.timeout} s")
    print(table(rows))
    return 0 if all(ready.values()) else 1


def _start(options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.new_mask", *options]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # the workers are the parallelism
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _timed(worker: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Let a worker take its times, and give its rows as they come."""
    assert worker.stdin is not None
    worker.stdin.write("time\n")
    worker.stdin.flush()
    while (line := _line(worker, deadline)).startswith("{"):
        yield json.loads(line)


def _line(worker: subprocess.Popen[str], deadline: float) -> str:
    """The next line a worker prints, or "" when it ended or ran out of time (then it is killed)."""
    assert worker.stdout is not None
    timer = threading.Timer(max(0.1, deadline - time.monotonic()), worker.kill)
    timer.start()
    try:
        return worker.stdout.readline().strip()
    finally:
        timer.cancel()


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'mask':22} {'S':>6} heads  GPU ms: tables   step   host ms: step  checked  syncs  |  flex GPU ms  host ms  syncs"
    lines = [head]
    for r in rows:
        ours = f"{r['tables_gpu_ms']:14.3f} {r['step_gpu_ms']:6.3f} {r['step_host_ms']:14.3f} {r['checked_host_ms']:8.3f}"
        counts = f"{r['step_syncs']:3} {r['checked_syncs']:2}"
        peer = f"{r['flex_gpu_ms']:13.3f} {r['flex_host_ms']:8.3f} {r['flex_syncs']:6}" if "flex_gpu_ms" in r else "  not timed"
        lines.append(f"{r['mask']:22} {r['seqlen']:6} {r['heads']:5}  {ours} {counts}  | {peer}")
    return "\n".join(lines)


# ---------------------------------------------------------------- in a worker process


def _worker(args: argparse.Namespace) -> int:
    import torch

    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print; only replies may reach the parent
    steps = {n: _steps(args.worker, n, args.peers) for n in args.seqlens}
    for made in steps.values():
        for step in made.values():
            step()
            step()
        torch.cuda.synchronize()
    print("ready", file=reply_to, flush=True)
    if sys.stdin.readline().strip() != "time":
        return 1
    info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for seqlen, made in steps.items():
        row = {"mask": args.worker, "seqlen": seqlen, "heads": _heads(args.worker), "info": info}
        for name, step in made.items():
            row |= {f"{name}_{what}": value for what, value in _measure(step).items()}
        print(json.dumps(row), file=reply_to, flush=True)
    return 0


def _heads(name: str) -> int:
    return 32 if name == "random_eviction" else 1


def _steps(name: str, seqlen: int, peers: list[str]) -> dict[str, Callable[[], object]]:
    """What is timed of one mask at one length."""
    import torch

    import maskc
    from benchmarks.masks import mask_case
    from benchmarks.peers import mask_mod
    from maskc.runtime import hopper, prep

    case = mask_case(name, seqlen, heads=_heads(name))
    device = torch.device("cuda", torch.cuda.current_device())
    steps: dict[str, Callable[[], object]] = {}
    if "maskc" in peers:
        mask = maskc.compile(case.mask)
        inputs = {key: _on_gpu(value) for key, value in case.inputs.items()}

        def bind(validate: bool) -> maskc.BoundMask:
            return mask.bind(nq=seqlen, nk=seqlen, validate=validate, **inputs)

        def tables(bound: maskc.BoundMask) -> object:
            v = bound.vectors(seqlen, seqlen, device, prep.vectors)
            return bound.schedule(v, HEAD_DIM, hopper.schedule)

        checked = bind(True)
        on_gpu = checked.inputs.to(device)

        def prepared() -> object:
            return hopper.schedule(prep.vectors(checked.compiled, on_gpu, seqlen, seqlen), HEAD_DIM)

        steps |= {"tables": prepared, "step": lambda: tables(bind(False)), "checked": lambda: tables(bind(True))}
    mod = mask_mod(case, device) if "flex" in peers else None
    if mod is not None and case.heads * seqlen**2 <= FLEX_CELLS:
        from torch.nn.attention.flex_attention import create_block_mask

        heads = case.heads if case.heads > 1 else None
        compiled = torch.compile(create_block_mask, dynamic=False)
        steps["flex"] = lambda: compiled(mod, None, heads, seqlen, seqlen, device="cuda", BLOCK_SIZE=128)
    return steps


def _on_gpu(value: Any) -> Any:
    """An input whose data lie on the GPU; numbers stay numbers."""
    from dataclasses import replace

    import torch

    from maskc.binding.constructors import SetSource

    match value:
        case SetSource():
            return replace(value, data=torch.as_tensor(value.data).cuda())
        case int():
            return value
        case _:
            return torch.as_tensor(value).cuda()


def _measure(step: Callable[[], object]) -> dict[str, float]:
    """Median GPU and host milliseconds of a step, and how often it waits for the GPU."""
    import torch

    gpu, host = [], []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        kept = step()
        end.record()
        torch.cuda.synchronize()
        gpu.append(start.elapsed_time(end))
        began = time.perf_counter()
        kept = step()
        host.append(1e3 * (time.perf_counter() - began))
        del kept
    with synchronisations() as found:
        step()
    return {"gpu_ms": round(median(gpu), 4), "host_ms": round(median(host), 4), "syncs": len(found)}


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """The operations inside that make the host wait for the GPU, as far as torch notices."""
    import torch

    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]


if __name__ == "__main__":
    raise SystemExit(main())
