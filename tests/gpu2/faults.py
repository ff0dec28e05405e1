"""A rank that disagrees, refuses, dies or stalls: what the other one must get, and in what time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import maskc
from maskc.codegen.render import CudaSource
from tests.gpu2 import cases

DOC = "input doc : segments\nmask doc_causal = same(doc) and k <= q"
GROUP_SECONDS = 6.0
"""Timeout of the group in these runs."""
LATEST = 2.5 * GROUP_SECONDS
"""By when a rank must have its error: a wait ends with the group's timeout, what stands behind one on a shared queue half a
timeout and a second later, when the link looks after it; and there are calls before."""
HEAD_DIM = 64
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"


@dataclass(frozen=True)
class Fault:
    """codes: what each rank must raise; None for one that is not there any more. blocking: torch's waits raise."""

    act: Callable[[int, Any], None]
    codes: tuple[str | None, str | None]
    blocking: bool = True


def call(rank: int, group: Any, lengths: list[int], strategy: str = "all-gather", q: Any = None) -> torch.Tensor:
    n = sum(lengths)
    spec = maskc.compile_text(DOC).bind(doc=maskc.segments(lengths=lengths), nq=n, nk=n)
    p = maskc.plan(spec, group=group, chunk=128, order="zigzag")
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, 2, HEAD_DIM, generator=g).bfloat16().to(DEVICE) for _ in range(3)]
    mine = [p.shard(t, rank).clone().requires_grad_() for t in whole]
    out = maskc.run(spec, mine[0] if q is None else q, mine[1], mine[2], group, plan=p, strategy=strategy)
    assert isinstance(out, torch.Tensor)
    return out


BATCH, OTHER = [300, 724], [400, 624]


def sources() -> Iterator[CudaSource]:
    for lengths in ([1024], BATCH):
        spec = maskc.compile_text(DOC).bind(doc=maskc.segments(lengths=lengths), nq=1024, nk=1024)
        p = maskc.plan(spec, world_size=cases.WORLD, chunk=128, order="zigzag")
        yield from cases.sources(spec, p, ("all-gather", "gated"), HEAD_DIM)


def warm(rank: int, group: Any) -> None:
    """Kernels are compiled and the ranks connected, so that the time of a fault is its own. Not of the same batch: on one
    that they have agreed on ranks do not compare again."""
    for strategy, lengths in product(("all-gather", "gated"), ([1024], OTHER)):
        call(rank, group, lengths, strategy).float().sum().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def other_documents(rank: int, group: Any) -> None:
    call(rank, group, BATCH if rank == 0 else [301, 723])


def other_strategy(rank: int, group: Any) -> None:
    call(rank, group, BATCH, "ring" if rank == 0 else "staged")


def refuses(rank: int, group: Any) -> None:
    call(rank, group, BATCH, q=None if rank == 0 else torch.zeros(1, 3, 2, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16))


def no_tensor(rank: int, group: Any) -> None:
    call(rank, group, BATCH, q=None if rank == 0 else "q")


def on_the_host(rank: int, group: Any) -> None:
    """Tensors where the group cannot send from."""
    spec = maskc.compile("std:causal").bind(nq=512, nk=512)
    x = torch.zeros(1, 256, 2, HEAD_DIM, device=DEVICE if rank == 0 else "cpu", dtype=torch.bfloat16)
    maskc.run(spec, x, x, x, group)


def killed_before(rank: int, group: Any) -> None:
    if rank == 1:
        os._exit(1)
    call(rank, group, BATCH)


def killed_between(rank: int, group: Any) -> None:
    out = call(rank, group, BATCH)
    if rank == 1:
        os._exit(1)
    out.float().sum().backward()


def killed_between_direct(rank: int, group: Any) -> None:
    """No host waits in the step: gradients become NaN in time, and the next call raises."""
    out = call(rank, group, BATCH, "gated")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if rank == 1:
        os._exit(1)
    out.float().sum().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    call(rank, group, BATCH, "gated")


def stalls(rank: int, group: Any) -> None:
    if rank == 1:
        time.sleep(3 * GROUP_SECONDS)
        os._exit(1)
    call(rank, group, BATCH)


FAULTS = {
    "other documents": Fault(other_documents, ("M708", "M708")),
    "other strategy": Fault(other_strategy, ("M708", "M708")),
    "refuses": Fault(refuses, ("M708", "M710")),
    "no tensor": Fault(no_tensor, ("M708", "M511")),
    "killed before": Fault(killed_before, ("M709", None)),
    "killed between": Fault(killed_between, ("M709", None)),
    "killed between, direct": Fault(killed_between_direct, ("M721", None)),
    "stalls": Fault(stalls, ("M709", None)),
    "killed, default waits": Fault(killed_between, ("ends", None), blocking=False),
} | ({"on the host": Fault(on_the_host, ("M708", "M504"))} if DEVICE == "cuda" else {})
