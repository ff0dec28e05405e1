"""The ablation of the FlashMask-3 paper on one device: ranks are simulated in turn, links are a model.

One sequence is cut over `world` ranks. Each rank's local attention is timed in turn, the rest of a step is that of S / P
tokens, and the exchange of keys and gradients comes from the printed model of the links. Rows that hide the exchange need
attention beside real copies; they are named and not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import maskc
from benchmarks.train_model import Shape
from benchmarks.train_steps import Setting, batches, documents, hidden, new_model, seconds, trimmed
from maskc.runtime import ops
from maskc.runtime.localize import localize
from maskc.runtime.machine import DEFAULT_MACHINE
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.plan_report import received

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


def rows(shape: Shape, s: Setting, world: int) -> Iterator[dict[str, Any]]:
    """The rows of `ROWS` for every set of documents."""
    for sparsity in SPARSITIES:
        yield from ablation(shape, s, world, sparsity)


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
    part = Setting(s.device, s.dtype, max(1, s.seqlen // world), s.batch, 5, 0)
    model, optimizer = new_model(shape, s)
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
