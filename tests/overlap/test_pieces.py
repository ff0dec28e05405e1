"""Into how many groups of heads keys are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.runtime.machine import BACKWARD_FACTOR
from maskc.runtime.overlap_pieces import (
    FEWEST_BACKWARD,
    FEWEST_PIECES,
    FORWARD_SPEED,
    GIVEN_SHARE,
    HIDING_PIECES,
    LEVEL,
    LONG_SECONDS,
    MOST_PIECES,
    PRICE,
    ROW_TILE,
    Speed,
    _fewest,
    backward_end,
    choose_backward_pieces,
    choose_given,
    choose_pieces,
    expected_end,
    way_of_gradients,
)
from maskc.runtime.overlap_plan import OverlapPlan, RowWork, Slot, joined, overlap_plan
from maskc.runtime.plan import plan
from tests.dist.cases import Case, vectors

RATES = st.sampled_from([1e8, 1e9, 1e10, 3e10, 1e11, 1e12])
CELLS = st.sampled_from([0.0, 1e-12, 1e-10, 1e-9, 3e-9, 1e-8, 1e-7])
"""Bytes per second of a link, and seconds of a multiprocessor for a cell: from copies alone to attention alone."""
ALONE = Speed(1.0, 1)
"""A multiprocessor that takes a second for a cell."""


def order(own: int, foreign: int, *work: RowWork) -> OverlapPlan:
    """A row in each slot; chunk i is slot i."""
    count = own + foreign
    slots = tuple(Slot(i, 0 if i < own else 1, False, count - 1 - i, 1) for i in range(count))
    return OverlapPlan(0, own, slots, (), count, (), work)


def test_a_tile_begins_so_early_that_it_comes_to_its_last_piece_in_time() -> None:
    """Copies of 10 s each; a tile of 12 cells, a third of them on each of three chunks."""
    tile = RowWork(ROW_TILE, 0b111, 12.0)
    assert expected_end(order(1, 2, tile), 1, 9.0, 1.0, ALONE) == 20 + 4
    assert expected_end(order(3, 0, tile), 1, 9.0, 1.0, ALONE) == 12


def test_work_lies_on_the_rows_of_a_slot() -> None:
    """Three quarters of 12 s of work lie on three own rows; the row of another takes 10 s to come, and is due then."""
    slots = Slot(0, 0, False, 1, 3), Slot(1, 1, False, 0, 1)
    plan_ = OverlapPlan(0, 1, slots, (), 4, (), (RowWork(ROW_TILE, 0b11, 12.0),))
    assert expected_end(plan_, 1, 10.0, 0.0, ALONE) == 10 - 9 + 12


def test_work_that_need_not_wait_fills_the_time() -> None:
    plan_ = order(1, 1, RowWork(ROW_TILE, 0b01, 30.0), RowWork(ROW_TILE, 0b10, 8.0))
    assert expected_end(plan_, 1, 5.0, 0.0, ALONE) == 38 + 8 / 2, "half the shortest tile: nobody says when it is taken"
    assert expected_end(plan_, 1, 50.0, 0.0, ALONE) == 58, "keys come later than the other work is done"
    works = RowWork(ROW_TILE, 0b01, 2.0), RowWork(ROW_TILE, 0b10, 30.0), RowWork(ROW_TILE, 0b10, 8.0)
    assert expected_end(order(1, 1, *works), 1, 50.0, 0.0, ALONE) == 50 + 38 + 8 / 2, "the shortest of those that are left"


def test_multiprocessors_share_the_tiles() -> None:
    """Tiles of 10 s that need not wait, on two multiprocessors; more than one each are taken unevenly."""
    two = Speed(1.0, 2)
    assert expected_end(order(1, 0, RowWork(4 * ROW_TILE, 1, 40.0)), 1, 0.0, 0.0, two) == 40 / 2 + 10 / 2
    assert expected_end(order(1, 0, RowWork(2 * ROW_TILE, 1, 20.0)), 1, 0.0, 0.0, two) == 10
    assert expected_end(order(1, 0, RowWork(ROW_TILE, 1, 10.0)), 1, 0.0, 0.0, two) == 10


def test_groups_of_heads_let_the_first_ones_begin() -> None:
    """Ten heads' tiles that need what comes at the end of 100 s: of one group all wait, of ten the last one alone."""
    plan_ = order(0, 1, RowWork(10 * ROW_TILE, 1, 100.0))
    assert expected_end(plan_, 1, 100.0, 0.0, ALONE) == 100 + 100 + 10 / 2
    assert expected_end(plan_, 10, 100.0, 0.0, ALONE) == pytest.approx(10 + 100 + 10 / 2)


def test_speed_of_a_multiprocessor() -> None:
    """A cell of a head and three batch items: a product of 128 numbers for the score and one for the output, each 2 FLOP."""
    assert Speed.of(256, 3, 132) == (pytest.approx(3 * 4 * 128 * 132 / FORWARD_SPEED), 132)


def test_fewer_groups_unless_more_end_noticeably_sooner() -> None:
    ends, pieces = {1: 9.0, 2: 5.02, 4: 5.0, 8: 4.99}, {1: 3, 2: 6, 4: 12, 8: 24}
    assert _fewest(ends, pieces, 1) == 4, "within half a percent of the best"
    assert _fewest(ends, pieces, 13) == 8, "the others give too few pieces"
    assert _fewest(ends, pieces, 25) == 4, "all give too few"
    assert _fewest({1: 5.0, 2: 5.0}, {1: 4, 2: 8}, 4) == 1


@given(st.integers(0, 100), st.sampled_from([6, 32]), st.sampled_from([64, 512]), RATES, CELLS)
def test_the_number_is_the_one_that_the_rule_says(seed: int, heads: int, chunk: int, rate: float, cell: float) -> None:
    """Every divisor of the heads up to the most possible one is tried, in both directions."""
    v, row_bytes, speed = vectors(Case(2, 2048, seed, "lts")), heads * 256, Speed(cell, 132)
    p = plan(v, world_size=2, chunk=chunk, heads=heads, heads_kv=heads)
    o = overlap_plan(p, 0)
    if not o.pulls:
        return
    most, rows_of_most = choose_pieces(o, p.keys, heads, row_bytes, rate)
    groups = [g for g in range(1, most + 1) if heads % g == 0]
    cuts = {g: joined(o, p.keys, round(rows_of_most / most * g)) for g in groups}
    pieces = {g: g * len(cut.pulls) for g, cut in cuts.items()}
    each = {g: (3e-6 if g == heads else 6e-6) + 4e-6 for g in groups}
    ends = {g: expected_end(cut, g, 2 * row_bytes / rate, each[g], speed) for g, cut in cuts.items()}
    few, many = (_fewest(ends, pieces, n) for n in (FEWEST_PIECES, HIDING_PIECES))
    chosen = many if many > few and ends[many] <= 1.06 * ends[few] else few
    assert choose_pieces(o, p.keys, heads, row_bytes, rate, speed)[0] == chosen

    coming = sum(s.rows for s in o.pulls) * 2 * row_bytes / rate
    leaving = sum(2 * p.keys.size_of(c) for _, chunks in o.lends for c in chunks) * 2 * row_bytes / rate
    kernel = 2.5 * sum(w.cells for w in o.work) * cell / 132
    backward = {g: backward_end(n, coming, leaving, kernel) for g, n in pieces.items()}
    found, rows = choose_backward_pieces(o, p.keys, heads, row_bytes, rate, speed)
    assert found == _fewest(backward, pieces, FEWEST_BACKWARD)
    assert rows == pytest.approx(rows_of_most / most * found, abs=1)


@given(st.integers(0, 100), st.sampled_from([6, 32]), st.sampled_from([8, 64, 512]), RATES, CELLS)
def test_no_other_number_ends_much_sooner(seed: int, heads: int, chunk: int, rate: float, cell: float) -> None:
    v, row_bytes = vectors(Case(2, 2048, seed, "lts")), heads * 256
    p = plan(v, world_size=2, chunk=chunk, heads=heads, heads_kv=heads)
    o, speed = overlap_plan(p, 0), Speed(cell, 132)
    most, rows_of_most = choose_pieces(o, p.keys, heads, row_bytes, rate)
    chosen, rows = choose_pieces(o, p.keys, heads, row_bytes, rate, speed)
    assert heads % chosen == 0
    assert chosen <= most
    assert rows == pytest.approx(rows_of_most / most * chosen, abs=1)

    def end(groups: int) -> float:
        cut = joined(o, p.keys, round(rows_of_most / most * groups))
        return expected_end(cut, groups, 2 * row_bytes / rate, (3e-6 if groups == heads else 6e-6) + 4e-6, speed)

    if o.pulls:
        assert all(end(chosen) <= (1 + PRICE) * (1 + LEVEL) ** 2 * end(g) for g in (1, most))


def test_what_nobody_works_on_comes_in_the_fewest_pieces() -> None:
    v = BoundaryVectors(4096, 4096, 1, 1, True)
    p = plan(v, world_size=2, chunk=512, heads=8, heads_kv=8)
    o = overlap_plan(p, 0)
    assert choose_pieces(o, p.keys, 8, 2048, 1e9)[0] == 8
    groups, rows = choose_pieces(o, p.keys, 8, 2048, 1e9, Speed(0.0, 132))
    assert groups * len(joined(o, p.keys, rows).pulls) >= HIDING_PIECES
    assert groups // 2 * len(joined(o, p.keys, rows // 2).pulls) < HIDING_PIECES
    assert choose_pieces(o, p.keys, 8, 2048, 1e9, Speed.of(256, 300, 8))[0] > 1, "attention takes about as long"


def test_a_backward_ends_with_its_kernel_or_its_copies() -> None:
    """Ten pieces; a copy and its flag take 10 us besides the bytes."""
    assert backward_end(10, 3.0, 0.0, 50.0) == pytest.approx(50 + 0.6 + 10e-6), "the last gradients leave behind the kernel"
    assert backward_end(10, 3.0, 0.0, 0.0) == pytest.approx(0.3 + 6 + 11 * 10e-6), "gradients wait for the first keys"
    assert backward_end(10, 3.0, 9.0, 0.0) == pytest.approx(12 + 10 * 10e-6), "what others send comes behind the keys"


def test_a_backward_has_few_pieces_where_copies_take_longest() -> None:
    v = BoundaryVectors(4096, 4096, 1, 1, True)
    p = plan(v, world_size=2, chunk=512, heads=8, heads_kv=8)
    o = overlap_plan(p, 0)
    few = choose_backward_pieces(o, p.keys, 8, 2048, 1e9, Speed.of(256, 1, 132))[0]
    many = choose_backward_pieces(o, p.keys, 8, 2048, 1e9, Speed.of(256, 300, 8))[0]
    assert few <= many


def test_work_of_a_plan_is_that_of_its_masks() -> None:
    """A causal mask of 1024 rows, zigzag: rank 0 has the first and the last quarter; cells are those of tiles."""
    v = BoundaryVectors(1024, 1024, 1, 1, True)
    p = plan(v, world_size=2, chunk=256, order="zigzag")
    work = overlap_plan(p, 0, 0, (6, 2)).work
    assert [(w.rows, w.need) for w in work] == [(256 * 6, 0b0001), (256 * 6, 0b1111)]
    assert work[1].cells / work[0].cells == pytest.approx(p.parts[0].workloads[3] / p.parts[0].workloads[0])
    assert 6 * 256 * 257 / 2 <= work[0].cells <= 6 * 256 * 256 * 1.2
    assert overlap_plan(p, 0).work == ()
    assert overlap_plan(p, 0, 0, (6, 2), 3).work[0].cells == pytest.approx(work[0].cells / 3)


@pytest.mark.parametrize(("heads", "head_bytes", "most"), [(32, 256, 8), (8, 256, 2), (3, 256, 1), (8, 1024, 8), (12, 512, 6)])
def test_given_keys_come_in_lines_that_a_copy_engine_writes_at_its_rate(heads: int, head_bytes: int, most: int) -> None:
    v = vectors(Case(2, 4096, 3, "none", causal=False))
    p = plan(v, world_size=2, chunk=512)
    o = overlap_plan(p, 0)
    forward, backward = choose_given(o, p.keys, heads, heads * head_bytes, 1e6, head_bytes)
    assert forward[0] == most, "as many groups as lines allow, where the link is slow"
    rows = sum(s.rows for s in o.pulls)
    assert forward[1] == round(rows / MOST_PIECES * most), "joined so far that there are no more pieces than those"
    assert 1 <= backward[0] <= most
    assert [c[0] for c in choose_given(o, p.keys, heads, heads * head_bytes, 1e18, head_bytes)] == [1, 1], "one where it is fast"


@pytest.mark.parametrize(
    ("seconds", "share", "way"),
    [
        (0.9 * LONG_SECONDS, 0.9 * GIVEN_SHARE, "given"),
        (1.1 * LONG_SECONDS, 0.9 * GIVEN_SHARE, "at once"),
        (0.9 * LONG_SECONDS, 1.1 * GIVEN_SHARE, "by pieces"),
        (1.1 * LONG_SECONDS, 1.1 * GIVEN_SHARE, "by pieces"),
    ],
)
def test_gradients_leave_by_what_they_take_of_a_backward(seconds: float, share: float, way: str) -> None:
    """share: of `seconds`, that the gradients of three rows of 1 byte, K alone, take: in fp32 12 bytes with those of V."""
    plan_ = order(1, 3, RowWork(ROW_TILE, 0b1111, seconds / BACKWARD_FACTOR))
    assert way_of_gradients(plan_, 1, 12 / (share * seconds), ALONE) == way
    assert way_of_gradients(plan_, 1, 12 / (share * seconds), None) == "given"
