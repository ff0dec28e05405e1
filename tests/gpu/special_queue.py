"""Forward kernel, its debug variants: queues as the loader consumed them against their mirror, dealing orders, the trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

import torch

import maskc
from benchmarks.kernels import variant
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import KernelSpec, MaskForm, QueueSource, Scheduler
from maskc.runtime import hopper, trace
from tests.codegen.mirror import KvIndex
from tests.gpu.forward import KEY, SCALE, Tensors, columns, global_window, operands, verify
from tests.gpu.inputs import FORMS, SUITE, random_vectors, suite_mask

SOURCES: tuple[QueueSource, ...] = get_args(QueueSource)
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)
NAMES = tuple(sorted(p.stem for p in SUITE.glob("*.mask") if not p.stem.startswith("9")))


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *(
            (f"queue/{name}/{source}", partial(_suite_queue if name in NAMES else _form_queue, name, source))
            for name, form in _forms().items()
            for source in _sources_of(form)
        ),
        *((f"queue/order/{s}", partial(_scheduler, s)) for s in SCHEDULERS),
        ("trace", _trace),
    ]


def sources() -> Iterator[CudaSource]:
    specs = {_recording(form, source) for form in _forms().values() for source in _sources_of(form)}
    dealt = forward_spec(MaskForm(lts=True, lte=True, uts=True, ute=True), 128, "bf16")
    specs |= {replace(dealt, scheduler=scheduler) for scheduler in SCHEDULERS}
    for spec in specs | {trace.trace_spec(MaskForm(causal=True, lts=True), 128, "bf16")}:
        yield from variant(spec)


@cache
def _forms() -> dict[str, MaskForm]:
    """Of the masks of the suite, then of random vectors, by name."""
    made = {name: suite_mask(name, 64, 64, random.Random(3)) for name in NAMES}
    masks = {n: maskc.compile(str(m[0])).bind(nq=64, nk=64, **m[1]).vectors() for n, m in made.items() if m is not None}
    masks |= {form: random_vectors(form, 64, 64, 1, 1, 5, "cpu") for form in FORMS}
    return {name: hopper.mask_form(v) for name, v in masks.items()}


def _sources_of(form: MaskForm) -> tuple[QueueSource, ...]:
    """A mask without data has no schedule."""
    return SOURCES[:1] if form.closed else SOURCES


def _recording(form: MaskForm, source: QueueSource) -> KernelSpec:
    return replace(forward_spec(form, 128, "bf16"), record_queue=True, queue=source)


# ---------------------------------------------------------------- the queue as the loader consumed it


def _recorded(v: BoundaryVectors, spec: KernelSpec, qkv: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, val = qkv
    blocks = (-(-v.nq // spec.block_q), -(-v.nk // spec.block_kv))
    record = torch.zeros(q.shape[0], q.shape[2], blocks[0], 1 + blocks[1], dtype=torch.int32, device="cuda")
    out, lse = hopper.forward_with(spec, v, q, k, val, SCALE, None, record)
    return record.cpu(), out, lse


def _queue(v: BoundaryVectors, source: QueueSource, heads: int) -> str:
    qkv = operands(v.batch, v.nq, v.nk, heads, heads)
    spec = _recording(hopper.mask_form(v), source)
    record, out, lse = _recorded(v, spec, qkv)
    for b in range(v.batch):
        for h in range(heads):
            m = h // (heads // v.heads)
            index = _kv_index(spec, v, b, m)
            for i in range(record.shape[2]):
                line = record[b, h, i].tolist()
                got = [((x & 0xFFFFFFFF) >> spec.tag_bits, x & (1 << spec.tag_bits) - 1) for x in line[1 : 1 + line[0]]]
                wanted = index.queue(i)
                if got != wanted:
                    return f"item {b} head {h} Q block {i}: {got[:8]} instead of {wanted[:8]}"
    return verify(v, qkv, out, lse)


def _kv_index(spec: KernelSpec, v: BoundaryVectors, item: int, head: int) -> KvIndex:
    def row(t: torch.Tensor) -> Any:
        return t[item % t.shape[0], head % t.shape[1]].tolist()

    named = {n: row(t) for n, t in zip(("lts", "lte", "uts", "ute", "diag"), v.tensors, strict=True) if t is not None}
    return KvIndex(spec, v.nq, v.nk, named, None if v.blocks is None else row(v.blocks.keep))


def _suite_queue(name: str, source: QueueSource) -> str:
    n = 1500
    made = suite_mask(name, n, n, random.Random(3))
    if made is None:
        return "the mask has no such shape"
    bound = maskc.compile(str(made[0])).bind(nq=n, nk=n, **made[1])
    v = bound.vectors(device=torch.device("cuda"))
    return _queue(v, source, max(2, v.heads))


def _form_queue(form: str, source: QueueSource) -> str:
    return _queue(random_vectors(form, 1100, 1300, 2, 2, 5, "cuda"), source, 4)


def _scheduler(scheduler: Scheduler) -> str:
    """The first rows of a global window visit everything: giants beside short rows."""
    v = global_window(6000, 200)
    qkv = operands(1, v.nq, v.nk, 14, 2)
    spec = replace(forward_spec(hopper.mask_form(v), 128, "bf16"), scheduler=scheduler)
    out, lse = hopper.forward_with(spec, v, *qkv, SCALE)
    out.fill_(math.nan)
    out, lse = hopper.forward_with(spec, v, *qkv, SCALE)
    return verify(v, qkv, out, lse)


# ---------------------------------------------------------------- what its roles did when


def _trace() -> str:
    """Every role of every CTA comes to its end, in order, and the index generator walks each work item once."""
    v = columns(3000, causal=1, lts=(KEY[:3000] // 700 + 1).clamp(max=4) * 700 + 200)
    found = list(trace.intervals(trace.record(v, *operands(1, 3000, 3000, 8, 2), SCALE)))
    spec = trace.trace_spec(hopper.mask_form(v), 128, "bf16")
    if any(one.length < 0 for one in found):
        return "time runs backwards"
    walked = sorted(one.at for one in found if one.role == 0 and one.state == "index")
    if walked != list(range(-(-v.nq // spec.block_q) * 8)):
        return f"work items {walked[:10]}..., {len(walked)} in all"
    roles = {(one.cta, one.role) for one in found}
    return "" if len(roles) == (2 + spec.warp_groups) * len({cta for cta, _ in roles}) else "a role is missing"
