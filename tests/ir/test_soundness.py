"""Lowered vectors against the predicate, element by element: the promise that must never fail."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_file
from maskc.ir import search
from maskc.ir.evaluate import evaluate_column, masked_rows, visible_runs
from maskc.ir.lower import interval_cases, needs_hole_free
from maskc.ir.nodes import MaskFn
from maskc.ir.printer import print_fn, print_program
from maskc.ir.reader import read_program
from maskc.ir.reference import broken_fact, dense
from maskc.ir.samples import random_env
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Proven, Refuted
from tests.ir.random_masks import random_mask
from tests.ir.test_suite import FORMS, SUITE


def compare_columns(fn: MaskFn, rng: random.Random, trials: int, size: int) -> int:
    """Compares the program and the fold with the oracle on random inputs; returns the number of columns."""
    verdict = prove(fn)
    program = verdict.program if isinstance(verdict, Proven) else None
    tiling = frozenset(program.tiling) if program is not None else frozenset[str]()
    cases, hole_free = interval_cases(fn), needs_hole_free(fn)
    heads = 2 if any(d.per == "head" for d in fn.inputs) else 1
    columns = 0
    for _ in range(trials):
        nk = rng.randint(1, size)
        nq = nk if fn.square else rng.randint(1, size)
        env = random_env(fn, rng, nq, nk, hole_free, tiling, heads)
        if env is None:
            continue
        assert broken_fact(fn, env) is None
        for h in range(heads):
            seen = dense(fn, env, h)
            for k in range(nk):
                columns += 1
                wanted = [row[k] for row in seen]
                runs = visible_runs(fn, cases, env, k, h)
                folded = [any(lo <= q < hi for lo, hi in runs) for q in range(nq)]
                assert folded == wanted, f"fold of key {k}, head {h}\n{print_fn(fn)}{env}"
                if program is None:
                    continue
                masked = masked_rows(program, env, k, evaluate_column(fn, program, env, k, h))
                assert masked == [not w for w in wanted], f"key {k}, head {h}\n{print_fn(fn)}{print_program(program)}{env}"
    return columns


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unproved masks are compared by their fold alone; looking for a counterexample would only cost time."""
    monkeypatch.setattr(search, "refutation", lambda fn: None)
    monkeypatch.setattr(search, "scattered_example", lambda fn: None)


@pytest.mark.parametrize("stem", FORMS)
def test_suite(stem: str) -> None:
    fn = parse_file(next(p for p in SUITE if p.stem == stem)).pick(None)
    assert compare_columns(fn, random.Random(stem), 60, 12) > 100


def random_masks(seeds: range, trials: int, square: bool) -> tuple[Counter[str], int]:
    outcomes: Counter[str] = Counter()
    columns = 0
    for seed in seeds:
        fn = random_mask(seed, square)
        try:
            verdict = prove(fn)
        except MaskcError as e:
            outcomes[e.code] += 1
            continue
        outcomes[type(verdict).__name__] += 1
        if isinstance(verdict, Proven):
            assert read_program(print_program(verdict.program)) == verdict.program
        columns += compare_columns(fn, random.Random(seed), trials, 9)
    return outcomes, columns


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("part", range(4))
def test_random_masks(part: int) -> None:
    outcomes, columns = random_masks(range(100 * part, 100 * part + 100), 20, square=True)
    assert outcomes["Proven"] > 40
    assert columns > 4000


@pytest.mark.usefixtures("no_search")
def test_random_rectangles() -> None:
    outcomes, columns = random_masks(range(150), 20, square=False)
    assert outcomes["Proven"] > 60
    assert columns > 5000


@pytest.mark.fuzz
@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("square", [True, False])
def test_many_random_masks(part: int, square: bool) -> None:
    outcomes, columns = random_masks(range(1000 + 400 * part, 1400 + 400 * part), 20, square)
    assert outcomes["Proven"] > 160
    assert columns > 16_000


def test_refutations_are_real() -> None:
    """A mask is refuted by a column whose masked runs are disjoint, apart and more than two."""
    refuted = 0
    for seed in range(25):
        fn = random_mask(seed)
        try:
            verdict = prove(fn)
        except MaskcError:
            continue
        if isinstance(verdict, Refuted):
            refuted += 1
            runs = verdict.counterexample.masked_runs
            assert len(runs) > 2
            assert all(lo < hi for lo, hi in runs)
            assert all(a[1] < b[0] for a, b in pairwise(runs))
    assert refuted >= 2
