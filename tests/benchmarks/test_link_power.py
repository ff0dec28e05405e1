"""Attention beside small copies, rehearsed over Gloo without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from benchmarks import link_power
from benchmarks.link_power import ALONE, ROUNDS, Traffic, copies, measure
from benchmarks.masks import mask_case
from benchmarks.nvml import Field
from benchmarks.overlap_ways import Cell, Rank
from maskc.runtime.comm import Peer
from tests.dist.conftest import ranks  # noqa: F401
from tests.dist.pool import Pool

ONE_WAY = Traffic("little", 64, 1.0, 1)


def rows(rank: int, group: Any) -> list[dict[str, Any]]:
    link_power.WARM = 0.1
    peer, cell = Peer.of(group), Cell("causal", 256, 4, 2)
    case = mask_case(cell.mask, cell.rows * peer.world, heads=cell.heads)
    made = Rank(peer, torch.device("cpu"), cell, case, case.spec())
    buffers = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    return list(measure(made, [ALONE, ONE_WAY], buffers, 0.1))


def test_every_kind_of_traffic_has_a_row_a_round_and_only_its_senders_copy(ranks: Pool) -> None:  # noqa: F811
    zero, one = ranks.run(2, rows)
    assert zero == one
    kinds = [t.name for t in (ALONE, ONE_WAY)]
    assert [(r["name"], r["round"]) for r in zero] == [(t, i) for i in range(ROUNDS) for t in (kinds, kinds[::-1])[i % 2]]
    for r in zero:
        assert [bool(each["copies"]) for each in r["ranks"]] == [r["senders"] > 0, False]
        assert all(each["ms"] > 0 for each in r["ranks"])


def test_copies_bring_bytes_and_end_with_the_block() -> None:
    mine, theirs = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with copies(Traffic("half", 32, 0.1, 1), mine, theirs) as times:
        while len(times) < 3:
            pass
    made = len(times)
    assert theirs.tolist() == [*range(32), *[0] * 32]
    assert made == len(times)
    assert sorted(times) == times


def test_fields_lie_as_in_the_header_of_nvml() -> None:
    """Two unsigned ints, two long longs, two enums, a union of 8 bytes."""
    assert ctypes.sizeof(Field) == 40
    assert [getattr(Field, name).offset for name, _ in Field._fields_] == [0, 4, 8, 16, 24, 28, 32]
