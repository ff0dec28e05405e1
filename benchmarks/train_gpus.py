"""Whole training steps of one model whose sequence is split over several GPUs (or CPU processes, to be tested).

Every rank holds the whole model; gradients are averaged by DistributedDataParallel, attention exchanges keys as the row of
the table says. Documents change at every step; they are bound and planned beforehand, as a data loader would. A step is as
long as that of the slowest rank.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import Empty
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import maskc
from benchmarks.train_model import Shape
from benchmarks.train_steps import Batch, Setting, batches, learn, new_model, seconds, trimmed
from maskc.runtime.plan import AttentionPlan

Order: TypeAlias = Literal["zigzag", "balanced"]
WARM = 2
LIMIT = 240.0
"""Seconds for all rows of a model."""


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    name: str
    order: Order
    strategy: str
    prune: bool = True


WAYS = (
    Way("dual chunk, plain gather", "zigzag", "all-gather", prune=False),
    Way("+ balanced plan", "balanced", "all-gather", prune=False),
    Way("+ pruning", "balanced", "all-gather"),
    Way("+ overlap", "zigzag", "gated"),
    Way("+ balanced plan + overlap, pruning off", "balanced", "gated", prune=False),
    Way("full", "balanced", "gated"),
)
"""From one to all of what maskc does: the first and the last are always measured, the others with --ablate."""


def rows(shape: Shape, s: Setting, world: int, sparsity: float, ways: Sequence[Way] = WAYS) -> Iterator[dict[str, Any]]:
    """The rows of `ways` as they come; what a row raised stands as its problem."""
    if not ways:
        return
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder) / "meet"), shape, s, sparsity, ways, results)
        running = mp.spawn(_worker, arguments, world, join=False)  # type: ignore[no-untyped-call]
        deadline, left = time.monotonic() + LIMIT, [w.name for w in ways]
        while left and time.monotonic() < deadline:
            codes = [p.exitcode for p in running.processes]
            try:
                row = results.get(timeout=1.0)
            except Empty:
                if None not in codes or any(codes):  # they had ended before this look at what they left
                    break
                continue
            left.remove(row["row"])
            yield {"gpus": world, "seqlen": s.seqlen, "sparsity": sparsity, **row}
        for process in running.processes:
            process.join(5.0)
            process.kill()
    for name in left:
        yield {"gpus": world, "seqlen": s.seqlen, "sparsity": sparsity, "row": name, "problem": "a rank ended or ran out of time"}


# ---------------------------------------------------------------- one rank


def _worker(
    rank: int, world: int, meet: str, shape: Shape, s: Setting, sparsity: float, ways: Sequence[Way], results: Any
) -> None:
    on_gpu = s.device.type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else s.device
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    s = replace(s, device=device)
    data = islice(batches(s, shape.vocabulary, sparsity, seed=1), WARM + s.steps)
    loaded = [_planned(batch, rank, world, shape) for batch in data]
    for way in ways:
        try:
            row = _timed(way, loaded, world, shape, s)
        except maskc.MaskcError as e:  # raised on every rank
            row = {"problem": str(e)}
        except Exception:
            traceback.print_exc()
            raise
        if rank == 0:
            results.put({"row": way.name, **row})
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Part:
    """A rank's rows of a batch under one plan."""

    batch: Batch
    plan: AttentionPlan
    weight: float


@dataclass(frozen=True)
class Planned:
    """A batch as a rank gets it from the loader: the mask, and its part under the plan of each order."""

    spec: maskc.BoundMask
    parts: dict[str, Part]


def _planned(batch: Batch, rank: int, world: int, shape: Shape) -> Planned:
    n = sum(batch.lengths)
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=batch.lengths), nq=n, nk=n)
    parts = {}
    for order in get_args(Order):
        plan = maskc.plan(
            spec, world_size=world, order=order, heads=shape.heads, heads_kv=shape.kv_heads, head_dim=shape.head_dim
        )
        tokens, labels = (plan.shard(t, rank) for t in (batch.tokens, batch.labels))
        rows = Batch(tokens, labels, plan.shard(batch.positions[None], rank)[0], batch.lengths)
        parts[order] = Part(rows, plan, plan.loss_weight(rank, batch.labels))
    return Planned(spec, parts)


def _timed(way: Way, loaded: list[Planned], world: int, shape: Shape, s: Setting) -> dict[str, Any]:
    model, optimizer = new_model(shape, s)
    devices = [s.device] if s.device.type == "cuda" else None
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
    times, losses = [], []
    for planned in loaded:
        part = planned.parts[way.order]
        plan = replace(part.plan, prune=way.prune)

        def attend(q: Tensor, k: Tensor, v: Tensor, spec: maskc.BoundMask = planned.spec, plan: AttentionPlan = plan) -> Tensor:
            out = maskc.run(spec, q, k, v, dist.group.WORLD, plan=plan, strategy=way.strategy)
            assert isinstance(out, Tensor)
            return out

        def step(part: Part = part, attend: Any = attend) -> None:
            losses.append(learn(parallel, optimizer, part.batch, attend, part.weight))

        dist.barrier()
        times.append(seconds(step, s.device))
    figures = torch.tensor(times, dtype=torch.float64, device=s.device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    ends = torch.stack([losses[0], losses[-1]]).double() / world
    dist.all_reduce(ends)
    mean, deviation = trimmed(figures.tolist()[WARM:], s.drop)
    return {
        "steps": s.steps,
        "step_ms": 1e3 * mean,
        "step_std_ms": 1e3 * deviation,
        "tokens_per_s": s.batch * s.seqlen / mean,
        "imbalance": sum(x.parts[way.order].plan.imbalance for x in loaded[WARM:]) / s.steps,
        "first_loss": ends[0].item(),
        "last_loss": ends[1].item(),
    }
