"""What `maskc plan` prints, and the errors of a plan's parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import maskc
from maskc.binding.bound import BoundMask
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import MaskcError
from maskc.runtime.kernel_tiles import kernel_tiles
from maskc.runtime.layout import Layout, contiguous, even_bounds
from maskc.runtime.localize import localize
from maskc.runtime.plan import plan
from maskc.runtime.plan_report import local_vectors, report
from maskc.runtime.tile_work import TileCosts
from tests.dist.cases import docs


def told(spec: BoundMask | BoundaryVectors, **more: Any) -> str:
    """The report without the digest, which holds the version."""
    return re.sub(r"digest [0-9a-f]{16}", "digest ...", report(spec, plan(spec, **more)))


def test_report(golden: Callable[[str, str], None]) -> None:
    golden("plan.txt", told(docs([3145, 2203, 2844]), world_size=4, nodes=2))
    golden("plan_given.txt", told(docs([4, 8]), world_size=2, chunk=3, assign=[0, 1, 1, 0], heads_kv=1, head_dim=64))


def test_ranks_without_rows_are_one_line() -> None:
    """Three causal rows on ranks 0, 2 and 5 of 40: no line for the others, whatever the section."""
    text = told(docs([3]), world_size=40, chunk=1, assign=[0, 2, 5], heads_kv=1, head_dim=64)
    lines = text.splitlines()
    assert "ranks 1 3-4 6-39 without rows" in lines
    assert "  to ranks 1 3-4 6-39: keys 0-2" in lines
    by_rank = [line.split() for line in lines if re.match(r" {3}\d ", line)]
    assert [fields[0] for fields in by_rank] == ["0", "2", "5"] * 3
    assert by_rank[3:6] == [["0", "-", "256", "B", "256", "B"], ["2", "-", "-", "256", "B"], ["5", "-", "-", "-"]]


def test_a_plan_that_sends_nothing_says_so() -> None:
    text = told(docs([3]), world_size=2, chunk=3, assign=[1])
    assert "dV take the same ways back\n  (nothing)\n" in text
    assert "\nrank 0 without rows\n" in text


def test_links_of_many_ranks_are_summed_per_rank() -> None:
    """Contiguous, one document of 20 rows: rank r sends its row to 19 - r others and receives r rows."""
    text = told(docs([20]), world_size=20, order="contiguous", heads_kv=1, head_dim=4)
    row = 2 * 4 * 2
    lines = text[text.index("rank        sends     receives") :].splitlines()[1:21]
    assert [line.split() for line in lines] == [
        [str(r), *(x for n in (19 - r, r) for x in (str(n * row), "B"))] for r in range(20)
    ]


def test_what_straddling_tiles_cost_is_told() -> None:
    """Two ranks in chunks of 96 rows taken in turn: of 64 rows of a warp group some lie in two chunks; of 384 none do."""
    causal = BoundaryVectors(2048, 2048, 1, 1, True)
    turns = [0, 1] * 11
    text = told(causal, world_size=2, chunk=96, assign=turns)
    assert "tiles straddle chunks of 96 that lie apart; chunks of 384 hold whole tiles, with up to 1152 rows a rank" in text
    found = kernel_tiles(causal, plan(causal, world_size=2, chunk=96, assign=turns))
    assert found is not None
    assert found.forward > 1.05
    assert found.backward > 1.05
    whole = kernel_tiles(causal, plan(causal, world_size=2, chunk=384, assign=[0, 1, 1, 0, 0, 1]))
    assert whole is not None
    assert (whole.forward, whole.backward) == (1, 1)
    assert whole.keys == (1920 + 2048) / 2048  # rank 0 sees no key of chunk 5, rank 1 all
    assert "straddle" not in told(causal, world_size=2, chunk=384, assign=[0, 1, 1, 0, 0, 1])
    assert (
        kernel_tiles(
            BoundaryVectors(2048, 2048, 1, 1, False, ute=torch.full((1, 1, 2048), 2048, dtype=torch.int32)),
            plan(causal, world_size=2),
        )
        is None
    )
    assert kernel_tiles(causal, plan(causal, world_size=2), head_dim=512) is None


def test_reports_of_many_ranks_leave_out_what_takes_long() -> None:
    """300 ranks of 8 chunks in a causal mask: half a million pairs of ranks and chunks."""
    causal = BoundaryVectors(300 * 8 * 128, 300 * 8 * 128, 1, 1, True)
    text = told(causal, world_size=300)
    assert "never sent: " in text
    assert "links, exchanges and predicted times are left out" in text
    assert "predicted step" not in text
    assert text.count("\n") < 330
    short = told(docs([8192]), world_size=4000)  # 3 rows a rank, in two pieces each if contiguous: more than a plan holds
    assert "\ncontiguous" not in short
    assert "\nzigzag" in short


def test_local_vectors_of_batches_heads_and_blocks() -> None:
    lts = torch.tensor([[[2, 4, 4, 4], [4, 4, 4, 4]], [[1, 1, 4, 4], [0, 0, 0, 0]]], dtype=torch.int32)
    v = BoundaryVectors(4, 4, 2, 2, False, lts=lts, blocks=BlockTable(torch.ones(2, 2, 2, 2, dtype=torch.bool), 2, 2))
    lines = local_vectors(v, plan(v, world_size=2, chunk=2, assign=[1, 0])).splitlines()
    assert lines[:7] == [
        "rank 0: rows 2-3 are local rows 0-1",
        "  keys 0, item 0, head 0: lts 0",
        "  keys 1-3, item 0, head 0: lts 2",
        "  keys 0-3, item 0, head 1: lts 2",
        "  keys 0-1, item 1, head 0: lts 0",
        "  keys 2-3, item 1, head 0: lts 2",
        "  keys 0-3, item 1, head 1: lts 0",
    ]
    assert lines[7] == "  block table (2, 2, 1, 2), blocks of 2 rows x 2 keys"
    nothing = BoundaryVectors(4, 4, 1, 1, False)
    assert local_vectors(nothing, plan(nothing, world_size=1)).splitlines()[1] == "  every key: nothing is masked"


# ---------------------------------------------------------------- errors of the parts


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("M701", lambda: Layout(0, (0,), ())),
        ("M702", lambda: Layout(1, (0, 4, 4), (0, 0))),
        ("M702", lambda: Layout(1, (1, 4), (0,))),
        ("M702", lambda: Layout(1, (0, 4), (0, 0))),
        ("M702", lambda: Layout(1, (0, 4), (1,))),
        ("M702", lambda: even_bounds(4, 0)),
        ("M703", lambda: contiguous(4, 2).chunks_of(-1)),
        ("M705", lambda: localize(BoundaryVectors(4, 5, 1, 1, True), contiguous(4, 2), (0,), contiguous(4, 2), (0,))),
        ("M715", lambda: plan([], world_size=2)),
        ("M714", lambda: plan(docs([5000]), world_size=2, chunk=1)),
    ],
)
def test_refused(code: str, make: Callable[[], object]) -> None:
    with pytest.raises(MaskcError) as e:
        make()
    assert e.value.code == code


def test_labels_of_another_batch_are_refused() -> None:
    text = "input doc : segments\nmask m = same(doc)"
    both = maskc.compile_text(text).bind(doc=[maskc.segments(lengths=x) for x in ([5, 3], [2, 6])], nq=8, nk=8)
    p = plan(both, world_size=2)
    for labels in (torch.zeros(3, 8), torch.zeros(8)):
        with pytest.raises(MaskcError, match="M710"):
            p.shift_labels(labels, dim=labels.dim() - 1)


def test_times_that_say_nothing_about_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="more or other samples"):
        TileCosts.fit([(1, n, 4, 1.0 / n) for n in range(1, 9)])


def test_rectangular_masks_across_nodes_are_balanced_too() -> None:
    """Keys stay where they are, so only the rows are dealt out."""
    spec = maskc.compile("std:causal").bind(nq=96, nk=64)
    p = plan(spec, world_size=4, nodes=2, chunk=4)
    assert p.method == "HCC-IPO"
    assert p.keys.owner == contiguous(64, 4, 4).owner
    assert p.imbalance < 1.05
