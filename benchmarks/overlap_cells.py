"""The cells of benchmarks/overlap.py: which masks, lengths, heads, ranks and links, their plans, and the rank looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.masks import mask_case, vectors_of
from maskc.boundary import BoundaryVectors
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan, plan_visits
from maskc.runtime.plan import AttentionPlan, plan
from maskc.runtime.plan_arguments import Order

MASKS = ("causal", "causal_document", "prefix_lm_document", "share_question", "sliding_window")
HEAD_DIM = 128
LINK_RATE = 50e9
"""Bytes per second of pinned host memory, as the model and the order of the backward's work expect it."""


@dataclass(frozen=True)
class Cell:
    """link: copies of every chunk; 1 is the link as it is, 2 one of half its rate."""

    mask: str
    seqlen: int
    heads: int
    heads_kv: int
    world: int
    link: int

    def __str__(self) -> str:
        return f"{self.mask:20} S={self.seqlen:6} Hq={self.heads} Hk={self.heads_kv:2} P={self.world} link/{self.link}"


def cells() -> Iterator[Cell]:
    """The grid, what says most first: the time may not reach for all of it."""
    paper = (65_536, 64, 1, 8, 1)  # 8192 rows a device, 64 query heads on one key head
    sizes = [(32_768, 32, 32, 2, 1), (65_536, 32, 8, 8, 1), (65_536, 32, 32, 2, 1), (131_072, 32, 8, 2, 2), paper]
    sizes += [(32_768, 32, 8, 8, 1), (65_536, 32, 8, 8, 2), (131_072, 32, 8, 8, 1), (65_536, 32, 1, 8, 2), (262_144, 32, 8, 8, 1)]
    slow = [c for size in sizes for c in (Cell("causal", *size),) if c.seqlen // c.world >= 1 << 15]
    yield from (c for size in sizes for m in MASKS if (c := Cell(m, *size)) not in slow)
    yield from slow


@dataclass(frozen=True)
class Problem:
    """A cell's mask, plan, and the rank that is looked at."""

    cell: Cell
    v: BoundaryVectors
    p: AttentionPlan
    order: OverlapPlan


def problem(cell: Cell, order: Order = "balanced") -> Problem:
    case = mask_case(cell.mask, cell.seqlen, heads=cell.heads)
    v = vectors_of(case)
    chunk = min(2048, max(128, cell.seqlen // cell.world // 8))
    p = plan(
        v,
        world_size=cell.world,
        chunk=chunk,
        order=order,
        heads=cell.heads,
        heads_kv=cell.heads_kv,
        head_dim=HEAD_DIM,
    )
    orders = [overlap_plan(p, r) for r in range(cell.world)]
    return Problem(cell, v, p, max(orders, key=lambda o: sum(s.rows for s in o.pulls)))


def everything_gathered(cell: Cell) -> tuple[Problem, OverlapPlan]:
    """Dual-chunk assignment; every rank gets every chunk."""
    made = problem(cell, "zigzag")
    everything = [frozenset(range(made.p.keys.chunk_count))] * cell.world
    return made, plan_visits(made.p.keys, everything, made.order.rank, cell.world)
