"""The whole way from a text and data to vectors against the oracle: batches, heads, block tables, proved or folded."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import pytest
import torch

import maskc
from maskc.ir import search
from maskc.ir.lower import needs_hole_free
from maskc.ir.reference import Env, dense
from maskc.ir.samples import random_env
from tests.binding.random_texts import random_text
from tests.binding.test_vectors import inputs_of


def batch_of(mask: maskc.CompiledMask, r: random.Random, nq: int, nk: int, heads: int) -> list[Env]:
    """Up to three items of random data, most of them without the holes that the mask cannot have."""
    program = mask.program
    hole_free = frozenset(program.hole_free) if program is not None else needs_hole_free(mask.fn)
    tiling = frozenset(program.tiling) if program is not None else frozenset[str]()
    if r.random() < 0.3:
        hole_free = tiling = frozenset()
    found = [random_env(mask.fn, r, nq, nk, hole_free, tiling, heads) for _ in range(r.choice((1, 1, 2, 3)))]
    return [env for env in found if env is not None]


def compare(seed: int, outcomes: Counter[str]) -> None:
    """One random mask on random data; counts what became of it and the columns that were compared."""
    r, text = random.Random(seed), random_text(seed)
    try:
        mask = maskc.compile_text(text)
    except maskc.MaskcError as e:
        outcomes[e.code] += 1
        return
    outcomes["compiled"] += 1
    per_head = any(d.per == "head" for d in mask.fn.inputs)
    for _ in range(4):
        nk, heads = r.randint(1, 11), r.choice((1, 2, 3))
        nq = nk if mask.fn.square or r.random() < 0.3 else r.randint(1, 11)
        items = batch_of(mask, r, nq, nk, heads)
        if not items:
            continue
        given = [inputs_of(mask, env) for env in items]
        inputs = given[0] if len(given) == 1 else {name: [item[name] for item in given] for name in given[0]}
        try:
            seen = ~mask.bind(nq=nq, nk=nk, **inputs).vectors().masked()
        except maskc.MaskcError as e:
            folded = mask.program is None or bool(mask.program.tiling)  # then a column may not fit
            if e.code != "M409" and not (e.code == "M416" and folded):
                raise
            outcomes[e.code] += 1
            continue
        for env, item in zip(items, seen.expand(len(items), -1, -1, -1), strict=True):
            for h in range(heads if per_head else 1):
                wanted = torch.tensor(dense(mask.fn, env, h))
                assert torch.equal(item[min(h, len(item) - 1)], wanted), f"seed {seed}, head {h}\n{text}{env}"
                outcomes["columns"] += nk


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 6000), marks=pytest.mark.fuzz)], ids=["", "many"])
def test_a_text_means_what_the_oracle_says(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "refutation", lambda fn: None)  # what is not proved is folded, or refused by its data
    monkeypatch.setattr(search, "scattered_example", lambda fn: None)
    outcomes: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", maskc.MaskcWarning)
        for seed in seeds:
            compare(seed, outcomes)
    assert outcomes["compiled"] > 0.4 * len(seeds), outcomes
    assert outcomes["columns"] > 10 * len(seeds), outcomes


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(50_000, 50_800), marks=pytest.mark.fuzz)], ids=["", "many"])
@pytest.mark.filterwarnings("ignore::maskc.MaskcWarning")
def test_refusals_come_with_their_counterexample(seeds: range) -> None:
    for seed in seeds:
        try:
            maskc.compile_text(random_text(seed))
        except maskc.MaskcError as e:
            notes = [label for d in e.diagnostics for label, _ in d.notes]
            assert (e.code == "M301") == ("smallest case found" in notes)  # noqa: PT017
