"""Whole training steps on packed documents: maskc, FlexAttention, and SDPA with a dense mask where that fits.

    python -m benchmarks.train [--model dense moe] [--attention maskc flex sdpa] [--seqlen 8192] [--out FILE]
    python -m benchmarks.train --ablate [--world 8]

A step is: bind the documents of a new batch, forward, loss, backward, AdamW. Documents change at every step. Of `--steps`
steps the `--drop` fastest and slowest are left out; what remains gives mean and standard deviation. "attention ms" is the
forward and backward of all layers' attention alone, on random tensors of the same shapes and the last batch's mask.

`--ablate` cuts one sequence over `--world` ranks that are simulated on one device: each rank's local attention is timed in
turn, the rest of a step is that of S / P tokens, and the exchange of keys and gradients comes from the printed model of the
links. Rows that hide the exchange need attention beside real copies; they are named and not run.

Without a GPU everything runs small and in fp32 or fp64, to be tested; such times say nothing and are not written by default.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskc
from benchmarks.train_model import Attend, Decoder, Shape
from maskc.runtime import ops
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.plan_report import received

RESULTS = Path(__file__).parent / "results" / "train.json"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SPARSITIES = (0.70, 0.80, 0.86)
NEEDS_OVERLAP = "not run: it needs attention beside copies over a loopback link, which this script does not drive yet"
ROWS: tuple[tuple[str, str | None], ...] = (
    ("dual chunk, plain gather", None),
    ("+ HCC-IPO", None),
    ("+ overlap", NEEDS_OVERLAP),
    ("+ HCC-IPO + overlap, routing over nodes off", NEEDS_OVERLAP),
    ("+ HCC-IPO + overlap, pruning off", NEEDS_OVERLAP),
    ("full", NEEDS_OVERLAP),
)


class CannotRun(Exception):
    """Why an attention is left out."""


@dataclass(frozen=True)
class Setting:
    device: torch.device
    dtype: torch.dtype
    seqlen: int
    batch: int
    steps: int
    drop: int
    most_mask_bytes: int


# ---------------------------------------------------------------- data


def documents(n: int, sparsity: float, seed: int) -> list[int]:
    """Lengths of documents cut at random, such that the causal document mask hides about this share of the n x n cells."""
    rng = random.Random(seed)
    best: list[int] = [n]
    for _ in range(2000):
        cuts = sorted(rng.sample(range(1, n), min(n - 1, max(0, round(rng.gauss(1 / (1 - sparsity) - 1, 1))))))
        lengths = [b - a for a, b in pairwise((0, *cuts, n))]
        if abs(hidden(lengths) - sparsity) < abs(hidden(best) - sparsity):
            best = lengths
        if abs(hidden(best) - sparsity) < 0.005:
            break
    return best


def hidden(lengths: Sequence[int]) -> float:
    """Share of cells that the causal document mask hides."""
    return 1 - sum(n * (n + 1) // 2 for n in lengths) / sum(lengths) ** 2


@dataclass(frozen=True)
class Batch:
    """tokens, labels [B, S] (-100 where a document ends), positions [S] inside documents, and the documents' lengths."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: list[int]


def batches(s: Setting, vocabulary: int, sparsity: float, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    number = seed
    while True:
        lengths = documents(s.seqlen, sparsity, number)
        tokens = torch.randint(0, vocabulary, (s.batch, s.seqlen), generator=generator)
        labels = tokens.roll(-1, 1)
        ends = torch.tensor(lengths).cumsum(0) - 1
        labels[:, ends] = -100
        positions = torch.cat([torch.arange(n) for n in lengths])
        yield Batch(tokens.to(s.device), labels.to(s.device), positions.to(s.device), lengths)
        number += 1


# ---------------------------------------------------------------- attention


def with_maskc(s: Setting) -> Callable[[Batch], Attend]:
    mask = maskc.compile("std:doc_causal")

    def of(batch: Batch) -> Attend:
        spec = mask.bind(doc=maskc.segments(lengths=batch.lengths), nq=s.seqlen, nk=s.seqlen)
        return lambda q, k, v: maskc.run(spec, q, k, v)

    return of


def with_flex(s: Setting) -> Callable[[Batch], Attend]:
    if s.device.type == "cpu":
        raise CannotRun("FlexAttention has no backward on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention, dynamic=False)

    def of(batch: Batch) -> Attend:
        ids = ids_of(batch.lengths, s.device)
        mod = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)  # noqa: E731  # as its users write it
        blocks = create_block_mask(mod, None, None, s.seqlen, s.seqlen, device=s.device, BLOCK_SIZE=128, _compile=True)
        return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return of


def with_sdpa(s: Setting) -> Callable[[Batch], Attend]:
    if s.seqlen**2 > s.most_mask_bytes:
        raise CannotRun(f"a dense mask of {s.seqlen} x {s.seqlen} is over --most-mask-mb")

    def of(batch: Batch) -> Attend:
        ids = ids_of(batch.lengths, s.device)
        dense = (ids[:, None] == ids[None, :]).tril()
        return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense, enable_gqa=True
        ).transpose(1, 2)

    return of


def ids_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


ATTENTION: dict[str, Callable[[Setting], Callable[[Batch], Attend]]] = {
    "maskc": with_maskc,
    "flex": with_flex,
    "sdpa": with_sdpa,
}


# ---------------------------------------------------------------- time


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def trimmed(values: Sequence[float], drop: int) -> tuple[float, float]:
    """Mean and standard deviation without the `drop` least and greatest."""
    kept = sorted(values)[drop : len(values) - drop]
    return statistics.mean(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0


def attention_seconds(attend: Attend, s: Setting, shape: Shape, repeats: int = 5) -> float:
    """Forward and backward of one layer's attention, median."""
    generator = torch.Generator(s.device).manual_seed(0)

    def made(heads: int) -> Tensor:
        size = (s.batch, s.seqlen, heads, shape.head_dim)
        return torch.randn(size, dtype=s.dtype, device=s.device, generator=generator)

    qkv = [made(h).requires_grad_() for h in (shape.heads, shape.kv_heads, shape.kv_heads)]
    dout = made(shape.heads)
    return statistics.median(seconds(lambda: torch.autograd.grad(attend(*qkv), qkv, dout), s.device) for _ in range(repeats))


def train(name: str, shape: Shape, s: Setting, sparsity: float) -> dict[str, Any]:
    """One row: steps of a fresh model with one attention; equal seeds give every attention the same model and data."""
    attends = ATTENTION[name](s)
    torch.manual_seed(0)
    model = Decoder(shape).to(s.device, s.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=s.device.type == "cuda")
    data = batches(s, shape.vocabulary, sparsity, seed=1)
    times, losses = [], []
    attend: Attend | None = None
    for _ in range(s.steps + 2):  # two to warm up
        batch = next(data)

        def step(batch: Batch = batch) -> None:
            nonlocal attend
            attend = attends(batch)
            loss = model(batch.tokens, batch.positions, batch.labels, attend)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        times.append(seconds(step, s.device))
    assert attend is not None
    mean, deviation = trimmed(times[2:], s.drop)
    alone = shape.layers * attention_seconds(attend, s, shape)
    return {
        "attention": name,
        "seqlen": s.seqlen,
        "batch": s.batch,
        "sparsity": sparsity,
        "step_ms": 1e3 * mean,
        "step_std_ms": 1e3 * deviation,
        "tokens_per_s": s.batch * s.seqlen / mean,
        "attention_ms": 1e3 * alone,
        "attention_share": alone / mean,
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
    }


# ---------------------------------------------------------------- ablation


def ablation(shape: Shape, s: Setting, world: int, sparsity: float) -> list[dict[str, Any]]:
    """The rows of `ROWS` for one set of documents: step time and tokens/s of the whole group, or why a row is not run."""
    lengths = documents(s.seqlen, sparsity, 1)
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=lengths), nq=s.seqlen, nk=s.seqlen)
    common: dict[str, Any] = {
        "world_size": world, "chunk": max(1, s.seqlen // (8 * world)), "heads": shape.heads, "heads_kv": shape.kv_heads,
        "head_dim": shape.head_dim,
    }  # fmt: skip
    plans = {
        "dual chunk, plain gather": maskc.plan(spec, order="zigzag", prune=False, overlap=False, **common),
        "+ HCC-IPO": maskc.plan(spec, order="balanced", prune=False, overlap=False, **common),
    }
    rest = rest_seconds(shape, s, world)
    rows = []
    for name, why_not in ROWS:
        row: dict[str, Any] = {"row": name, "ranks": world, "simulated": True, "seqlen": s.seqlen, "sparsity": hidden(lengths)}
        if why_not is not None:
            rows.append(row | {"problem": why_not})
            continue
        p = plans[name]
        samples = [step_seconds(spec, p, shape, s, rest) for _ in range(s.steps)]
        mean, deviation = trimmed(samples, s.drop)
        rows.append(
            row
            | {
                "step_ms": 1e3 * mean,
                "step_std_ms": 1e3 * deviation,
                "tokens_per_s": s.batch * s.seqlen / mean,
                "imbalance": p.imbalance,
                "exchange_ms": 1e3 * exchange_seconds(p, shape, s),
            }
        )
    return rows


def step_seconds(spec: maskc.BoundMask, p: AttentionPlan, shape: Shape, s: Setting, rest: float) -> float:
    """The slowest rank's attention in all layers, the exchange by the model, and everything else."""
    slowest = max(rank_seconds(spec, p, rank, shape, s) for rank in range(p.world))
    return shape.layers * (slowest + exchange_seconds(p, shape, s)) + rest


def rank_seconds(spec: maskc.BoundMask, p: AttentionPlan, rank: int, shape: Shape, s: Setting) -> float:
    """Local forward and backward of one layer; keys are those that the plan brings, all of them without pruning."""
    chunks = p.rows.chunks_of(rank)
    if not chunks:
        return 0.0
    columns = tuple(sorted(p.needed(rank))) if p.prune else tuple(range(p.keys.chunk_count))
    v = localize(spec.vectors(s.seqlen, s.seqlen, s.device), p.rows, chunks, p.keys, columns, s.device)
    generator = torch.Generator(s.device).manual_seed(rank)

    def made(n: int, heads: int) -> Tensor:
        return torch.randn((s.batch, n, heads, shape.head_dim), dtype=s.dtype, device=s.device, generator=generator)

    q, k, val, dout = made(v.nq, shape.heads), made(v.nk, shape.kv_heads), made(v.nk, shape.kv_heads), made(v.nq, shape.heads)
    scale = shape.head_dim**-0.5

    tables = ops.backend_module(ops.BY_DEVICE[s.device.type]).schedule(v, shape.head_dim)  # once a step, for all layers

    def call() -> None:
        out, lse = ops.forward(v, q, k, val, scale, schedule=tables)
        ops.backward(v, q, k, val, out, lse, dout, None, scale, schedule=tables)

    return seconds(call, s.device)


def exchange_seconds(p: AttentionPlan, shape: Shape, s: Setting) -> float:
    """Of one layer, by the model: K and V forward and again backward, gradients back in fp32."""
    rows = max(received(p)) if p.prune else max(p.keys.length - p.keys.local_length(r) for r in range(p.world))
    one_way = rows * 2 * shape.kv_heads * shape.head_dim * s.batch
    return one_way * (2 * s.dtype.itemsize + 4) / DEFAULT_MACHINE.intra


def rest_seconds(shape: Shape, s: Setting, world: int) -> float:
    """A step of the same model on S / P tokens with no attention in it, median of five."""
    part = Setting(s.device, s.dtype, max(1, s.seqlen // world), s.batch, 5, 0, s.most_mask_bytes)
    torch.manual_seed(0)
    model = Decoder(shape).to(s.device, s.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=s.device.type == "cuda")
    data = batches(part, shape.vocabulary, 0.5, seed=1)

    def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ratio = q.shape[2] // k.shape[2]
        return q + (k + v).repeat_interleave(ratio, 2)

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad(set_to_none=True)
        model(batch.tokens, batch.positions, batch.labels, nothing).backward()
        optimizer.step()

    step()
    return statistics.median(seconds(step, s.device) for _ in range(5))


# ---------------------------------------------------------------- command line


def shapes(a: argparse.Namespace) -> dict[str, Shape]:
    dense = Shape(a.layers, a.width, a.heads, a.kv_heads, a.head_dim, a.hidden, a.vocabulary)
    return {"dense": dense, "moe": Shape(**{**asdict(dense), "experts": a.experts, "active": a.active})}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.train", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", nargs="+", choices=("dense", "moe"), default=["dense", "moe"])
    p.add_argument("--attention", nargs="+", choices=tuple(ATTENTION), default=list(ATTENTION))
    p.add_argument("--seqlen", type=int, default=8192)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--sparsity", type=float, default=0.86, help="share of cells that the document masks hide")
    p.add_argument("--steps", type=int, default=70)
    p.add_argument("--drop", type=int, default=10, help="so many of the fastest and of the slowest steps are left out")
    for name, value in {"layers": 4, "width": 2048, "heads": 64, "kv-heads": 8, "head-dim": 128, "hidden": 4096}.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--vocabulary", type=int, default=32_000)
    p.add_argument("--experts", type=int, default=16)
    p.add_argument("--active", type=int, default=2, help="experts a token goes to")
    p.add_argument("--dtype", choices=tuple(DTYPES), default=None, help="bf16 on a GPU, fp32 on a CPU")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--most-mask-mb", type=int, default=2048, help="SDPA's dense mask may take this much")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--ablate", action="store_true", help="the paper's ablation, ranks simulated on one device")
    p.add_argument("--world", type=int, default=8, help="simulated ranks of --ablate")
    p.add_argument("--out", type=Path, default=None, help=f"default on a GPU: {RESULTS.name}; on a CPU nothing is written")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    a = p.parse_args(arguments)
    if a.gpus != 1:
        p.error("--gpus: several GPUs are not driven yet; examples/train_fsdp_context_parallel.py shows such a step")
    if a.steps <= 2 * a.drop:
        p.error(f"--drop {a.drop} leaves nothing of --steps {a.steps}")
    device = torch.device(a.device)
    dtype = DTYPES[a.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    s = Setting(device, dtype, a.seqlen, a.batch, a.steps, a.drop, a.most_mask_mb << 20)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: times say nothing about GPUs"
    print(f"{name}; torch {torch.__version__}; {dtype}")
    rows: list[dict[str, Any]] = []
    for model in a.model:
        for row in run(model, shapes(a)[model], s, a):
            rows.append({"model": model, **row})
            print(line(rows[-1]), flush=True)
    out = a.out or (RESULTS if device.type == "cuda" else None)
    if out is not None:
        from benchmarks.digest import digest

        head = {"device": name, "torch": torch.__version__, "digest": digest(), "machine": asdict(DEFAULT_MACHINE)}
        out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def run(model: str, shape: Shape, s: Setting, a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if a.ablate:
        print(f"ranks simulated in turn on one device; links by model: {DEFAULT_MACHINE}")
        for sparsity in SPARSITIES:
            yield from ablation(shape, s, a.world, sparsity)
        return
    for name in a.attention:
        try:
            yield train(name, shape, s, a.sparsity)
        except CannotRun as e:
            yield {"attention": name, "seqlen": s.seqlen, "problem": str(e)}


def line(r: dict[str, Any]) -> str:
    what = f"{r['model']:6}" + (f"{r['sparsity']:.0%} hidden  {r['row']:44}" if "row" in r else f"{r['attention']:6}")
    if "problem" in r:
        return f"{what} {r['problem']}"
    text = f"{what} {r['step_ms']:9.2f} ± {r['step_std_ms']:.2f} ms a step  {r['tokens_per_s']:10.0f} tokens/s"
    if "attention_ms" in r:
        return f"{text}  attention {r['attention_ms']:.2f} ms, {r['attention_share']:.0%}  loss {r['last_loss']:.4f}"
    return f"{text}  imbalance {r['imbalance']:.3f}, exchange {r['exchange_ms']:.2f} ms a layer (model)"


if __name__ == "__main__":
    raise SystemExit(main())
