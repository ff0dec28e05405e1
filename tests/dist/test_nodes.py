"""Bytes between nodes as they were sent: 2 x 4, 4 x 2 and 3 x 3 ranks over Gloo, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.schedule import Move
from tests.dist.cases import Case, attend, vectors, verify
from tests.dist.pool import Pool

SHAPES = [(2, 4), (4, 2), (3, 3)]
ROW_BYTES = 1 * 16 * 8
"""K and V of one row: one head of 8 + 8 elements, fp64."""


@pytest.fixture(scope="module")
def many() -> Iterator[Pool]:
    pool = Pool((8, 9))
    yield pool
    pool.close()


def case_of(nodes: int, per_node: int, form: str, strategy: str, hierarchical: bool) -> Case:
    switches = {"nodes": nodes, "hierarchical": hierarchical}
    return Case(nodes * per_node, 72, 5, form, chunk=2, heads=(1, 1, 1), strategy=strategy, switches=switches)


def crossed(results: list[dict[str, Any]], per_node: int, kind: str) -> int:
    """Bytes of one kind that went from one node to another."""
    return sum(
        count
        for src, result in enumerate(results)
        for (k, dst), count in result["sent"].items()
        if k == kind and src // per_node != dst // per_node
    )


def rows_wanted(p: AttentionPlan, per_rank: bool) -> int:
    """Rows that come from other nodes, each once per node that needs them, or once per rank."""
    size = p.node_size
    wanted = {
        (r if per_rank else r // size, c) for r in range(p.world) for c in p.needed(r) if p.keys.owner[c] // size != r // size
    }
    return sum(p.keys.size_of(c) for _, c in wanted)


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize(("form", "strategy"), [("lts", "all-gather"), ("lts lte uts ute", "staged")])
def test_a_needed_chunk_crosses_once_per_node(many: Pool, nodes: int, per_node: int, form: str, strategy: str) -> None:
    """Forward and backward K and V once each, dK and dV once: added up inside the node before they cross."""
    case = case_of(nodes, per_node, form, strategy, hierarchical=True)
    v = vectors(case)
    results = many.run(case.world, attend, case, v)
    verify(case, v, results)
    rows = rows_wanted(case.plan(v), per_rank=False)
    assert rows > 0
    assert crossed(results, per_node, "kv") == 2 * rows * ROW_BYTES
    assert crossed(results, per_node, "grad") == rows * ROW_BYTES


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_flat_routes_cross_once_per_rank(many: Pool, nodes: int, per_node: int) -> None:
    case = case_of(nodes, per_node, "lts", "all-gather", hierarchical=False)
    v = vectors(case)
    results = many.run(case.world, attend, case, v)
    verify(case, v, results)
    p = case.plan(v)
    rows = rows_wanted(p, per_rank=True)
    assert rows > rows_wanted(p, per_rank=False), "the case tells the two apart"
    assert crossed(results, per_node, "kv") == 2 * rows * ROW_BYTES
    assert crossed(results, per_node, "grad") == rows * ROW_BYTES


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_a_chunk_that_nobody_in_a_node_needs_never_enters_it(many: Pool, nodes: int, per_node: int) -> None:
    """Documents inside the nodes: no byte crosses."""
    case = case_of(nodes, per_node, "none", "all-gather", hierarchical=True)
    v = vectors(case)
    rows = 72 // nodes
    key = torch.arange(72, dtype=torch.int32)
    ends = ((key // rows + 1) * rows).view(1, 1, 72).contiguous()
    inside = replace(v, lts=ends)
    fixed = replace(case, order="contiguous")
    results = many.run(case.world, attend, fixed, inside)
    verify(fixed, inside, results)
    assert crossed(results, per_node, "kv") == crossed(results, per_node, "grad") == 0
    assert sum(count for r in results for count in r["sent"].values()) > 0


@pytest.mark.parametrize(("nodes", "per_node"), [*SHAPES, (1, 4), (5, 3)])
@pytest.mark.parametrize("hierarchical", [True, False])
def test_overlapped_copies_are_the_moves_that_everybody_else_makes(nodes: int, per_node: int, hierarchical: bool) -> None:
    """The visit order of every rank, with what it carries for neighbours, is the all-gather in another order."""
    for form in ("lts", "lts lte uts ute", "none"):
        case = case_of(nodes, per_node, form, "all-gather", hierarchical)
        p = case.plan(vectors(case))
        copies = []
        for rank in range(p.world):
            mine = overlap_plan(p, rank)
            copies += [Move(s.source, rank, s.chunk) for s in mine.pulls]
            copies += [Move(p.keys.owner[c], rank, c) for c in mine.carried]
        assert sorted(copies) == sorted(p.schedule("all-gather").moves())
