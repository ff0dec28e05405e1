"""One call on two ranks against dense fp64, by the rule of `tests.gpu.check`, and the bytes that it sent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

import maskc
from maskc.binding.bound import BoundMask
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import comm, hopper
from maskc.runtime.localize import localize
from maskc.runtime.plan import AttentionPlan
from tests.gpu import check
from tests.gpu.cases import Case
from tests.gpu.inputs import NAMES, suite_mask

WORLD = 2
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


@dataclass(frozen=True)
class PairCase:
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

    def spec(self) -> BoundMask:
        """Bound to inputs on the host; random, equal on all ranks."""
        found = suite_mask(self.mask, self.n, self.n, random.Random(self.seed))
        assert found is not None, self.name
        path, inputs = found
        return maskc.compile(path).bind(nq=self.n, nk=self.n, **inputs)

    def plan(self, spec: BoundMask) -> AttentionPlan:
        return maskc.plan(
            spec,
            world_size=WORLD,
            order=self.order,  # type: ignore[arg-type]
            chunk=self.chunk,
            prune=self.prune,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
        )


def all_cases() -> list[PairCase]:
    """Every mask of the suite in every way; all masks come round once before a mask comes again."""
    cases = []
    for turn in range(len(WAYS)):
        for i, mask in enumerate(NAMES):
            strategy, order, prune = WAYS[(i + turn) % len(WAYS)]
            n = SIZES[(i + 2 * turn) % len(SIZES)]
            n += n % 2 if mask.startswith("20_") else 0  # noisy and clean halves
            heads, heads_kv = HEADS[(i + turn) % len(HEADS)]
            dim, batch = (64 if (i + turn) % 5 == 4 else 128), 1 + (i + turn) % 4 // 3
            chunk = (128, 256, 96)[(i + turn) % 3]
            cases.append(
                PairCase(mask, n, heads, heads_kv, dim, batch, strategy, order, prune, chunk, turn % 2 == 1, turn * 100 + i)
            )
    return cases


def run_case(case: PairCase, rank: int, group: Any) -> str:
    """ "" when this rank saw nothing wrong. The whole results come together on every rank; each compares them."""
    spec = case.spec()
    p = case.plan(spec)
    torch.manual_seed(case.seed)
    like = _single(case, spec.heads)
    call = check._operands(like)
    q, k, v = (p.shard(call[n], rank, of=of).clone().requires_grad_() for n, of in (("q", "rows"), ("k", "keys"), ("v", "keys")))
    with comm.count_traffic() as ledger, check.poisoned():
        out, lse = maskc.run(
            spec, q, k, v, group, plan=p, strategy=case.strategy, return_lse=True, deterministic=case.deterministic
        )
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.shard(call["dout"], rank))
    told = [p.traffic(case.strategy, 0, d, case.batch, 2)[rank] for d in ("forward", "backward")]  # type: ignore[arg-type]
    wanted_bytes = [sum(both) for both in zip(*told, strict=True)]
    sent = [ledger.to(r) for r in range(WORLD)]
    if sent != wanted_bytes:
        return f"rank {rank} sent {sent} bytes, the plan says {wanted_bytes}"
    got = {name: p.unshard(x, group) for name, x in (("out", out.detach()), ("dq", dq))}
    got["lse"] = p.unshard(lse.detach(), group, dim=2)
    got |= {name: p.unshard(x, group, of="keys") for name, x in (("dk", dk), ("dv", dv))}
    exact = check.reference(spec.vectors(case.n, case.n, torch.device(check.DEVICE)), call, "bf16")
    return check.compare(got, exact, check.fp32_rounding(call), like)


def _single(case: PairCase, mask_heads: int) -> Case:
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


def compile_for(cases: list[PairCase]) -> int:
    """Compile what the ranks will need side by side; the number of variants. Needs no GPU."""
    needed = dict.fromkeys(variant for case in cases for variant in _variants(case))
    sources = []
    for form, dim, single, deterministic in needed:
        spec = forward_spec(form, dim, "bf16", "input" if single else "f32")
        sources += [forward_source(spec), select_backward(form, dim, "bf16", deterministic=deterministic).source()]
        planned = schedule_spec(form, dim)
        if planned.packed:
            sources.append(schedule_source(planned))
    unique = list({s.text: s for s in sources}.values())
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_cubin, unique))
    return len(unique)


def _variants(case: PairCase) -> Iterator[tuple[MaskForm, int, bool, bool]]:
    spec = case.spec()
    p = case.plan(spec)
    v = spec.vectors(case.n, case.n)
    steps = p.schedule(case.strategy).steps
    for rank in range(WORLD):
        columns = [s.columns[rank] for s in steps if s.columns[rank]]
        for c in columns:
            local = localize(v, p.rows, p.rows.chunks_of(rank), p.keys, c)
            yield hopper.mask_form(local), case.head_dim, len(columns) == 1, case.deterministic


def smaller(case: PairCase) -> PairCase:
    """The case for a machine without GPUs."""
    return replace(case, n=64 if case.n % 2 == 0 else 61, chunk=8, head_dim=16, heads=4, heads_kv=min(4, case.heads_kv))
