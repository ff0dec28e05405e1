"""Facts made of every kind of term: data are refused exactly where the oracle finds one broken."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

import maskc
from maskc import segments
from maskc.ir.reference import Env, broken_fact

TERMS = (
    "k",
    "w",
    "nk - k",
    "w * 2 - 3",
    "x[k - 1] + 1",
    "doc.pos[k]",
    "doc.len[k]",
    "doc.start[k]",
    "doc.end[k] - 1",
    "doc[k]",
    "doc.pos[k] // 2",
    "(doc.pos[k] - 3) // w",
    "doc.end[k] % 3",
    "(k - 4) % w",
    "abs(k - w)",
    "min(k, w, 3)",
    "max(w, doc.pos[k])",
    "(if k in doc then doc.end[k] else k)",
    "(if y[k] then 1 else w)",
    "(if w <= 2 then w else 4)",
)
FORMS = (
    "x[k] <= TERM",
    "x[k] != TERM",
    "not (x[k] < TERM - 2)",
    "(y[k] or x[k] >= TERM)",
    "(k in doc or x[k] == TERM)",
    "(if y[k] then x[k] <= TERM else x[k] >= 0)",
)
DECLARED = "input doc : segments\ninput w : int where w >= 1\ninput y : bool per key\ninput x : int per key where "
MASK = "\nmask m = k <= q < k + abs(x[k]) + w and (same(doc) or y[k])\n"


def environment(r: random.Random) -> Env:
    n = r.randint(1, 8)
    edges = [0, *sorted(r.randint(0, n) for _ in range(r.randint(1, 3)))]
    x = [r.choice((0, 1, 2, r.randint(-2, n + 1))) for _ in range(n)]
    y = [r.random() < 0.5 for _ in range(n)]
    return Env(n, n, {"w": r.randint(1, 5)}, {"x": x, "y": y}, {"doc": list(pairwise(edges))})


@pytest.mark.parametrize("term", TERMS)
def test_facts_are_checked_as_the_oracle_reads_them(term: str) -> None:
    r, found = random.Random(term), Counter[bool]()
    for form in FORMS:
        mask = maskc.compile_text(DECLARED + form.replace("TERM", term) + MASK)
        for _ in range(25):
            env = environment(r)
            doc = segments(ranges=list(env.sets["doc"]))
            broken = broken_fact(mask.fn, env)
            given = {"doc": doc, "w": env.scalars["w"], "x": list(env.vectors["x"]), "y": list(env.vectors["y"])}
            try:
                mask.bind(nk=env.nk, **given)
                refused = False
            except maskc.MaskcError as e:
                if e.code != "M402":
                    raise
                refused = True
            assert refused == (broken is not None), f"{form}: {env}"
            found[refused] += 1
    assert min(found[True], found[False]) > 20, found
