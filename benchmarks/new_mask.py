"""What a new mask costs at every step: binding, preparation kernel and schedule, beside FlexAttention's block mask.

    python -m benchmarks.new_mask [--seqlens 8192 32768 131072] [--masks ...] [--flex causal_document ...] [--out FILE]

The data of the mask lie on the GPU, as a packing kernel or a copy of the batch would leave them. GPU times are those of
CUDA events around work that was issued while the GPU was kept busy, so they hold no launch gaps; host times are those of
issuing it. `tables` is the preparation kernel and the schedule of the attention kernels, `step` binding (without reading
the data back) as well, `checked` binding with its one read. FlexAttention's is its compiled `create_block_mask` with the
same mask, for a few masks only: it looks at every cell, so its time hardly depends on the mask, and compiling takes long.

One process times maskc alone on the machine; then one process for each of FlexAttention's masks compiles, all at the same
time, and they are timed one after another.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.masks import NAMES

SEQLENS = (8192, 32768, 131072)
FLEX = ("causal_document", "share_question")
HEAD_DIM = 128
REPEATS = 10
BUSY_CYCLES = 20_000_000
"""About 10 ms, during which everything that is timed gets issued."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_mask", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=list(SEQLENS))
    parser.add_argument("--masks", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--flex", nargs="*", default=list(FLEX), choices=NAMES[1:], help="masks that FlexAttention makes as well")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "new_mask.json")
    parser.add_argument("--worker", choices=("maskc", "flex"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _worker(args)

    from benchmarks.digest import digest

    began = time.monotonic()
    seqlens = ["--seqlens", *map(str, args.seqlens)]
    info: dict[str, Any] = {"head_dim": HEAD_DIM, "repeats": REPEATS}
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for peer, together in (("maskc", [args.masks] if args.masks else []), ("flex", [[name] for name in args.flex])):
        workers = [_start(peer, [*seqlens, "--masks", *masks]) for masks in together]
        if workers:  # they have time
            info["digest"] = info.get("digest") or digest()
        for worker in workers:  # they compile side by side; each is let go when the one before has ended
            for reply in _replies(worker, began + args.timeout):
                info |= reply.pop("info")
                rows.append(reply)
                args.out.write_text(json.dumps({**info, "rows": rows}, indent=1) + "\n")
            worker.kill()
            worker.wait()
        print(f"{peer}: {len(rows)} rows after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))
    wanted = len(args.seqlens) * (len(args.masks) + len(args.flex))
    if len(rows) < wanted:
        print(f"{wanted - len(rows)} of {wanted} rows did not come within {args.timeout} s")
    return 0 if len(rows) == wanted else 1


def _start(peer: str, options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.new_mask", "--worker", peer, *options]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # the workers are the parallelism
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _replies(worker: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Wait until a worker has compiled, let it take its times, and give its rows as they come."""
    assert worker.stdin is not None
    if _line(worker, deadline) != "ready":
        return
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
    """Text: maskc beside FlexAttention where both were timed."""
    flex = {(r["mask"], r["seqlen"]): r for r in rows if r["peer"] == "flex"}
    lines = [f"{'mask':22} {'S':>6} heads  GPU ms: tables  step  host ms: step  checked  waits  |  flex: GPU ms  host ms  waits"]
    for r in rows:
        if r["peer"] == "maskc":
            ours = f"{r['tables_gpu_ms']:14.3f} {r['step_gpu_ms']:5.3f} {r['step_host_ms']:14.3f} {r['checked_host_ms']:8.3f}"
            waits = f"{r['step_syncs']:3} {r['checked_syncs']:2}"
            f = flex.get((r["mask"], r["seqlen"]))
            peer = f"{f['step_gpu_ms']:12.3f} {f['step_host_ms']:8.3f} {f['step_syncs']:6}" if f else ""
            lines.append(f"{r['mask']:22} {r['seqlen']:6} {r['heads']:5}  {ours} {waits}  | {peer}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------- in a worker process


Step = Callable[[], object]


def _worker(args: argparse.Namespace) -> int:
    import torch

    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print; only replies may reach the parent
    make = _maskc_steps if args.worker == "maskc" else _flex_steps
    made = [{seqlen: make(name, seqlen) for seqlen in args.seqlens} for name in args.masks]
    with ThreadPoolExecutor(len(made)) as pool:  # kernels of different masks compile side by side
        list(pool.map(_warm, made))
    torch.cuda.synchronize()
    print("ready", file=reply_to, flush=True)
    if sys.stdin.readline().strip() != "time":
        return 1
    info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, by_length in zip(args.masks, made, strict=True):
        for seqlen, steps in by_length.items():
            row = {"peer": args.worker, "mask": name, "seqlen": seqlen, "heads": _heads(name), "info": info}
            for step, call in steps.items():
                row |= {f"{step}_{what}": value for what, value in _measure(call).items()}
            print(json.dumps(row), file=reply_to, flush=True)
    return 0


def _warm(steps: dict[int, dict[str, Step]]) -> None:
    for by_name in steps.values():
        for step in by_name.values():
            step()
            step()


def _heads(name: str) -> int:
    return 32 if name == "random_eviction" else 1


def _maskc_steps(name: str, seqlen: int) -> dict[str, Step]:
    import torch

    import maskc
    from benchmarks.masks import mask_case
    from maskc.runtime import hopper, prep

    case = mask_case(name, seqlen, heads=_heads(name))
    device = torch.device("cuda", torch.cuda.current_device())
    mask = maskc.compile(case.mask)
    inputs = {key: _on_gpu(value) for key, value in case.inputs.items()}

    def step(validate: bool) -> object:
        bound = mask.bind(nq=seqlen, nk=seqlen, validate=validate, **inputs)
        return bound.schedule(bound.vectors(seqlen, seqlen, device, prep.vectors), HEAD_DIM, hopper.schedule)

    on_gpu = mask.bind(nq=seqlen, nk=seqlen, **inputs).inputs.to(device)

    def tables() -> object:
        return hopper.schedule(prep.vectors(mask, on_gpu, seqlen, seqlen), HEAD_DIM)

    return {"tables": tables, "step": partial(step, False), "checked": partial(step, True)}


def _flex_steps(name: str, seqlen: int) -> dict[str, Step]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from benchmarks.masks import mask_case
    from benchmarks.peers import mask_mod

    case = mask_case(name, seqlen, heads=_heads(name))
    mod = mask_mod(case, torch.device("cuda"))
    assert mod is not None, "a full mask has no block mask"
    heads = case.heads if case.heads > 1 else None
    compiled = torch.compile(create_block_mask, dynamic=False)
    return {"step": lambda: compiled(mod, None, heads, seqlen, seqlen, device="cuda", BLOCK_SIZE=128)}


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
