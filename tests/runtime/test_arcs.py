"""Arcs of a circle: rows and work even in few pieces, for any work; the plan takes them where its model says so."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.runtime.arcs import PLACES, SLACK, SWAPS, TRIED, Ints, _Circle, arcs, owners
from maskc.runtime.chunking import EVEN, FINE, default_chunk
from maskc.runtime.plan import AttentionPlan, plan
from tests.runtime.test_plan import doc_mask

works = st.lists(st.integers(0, 60), min_size=8, max_size=60).map(lambda w: np.array(w, dtype=np.int64))


def full(tiles: int) -> list[tuple[int, np.ndarray]]:
    return [(1, np.ones((tiles, tiles), dtype=np.bool_))]


def window(tiles: int, width: int) -> np.ndarray:
    """Bool [tiles, tiles]: a row sees itself and the `width` before it."""
    back = np.arange(tiles)[:, None] - np.arange(tiles)
    return (back >= 0) & (back <= width)


def pieces(owner: Ints) -> int:
    return 1 + int((np.diff(owner) != 0).sum())


def halves(work: Ints, seen: np.ndarray, price: float) -> tuple[Ints, Ints]:
    """Tiles of two ranks, by one cut."""
    found: tuple[Ints, Ints] = _Circle(work, [(1, seen)], price, SLACK).halved(np.arange(len(work)), len(work) // 2, 0.5, 2)
    return found


def dealt(work: Ints, world: int, swaps: int) -> Ints:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskc.runtime.arcs.SWAPS", swaps)
        return owners(work, full(len(work)), world, 0.0)


@given(works, st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_ranks_have_equally_many_tiles_in_few_pieces(work: Ints, world: int) -> None:
    """2 P - 1 pieces; then tiles at ends are swapped as long as that helps."""
    cut, swapped = dealt(work, world, 0), dealt(work, world, 1000)
    assert pieces(cut) <= 2 * world - 1
    before, after = (np.bincount(owner, weights=work, minlength=world).max() for owner in (cut, swapped))
    for owner in (cut, swapped):
        held = np.bincount(owner, minlength=world)
        assert held.max() - held.min() <= 1
    if before <= (1 + EVEN) * work.sum() / world:
        assert np.array_equal(cut, swapped)
    else:
        assert after <= before
        assert after <= (1 + SLACK) * work.sum() / world or not swaps_that_help(work, swapped, world)


def swaps_that_help(work: Ints, owner: Ints, world: int) -> list[tuple[int, int]]:
    """Tiles at ends of pieces, of the heaviest rank and of another, after whose swap neither has as much work as that has."""
    loads = np.bincount(owner, weights=work, minlength=world)
    ends = [i for i in range(len(work)) if owner[max(0, i - 1)] != owner[i] or owner[min(len(work) - 1, i + 1)] != owner[i]]
    ends = sorted({0, len(work) - 1, *ends})
    heavy = int(loads.argmax())
    return [
        (a, b)
        for a in ends
        for b in ends
        if owner[a] == heavy != owner[b]
        if max(loads[heavy] - work[a] + work[b], loads[owner[b]] + work[a] - work[b]) < loads[heavy]
    ]


@given(works)
@settings(max_examples=150, deadline=None)
def test_two_halves_differ_by_less_than_a_tile(work: Ints) -> None:
    """From an arc to the next its work changes by less than the heaviest tile, and over half a turn it changes sides."""
    work = work[: len(work) // 2 * 2]
    arc, rest = halves(work, full(len(work))[0][1], 0.0)
    off = abs(int(work[arc].sum()) - int(work[rest].sum())) / 2
    assert off <= max(work.max() / 2, SLACK * work.sum() / 2)


@given(works, st.integers(0, 2**32 - 1), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_no_arc_is_cheaper(work: Ints, seed: int, price: float) -> None:
    """Among all arcs within the slack, or the evenest, counted one by one."""
    n = len(work)
    seen = np.random.default_rng(seed).random((n, n)) < 0.1

    def judged(arc: np.ndarray) -> tuple[float, float]:
        """Work that it is off its share, and that with the price of what travels."""
        held = np.isin(np.arange(n), arc)
        inflow = max(int((seen[mine].any(0) & ~mine).sum()) for mine in (held, ~held))
        off = abs(int(work[held].sum()) - work.sum() / 2)
        return off, off + price * inflow

    found = [judged((at + np.arange(n // 2)) % n) for at in range(n)]
    limit = max(min(off for off, _ in found), SLACK * work.sum() / 2)
    allowed = [cost for off, cost in found if off <= limit]
    taken = judged(halves(work, seen, price)[0])
    assert taken[0] <= limit
    assert len(allowed) > PLACES or taken[1] == pytest.approx(min(allowed))


def test_ranks_of_few_tiles_are_evened_out_by_swaps() -> None:
    """Documents of 1 to 16 tiles, causal, 16 tiles a rank: cuts alone leave 5 %, and more."""
    rng = np.random.default_rng(0)
    worst = {0: 0.0, SWAPS: 0.0}
    for _ in range(20):
        work = np.concatenate([1 + np.arange(n) for n in rng.integers(1, 17, 40)])[:128]
        for swaps in worst:
            loads = np.bincount(dealt(work, 8, swaps), weights=work, minlength=8)
            worst[swaps] = max(worst[swaps], loads.max() * 8 / work.sum())
    assert worst[0] > 1.05
    assert worst[SWAPS] < 1.015


def test_all_cuts_together_are_off_by_the_slack_at_most() -> None:
    """However dear keys are: three halvings share it. Work that changes slowly, so that single tiles do not count."""
    tiles, world = 3000, 8
    work = (1000 + 300 * np.sin(np.arange(tiles) * 6 * np.pi / tiles)).astype(np.int64)
    for seed in range(3):
        seen = np.random.default_rng(seed).random((tiles, tiles)) < 2e-4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("maskc.runtime.arcs.SWAPS", 0)
            loads = np.bincount(owners(work, [(1, seen)], world, 1e9), weights=work, minlength=world)
        assert SLACK / 4 < loads.max() / loads.mean() - 1 <= SLACK


def test_halves_that_are_alike_are_dealt_alike() -> None:
    """A sequence said twice, cut between the two first: ranks of the second half get what those of the first got."""
    n, world, alike = 128, 8, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        work = np.tile(rng.integers(200, 220, n), 2)
        seen = np.kron(np.eye(2, dtype=np.bool_), rng.random((n, n)) < 0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("maskc.runtime.arcs.SWAPS", 0)
            first, second = owners(work, [(1, seen)], world, 1.0).reshape(2, n)
        if len(set((first // (world // 2)).tolist())) == 1:
            alike += 1
            assert np.array_equal(first % (world // 2), second % (world // 2))
    assert alike > 10


def test_of_many_even_places_those_that_are_tried_lie_all_around_the_circle() -> None:
    """Two documents of half the tiles, neither of which begins with the sequence; everything is even."""
    tiles, start = 512, 160
    assert tiles > PLACES
    document = (np.arange(tiles) >= start) & (np.arange(tiles) < start + tiles // 2)
    owner = owners(np.ones(tiles, dtype=np.int64), [(1, document[:, None] == document)], 2, 1.0)
    assert np.array_equal(owner == owner[start], document)


def swaps_taken(work: Ints, owner: Ints, world: int) -> list[Ints]:
    """The loads before each swap that is looked for, and those behind the last one."""
    circle, seen = _Circle(work, full(len(work)), 0.0, SLACK), list[Ints]()
    look = circle._best_swap

    def watched(owner: Ints, loads: Ints, heavy: int) -> tuple[int, int] | None:
        seen.append(loads.copy())
        return look(owner, loads, heavy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(circle, "_best_swap", watched)
        circle.even_out(owner, world)
    return [*seen, np.bincount(owner, weights=work, minlength=world)]


def test_swaps_end_as_soon_as_ranks_are_even() -> None:
    ended = 0
    for seed in range(20):
        work = np.random.default_rng(seed).integers(900, 1100, 64)
        *before, after = swaps_taken(work, np.arange(64) // 16, 4)
        limit = (1 + SLACK) * work.sum() / 4
        assert all(loads.max() > limit for loads in before)
        ended += bool(before) and after.max() <= limit
    assert ended > 5


@given(works, st.integers(2, 4), st.integers(0, 2**32 - 1), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_no_swap_is_cheaper_among_those_that_even_out_most(work: Ints, world: int, seed: int, price: float) -> None:
    n, rng = len(work), np.random.default_rng(seed)
    seen, owner = rng.random((n, n)) < 0.1, np.sort(rng.permutation(np.arange(n) % world))
    loads = np.bincount(owner, weights=work, minlength=world).astype(np.int64)
    heavy = int(loads.argmax())
    found = _Circle(work, [(1, seen)], price, SLACK)._best_swap(owner, loads, heavy)

    def judged(a: int, b: int) -> tuple[int, float]:
        """The greater load of the two behind it, and that with the price of what travels."""
        after = owner.copy()
        after[a], after[b] = owner[b], heavy
        held = [after == r for r in (heavy, owner[b])]
        peak = max(int(work[mine].sum()) for mine in held)
        return peak, peak + price * max(int((seen[mine].any(0) & ~mine).sum()) for mine in held)

    all_swaps = {swap: judged(*swap) for swap in swaps_that_help(work, owner, world)}
    if found is None:
        assert not all_swaps
        return
    peaks = sorted(peak for peak, _ in all_swaps.values())
    least = min(cost for peak, cost in all_swaps.values() if peak < [*peaks, peaks[-1] + 1][min(TRIED, len(peaks))])
    assert all_swaps[found][0] <= peaks[min(TRIED, len(peaks)) - 1]
    assert all_swaps[found][1] <= least or all_swaps[found][1] == pytest.approx(least)


def test_a_triangle_gives_dual_chunk_and_a_window_the_part_that_its_start_saves() -> None:
    """Rows 0 to w of a window see less, as a triangle does: [0, x) with x = w (1 - 1 / sqrt 2) makes up for half of that."""
    triangle = np.tri(64, dtype=np.bool_)
    found = owners(triangle.sum(1), [(1, triangle)], 2, 0.0)
    assert np.flatnonzero(found == 0).tolist() in (list(range(16, 48)), [*range(16), *range(48, 64)])
    narrow = window(512, 64)
    owner = owners(narrow.sum(1), [(1, narrow)], 2, 0.0)
    (first, second) = np.flatnonzero(np.diff(owner)) + 1
    assert second - first == 256
    assert abs(first - 64 * (1 - 0.5**0.5)) <= 1


@given(works, st.integers(2, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_chunks_end_where_owner_or_readers_change(work: Ints, world: int, seed: int) -> None:
    """So no key travels that nobody needs, unless there were too many chunks; none is longer than a quarter of a rank."""
    n, tile = len(work), 128
    rng = np.random.default_rng(seed)
    start = rng.integers(0, n, n)
    seen = (np.arange(n) >= np.minimum(start, np.arange(n))[:, None]) & (np.arange(n) <= np.arange(n)[:, None])
    length = n * tile - int(rng.integers(0, tile))
    layout = arcs(work, [(1, seen)], world, tile, length, 1.0)
    assert layout.bounds[-1] == length
    assert all(b % tile == 0 for b in layout.bounds[:-1])
    assert max(b - a for a, b in pairwise(layout.bounds)) <= -(-n // (4 * world)) * tile
    owner = np.repeat(layout.owner, np.diff([*(b // tile for b in layout.bounds[:-1]), n]))
    assert np.array_equal(owner, owners(work, [(1, seen)], world, 1.0))
    reads = np.stack([seen[owner == r].any(0) | (owner == r) for r in range(world)])
    changes = {int(i) + 1 for i in np.flatnonzero(np.diff(reads, axis=1).any(0) | (np.diff(owner) != 0))}
    if len(changes) <= 2 * FINE * world:
        assert {i * tile for i in changes} <= set(layout.bounds)


# ---------------------------------------------------------------- in a plan


def sliding(length: int, width: int) -> BoundaryVectors:
    import maskc

    return maskc.compile("std:sliding_window").bind(window=width, nq=length, nk=length).vectors()


def most(p: AttentionPlan) -> int:
    return max(map(p.rows.local_length, range(p.world)))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_windows_are_even_with_as_few_rows(world: int) -> None:
    n = 16384 * world
    v = sliding(n, n // 16)
    p, before = plan(v, world_size=world), plan(v, world_size=world, chunk=2048)
    assert p.method == "arcs"
    assert before.imbalance > 1.03 > 1.005 >= p.imbalance
    assert most(p) == most(before) == 16384
    assert max(p.received()) <= 1.6 * max(before.received())


def test_packed_documents_send_less_and_are_as_even() -> None:
    taken = 0
    for seed in range(8):
        cuts = np.sort(np.random.default_rng(seed).integers(1, 65536, 40)).tolist()
        mask = doc_mask([b - a for a, b in zip([0, *cuts], [*cuts, 65536], strict=True)])
        for world in (2, 4):
            p, fine = plan(mask, world_size=world), plan(mask, world_size=world, chunk=default_chunk(65536, world))
            assert p.imbalance <= max(1 + EVEN, fine.imbalance)
            assert most(p) <= most(fine)
            if p.method == "arcs":
                taken += 1
                assert max(p.received()) < max(fine.received())
    assert taken >= 12


def test_arcs_stand_back_where_something_is_asked_for() -> None:
    """A chunk size, nodes, a band, another order, or lengths of which rows and keys differ."""
    n = 16384
    v = sliding(n, 1024)
    assert plan(v, world_size=2).method == "arcs"
    for named in ({"chunk": 1024}, {"nodes": 2}, {"epsilon": 0.01}, {"order": "zigzag"}, {"assign": [0] * 8 + [1] * 8}):
        assert plan(v, world_size=2, **named).method != "arcs"  # type: ignore[arg-type]
    assert plan(BoundaryVectors(n, n // 2, 1, 1, False), world_size=2).method != "arcs"


def test_layers_and_batch_items_of_one_mask_are_dealt_as_it_is() -> None:
    """Work and keys of all of them grow alike."""
    cuts = [0, 900, 4000, 5100, 9000, 12_345, 16_384]
    lengths = [b - a for a, b in pairwise(cuts)]
    one = plan(doc_mask(lengths), world_size=2)
    assert one.method == "arcs"
    assert plan([doc_mask(lengths), doc_mask(lengths)], weights=[1, 2], world_size=2).rows == one.rows
    assert plan(doc_mask([lengths, lengths]), world_size=2).rows == one.rows


def test_arcs_know_only_what_the_mean_proves() -> None:
    p = plan(sliding(16384, 1024), world_size=2)
    assert p.lower_bound == p.proven_bound == -(-sum(p.workloads) // 2)
    assert sorted(p.part_workloads()) == sorted(p.workloads)
