"""One call on all ranks against dense fp64, by the rule of `tests.gpu.check`, and the bytes that it sent."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch

import maskc
from maskc.binding.bound import BoundMask
from maskc.codegen.exchange import exchange_source
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.kernels import KERNELS, Request
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import MaskForm, OutDtype
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import comm, hopper
from maskc.runtime.localize import localize
from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.schedule import DIRECT
from tests.gpu import check
from tests.gpu.cases import Case
from tests.gpu.inputs import NAMES, suite_mask
from tests.gpu2.place import world
from tests.gpu2.ways import WAYS as WAYS_OUT
from tests.gpu2.ways import Leaving, leaving

SIZES = (1024, 937, 1300, 2048, 385, 129)
HEADS = ((8, 2), (4, 4), (8, 1))
WAYS: tuple[tuple[str, str, bool], ...] = (
    ("all-gather", "balanced", True),
    ("staged", "zigzag", True),
    ("ring", "balanced", True),
    ("all-gather", "zigzag", False),
    ("staged", "contiguous", True),
    ("all-gather", "contiguous", True),
)
"""(strategy, order, prune)"""
DIRECT_WAYS: tuple[tuple[str, str, bool], ...] = (
    ("gated", "balanced", True),
    ("gated", "zigzag", True),
    ("copy-then-attend", "balanced", True),
    ("gated", "contiguous", True),
    ("sm-copy", "balanced", True),
    ("gated", "balanced", False),
)
"""The same, keys taken out of the other ranks' memory."""


@dataclass(frozen=True)
class GroupCase:
    """A suite mask over n tokens, forward and backward."""

    mask: str
    n: int
    heads: int
    heads_kv: int
    head_dim: int
    batch: int
    strategy: str
    order: str
    prune: bool
    chunk: int
    deterministic: bool
    seed: int

    @property
    def name(self) -> str:
        pruned = "pruned" if self.prune else "unpruned"
        shape = f"{self.batch}x{self.n}/h{self.heads}.{self.heads_kv}/d{self.head_dim}"
        return f"{self.mask}/{self.strategy}/{self.order}/{pruned}/{shape}"

    def leaving(self, rank: int) -> Leaving:
        """Ranks choose for themselves, so all pairs of ways come."""
        return random.Random(f"{self.seed} {rank}").choice(WAYS_OUT)

    def spec(self) -> BoundMask:
        """Bound to inputs on the host; random, equal on all ranks."""
        found = suite_mask(self.mask, self.n, self.n, random.Random(self.seed))
        assert found is not None, self.name
        path, inputs = found
        return maskc.compile(path).bind(nq=self.n, nk=self.n, **inputs)

    def plan(self, spec: BoundMask) -> AttentionPlan:
        return maskc.plan(
            spec,
            world_size=world(),
            order=self.order,  # type: ignore[arg-type]
            chunk=self.chunk,
            prune=self.prune,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
        )


def all_cases() -> list[GroupCase]:
    """Every mask of the suite in every way; all masks come once before one comes again, over and without NCCL in turn."""
    cases = []
    for turn in range(2 * len(WAYS)):
        ways = DIRECT_WAYS if turn % 2 else WAYS
        for i, mask in enumerate(NAMES):
            strategy, order, prune = ways[(i + turn // 2) % len(ways)]
            n = SIZES[(i + 2 * turn) % len(SIZES)]
            n += n % 2 if mask.startswith("20_") else 0  # noisy and clean halves
            heads, heads_kv = HEADS[(i + turn) % len(HEADS)]
            dim, batch = (64 if (i + turn) % 5 == 4 else 128), 1 + (i + turn) % 4 // 3
            chunk = (128, 256, 96)[(i + turn) % 3]
            cases.append(
                GroupCase(mask, n, heads, heads_kv, dim, batch, strategy, order, prune, chunk, turn % 4 > 1, turn * 100 + i)
            )
    return cases


def run_case(case: GroupCase, rank: int, group: Any) -> str:
    """ "" when this rank saw nothing wrong. The whole results come together on every rank; each compares them."""
    spec = case.spec()
    p = case.plan(spec)
    torch.manual_seed(case.seed)
    like = _single(case, spec.heads)
    call = check._operands(like)
    q, k, v = (p.shard(call[n], rank, of=of).clone().requires_grad_() for n, of in (("q", "rows"), ("k", "keys"), ("v", "keys")))
    with comm.count_traffic() as ledger, check.poisoned(), leaving(case.leaving(rank)):
        out, lse = maskc.run(
            spec, q, k, v, group, plan=p, strategy=case.strategy, return_lse=True, deterministic=case.deterministic
        )
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.shard(call["dout"], rank))
    problem = wrong_bytes(case, p, rank, ledger)
    if case.strategy == "gated":
        again = maskc.run(spec, *(x.detach() for x in (q, k, v)), group, plan=p, strategy="copy-then-attend")
        if not torch.equal(again, out):  # type: ignore[arg-type]
            problem = problem or f"gated and gathered are not the same bits on rank {rank}"
    got = {name: p.unshard(x, group) for name, x in (("out", out.detach()), ("dq", dq))}
    got["lse"] = p.unshard(lse.detach(), group, dim=2)
    got |= {name: p.unshard(x, group, of="keys") for name, x in (("dk", dk), ("dv", dv))}
    exact = check.reference(spec.vectors(case.n, case.n, torch.device(check.DEVICE)), call, "bf16")
    return problem or check.compare(got, exact, check.fp32_rounding(call), like)


def wrong_bytes(case: GroupCase, p: AttentionPlan, rank: int, ledger: comm.Ledger) -> str:
    """ "" where forward and backward sent what the plan says."""
    tables = [p.traffic(case.strategy, 0, d, case.batch, 2) for d in ("forward", "backward")]  # type: ignore[arg-type]
    for other in range(p.world):
        found, wanted = ledger.to(other), sum(t[rank][other] for t in tables)
        if other != rank and found != wanted:
            return f"rank {rank} sent {found} bytes to rank {other}, the plan says {wanted}"
    return ""


def _single(case: GroupCase, mask_heads: int) -> Case:
    """The same call on one device, as `tests.gpu` knows it."""
    return Case(
        f"suite:{case.mask}",
        case.n,
        case.n,
        case.batch,
        case.heads,
        case.heads_kv,
        mask_heads,
        case.head_dim,
        "bf16",
        strided=False,
        lse_grad=False,
        deterministic=case.deterministic,
        direction="bwd",
        seed=case.seed,
    )


# ---------------------------------------------------------------- kernels


def compile_for(sources: Iterable[CudaSource]) -> int:
    """Compile what the ranks will need side by side; the number of kernels. Needs no GPU."""
    different = dict.fromkeys((exchange_source(), *sources))
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_cubin, different))
    return len(different)


def sources_of(case: GroupCase) -> Iterator[CudaSource]:
    strategies = (case.strategy, "copy-then-attend") if case.strategy == "gated" else (case.strategy,)
    spec = case.spec()
    yield from sources(spec, case.plan(spec), strategies, case.head_dim, case.deterministic)


def sources(
    spec: BoundMask, p: AttentionPlan, strategies: Sequence[str], head_dim: int, deterministic: bool = False
) -> Iterator[CudaSource]:
    """Of a call by these strategies on every rank, forward and backward."""
    for kernel in KERNELS["prep"](Request(spec.compiled.fn, spec.compiled.program)):
        yield kernel.source
    v = spec.vectors(p.rows.length, p.keys.length)
    for strategy, rank in product(strategies, range(p.world)):
        if strategy in DIRECT:
            columns, gated = [overlap_plan(p, rank).columns], strategy != "copy-then-attend"
        else:
            steps = p.schedule(strategy).steps
            columns, gated = [s.columns[rank] for s in steps if s.columns[rank]], False
        for c in columns:
            form = hopper.mask_form(localize(v, p.rows, p.rows.chunks_of(rank), p.keys, c))
            out: OutDtype = "input" if len(columns) == 1 else "f32"
            yield from _variants(form, head_dim, out, gated, deterministic)


@cache
def _variants(form: MaskForm, head_dim: int, out: OutDtype, gated: bool, deterministic: bool) -> tuple[CudaSource, ...]:
    forward = forward_spec(form, head_dim, "bf16", out)
    backward = select_backward(form, head_dim, "bf16", deterministic=deterministic)
    planned = schedule_spec(form, head_dim)
    schedule = [schedule_source(planned)] if planned.packed else []
    return *schedule, forward_source(replace(forward, gated=gated)), replace(backward, gated=gated).source()


def smaller(case: GroupCase) -> GroupCase:
    """The case for a machine without GPUs."""
    return replace(case, n=64 if case.n % 2 == 0 else 61, chunk=8, head_dim=16, heads=4, heads_kv=min(4, case.heads_kv))
