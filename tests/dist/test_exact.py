"""Every strategy on 2, 3, 4 and 8 ranks equals dense fp64 attention, forward and backward, and sends what the plan says."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

import maskc
from maskc.binding.bound import BoundMask
from maskc.compiled import CompiledMask
from maskc.diagnostics import MaskcError
from tests.dist.cases import FORMS, Case, attend, vectors, verify
from tests.dist.pool import Pool
from tests.gpu.inputs import NAMES, suite_mask

STRATEGIES = ("all-gather", "staged", "ring")
NODES = {2: (1, 2), 3: (1, 3), 4: (1, 2), 8: (1, 2, 4)}


def sample(seed: int) -> Case:
    """A random case: sizes down to one row, chunks down to one row, idle ranks, every switch."""
    r = random.Random(seed)
    world = r.choice([2, 2, 3, 4, 4, 8])
    heads_kv = r.choice([1, 2, 4])
    batch = r.choice([1, 1, 1, 2])
    switches: dict[str, object] = {"nodes": r.choice(NODES[world])}
    if r.random() < 0.3:
        switches |= r.choice([{"prune": False}, {"overlap": False}, {"hierarchical": False}, {"epsilon": 0.1}])
    return Case(
        world=world,
        n=r.choice([1, 2, 3, 13, 29, 40, 65]),
        seed=seed,
        form=r.choice(FORMS),
        causal=r.random() < 0.6,
        strategy=r.choice(STRATEGIES),
        order="balanced" if "epsilon" in switches else r.choice(["balanced", "balanced", "contiguous", "zigzag"]),
        chunk=r.choice([None, 1, 3, 8]),
        heads=(4, heads_kv, r.choice([1, 1, 2, 4])),
        batch=(batch, r.choice([1, batch])),
        dims=(8, r.choice([8, 4])),
        nk=r.choice([None, None, None, 23]),
        switches=switches,
    )


def run(ranks: Pool, cases: list[Case]) -> None:
    for case in cases:
        verify(case, vectors(case), ranks.run(case.world, attend, case, vectors(case)))


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_sampled(ranks: Pool, first: int) -> None:
    run(ranks, [sample(seed) for seed in range(first, first + 20)])


@pytest.mark.dist
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_sampled_widely(ranks: Pool, first: int) -> None:
    run(ranks, [sample(seed) for seed in range(first, first + 100)])


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_form(ranks: Pool, strategy: str, world: int) -> None:
    for form in FORMS:
        for causal in (False, True):
            for n, chunk in ((64, 8), (41, 5)):
                run(ranks, [Case(world, n, n, form, causal, strategy, chunk=chunk, heads=(4, 2, 2))])


# ---------------------------------------------------------------- the masks of the suite


@cache
def compiled(path: Path) -> CompiledMask:
    return maskc.compile(path)


def bound(name: str, n: int, r: random.Random) -> BoundMask:
    """The mask with random inputs; some masks (fid) hold only for some data, which binding tells."""
    while True:
        found = suite_mask(name, n, n, r)
        assert found is not None
        path, inputs = found
        try:
            return compiled(path).bind(nq=n, nk=n, **inputs)
        except MaskcError as e:
            assert e.code == "M416", e  # noqa: PT017


def suite_case(ranks: Pool, name: str, world: int, number: int) -> None:
    r = random.Random(number)
    n = r.choice([28, 40, 66])
    spec = bound(name, n, r)
    case = Case(
        world=world,
        n=n,
        seed=number,
        strategy=STRATEGIES[number % 3],
        order=r.choice(["balanced", "contiguous", "zigzag"]),
        chunk=r.choice([None, 2, 5]),
        heads=(4, r.choice([1, 2, 4]), spec.heads),
        switches={"nodes": r.choice(NODES[world])},
    )
    verify(case, spec, ranks.run(world, attend, case, spec))


@pytest.mark.parametrize("name", NAMES)
def test_suite(ranks: Pool, name: str) -> None:
    number = NAMES.index(name)
    suite_case(ranks, name, (2, 4, 3, 8)[number % 4], number)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_suite_on_all_world_sizes(ranks: Pool, name: str, world: int) -> None:
    for number in range(3):
        suite_case(ranks, name, world, number)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4])
def test_three_intervals_beside_the_triangle(ranks: Pool, world: int, strategy: str) -> None:
    """Suite mask 94 keeps DIAG after localization."""
    for number in range(3):
        spec = bound("94_packed_blockwise_causal", 40, random.Random(number))
        case = Case(world, 40, number, strategy=strategy, chunk=3)
        verify(case, spec, ranks.run(world, attend, case, spec))


@pytest.mark.parametrize("world", [2, 4])
def test_rectangles(ranks: Pool, world: int) -> None:
    """Cross attention: rows and keys of other lengths are dealt out each on their own."""
    for number, name in enumerate(("37_cross_pairs", "27_bottom_right", "03_sliding_window", "10_prefix_lm")):
        path, inputs = suite_mask(name, 31, 46, random.Random(number)) or pytest.fail("no inputs")
        spec = compiled(path).bind(nq=31, nk=46, **inputs)
        case = Case(world, 31, number, nk=46, strategy=STRATEGIES[number % 3], heads=(2, 1, spec.heads))
        verify(case, spec, ranks.run(world, attend, case, spec))


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("form", ["lts", "lts lte uts ute"])
def test_a_chunk_enters_a_node_once(nodes: int, per_node: int, form: str) -> None:
    """What the moves say; `verify` ties the bytes to them. A chunk that no rank of a node needs never enters it."""
    world = nodes * per_node
    case = Case(world, 72, 5, form, chunk=2, switches={"nodes": nodes})
    p = case.plan(vectors(case))
    flat = Case(world, 72, 5, form, chunk=2, switches={"nodes": nodes, "hierarchical": False}).plan(vectors(case))
    assert flat.keys == p.keys
    for strategy in ("all-gather", "staged"):
        entered = [(m.dst // per_node, m.chunk) for m in p.schedule(strategy).moves() if m.src // per_node != m.dst // per_node]
        assert len(entered) == len(set(entered))
        wanted = {(r // per_node, c) for r in range(world) for c in p.needed(r) if p.keys.owner[c] // per_node != r // per_node}
        assert set(entered) == wanted
        per_rank = [m for m in flat.schedule(strategy).moves() if m.src // per_node != m.dst // per_node]
        assert {(m.dst, m.chunk) for m in per_rank} == {
            (r, c) for r in range(world) for c in flat.needed(r) if flat.keys.owner[c] // per_node != r // per_node
        }


@pytest.mark.dist
def test_three_nodes_of_three() -> None:
    pool = Pool((9,))
    try:
        for number, strategy in enumerate(STRATEGIES * 4):
            run(pool, [Case(9, 70, number, FORMS[number % len(FORMS)], strategy=strategy, chunk=3, switches={"nodes": 3})])
    finally:
        pool.close()
