"""Keys taken out of the memory of other ranks, over shared memory: every executor, plans that change from call to call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from maskc.runtime.schedule import DIRECT
from tests.dist.cases import FORMS, Case, attend, vectors, verify
from tests.dist.pool import Pool
from tests.dist.test_exact import sample


def direct(seed: int) -> Case:
    case = sample(seed)
    r = random.Random(seed)
    switches = {k: v for k, v in case.switches.items() if k not in ("hierarchical", "nodes")}
    return replace(case, strategy=r.choice(DIRECT), switches=switches)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_sampled(ranks: Pool, first: int) -> None:
    """One group after another with other sizes, readers and owners: the words and regions of a link serve them all."""
    for seed in range(first, first + 20):
        case = direct(seed)
        verify(case, vectors(case), ranks.run(case.world, attend, case, vectors(case)))


@pytest.mark.dist
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_sampled_widely(ranks: Pool, first: int) -> None:
    for seed in range(first, first + 100):
        case = direct(seed)
        verify(case, vectors(case), ranks.run(case.world, attend, case, vectors(case)))


def several_calls(rank: int, group: Any, cases: list[Case]) -> list[dict[str, Any]]:
    return [attend(rank, group, case, vectors(case)) for case in cases]


def test_layers_follow_each_other_without_a_word_between_them(ranks: Pool) -> None:
    cases = [Case(3, 40, seed, FORMS[1 + seed % 3], strategy="gated", chunk=4, heads=(4, 2, 1)) for seed in range(8)]
    results = ranks.run(3, several_calls, cases)
    for i, case in enumerate(cases):
        verify(case, vectors(case), [r[i] for r in results])
