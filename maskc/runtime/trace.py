"""What the roles of the forward kernel do when: a run of its trace variant, as a Chrome trace and as shares of time.

An event starts a state of a role (`STATES`), which lasts until the role's next event. Times come from the SM clock; the
global timer is read at both ends of a role, which turns cycles into nanoseconds and lines the CTAs up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.spec import STATES, Dtype, KernelSpec, MaskForm
from maskc.runtime import hopper

ROLES = ("KV Index Generator", "KV Loader", "MMA Consumer 0", "MMA Consumer 1", "MMA Consumer 2")
_END = STATES.index("end")


@dataclass(frozen=True, slots=True)
class Interval:
    """A role of a CTA in one state; start and length in nanoseconds of the global timer. at: work item, block or Q block."""

    cta: int
    role: int
    state: str
    start: float
    length: float
    at: int


def trace_spec(form: MaskForm, head_dim: int, dtype: Dtype, events: int = 4096) -> KernelSpec:
    """The default forward variant of a mask form, with room for so many events of each role."""
    return replace(forward_spec(form, head_dim, dtype), trace=events)


def record(v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor, val: torch.Tensor, scale: float) -> torch.Tensor:
    """Run the trace variant, after one run to warm up; events int64 [CTAs, roles, events, 2] on the CPU.

    A role that has more events than there is room for stops recording; it then has no end and is left out.
    """
    spec = trace_spec(hopper.mask_form(v), q.shape[3], hopper.DTYPES[q.dtype])
    shape = (hopper.multiprocessors(q.device), 2 + spec.warp_groups, spec.trace, 2)
    tables = hopper.schedule_for(spec, v)
    for _ in range(2):
        lines = torch.zeros(shape, dtype=torch.int64, device=q.device)
        hopper.forward_with(spec, v, q, k, val, scale, tables, trace=lines)
    return lines.cpu()


def intervals(lines: torch.Tensor) -> Iterator[Interval]:
    """The states of every role that recorded its end, in the order in which it went through them."""
    for cta, roles in enumerate(lines.tolist()):
        for role, line in enumerate(roles):
            (clock0, time0), *events = line
            ends = next((i for i, (_, word) in enumerate(events) if word >> 32 == _END), None)
            if ends is None:
                continue
            clock1, word = events[ends]
            elapsed = (word - time0) & 0xFFFFFFFF  # the end holds the low half of the global timer
            rate = elapsed / max(1, clock1 - clock0)
            for (clock, word), (following, _) in pairwise(events[: ends + 1]):
                start = time0 + (clock - clock0) * rate
                yield Interval(cta, role, STATES[word >> 32], start, (following - clock) * rate, word & 0xFFFFFFFF)


def shares(lines: torch.Tensor) -> dict[str, dict[str, float]]:
    """Per role the share of its time in each state, over all CTAs; consumers together."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in intervals(lines):
        spent[ROLES[min(one.role, 2)].removesuffix(" 0")][one.state] += one.length
    return {role: {state: t / sum(times.values()) for state, t in times.items()} for role, times in spent.items()}


def write_chrome(lines: torch.Tensor, path: Path) -> None:
    """A file for chrome://tracing or Perfetto: one process per CTA, one thread per role."""
    found = list(intervals(lines))
    first = min((one.start for one in found), default=0.0)
    names = [
        {"name": "thread_name", "ph": "M", "pid": cta, "tid": role, "args": {"name": ROLES[role]}}
        for cta, role in sorted({(one.cta, one.role) for one in found})
    ]
    spans = [
        {
            "name": one.state,
            "ph": "X",
            "ts": (one.start - first) / 1e3,
            "dur": one.length / 1e3,
            "pid": one.cta,
            "tid": one.role,
            "args": {"at": one.at},
        }
        for one in found
    ]
    path.write_text(json.dumps({"traceEvents": [*names, *spans], "displayTimeUnit": "ns"}) + "\n", encoding="utf-8")
