"""The whole way from a text and data to vectors against the oracle: batches, heads, block tables, proved or folded.

What is proved of a mask must hold on the data, and data that break a fact must be refused.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import maskc
from maskc.ir import search
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import InputKind
from maskc.ir.reference import Env, broken_fact, dense
from maskc.ir.samples import random_env
from maskc.ir.search import broken_claim_of
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


def check_claims(mask: maskc.CompiledMask, env: Env) -> int:
    """What was proved, on data; a mask without keys has no row to speak of."""
    proved = [c.check for c in mask.checks if c.status == "proved" and env.nk > 0]
    for check in proved:
        assert broken_claim_of(mask.fn, check, env) is None, f"{check}\n{env}"
    return len(proved)


def check_broken_fact(mask: maskc.CompiledMask, env: Env, r: random.Random) -> bool:
    """One number of the data changed, now and then to the largest or smallest there is: refused if a fact says so."""
    numbers = [d for d in mask.fn.inputs if d.kind is InputKind.INT and not d.sorted]
    numbers = [d for d in numbers if d.per is None or env.vectors[d.name]]
    if not numbers:
        return False
    d, value = r.choice(numbers), r.choice((-(2**31), -1, 0, 1, env.nk, 2**31 - 1))
    if d.per is None:
        env = replace(env, scalars={**env.scalars, d.name: value})
    else:
        vector = list(env.vectors[d.name])
        vector[r.randrange(len(vector))] = value
        env = replace(env, vectors={**env.vectors, d.name: vector})
    try:
        mask.bind(nq=env.nq, nk=env.nk, **inputs_of(mask, env))
        refused = False
    except maskc.MaskcError as e:
        if e.code in ("M409", "M416", "M609"):
            return False
        refused = e.code == "M402"
    assert refused == (broken_fact(mask.fn, env) is not None), env
    return refused


def compare(seed: int, outcomes: Counter[str]) -> None:
    """One random mask on random data; counts what became of it and the columns that were compared."""
    r, text = random.Random(seed), random_text(seed)
    try:
        mask = maskc.compile_text(text)
    except maskc.MaskcError as e:
        outcomes[e.code] += 1
        if e.code != "M303":
            return
        mask = maskc.compile_text(text.partition("check")[0])
    outcomes["compiled"] += 1
    per_head = any(d.per == "head" for d in mask.fn.inputs)
    for _ in range(4):
        sizes = range(bool(mask.fn.tables), 12)  # a table of no row is no list of lists
        nk, heads = r.choice(sizes), r.choice((1, 2, 3))
        nq = nk if mask.fn.square or r.random() < 0.3 else r.choice(sizes)
        items = batch_of(mask, r, nq, nk, heads)
        if not items:
            continue
        given = [inputs_of(mask, env) for env in items]
        inputs = given[0] if len(given) == 1 else {name: [item[name] for item in given] for name in given[0]}
        try:
            seen = ~mask.bind(nq=nq, nk=nk, **inputs).vectors().masked()
        except maskc.MaskcError as e:
            folded = mask.program is None or bool(mask.program.tiling)  # then a column may not fit
            if e.code not in ("M409", "M609") and not (e.code == "M416" and folded):
                raise
            outcomes[e.code] += 1
            continue
        for env, item in zip(items, seen.expand(len(items), -1, -1, -1), strict=True):
            for h in range(heads if per_head else 1):
                wanted = torch.tensor(dense(mask.fn, env, h), dtype=torch.bool).view(nq, nk)
                assert torch.equal(item[min(h, len(item) - 1)], wanted), f"seed {seed}, head {h}\n{text}{env}"
                outcomes["columns"] += nk
        if not mask.fn.tables:
            outcomes["claims"] += sum(check_claims(mask, env) for env in items)
            outcomes["broken facts"] += check_broken_fact(mask, items[0], r)


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
    assert min(outcomes["claims"], outcomes["broken facts"]) > 0.1 * len(seeds), outcomes


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(50_000, 50_800), marks=pytest.mark.fuzz)], ids=["", "many"])
@pytest.mark.filterwarnings("ignore::maskc.MaskcWarning")
def test_refusals_come_with_their_counterexample(seeds: range) -> None:
    for seed in seeds:
        try:
            maskc.compile_text(random_text(seed))
        except maskc.MaskcError as e:
            notes = [label for d in e.diagnostics for label, _ in d.notes]
            assert (e.code == "M301") == ("smallest case found" in notes)  # noqa: PT017
