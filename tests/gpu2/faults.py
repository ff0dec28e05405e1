"""Rank 1 disagrees, refuses, dies or stalls: what the others must get, and in what time."""

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
from tests.gpu2 import cases, place
from tests.gpu2.ways import Leaving

DOC = "input doc : segments\nmask doc_causal = same(doc) and k <= q"
GROUP_SECONDS = 6.0
"""Timeout of the group in these runs."""
LATEST = 2.5 * GROUP_SECONDS
"""By when a rank must have its error: a wait ends with the group's timeout, what stands behind one on a shared queue half a
timeout and a second later, when the link looks after it; and there are calls before."""
HEAD_DIM = 64


@dataclass(frozen=True)
class Fault:
    """codes: what rank 1 must raise, behind what the others must; None where it is not there any more. blocking: torch's waits
    raise. latest: seconds by which a rank must have its error. ways: likewise, by which gradients leave, if between GPUs."""

    act: Callable[[int, Any], None]
    codes: tuple[str | None, str | None]
    blocking: bool = True
    latest: float = LATEST
    ways: tuple[Leaving, Leaving] = ("given", "given")

    def code(self, rank: int) -> str | None:
        return self.codes[rank == 1]

    def way(self, rank: int) -> Leaving:
        return self.ways[rank == 1]


def call(rank: int, group: Any, lengths: list[int], strategy: str = "all-gather", q: Any = None) -> torch.Tensor:
    n = sum(lengths)
    spec = maskc.compile_text(DOC).bind(doc=maskc.segments(lengths=lengths), nq=n, nk=n)
    p = maskc.plan(spec, group=group, chunk=128, order="zigzag")
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, 2, HEAD_DIM, generator=g).bfloat16().to(place.device()) for _ in range(3)]
    mine = [p.shard(t, rank).clone().requires_grad_() for t in whole]
    out = maskc.run(spec, mine[0] if q is None else q, mine[1], mine[2], group, plan=p, strategy=strategy)
    assert isinstance(out, torch.Tensor)
    return out


def batch(first: int = 300) -> list[int]:
    """Two documents, of which the first has so many rows."""
    return [first, 512 * place.world() - first]


def sources() -> Iterator[CudaSource]:
    for lengths in ([sum(batch())], batch()):
        spec = maskc.compile_text(DOC).bind(doc=maskc.segments(lengths=lengths), nq=sum(lengths), nk=sum(lengths))
        p = maskc.plan(spec, world_size=place.world(), chunk=128, order="zigzag")
        yield from cases.sources(spec, p, ("all-gather", "gated"), HEAD_DIM)


def settle() -> None:
    if place.gpus():
        torch.cuda.synchronize()


def warm(rank: int, group: Any) -> None:
    """Kernels are compiled and the ranks connected, so that the time of a fault is its own. Not of the same batch: on one
    that they have agreed on ranks do not compare again."""
    for strategy, lengths in product(("all-gather", "gated"), ([sum(batch())], batch(400))):
        call(rank, group, lengths, strategy).float().sum().backward()
    settle()


def other_documents(rank: int, group: Any) -> None:
    call(rank, group, batch(300 + (rank == 1)))


def other_documents_direct(rank: int, group: Any) -> None:
    call(rank, group, batch(300 + (rank == 1)), "gated")


def other_strategy(rank: int, group: Any) -> None:
    call(rank, group, batch(), "staged" if rank == 1 else "ring")


def refuses(rank: int, group: Any) -> None:
    wrong = torch.zeros(1, 3, 2, HEAD_DIM, device=place.device(), dtype=torch.bfloat16)
    call(rank, group, batch(), q=wrong if rank == 1 else None)


def no_tensor(rank: int, group: Any) -> None:
    call(rank, group, batch(), q="q" if rank == 1 else None)


def on_the_host(rank: int, group: Any) -> None:
    """Tensors where the group cannot send from."""
    n = 256 * place.world()
    spec = maskc.compile("std:causal").bind(nq=n, nk=n)
    x = torch.zeros(1, 256, 2, HEAD_DIM, device="cpu" if rank == 1 else place.device(), dtype=torch.bfloat16)
    maskc.run(spec, x, x, x, group)


def killed_before(rank: int, group: Any) -> None:
    if rank == 1:
        os._exit(1)
    call(rank, group, batch())


def killed_before_direct(rank: int, group: Any) -> None:
    """Of a batch that the ranks have agreed on, so that no host waits for the other one."""
    if rank == 1:
        os._exit(1)
    call(rank, group, batch(400), "gated")
    settle()
    call(rank, group, batch(400), "gated")


def killed_between(rank: int, group: Any) -> None:
    out = call(rank, group, batch())
    if rank == 1:
        os._exit(1)
    out.float().sum().backward()


def killed_between_direct(rank: int, group: Any) -> None:
    """No host waits in the step: gradients become NaN in time, and the next call raises."""
    out = call(rank, group, batch(), "gated")
    settle()
    if rank == 1:
        os._exit(1)
    out.float().sum().backward()
    settle()
    call(rank, group, batch(), "gated")


def stalls(rank: int, group: Any) -> None:
    if rank == 1:
        time.sleep(3 * GROUP_SECONDS)
        os._exit(1)
    call(rank, group, batch())


def stalls_direct(rank: int, group: Any) -> None:
    """Rank 1 goes on when the others have given up, and must hear of it."""
    out = call(rank, group, batch(), "gated")
    settle()
    if rank == 1:
        time.sleep(LATEST)
    out.float().sum().backward()
    settle()
    call(rank, group, batch(), "gated")


def not_allowed(rank: int, group: Any) -> None:
    """Without torch's leave ranks do not share memory of one GPU; more of it is asked for here."""
    os.environ.pop(place.LEAVE)
    call(rank, group, [2048 * place.world()], "gated")


FAULTS = {
    "other documents": Fault(other_documents, ("M708", "M708")),
    "other documents, direct": Fault(other_documents_direct, ("M708", "M708")),
    "other strategy": Fault(other_strategy, ("M708", "M708")),
    "refuses": Fault(refuses, ("M708", "M710")),
    "no tensor": Fault(no_tensor, ("M708", "M511")),
    "killed before": Fault(killed_before, ("M709", None)),
    "killed before, direct": Fault(killed_before_direct, ("M721", None)),
    "killed between": Fault(killed_between, ("M709", None)),
    "killed between, direct": Fault(killed_between_direct, ("M721", None)),
    "killed between, at once": Fault(killed_between_direct, ("M721", None), ways=("at once", "at once")),
    "stalls": Fault(stalls, ("M709", None)),
    "stalls, direct": Fault(stalls_direct, ("M721", "M721"), latest=LATEST + GROUP_SECONDS),
    "stalls, at once": Fault(stalls_direct, ("M721", "M721"), latest=LATEST + GROUP_SECONDS, ways=("given", "at once")),
    "killed, default waits": Fault(killed_between, ("ends", None), blocking=False),
    "on the host": Fault(on_the_host, ("M708", "M504")),
    "one GPU": Fault(not_allowed, ("M723", "M723")),
}


def names() -> list[str]:
    """Those that there are in this place: Gloo, for one, sends tensors of the host, too."""
    here = {"on the host": place.backend() == "nccl", "one GPU": place.shared()}
    return [name for name in FAULTS if here.get(name, True)]
