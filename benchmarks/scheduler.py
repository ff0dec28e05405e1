"""What the order of work items is worth: every scheduler of both directions over the twelve masks, with few and many heads.

    python -m benchmarks.scheduler --out benchmarks/results/scheduler.json

Forward: the schedulers of `KernelSpec`. Backward: key tiles head by head as they lie ("natural"), of several heads in turn
("together"), by falling work ("falling"), and what a call gets ("default"). A figure is the geometric mean over the masks
of TFLOP/s by exact density; in brackets the same divided by the scheduler's own figure at the most heads. Tables of a mask
are made before timing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.masks import NAMES, density, mask_case
from maskc.boundary import BoundaryVectors
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import Scheduler

HEAD_DIM = 128
MOST = 32  # heads of one batch item; more heads than that come as more items


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--batch-heads", type=int, nargs="+", default=[8, 16, 32, 512])
    parser.add_argument("--masks", nargs="+", default=list(NAMES))
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds; masks that are not reached are left out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduler.json"))
    args = parser.parse_args()

    import torch

    from benchmarks.digest import digest
    from benchmarks.kernels import compile_all

    deadline = time.monotonic() + args.timeout
    rows: list[dict[str, Any]] = []
    info = {"device": torch.cuda.get_device_name(), "digest": digest(), "seqlen": args.seqlen}
    compile_all(sources(args.masks, args.seqlen))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.masks:
        for heads in args.batch_heads:
            if time.monotonic() > deadline:
                print(f"{name} with {heads} heads: out of time")
                continue
            rows += _cell(name, args.seqlen, heads)
            args.out.write_text(json.dumps({**info, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print(short_of(rows))
    return 0


# ---------------------------------------------------------------- measuring


def sources(masks: list[str], seqlen: int) -> list[CudaSource]:
    """Every variant that is going to be timed."""
    from benchmarks.kernels import attention
    from maskc.codegen.forward import forward_source, forward_spec
    from maskc.runtime.hopper import mask_form

    found: list[CudaSource] = []
    for form in {mask_form(vectors(name, seqlen, 2, "cpu")) for name in masks}:
        spec = forward_spec(form, HEAD_DIM, "bf16")
        found += [*attention(form, HEAD_DIM), *(forward_source(replace(spec, scheduler=s)) for s in get_args(Scheduler))]
    return found


def vectors(name: str, seqlen: int, heads: int, device: str) -> BoundaryVectors:
    """The vectors that the kernels are given: in the order of `maskc.runtime.reorder`, where it applies."""
    import maskc
    from maskc.runtime import reorder

    case = mask_case(name, seqlen, heads=heads)
    compiled = maskc.compile(case.mask)
    v = compiled.bind(nq=seqlen, nk=seqlen, **case.inputs).vectors(device=device)
    return reorder.by_end(v).vectors if reorder.ends_by_data(compiled) else v


def _cell(name: str, seqlen: int, batch_heads: int) -> list[dict[str, Any]]:
    """One mask with one number of heads: a row per direction and scheduler."""
    import torch

    heads = min(batch_heads, MOST)
    batch = batch_heads // heads
    v = vectors(name, seqlen, heads, "cuda")
    torch.manual_seed(0)
    q, k, val, dout = (torch.randn(batch, seqlen, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    flop = 4 * batch_heads * seqlen**2 * HEAD_DIM * density(mask_case(name, seqlen, heads=heads))
    rows = []
    for direction, scheduler, default, run in _runs(v, q, k, val, dout):
        milliseconds = _milliseconds(run)
        work = flop if direction == "fwd" else 2.5 * flop
        rows.append(
            {
                "direction": direction,
                "scheduler": scheduler,
                "default": default,
                "mask": name,
                "batch_heads": batch_heads,
                "ms": milliseconds,
                "tflops": work / milliseconds / 1e9,
            }
        )
    return rows


def _runs(v: BoundaryVectors, q: Any, k: Any, val: Any, dout: Any) -> Iterator[tuple[str, str, bool, Callable[[], Any]]]:
    """(direction, scheduler, whether it is what a call gets, the call)."""
    from maskc.codegen.forward import forward_spec
    from maskc.codegen.spec_bwd import select_backward
    from maskc.runtime.hopper import forward_with, mask_form, schedule_for
    from maskc.runtime.hopper_bwd import Dealing, backward_with, heads_together

    form, scale = mask_form(v), HEAD_DIM**-0.5
    default = forward_spec(form, HEAD_DIM, "bf16")
    out, lse = forward_with(default, v, q, k, val, scale)
    for scheduler in get_args(Scheduler):
        spec = replace(default, scheduler=scheduler)
        tables = schedule_for(spec, v)
        run = partial(forward_with, spec, v, q, k, val, scale, tables)
        yield "fwd", scheduler, scheduler == default.scheduler, run
    backward = select_backward(form, HEAD_DIM, "bf16")
    together = heads_together(v.nq * HEAD_DIM)
    dealings = {
        "default": None,
        "natural": Dealing(),
        "together": Dealing(together),
        "falling": Dealing(together, bool(form.vectors)),
    }
    for name, dealing in dealings.items():
        run = partial(backward_with, backward, v, q, k, val, out, lse, dout, None, scale, q.dtype, dealing)
        yield "bwd", name, dealing is None, run


def _milliseconds(run: Callable[[], Any], seconds: float = 0.03) -> float:
    """Median of single calls by CUDA events: 2 warm, then 3 to 20 in about `seconds`."""
    import torch

    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(3, min(20, int(seconds / max(time.perf_counter() - started, 1e-6))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host gets ahead: short kernels then follow each other
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs)


# ---------------------------------------------------------------- the printed table


def table(rows: list[dict[str, Any]]) -> str:
    """Text: a line per direction and scheduler, a column per number of heads."""
    counts = sorted({r["batch_heads"] for r in rows})
    complete = [
        m for m in dict.fromkeys(r["mask"] for r in rows) if {r["batch_heads"] for r in rows if r["mask"] == m} == set(counts)
    ]
    lines = [f"TFLOP/s, geometric mean over {len(complete)} masks" + "".join(f"{f'B*H = {n}':>16}" for n in counts)]
    for direction, scheduler in dict.fromkeys((r["direction"], r["scheduler"]) for r in rows):
        means = []
        for n in counts:
            rates = [
                r["tflops"]
                for r in rows
                if (r["direction"], r["scheduler"], r["batch_heads"]) == (direction, scheduler, n) and r["mask"] in complete
            ]
            means.append(math.exp(sum(map(math.log, rates)) / len(rates)) if rates else math.nan)
        cells = "".join(f"{f'{x:.0f} ({x / means[-1]:.2f})':>16}" for x in means)
        lines.append(f"{direction} {scheduler:<28}{cells}")
    return "\n".join(lines)


def short_of(rows: list[dict[str, Any]], wanted: float = 0.9, least_ms: float = 0.1) -> str:
    """Text: cells of the default order that take `least_ms` and run below `wanted` of their rate with the most heads."""
    most = max(r["batch_heads"] for r in rows)
    best = {(r["direction"], r["mask"]): r["tflops"] for r in rows if r["batch_heads"] == most and r["default"]}
    cells = [
        (r["tflops"] / best[r["direction"], r["mask"]], r)
        for r in rows
        if r["default"] and r["ms"] >= least_ms and (r["direction"], r["mask"]) in best
    ]
    below = sorted(((share, r) for share, r in cells if share < wanted), key=lambda c: c[0])
    lines = [f"{len(cells) - len(below)} of {len(cells)} cells from {least_ms} ms on reach {wanted} of the rate at B*H = {most}"]
    return "\n".join(
        [*lines, *(f"  {s:.2f} {r['direction']} {r['mask']} B*H = {r['batch_heads']} {r['ms']:.3f} ms" for s, r in below)]
    )


if __name__ == "__main__":
    raise SystemExit(main())
