"""The ablation of the FlashMask-3 paper on one GPU: whole training steps of one simulated rank of a context-parallel group.

One sequence of packed documents is cut over `world` ranks in two nodes. The GPU plays one of them: forward, loss, backward
and AdamW of a decoder on that rank's rows, its attention exchanging keys and gradients with pinned host memory, or that of a
second GPU, in the place of the other ranks (`benchmarks.train_link`). Copy engines carry them: between nodes at about 50 GB/s,
inside a node seven times faster, as NVLink is. Each row of the table is timed on the rank whose attention, exchange included,
takes longest, because the others would wait for it. The documents of a set are the same in all steps; plans and tables are
made beforehand, as a data loader would.

Not in it: that several ranks share links and memory, that a relayed chunk arrives late, and adding up gradients in relays.
A plain gather is taken to enter a node once, as that of NCCL does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

import maskc
from benchmarks.kernels import attention, compile_all
from benchmarks.train_link import Kind, Link, Memory, part_of
from benchmarks.train_model import Shape
from benchmarks.train_steps import Batch, Setting, documents, hidden, learn, new_model, packed, seconds, trimmed
from maskc.bench import wait
from maskc.codegen.exchange import exchange_source
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.transport import CudaQueues, HostQueues, KeyShape

SPARSITIES = (0.70, 0.80, 0.86)
CHUNKS = 4
"""Of a rank: enough to be within 1 % of even, and few enough copies for the host to keep ahead."""
GROUPS = 2
"""Of heads, copied one after another: work on the first begins half-way, and the host keeps ahead of so many copies."""
NODES = 2
PACKS = 1
"""Documents of one sparsity that the steps are divided over."""
INSIDE = 7
"""Times that the link inside a node is faster than the one between nodes."""
LINK_RATE = 50e9
"""Bytes per second between nodes."""
WARM = 3
TIMEOUT = 2.0


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    order: Literal["zigzag", "balanced"]
    executor: Executor
    prune: bool = True
    hierarchical: bool = True

    def plan(self, spec: maskc.BoundMask, shape: Shape, world: int, rows: int) -> AttentionPlan:
        return maskc.plan(
            spec,
            world_size=world,
            nodes=NODES if world % NODES == 0 else 1,
            chunk=max(1, rows // (CHUNKS * world)),
            order=self.order,
            prune=self.prune,
            hierarchical=self.hierarchical and world % NODES == 0,
            heads=shape.heads,
            heads_kv=shape.kv_heads,
            head_dim=shape.head_dim,
        )


ROWS = (
    Variant("dual chunk, plain gather", "zigzag", "copy-then-attend", prune=False),
    Variant("+ HCC-IPO", "balanced", "copy-then-attend", prune=False),
    Variant("+ overlap", "zigzag", "gated"),
    Variant("+ HCC-IPO + overlap, routing over nodes off", "balanced", "gated", hierarchical=False),
    Variant("+ HCC-IPO + overlap, pruning off", "balanced", "gated", prune=False),
    Variant("full", "balanced", "gated"),
)


def rows(
    shape: Shape,
    s: Setting,
    sparsities: Sequence[float],
    world: int,
    link: Kind = "host",
    limit: float = inf,
    there: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> Iterator[dict[str, Any]]:
    """The rows of `ROWS` for every set of documents: step time, and tokens/s of the whole group if no rank is slower.

    there: rows, by what they are, that are not wanted again. limit: seconds after which no further row is begun.
    """
    ends = time.monotonic() + limit
    key_shape = KeyShape(1, shape.kv_heads, shape.head_dim, shape.head_dim, s.dtype)
    memory = Memory(s.seqlen, key_shape, s.device, link)
    if s.device.type == "cuda":
        compile_ahead(shape, s, world)
    trainer = Trainer(shape, s)
    for sparsity in sparsities:
        packs = [documents(s.seqlen, sparsity, seed) for seed in range(PACKS)]
        for variant in ROWS:
            what: dict[str, Any] = {
                "row": variant.name,
                "ranks": world,
                "nodes": NODES,
                "simulated": True,
                "link": link,
                "seqlen": s.seqlen,
            }
            what |= {"sparsity": sparsity, "hidden": statistics.mean(map(hidden, packs))}
            if there(what):
                continue
            if time.monotonic() > ends:
                return
            yield {**what, **measured(variant, packs, shape, s, world, memory, trainer)}


def compile_ahead(shape: Shape, s: Setting, world: int) -> None:
    """Every kernel of the table, side by side."""
    spec = bound(documents(s.seqlen, SPARSITIES[0], 0), s)
    v, forms = spec.vectors(s.seqlen, s.seqlen), set()
    for variant in ROWS:
        p = variant.plan(spec, shape, world, s.seqlen)
        columns = part_of(p, 0).plan.columns
        forms.add(hopper.mask_form(localize(v, p.rows, p.rows.chunks_of(0), p.keys, columns)))
    kernels = [attention(form, shape.head_dim, hopper.DTYPES[s.dtype], gated=(False, True)) for form in forms]
    compile_all([*chain.from_iterable(kernels), exchange_source()])


def bound(lengths: list[int], s: Setting) -> maskc.BoundMask:
    return maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=lengths), nq=s.seqlen, nk=s.seqlen)


def measured(
    variant: Variant,
    packs: list[list[int]],
    shape: Shape,
    s: Setting,
    world: int,
    memory: Memory,
    trainer: Trainer,
) -> dict[str, Any]:
    """The figures of one row, or why there are none."""
    times: list[tuple[float, float]] = []
    ranks: list[Rank] = []
    try:
        for number, lengths in enumerate(packs):
            spec = bound(lengths, s)
            p = variant.plan(spec, shape, world, s.seqlen)
            rank = slowest(spec, p, variant.executor, memory, shape, s)
            batch = rank.batch(packed(lengths, s, shape.vocabulary, torch.Generator().manual_seed(number)))
            steps = s.steps // len(packs) + (number < s.steps % len(packs))
            times += [trainer.step(rank, batch) for _ in range(WARM + steps)][WARM:]
            ranks.append(rank)
    except MaskcError as e:
        return {"problem": str(e)}
    mean, deviation = trimmed([taken for taken, _ in times], s.drop)
    return {
        "steps": len(times),
        "step_ms": 1e3 * mean,
        "step_std_ms": 1e3 * deviation,
        "tokens_per_s": s.seqlen / mean,
        "enqueue_ms": 1e3 * statistics.median(enqueued for _, enqueued in times),
        "imbalance": statistics.mean(r.plan.imbalance for r in ranks),
        "attention_ms": 1e3 * shape.layers * statistics.mean(r.attention for r in ranks),
        "received_mb": statistics.mean(r.received for r in ranks) / 1e6,
        "worst_ranks": [r.rank for r in ranks],
    }


# ---------------------------------------------------------------- one rank


class Rank:
    """A simulated rank: its rows, its local mask, its buffers. attention: seconds of one layer, exchange included."""

    def __init__(
        self, spec: maskc.BoundMask, p: AttentionPlan, rank: int, executor: Executor, memory: Memory, shape: Shape, s: Setting
    ) -> None:
        self.plan, self.rank, self.executor, self.shape, self.setting = p, rank, executor, shape, s
        part = part_of(p, rank)
        link = Link(part, p.keys, memory, INSIDE)
        queues = CudaQueues(s.device) if s.device.type == "cuda" else HostQueues()
        self.over = Overlapped(
            part.plan,
            p.keys,
            memory.shape,
            link,
            queues,
            s.device,
            timeout=TIMEOUT,
            rate=INSIDE * LINK_RATE,
            groups=GROUPS if shape.kv_heads % GROUPS == 0 else 1,
        )
        link.carry_behind(self.over.forward_cut, self.over.backward_cut)
        vectors = spec.vectors(s.seqlen, s.seqlen, s.device)
        self.local = localize(vectors, p.rows, p.rows.chunks_of(rank), p.keys, part.plan.columns, s.device)
        row_bytes = sum(t[:, 0].numel() * t.element_size() for t in memory.keys)
        self.received = row_bytes * sum(p.keys.size_of(x.chunk) for x in part.plan.pulls)
        self.attention = 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Exchanged.apply(q, k, v, self)  # type: ignore[no-any-return,no-untyped-call]

    def batch(self, whole: Batch) -> Batch:
        """The rank's rows of a batch."""
        tokens, labels = (self.plan.shard(t, self.rank) for t in (whole.tokens, whole.labels))
        return Batch(tokens, labels, self.plan.shard(whole.positions[None], self.rank)[0], whole.lengths)

    def time_attention(self, repeats: int = 3) -> None:
        """One layer on random tensors; the least of some times after a warm one."""
        generator = torch.Generator(self.setting.device).manual_seed(self.rank)

        def made(heads: int) -> Tensor:
            size = (1, self.local.nq, heads, self.shape.head_dim)
            return torch.randn(size, dtype=self.setting.dtype, device=self.setting.device, generator=generator)

        qkv = [made(h).requires_grad_() for h in (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)]
        dout = made(self.shape.heads)

        def call() -> None:
            torch.autograd.grad(self.attend(*qkv), qkv, dout)
            self.over.finish()

        call()
        self.attention = min(seconds(call, self.setting.device) for _ in range(repeats))


class _Exchanged(torch.autograd.Function):
    """Attention of a rank's rows to its own keys and those on the link; keys are gathered again backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: Rank) -> Tensor:
        ctx.rank, scale = rank, q.shape[3] ** -0.5
        out, lse = rank.over.forward(rank.local, q, k, v, scale, rank.executor)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        rank: Rank = ctx.rank
        given = rank.local, q, k, v, out, lse, dout[0].contiguous(), q.shape[3] ** -0.5
        return *rank.over.backward(*given, rank.executor), None


def slowest(spec: maskc.BoundMask, p: AttentionPlan, executor: Executor, memory: Memory, shape: Shape, s: Setting) -> Rank:
    """The rank whose attention takes longest."""
    worst: Rank | None = None
    for r in range(p.world):
        rank = Rank(spec, p, r, executor, memory, shape, s)
        rank.time_attention()
        if worst is None or rank.attention > worst.attention:
            worst = rank
    assert worst is not None
    return worst


class Trainer:
    """One model for all rows: what its weights are changes no time."""

    def __init__(self, shape: Shape, s: Setting) -> None:
        self.model, self.optimizer = new_model(shape, s)
        self.device = s.device

    def step(self, rank: Rank, batch: Batch) -> tuple[float, float]:
        """Seconds of a step of this rank, and of those the seconds until everything is enqueued."""
        wait(self.device)
        started = time.perf_counter()
        learn(self.model, self.optimizer, batch, rank.attend)
        enqueued = time.perf_counter() - started
        wait(self.device)
        taken = time.perf_counter() - started
        rank.over.finish()
        return taken, enqueued
