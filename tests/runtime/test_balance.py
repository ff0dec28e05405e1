"""Assignments of chunks: valid, never worse than LPT, never below a proven bound, equal to the optimum on small instances."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import balance_masks
from benchmarks.counting import counting_bound, impossible
from benchmarks.exact import Bracket, solve
from maskc.runtime.balance import RUN_TIME, THOROUGH, Effort, balance, greedy
from maskc.runtime.cover import CoverProblem, cover_ranks
from maskc.runtime.node_balance import Problem, Traffic, balance_nodes, by_blocks, by_swaps, node_blocks, swap_traffic
from maskc.runtime.plan import plan
from maskc.runtime.split import _by_table, _meet

SMALL = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 30) | st.sampled_from([0, 7, 7, 100]), min_size=1, max_size=12))


def check(weights: list[int], ranks: int, a) -> None:
    k = -(-len(weights) // ranks)
    assert len(a.owner) == len(weights)
    assert max(np.bincount(a.owner, minlength=ranks)) <= k
    loads = [sum(w for w, r in zip(weights, a.owner, strict=True) if r == rank) for rank in range(ranks)]
    assert loads == list(a.workloads)
    assert a.lower_bound <= a.proven_bound <= a.makespan


@given(SMALL)
@settings(max_examples=150, deadline=None)
def test_small_instances_reach_the_optimum(case: tuple[int, list[int]]) -> None:
    ranks, weights = case
    a = balance(weights, ranks, THOROUGH)
    check(weights, ranks, a)
    optimum = solve(weights, ranks, 2_000_000)
    assert optimum.exact
    assert a.proven_bound <= optimum.high <= a.makespan
    if ranks * -(-len(weights) // ranks) <= 12 and ranks >= 3 and cover_ranks(-(-len(weights) // ranks)) >= ranks:
        assert a.makespan == optimum.high
    assert a.makespan <= balance(weights, ranks, THOROUGH, pairs=False).makespan


@given(SMALL)
@settings(max_examples=100, deadline=None)
def test_the_bound_by_counting_is_one(case: tuple[int, list[int]]) -> None:
    ranks, weights = case
    optimum = solve(weights, ranks, 2_000_000)
    assert optimum.exact
    mean = -(-sum(weights) // ranks)
    assert mean <= counting_bound(weights, ranks, optimum.high) <= optimum.high


def test_the_bound_by_counting_sees_what_the_mean_does_not() -> None:
    weights = [10] * 5 + [1] * 4  # three ranks of three: one holds two tens
    assert counting_bound(weights, 3, 31) == 21


def test_the_worst_pack_of_the_histogram_cannot_be_even() -> None:
    """Peak over mean 1.02 is out of reach with 8 chunks a rank: 13 chunks of one size, more than a quarter of a rank each."""
    p = plan(balance_masks._packed("std:doc_full", 9), world_size=8, chunk=balance_masks.SEQUENCE // 64)
    weights = p.parts[0].workloads
    assert impossible(weights, 8, int(balance_masks.BAR * sum(weights) / 8))
    assert not impossible(weights, 8, p.makespan)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_assignments_are_valid_deterministic_and_scale_free(weights: list[int], ranks: int, factor: int) -> None:
    a = balance(weights, ranks)
    check(weights, ranks, a)
    assert a == balance(list(weights), ranks)
    scaled = balance([w * factor for w in weights], ranks)
    assert scaled.owner == a.owner
    assert scaled.makespan == a.makespan * factor
    assert a.makespan <= balance(weights, ranks, pairs=False).makespan
    check(weights, ranks, greedy(weights, ranks))


@pytest.mark.parametrize(
    ("weights", "ranks"),
    [([5] * 12, 4), ([0] * 9, 3), ([100, *[1] * 11], 4), ([3, 5] * 8, 4), ([2**31 + i for i in range(32)], 8), ([7], 8)],
    ids=["equal", "zeros", "giant", "two values", "large", "fewer chunks than ranks"],
)
def test_ties_and_extremes(weights: list[int], ranks: int) -> None:
    a = balance(weights, ranks, THOROUGH)
    check(weights, ranks, a)
    assert a.optimal


@pytest.mark.parametrize(("n", "ranks", "top"), [(64, 16, 1000), (64, 8, 200), (128, 16, 200)])
def test_the_lower_bound_is_reached(n: int, ranks: int, top: int) -> None:
    for seed in range(5):
        weights = np.random.default_rng(seed).integers(1, top + 1, n).tolist()
        a = balance(weights, ranks, THOROUGH)
        assert a.makespan == a.lower_bound, seed
        gap = balance(weights, ranks, RUN_TIME).makespan / a.lower_bound - 1
        assert gap <= balance(weights, ranks, pairs=False).makespan / a.lower_bound - 1


def test_two_per_rank_is_certified_always() -> None:
    for seed in range(5):
        weights = np.random.default_rng(seed).integers(1, 40, 10).tolist()
        a = balance(weights, 5, Effort(splits=0, nodes=0))
        assert a.optimal
        assert solve(weights, 5, 1_000_000) == Bracket(a.makespan, a.makespan)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_splits_are_exact_either_way(k: int) -> None:
    rng = np.random.default_rng(k)
    for top in (3, 50, 2**40):
        items = rng.integers(0, top, 2 * k)
        total = int(items.sum())
        best = min(max(s, total - s) for c in combinations(range(2 * k), k) for s in [int(items[list(c)].sum())])
        for split in (_by_table(items[None], k)[0], _meet(items, k)):
            assert split.peak == best
            assert split.first.sum() == k
            assert max(int(items[split.first].sum()), int(items[~split.first].sum())) == best


def test_a_cover_that_ends_without_one_is_a_proof() -> None:
    rng = np.random.default_rng(3)
    proved = 0
    for _ in range(60):
        weights = np.sort(rng.integers(1, 60, 12))[::-1].astype(np.int64)
        optimum = solve(weights.tolist(), 4, 1_000_000)
        assert optimum.exact
        problem = CoverProblem(weights, 3)
        assert problem.search(optimum.high, 10**6, rng).groups is not None
        below = problem.search(optimum.high - 1, 10**6, rng)
        assert below.groups is None
        assert below.impossible
        proved += below.nodes > 0
    assert proved > 0


@pytest.mark.parametrize(
    ("weights", "lower", "optimum"),
    [
        ([7, 13, 25, 7, 25, 18, 7, 2, 13], 39, 40),
        ([13, 13, 13, 2, 21, 28, 13, 13, 35], 51, 54),
        ([7, 40, 13, 7, 22, 40, 13, 28, 18], 63, 65),
    ],
)
def test_an_optimum_above_the_bound_is_certified(weights: list[int], lower: int, optimum: int) -> None:
    """Searches for every smaller makespan end without a cover."""
    a = balance(weights, 3, THOROUGH)
    check(weights, 3, a)
    assert (a.lower_bound, a.proven_bound, a.makespan, a.optimal) == (lower, optimum, optimum, True)
    assert solve(weights, 3, 1_000_000).high == optimum


@pytest.mark.parametrize(
    ("weights", "bound"),
    [
        ([20, 11, 9, 2, 2, 1, 1, 1, 1], 22),  # the heaviest with the two lightest
        ([20, 20, 20, 11, 9, 2, 2, 2, 1], 32),  # two of the four heaviest with the lightest, and no sum of three is 31
    ],
)
def test_the_lower_bound_counts_the_lightest_companions(weights: list[int], bound: int) -> None:
    assert balance(weights, 3).lower_bound == bound


# ---------------------------------------------------------------- nodes


def traffic(rng: np.random.Generator, n: int) -> Traffic:
    return Traffic(rng.integers(1, 5, n), ((1, rng.random((n, n)) < 0.4), (3, rng.random((n, n)) < 0.2)))


def test_inflow_after_a_swap_is_predicted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        n = int(rng.integers(4, 16))
        t, owner = traffic(rng, n), rng.integers(0, 2, n)
        a, b = np.flatnonzero(owner == 0), np.flatnonzero(owner == 1)
        if len(a) and len(b):
            predicted = t.after_swap(owner, 0, a, b)
            for i, x in enumerate(a):
                for j, y in enumerate(b):
                    swapped = owner.copy()
                    swapped[[x, y]] = swapped[[y, x]]
                    assert t.inflow(swapped, 0) == predicted[i, j]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (3, 3), (8, 1)])
def test_swaps_lower_traffic_inside_the_band(nodes: int, per_node: int) -> None:
    rng = np.random.default_rng(nodes)
    world, n = nodes * per_node, nodes * per_node * 4
    w, t = rng.integers(50, 150, n), traffic(rng, n)
    first = balance(w.tolist(), world)
    owner = np.array(first.owner)
    problem = Problem(w, t, nodes, per_node, 50_000, RUN_TIME)
    swapped = swap_traffic(problem, owner)
    before, after = t.inflows(owner // per_node, nodes), t.inflows(swapped // per_node, nodes)
    assert (after.max(), after.sum()) <= (before.max(), before.sum())
    loads = np.bincount(swapped, weights=w, minlength=world)
    limit = max(first.makespan, w.sum() / world * 1.05)
    assert loads.max() <= limit
    assert sorted(np.bincount(swapped)) == sorted(np.bincount(owner))

    ways = [by_swaps(problem, first), by_blocks(problem, first)]
    assert ways[0].assignment.makespan <= limit
    for way in ways:  # stage 3 leaves the chunks of each node alone
        node_of = np.array(way.assignment.owner) // per_node
        assert tuple(t.inflows(node_of, nodes)) == way.inflows
        check(w.tolist(), world, way.assignment)
    assert np.array_equal(np.array(ways[0].assignment.owner) // per_node, swapped // per_node)
    found = balance_nodes(problem, lambda makespan, inflow: inflow)
    assert found.assignment.makespan <= limit
    assert max(found.inflows) <= max(ways[0].inflows)


def test_node_blocks_even_out_the_nodes() -> None:
    rng = np.random.default_rng(5)
    w = np.sort(rng.integers(1, 1000, 64))
    node_of = node_blocks(Problem(w, traffic(rng, 64), 4, 4, 20_000, RUN_TIME))
    assert np.bincount(node_of).tolist() == [16] * 4
    loads = np.bincount(node_of, weights=w)
    contiguous = w.reshape(4, 16).sum(1)
    assert loads.max() <= contiguous.max()
    assert loads.max() / loads.mean() <= 1.02
