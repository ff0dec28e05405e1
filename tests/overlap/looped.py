"""Rank 1 of three with gradients of the others in its staging, for tests of what adds them up."""

from __future__ import annotations

from typing import NamedTuple

import torch

from maskc.boundary import BoundaryVectors
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan
from maskc.runtime.overlap_sum import GradientSum
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.transport import KeyShape, Loopback
from tests.dist.cases import Case, vectors

CPU = torch.device("cpu")


class Looped(NamedTuple):
    v: BoundaryVectors
    p: AttentionPlan
    order: OverlapPlan
    link: Loopback
    sums: GradientSum


def looped(case: Case, chunk: int, shape: KeyShape) -> Looped:
    """Staging holds random gradients."""
    v = vectors(case)
    p = plan(v, world_size=3, chunk=chunk)
    order = overlap_plan(p, 1)
    link = Loopback(p.keys, 1, order.sources, shape, pinned=False, lends=order.lends)
    sums = GradientSum(order, p.keys, shape, link, CPU)
    for reader, chunks in order.lends:
        for t in (t for c in chunks for t in link.staged(reader, c)):
            t.normal_()
    return Looped(v, p, order, link, sums)
