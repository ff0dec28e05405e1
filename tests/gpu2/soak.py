"""Many gated calls in a row, forward and backward, random masks and host delays: always the bits of the first time."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import maskc
from maskc.binding.bound import BoundMask
from maskc.codegen.render import CudaSource
from maskc.runtime.plan import AttentionPlan
from tests.gpu.inputs import suite_mask
from tests.gpu2 import cases, place
from tests.gpu2.ways import WAYS, leaving

MASKS = ("01_full", "02_causal", "05_doc_full", "09_doc_prefix", "06_share_question", "07_global_window", "14_sinks_window")
HEAD_DIM = 64
TOGETHER = 20
"""Calls without a synchronisation between them."""
LONGEST = 2e-3
"""Seconds of a host's delay."""


@dataclass
class Call:
    """One of the calls that come again and again; `wanted` are the results of the first time."""

    spec: Any
    plan: AttentionPlan
    inputs: list[Tensor]
    wanted: list[Tensor] = field(default_factory=list)

    def run(self, group: Any, strategy: str) -> list[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in self.inputs[:3])
        out, lse = maskc.run(self.spec, q, k, v, group, plan=self.plan, strategy=strategy, return_lse=True)
        _, dk, dv = torch.autograd.grad(out, (q, k, v), self.inputs[3])
        return [out.detach(), lse.detach(), dk, dv]  # dq is added up as it comes


def masks(host: bool = False) -> Iterator[tuple[BoundMask, AttentionPlan]]:
    """Of the calls, the same on all ranks. Some keep keys for their backward; to some come keys that no row sees."""
    for number, name in enumerate(MASKS):
        n = ((64, 61)[number % 2] if host else (1024, 1500, 2048)[number % 3]) * place.world() // 2
        found = suite_mask(name, n, n, random.Random(number))
        assert found is not None
        path, inputs = found
        spec = maskc.compile(path).bind(nq=n, nk=n, **inputs)
        order = ("balanced", "zigzag", "contiguous")[number % 3]
        kept, prune = number % 4 == 3, order != "contiguous"
        chunk, world = 8 if host else 128, place.world()
        yield spec, maskc.plan(spec, world_size=world, chunk=chunk, order=order, prune=prune, keep_keys=kept)  # type: ignore[arg-type]


def sources() -> Iterator[CudaSource]:
    for spec, p in masks():
        yield from cases.sources(spec, p, ("gated", "copy-then-attend"), HEAD_DIM)


def made(rank: int) -> list[Call]:
    calls = []
    for number, (spec, p) in enumerate(masks(place.device() == "cpu")):
        g = torch.Generator().manual_seed(number)
        of_keys = (4, 2)[number % 2]  # kernels can give the gradients of the former, not those of the latter
        whole = [torch.randn(1, p.rows.length, h, HEAD_DIM, generator=g).bfloat16() for h in (4, of_keys, of_keys, 4)]
        calls.append(Call(spec, p, [p.shard(t, rank).to(place.device()) for t in whole]))
    return calls


def on_engines(calls: list[Call], group: Any) -> str:
    """ "" when all copies of keys and gradients show as such in a profile, and not as kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for call in calls:
            call.run(group, "gated")
        torch.cuda.synchronize()
    names = [e.key for e in seen.key_averages() for _ in range(e.count)]
    kinds = ("PtoP",) * (place.gpus() > 1) + ("DtoD",) * place.shared()
    copied = sum(any(kind in name for kind in kinds) for name in names)
    print(f"profile: {Counter(name[:60] for name in names).most_common(12)}", file=sys.stderr)
    return "" if copied >= 2 * len(calls) else f"{copied} copies in the profile of {len(calls)} calls"


def run(rank: int, group: Any, count: int, until: float) -> tuple[str, int]:
    """ "" when all results are the same bits, and of how many calls.

    The ranks draw the same calls, many at a time of two masks in turn, which then keep their key buffers, and delays and
    ways of gradients of their own.

    until: time.monotonic() after which no more are begun.
    """
    calls = made(rank)
    for call in calls:
        call.wanted = call.run(group, "copy-then-attend")
    together, alone = random.Random(1), random.Random(rank)
    done = 0
    while done < count and all_have_time(until, group):
        differ = []
        drawn = together.choice((calls, together.sample(calls, 2)))
        for _ in range(min(TOGETHER, count - done)):
            call = together.choice(drawn)
            time.sleep(alone.random() * LONGEST * (alone.random() < 0.5))
            with leaving(alone.choice(WAYS)):
                got = call.run(group, "gated")
            differ.append(torch.stack([(a != b).any() for a, b in zip(got, call.wanted, strict=True)]))
        wrong = torch.stack(differ).nonzero()
        if len(wrong):
            at, which = wrong[0].tolist()
            return f"call {done + at}: {('out', 'lse', 'dk', 'dv')[which]} differs ({len(wrong)} such)", done
        done += len(differ)
    return (on_engines(calls, group) if place.gpus() else ""), done


def all_have_time(until: float, group: Any) -> bool:
    """The same answer on all ranks."""
    left = torch.tensor([until - time.monotonic()], device=place.device())
    dist.all_reduce(left, op=dist.ReduceOp.MIN, group=group)
    return left.item() > 0
