"""Context parallelism on one GPU: the kernels run every simulated rank of P = 2, 4, 8 in turn and together equal P = 1.

No process group: a rank's keys are taken from the whole sequence as its schedule says, partial results are merged as the
executor merges them, and gradients are added in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import get_args

import torch
from torch import Tensor

import maskc
from benchmarks.kernels import attention, compile_all
from maskc.binding.bound import BoundMask
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import MaskForm, OutDtype
from maskc.runtime import hopper, ops
from maskc.runtime.localize import fold_causal, localize, take
from maskc.runtime.merge import merge
from maskc.runtime.plan import plan
from tests.gpu.inputs import suite_mask

MASKS = (
    "02_causal",
    "05_doc_full",
    "09_doc_prefix",
    "06_share_question",
    "07_global_window",
    "12_random_eviction",
    "28_duo_heads",
    "94_packed_blockwise_causal",
)
STRATEGIES = ("all-gather", "staged", "ring")
HEAD_DIM = 64
LENGTHS = (1024, 937)
LIMIT = 1.5
"""Root mean square of the error against fp64 of the ranks together, in units of the same of one call."""
LARGEST = 3.0
"""The same of the largest error: the last rounding of one element may fall to the other side of a tie, a whole ulp away."""


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    """Every mask on 2, 4 and 8 ranks, with the strategies in turn; a ragged length on uneven ranks."""
    cases: list[tuple[str, Callable[[], str]]] = []
    for i, name in enumerate(MASKS):
        for j, world in enumerate((2, 4, 8)):
            strategy = STRATEGIES[(i + j) % 3]
            n = LENGTHS[(i + j) % 2]
            cases.append((f"context/{name}/{world}/{strategy}/{n}", partial(check, name, world, strategy, n)))
    cases += [(f"context/nan that nobody sees/{s}", partial(unseen, s)) for s in STRATEGIES]
    return cases


def unseen(strategy: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    """Keys that no row of any rank sees may hold NaN; keys that only other ranks' rows see lie in the same tiles."""
    n = 800
    spec = documents(n)
    if device == "cuda":
        list(map(compiled, forms(spec, n)))
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, h, HEAD_DIM, generator=g).to(dtype).to(device) for h in (4, 2, 2, 4)]
    found = []
    for tail in (0.0, torch.nan):
        for t in whole[:3]:
            t[:, 710:] = tail
        found.append(in_turn(spec, whole, 4, strategy))
    for label, clean, dirty in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        if label != "lse" and not bool(torch.isfinite(dirty).all()):
            return f"{label} is not finite"
        if label in ("out", "lse") and not torch.equal(clean, dirty):
            return f"{label} depends on what nobody sees"
    return ""


def documents(n: int) -> BoundMask:
    """Three causal documents, then rows that belong to none."""
    return maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[300, 333, 77]), nq=n, nk=n)


def check(name: str, world: int, strategy: str, n: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    """ "" when the ranks together are as near to fp64 as one call is, else the tensor that is not."""
    found = suite_mask(name, n, n, random.Random(7))
    assert found is not None
    path, inputs = found
    spec = maskc.compile(path).bind(nq=n, nk=n, **inputs)
    g = torch.Generator().manual_seed(0)
    heads, heads_kv, dim = 4, 2, HEAD_DIM
    if device == "cuda":
        list(map(compiled, forms(spec, n)))
    whole = [torch.randn(1, n, h, dim, generator=g).to(dtype) for h in (heads, heads_kv, heads_kv, heads)]
    truth = one_call(spec, [t.double() for t in whole])
    on_device = [t.to(device) for t in whole]
    alone = one_call(spec, on_device)
    ranks = in_turn(spec, on_device, world, strategy)
    for label, exact, one, many in zip(("out", "lse", "dq", "dk", "dv"), truth, alone, ranks, strict=True):
        finite = torch.isfinite(exact)
        if not torch.equal(torch.isfinite(many.cpu()), finite):
            return f"{label} is finite elsewhere"
        errors, floors = ((x.cpu().double() - exact)[finite] for x in (many, one))
        for what, limit, size in (
            ("rms", LIMIT, lambda e: e.square().mean().sqrt()),
            ("largest", LARGEST, lambda e: e.abs().max()),
        ):
            error, floor = size(errors).item(), size(floors).item()
            if not error <= limit * floor:
                return f"{label}: {what} error {error:.2e} from fp64, one call {floor:.2e}"
    return ""


def sources() -> Iterator[CudaSource]:
    """Every kernel of these cases, for whoever compiles ahead."""
    made = [suite_mask(name, LENGTHS[0], LENGTHS[0], random.Random(7)) for name in MASKS]
    specs = [maskc.compile(path).bind(nq=LENGTHS[0], nk=LENGTHS[0], **inputs) for path, inputs in filter(None, made)]
    for form in {form for spec in (*specs, documents(LENGTHS[0])) for form in forms(spec, LENGTHS[0])}:
        yield from kernels(form)


def forms(spec: BoundMask, n: int) -> set[MaskForm]:
    """Of the whole mask and of its localized vectors."""
    whole = spec.vectors(n, n)
    return {hopper.mask_form(whole), hopper.mask_form(fold_causal(whole))}


def kernels(form: MaskForm) -> tuple[CudaSource, ...]:
    return attention(form, HEAD_DIM, outs=get_args(OutDtype))


@cache
def compiled(form: MaskForm) -> None:
    """Side by side where nobody has compiled ahead; once per form and process."""
    compile_all(kernels(form))


def one_call(spec: BoundMask, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    vectors = spec.vectors(q.shape[1], k.shape[1], q.device)
    scale = q.shape[3] ** -0.5
    out, lse = ops.forward(vectors, q, k, v, scale)
    return out, lse, *ops.backward(vectors, q, k, v, out, lse, dout, None, scale)


def in_turn(spec: BoundMask, tensors: list[Tensor], world: int, strategy: str) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of the whole sequence from every rank's local calls."""
    q, k, v, dout = tensors
    n, scale = q.shape[1], q.shape[3] ** -0.5
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    vectors = spec.vectors(n, n, q.device)
    p = plan(spec, world_size=world, nq=n, nk=n, chunk=128)
    steps = p.schedule(strategy).steps
    out, dq = torch.empty_like(dout), torch.zeros(q.shape, dtype=acc, device=q.device)
    lse = torch.empty(1, q.shape[2], n, dtype=acc, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=q.device) for x in (k, v))
    for rank in range(world):
        chunks = p.rows.chunks_of(rank)
        if not chunks:
            continue
        rows = torch.cat([torch.arange(*r, device=q.device) for r in p.rows.ranges(chunks)])
        queries, grads = q[:, rows], dout[:, rows]
        calls = []
        total = None
        for step in steps:
            if columns := step.columns[rank]:
                ranges = p.keys.ranges(columns)
                local = localize(vectors, p.rows, chunks, p.keys, columns, q.device)
                calls.append((local, take(k, ranges, 1), take(v, ranges, 1), ranges))
                part = ops.forward(local, queries, *calls[-1][1:3], scale, out_dtype=acc)
                total = part if total is None else merge(total, part)
        assert total is not None
        mine, norm = total[0].to(q.dtype), total[1]
        out[:, rows], lse[:, :, rows] = mine, norm.to(acc)
        for local, keys, values, ranges in calls:
            parts = ops.backward(local, queries, keys, values, mine, norm, grads, None, scale, grad_dtype=acc)
            dq[:, rows] += parts[0]
            at = torch.cat([torch.arange(*r, device=q.device) for r in ranges])
            dk[:, at] += parts[1]
            dv[:, at] += parts[2]
    return out, lse, dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
