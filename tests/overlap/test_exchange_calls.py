"""What the kernels around attention are told: tables as their structs have them, sizes in the units that they count in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from maskc.codegen.exchange import FILL_RUNS
from maskc.runtime import exchange
from maskc.runtime.exchange import ALIGNMENT, LONE, TILE_ROWS, Added, Addend, Lent, SumTable

CPU = torch.device("cpu")


@dataclass
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    body: Any


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    seen: list[Launch] = []

    def launch(kernel: str, grid: Any, threads: int, arguments: Any, **_: object) -> None:
        seen.append(Launch(kernel, grid, type(arguments.body).from_buffer_copy(arguments.body)))

    monkeypatch.setattr(exchange, "launch", launch)
    monkeypatch.setattr(exchange, "_kernel", lambda name: name)
    return seen


def test_tables_of_one_copy_begin_at_whole_lines() -> None:
    given = [np.arange(n, dtype=np.uint8) for n in (5, ALIGNMENT, 1, ALIGNMENT + 1)]
    there = exchange.on_device(CPU, *given)
    starts = [t.storage_offset() for t in there]
    assert starts == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
    assert all(t.numpy().tolist() == g.tolist() for t, g in zip(there, given, strict=True))


def lent(number: int) -> Lent:
    return Lent(*range(7 * number, 7 * number + 7))


def test_a_key_tile_finds_what_others_have_of_it() -> None:
    """The number of the first and how many; LONE where that does not lie in one piece."""
    tiles = [[lent(0), lent(1)], None, [], [lent(2)]]
    counts, places = exchange.lent_table(tiles, CPU)
    words = counts.numpy().view(np.uint32).tolist()
    rows = places.numpy().view(exchange._LENT)
    assert [(w & 0xFFFF, w >> 16) for w in words if w >> 16 != LONE] == [(0, 2), (2, 0), (2, 1)]
    assert words[1] >> 16 == LONE
    assert [tuple(int(x) for x in row) for row in rows] == [tuple(lent(i)) for i in range(3)]


def test_places_of_others_are_numbered_by_sixteen_bits() -> None:
    exchange.lent_table([[lent(0)] * 0xFFFF], CPU)
    with pytest.raises(ValueError, match="65536 places"):
        exchange.lent_table([[lent(0)] * 0x10000], CPU)


def addend(rows: int, own: int | None = 0) -> Addend:
    return Addend(0, 0, 64, own, rows, 64, ())


@pytest.mark.parametrize(("rows", "blocks"), [((5, 300), 3), ((TILE_ROWS,), 1), ((TILE_ROWS + 1,), 2), ((100_000,) * 300, 3)])
def test_the_longest_piece_settles_how_many_share_one(launches: list[Launch], rows: tuple[int, ...], blocks: int) -> None:
    """A CTA for each tile of it, but no more than about a thousand in all."""
    table, x = SumTable.of([addend(n) for n in rows], CPU), torch.zeros(1, 4)
    exchange.sum_gradients(table, (x, x), (x, x))
    assert launches[-1].grid == (blocks, len(rows), 1)


def test_tiles_are_those_of_the_kernel_that_added_some(launches: list[Launch]) -> None:
    table, x = SumTable.of([addend(300)], CPU), torch.zeros(1, 4)
    exchange.sum_gradients(table, (x, x), (x, x), Added(torch.zeros(6, 9, dtype=torch.int32), (1 << 32) + 5, 4, 64))
    assert launches[-1].grid == (5, 1, 1)
    body = launches[-1].body
    assert (body.tiles, body.epoch, body.own_tile, body.tile_rows) == (9, 5, 4, 64)


def test_where_there_are_no_rows_nothing_is_added_up(launches: list[Launch]) -> None:
    x = torch.zeros(1, 4)
    for addends in ([], [addend(0)]):
        exchange.sum_gradients(SumTable.of(addends, CPU), (x, x), (x, x))
    assert not launches


def test_all_of_a_result_is_spoilt_where_any_rank_has_failed(launches: list[Launch]) -> None:
    """Counted in words of four bytes; the words of all ranks are looked at."""
    results, failed = (torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(5, 4)), torch.zeros(7, dtype=torch.int32)
    exchange.spoil(results, failed)
    body = launches[-1].body
    assert list(body.words) == [t.data_ptr() for t in results]
    assert list(body.count) == [12, 20]
    assert (body.failed, body.ranks) == (failed.data_ptr(), 7)
    exchange.spoil(results[:1], failed)
    assert list(launches[-1].body.count) == [12, 0]


def test_rows_are_filled_by_units_of_sixteen_bytes(launches: list[Launch]) -> None:
    """Runs by as many as a launch takes."""
    own = tuple(torch.zeros(2, 900, 3, dim, dtype=torch.bfloat16) for dim in (64, 32))
    into = tuple(torch.zeros(3, 900, 2, dim, dtype=torch.bfloat16) for dim in (64, 32))
    runs = [(10 * i, slice(7 * i, 7 * i + i % 5 + 1)) for i in range(FILL_RUNS + 2)]
    exchange.fill(own, into, runs, 8)  # type: ignore[arg-type]
    filled = []
    for one in launches:
        body = one.body
        assert one.grid == (8, 1, 1)
        assert (list(body.units), body.batch, body.heads) == ([8, 4], 2, 3)
        assert list(body.row_stride) == [2 * t.stride(1) for t in own]
        assert list(body.into_head) == [2 * t.stride(0) for t in into]
        filled += [(body.place[i], slice(body.first[i], body.first[i] + body.rows[i])) for i in range(body.runs)]
    assert filled == runs


def test_copies_of_a_slow_link_are_made_several_times(launches: list[Launch]) -> None:
    into, source = torch.zeros(6, 4), torch.zeros(6, 4)
    table = exchange.copy_table([(into, source)], CPU)
    row = table.numpy().view(exchange._PART)[0]
    assert (int(row["into"]), int(row["source"]), int(row["bytes"])) == (into.data_ptr(), source.data_ptr(), 96)
    exchange.copy_chunks(table, torch.zeros(3, dtype=torch.int32), 2, (100, 200), (1 << 32) + 9, 4, repeats=5)
    body = launches[-1].body
    assert (body.count, body.parts, body.repeats, body.epoch, body.flags, body.counts) == (3, 2, 5, 9, 100, 200)
    with pytest.raises(ValueError, match="no plain copy"):
        exchange.copy_table([(into, source.t().contiguous().t())], CPU)
