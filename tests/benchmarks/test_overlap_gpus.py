"""The benchmark between GPUs, rehearsed over Gloo: every way gives the same result, every cell a row per way."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import maskc
from benchmarks import overlap_gpus, overlap_nodes
from benchmarks.masks import mask_case
from benchmarks.overlap_ways import Cell, Rank, Run, exchanged, gathered
from maskc.runtime.comm import Peer
from tests.dist.conftest import ranks  # noqa: F401
from tests.dist.pool import Pool

CELL = Cell("prefix_lm_document", 256, 4, 2)


def rank_of(group: Any, cell: Cell = CELL) -> Rank:
    peer = Peer.of(group)
    case = mask_case(cell.mask, cell.rows * peer.world, heads=cell.heads)
    spec = maskc.compile(case.mask).bind(nq=case.seqlen, nk=case.seqlen, **case.inputs)
    return Rank(peer, torch.device("cpu"), cell, case, spec)


def ways(rank: int, group: Any) -> float:
    """The largest difference between the baseline that gathers everything and the exchanges of `maskc.run`."""
    made = rank_of(group)
    p = made.plan("zigzag")
    everything = [gathered(made, p), *(exchanged(made, p, s) for s in ("all-gather", "ring", "gated"))]

    def results(run: Run) -> list[Tensor]:
        out, lse = run.forward()
        return [out, lse, *run.backward(out, lse)]

    first, *others = map(results, everything)
    return max((a - b).abs().max().item() for other in others for a, b in zip(first, other, strict=True))


def test_all_ways_are_the_same_attention(ranks: Pool) -> None:  # noqa: F811
    assert max(ranks.run(2, ways)) < 1e-5


def one_cell(rank: int, group: Any) -> list[dict[str, Any]]:
    return overlap_gpus.measure(rank_of(group), list(overlap_gpus.WAYS), 1.0)


def test_a_cell_has_a_row_of_every_way(ranks: Pool) -> None:  # noqa: F811
    rows = ranks.run(2, one_cell)[0]
    assert [r["way"] for r in rows] == list(overlap_gpus.WAYS)
    for r in rows:
        assert r["step_ms"] == pytest.approx(r["forward_ms"] + r["backward_ms"])
        assert r["bytes_backward"] > r["bytes_forward"] > 0
    ours, all_of_it = rows[0], rows[-1]
    assert ours["e_forward"] is not None
    assert ours["same_bits"]
    assert ours["off_all_gather"] < 1e-5
    assert all_of_it["e_forward"] is None
    assert all_of_it["attention_forward_ms"] > 0
    assert all_of_it["bytes_forward"] > ours["bytes_forward"], "pruned"


def nodes(rank: int, group: Any) -> list[dict[str, Any]]:
    with patch.multiple(overlap_nodes, REPEATS=2, MORE=0.0):  # times of hosts never agree
        return list(islice(overlap_nodes.rows([rank], torch.device("cpu"), 128, 2, group), 8))


def test_routing_over_nodes_saves_what_the_plan_says(ranks: Pool) -> None:  # noqa: F811
    zero, one = ranks.run(2, nodes)
    assert zero == one
    assert all(r["same_bits"] for r in zero)
    found = {(r["routing"], r["prune"]): r["bytes_across"] for r in zero}
    assert found["hierarchical", True] < found["hierarchical", False]
    assert found["hierarchical", False] * overlap_nodes.PER_NODE == found["flat", False]
    assert found["hierarchical", True] < found["flat", True] < found["flat", False]


def test_the_grid_starts_with_every_mask() -> None:
    listed = list(overlap_gpus.cells(2))
    assert len(set(listed)) == len(listed)
    assert tuple(c.mask for c in listed[:5]) == overlap_gpus.MASKS
    assert {c.rows for c in listed} == {8192, 16_384, 32_768, 65_536}
    assert {c.heads_kv for c in listed} == {1, 8, 32}
    assert Cell("causal", 8192, 64, 1, 16) in listed


def test_the_file_names_what_it_was_measured_with_and_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "made" / "overlap_gpus.json"
    overlap_gpus.write(out, 2, [{"way": "gated", "step_ms": 1}, {"way": "ring", "step_ms": 1}])
    overlap_gpus.write(out, 2, [{"way": "gated", "step_ms": 2}])
    record = json.loads(out.read_text())
    assert record["rows"] == [{"way": "ring", "step_ms": 1}, {"way": "gated", "step_ms": 2}]
    assert len(record["digest"]) == 64
    assert record["gpus"] == 2
    out.write_text(json.dumps({**record, "digest": "of other sources"}))
    overlap_gpus.write(out, 2, [{"way": "gated", "step_ms": 3}])
    assert json.loads(out.read_text())["rows"] == [{"way": "gated", "step_ms": 3}]


def three(rank: int, group: Any) -> list[dict[str, Any]]:
    return overlap_gpus.measure(rank_of(group), ("gated", "dual-chunk gather"), 1.0)


def test_any_number_of_ranks_is_compared_round_by_round(ranks: Pool) -> None:  # noqa: F811
    found = ranks.run(3, three)
    assert [[r["rounds"] for r in rows] for rows in found] == [[found[0][0]["rounds"]] * 2] * 3, "all ranks end together"
    ours = found[0][0]
    assert ours["world"] == 3
    assert ours["rounds"] % 4 == 0
    for d in ("forward", "backward", "step"):
        value, low, high = ours[f"faster_{d}"]
        assert low <= value <= high
    assert ours["e_forward"] == pytest.approx(1 - ours["beyond_forward_ms"][0] / ours["comm_forward_ms"])
    low, high = ours["e_forward_interval"]
    assert low <= ours["e_forward"] <= high
