"""Schedules walked through on one machine: what travels is where it is sent from, and every needed chunk is attended to once."""

from __future__ import annotations

import gc
from collections import Counter
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.runtime.layout import Layout
from maskc.runtime.plan import plan
from maskc.runtime.schedule import DIRECT, STAGES, STRATEGIES, Schedule, make_schedule, routes


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, tuple[frozenset[int], ...], int]:
    """(keys, what each rank needs, ranks per node)."""
    nodes, node_size = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 4), (1, 7), (2, 1), (1, 2), (1, 1)]))
    world, chunks = nodes * node_size, draw(st.sampled_from([6, 8, 3, 2, 1, 0]))
    edges = sorted(draw(st.sets(st.integers(1, 30), min_size=chunks, max_size=chunks)))
    owner = tuple(draw(st.lists(st.integers(0, world - 1), min_size=chunks, max_size=chunks)))
    needs = st.frozensets(st.sampled_from(range(chunks))) if chunks else st.just(frozenset[int]())
    return Layout(world, (0, *edges), owner), tuple(draw(needs) for _ in range(world)), node_size


def walked(s: Schedule, keys: Layout) -> list[set[int]]:
    """What each rank holds at the end, if every move finds its chunk at its source, and every step its columns."""
    held = [set(keys.chunks_of(r)) for r in range(keys.world)]
    for step in s.steps:
        for phase in step.phases:
            assert all(m.chunk in held[m.src] and m.src != m.dst for m in phase)
            for m in phase:
                held[m.dst].add(m.chunk)
        for rank, columns in enumerate(step.columns):
            assert set(columns) <= held[rank]
            assert list(columns) == sorted(set(columns))
    return held


@settings(max_examples=300)
@given(problems(), st.sampled_from([*STRATEGIES, *DIRECT]), st.booleans(), st.booleans())
def test_every_rank_attends_once_to_what_it_needs(
    problem: tuple[Layout, tuple[frozenset[int], ...], int], strategy: str, prune: bool, hierarchical: bool
) -> None:
    keys, needed, node_size = problem
    s = make_schedule(strategy, keys, needed, node_size=node_size, prune=prune, hierarchical=hierarchical)
    held = walked(s, keys)
    for rank in range(keys.world):
        attended = Counter(c for step in s.steps for c in step.columns[rank])
        assert attended == Counter(needed[rank])
        own = set(keys.chunks_of(rank))
        if not prune:
            assert held[rank] == set(range(keys.chunk_count))
        elif not hierarchical and strategy != "ring":
            assert held[rank] == own | needed[rank]
    assert not any(step.phases == () and not any(step.columns) for step in s.steps)
    moves = list(s.moves())
    assert s.direct == all(m.src == keys.owner[m.chunk] for m in moves)
    if not hierarchical or strategy == "ring":
        assert len({(m.dst, m.chunk) for m in moves}) == len(moves), "nothing travels to a rank twice"
    rows = Counter[tuple[int, int]]()
    for m in moves:
        rows[m.src, m.dst] += keys.size_of(m.chunk)
    assert s.rows_sent(keys) == tuple(tuple(rows[a, b] for b in range(keys.world)) for a in range(keys.world))


@given(problems())
def test_a_chunk_crosses_into_a_node_once(problem: tuple[Layout, tuple[frozenset[int], ...], int]) -> None:
    keys, needed, node_size = problem
    for strategy in ("all-gather", "staged"):
        s = make_schedule(strategy, keys, needed, node_size=node_size, hierarchical=True)
        across = [(m.dst // node_size, m.chunk) for m in s.moves() if m.src // node_size != m.dst // node_size]
        assert len(set(across)) == len(across)
        for m in s.moves():
            owner = keys.owner[m.chunk]
            assert owner in (m.src, m.dst) or m.src % node_size == owner % node_size


@given(problems())
def test_steps_of_each_strategy(problem: tuple[Layout, tuple[frozenset[int], ...], int]) -> None:
    keys, needed, node_size = problem
    gathered, staged, ring = (make_schedule(name, keys, needed, node_size=node_size) for name in STRATEGIES)
    assert len(gathered.steps) <= 1
    assert len(staged.steps) <= 1 + min(STAGES, keys.world - 1)
    for step in staged.steps:
        own = all(keys.owner[c] == r for r, columns in enumerate(step.columns) for c in columns)
        assert own == (not step.phases), "own chunks first, without an exchange"
    assert all((m.dst - m.src) % keys.world == 1 for m in ring.moves()), "from neighbour to neighbour"
    for m in ring.moves():
        wanting = [(r - keys.owner[m.chunk]) % keys.world for r in range(keys.world) if m.chunk in needed[r]]
        assert (m.dst - keys.owner[m.chunk]) % keys.world <= max(wanting), "no further than somebody wants it"


@pytest.mark.parametrize(("world", "sizes"), [(2, [1]), (4, [1, 1, 1]), (5, [1, 1, 1, 1]), (9, [2, 2, 2, 2]), (12, [2, 3, 3, 3])])
def test_stages_are_as_even_as_peers_allow(world: int, sizes: list[int]) -> None:
    keys = Layout(world, tuple(range(world + 1)), tuple(range(world)))
    s = make_schedule("staged", keys, [frozenset(range(world))] * world, node_size=world)
    assert [len(step.columns[0]) for step in s.steps] == [1, *sizes]


@given(problems(), st.sampled_from(STRATEGIES), st.booleans())
def test_routes_are_the_moves_of_a_rank(
    problem: tuple[Layout, tuple[frozenset[int], ...], int], strategy: str, hierarchical: bool
) -> None:
    """In an order that both ends know: what goes to a rank is sorted by chunk, on either side."""
    keys, needed, node_size = problem
    s = make_schedule(strategy, keys, needed, node_size=node_size, hierarchical=hierarchical)
    for rank in range(keys.world):
        for step, per_phase in zip(s.steps, routes(s, rank), strict=True):
            for phase, route in zip(step.phases, per_phase, strict=True):
                assert sorted(route.sends) == [m for m in phase if m.src == rank]
                assert sorted(route.receives) == [m for m in phase if m.dst == rank]
                assert [(m.dst, m.chunk) for m in route.sends] == sorted((m.dst, m.chunk) for m in route.sends)
                assert [(m.src, m.chunk) for m in route.receives] == sorted((m.src, m.chunk) for m in route.receives)
                back = route.back
                assert [(m.dst, m.src, m.chunk) for m in back.receives] == [(m.src, m.dst, m.chunk) for m in route.sends]
                assert [(m.dst, m.src, m.chunk) for m in back.sends] == [(m.src, m.dst, m.chunk) for m in route.receives]


def test_what_is_kept_of_a_plan_goes_with_it() -> None:
    made = plan(BoundaryVectors(64, 64, 1, 1, True), world_size=4)
    kept = ref(made.schedule("ring"))
    assert made.schedule("ring") is kept()
    del made
    gc.collect()
    assert kept() is None
