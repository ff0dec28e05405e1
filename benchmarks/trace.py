"""Where the roles of the forward kernel spend their time, per mask of the benchmark: waits and work as shares.

    python -m benchmarks.trace --seqlen 8192 --chrome causal_document=trace.json

"loader waits for the queue": the index generator is late. "consumers wait for tiles": K with its bounds, V or Q are late.
"scores", "output": waiting for the tensor cores; "softmax": exp2, sums, masks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.masks import NAMES
from maskc.boundary import BoundaryVectors
from maskc.codegen.render import CudaSource

LOADER, CONSUMER = "KV Loader", "MMA Consumer"
COLUMNS = (
    (LOADER, "queue"),
    (LOADER, "slot"),
    *((CONSUMER, s) for s in ("queue", "tile", "turn", "scores", "softmax", "output", "epilogue")),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--masks", nargs="+", default=list(NAMES))
    parser.add_argument("--every", type=int, default=4, help="shares are those of every n-th CTA")
    parser.add_argument("--chrome", metavar="MASK=FILE", default="", help="also write the Chrome trace of one mask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trace.json"))
    args = parser.parse_args()

    import torch

    from benchmarks.digest import digest
    from benchmarks.kernels import compile_all
    from benchmarks.scheduler import vectors
    from maskc.runtime import trace

    device = torch.device("cuda")
    chrome, _, chrome_path = args.chrome.partition("=")
    masks = {name: vectors(name, args.seqlen, args.heads, "cuda") for name in args.masks}
    compile_all(sources(list(masks.values()), args.head_dim))
    rows: dict[str, dict[str, dict[str, float]]] = {}
    info = {"device": torch.cuda.get_device_name(), "digest": digest(), "seqlen": args.seqlen, "heads": args.heads}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'mask':24}" + "".join(f"{f'{role.split()[-1][:4]}:{state}':>15}" for role, state in COLUMNS))
    for name, v in masks.items():
        shape = (1, args.seqlen, args.heads, args.head_dim)
        q, k, val = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
        lines = trace.record(v, q, k, val, args.head_dim**-0.5)
        rows[name] = trace.shares(lines[:: args.every])
        cells = (rows[name].get(role, {}).get(state, 0.0) for role, state in COLUMNS)
        print(f"{name:24}" + "".join(f"{100 * share:13.1f} %" for share in cells), flush=True)
        args.out.write_text(json.dumps({**info, "shares": rows}, indent=1) + "\n", encoding="utf-8")
        if name == chrome:
            trace.write_chrome(lines, Path(chrome_path))
    return 0


def sources(masks: list[BoundaryVectors], head_dim: int) -> list[CudaSource]:
    """The traced variants of these masks."""
    from benchmarks.kernels import variant
    from maskc.runtime import hopper, trace

    specs = {trace.trace_spec(hopper.mask_form(v), head_dim, "bf16") for v in masks}
    return [source for spec in specs for source in variant(spec)]


if __name__ == "__main__":
    raise SystemExit(main())
