"""What the page computes by itself equals what the library computes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskc
from maskc.binding.bound import BoundMask
from maskc.codegen.spec import CAUSAL, LTE, LTS, UTE, UTS
from maskc.ir.reference import Env, visible
from maskc.report import cases as report_cases
from maskc.report.cases import Subject, case, head_of, parse_size
from maskc.report.gallery import EXAMPLES
from maskc.report.plans import chunk_size
from maskc.runtime.layout import Layout, even_bounds
from maskc.runtime.localize import RowMap, fold_causal, localize
from maskc.runtime.plan import plan
from maskc.tiles import classify
from tests.codegen.mirror import KvIndex
from tests.report.javascript import evaluate, needs_node

pytestmark = needs_node

NAMES = list(EXAMPLES)


def slices(s: Subject, c: dict[str, Any]) -> list[tuple[int, Any]]:
    """(number of the slice, its vectors alone)."""
    v = s.bound.vectors()
    return [(i, head_of(v, raw["item"], raw["head"])) for i, raw in enumerate(c["slices"])]


def test_cells(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    body = """return data.map((c) => c.slices.map((_, i) => {
        const s = openSlice(c, i), column = (k) => Array.from({ length: s.nq }, (_, q) => isMasked(s, q, k) ? 1 : 0);
        return Array.from({ length: s.nk }, (_, k) => [visibleRows(s, k), column(k)]);
    }));"""
    small = [n for n in NAMES if cases[n]["nq"] <= 128]
    for name, found in zip(small, evaluate(body, [cases[n] for n in small]), strict=True):
        for (_, v), columns in zip(slices(subjects[name], cases[name]), found, strict=True):
            masked = v.masked()[0, 0]
            assert torch.tensor([cells for _, cells in columns], dtype=torch.bool).T.equal(masked), name
            for k, (rows, _) in enumerate(columns):
                assert [q for a, b in rows for q in range(a, b)] == (~masked[:, k]).nonzero().flatten().tolist(), name


def test_tile_classes(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    for name, found in zip(NAMES, evaluate(TILES, [cases[n] for n in NAMES]), strict=True):
        assert found == expected_tiles(subjects[name], cases[name]), name


TILES = """return data.map((c) => c.slices.map((_, n) => Object.keys(c.tiles).map((size) => {
    const s = openSlice(c, n), [bq, bkv] = size.split("x").map(Number);
    return Array.from({ length: Math.ceil(s.nq / bq) }, (_, i) => rowOfTiles(s, i, bq, bkv).map((t) => t.cls).reverse());
})));"""


def expected_tiles(s: Subject, c: dict[str, Any]) -> list[list[list[list[int]]]]:
    return [[classify(v, *parse_size(size))[0, 0].tolist() for size in c["tiles"]] for _, v in slices(s, c)]


QUEUES = """return data.map((c) => c.slices.map((_, n) => {
    const s = openSlice(c, n);
    return Array.from({ length: Math.ceil(s.nq / 16) }, (_, i) => rowOfTiles(s, i, 16, 16).filter((t) => t.cls !== SKIP)
        .map((t) => [t.block, t.cls === PARTIAL ? tileTests(s, i, t.block, 16, 16) : []]));
}));"""


def test_queues_and_tests_are_the_kernels(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    """Order of the queue, and the bounds that a PARTIAL tile is tested against, as the kernel's own mirror has them."""
    tests = {CAUSAL: "q < k", LTS: "LTS", LTE: "LTE", UTS: "UTS", UTE: "UTE"}
    for name, found in zip(NAMES, evaluate(QUEUES, [cases[n] for n in NAMES]), strict=True):
        for (_, v), rows in zip(slices(subjects[name], cases[name]), found, strict=True):
            vectors = dict(zip(("lts", "lte", "uts", "ute", "diag"), v.tensors, strict=True))
            spec: Any = SimpleNamespace(
                block_q=16, block_kv=16, row_groups=1, zero_unseen=False, form=SimpleNamespace(causal=v.causal)
            )
            index = KvIndex(spec, v.nq, v.nk, {n: t[0, 0].tolist() for n, t in vectors.items() if t is not None})
            for i, got in enumerate(rows):
                want = [(block, [text for bit, text in tests.items() if tag & bit]) for block, tag in index.queue(i)]
                assert [tuple(entry) for entry in got] == want, (name, i)


def test_tile_classes_where_a_page_holds_some_keys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long irregular vectors: the minima and maxima that come along keep every class exact."""
    monkeypatch.setattr(report_cases, "RUNS", 50)
    monkeypatch.setattr(report_cases, "SPACED_KEYS", 30)
    monkeypatch.setattr(report_cases, "tile_sizes", lambda n: ((16, 32), (16, 64), (32, 96)))
    evict = torch.randint(1, 500, (500,), generator=torch.Generator().manual_seed(1)) + torch.arange(500)
    s = Subject("evict", "yours", maskc.compile("std:random_eviction").bind(nq=500, nk=500, evict=evict), planned=False)
    c: dict[str, Any] = dict(case(s))
    assert c["slices"][0]["stride"] == 17
    assert c["slices"][0]["inputs"] is None
    assert evaluate(TILES, [c]) == [expected_tiles(s, c)]
    held = evaluate("const s = openSlice(data, 0); return [heldKey(s, 40), isMasked(s, 40, 34), isMasked(s, 30, 34)];", c)
    assert held == [34, bool(int(evict[34]) <= 40), True]


def test_block_tables(subjects: dict[str, Subject]) -> None:
    keep = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = maskc.compile_text("input keep : bool per block(16, 16)\nmask m = k <= q + 20 and keep[q // 16, k // 16]")
    s = Subject("m", "yours", mask.bind(nq=90, nk=120, keep=keep))
    c: dict[str, Any] = dict(case(s))
    assert evaluate(TILES, [c]) == [expected_tiles(s, c)]
    body = """const s = openSlice(data, 0);
        return Array.from({ length: 90 }, (_, q) => Array.from({ length: 120 }, (_, k) => isMasked(s, q, k)));"""
    assert torch.tensor(evaluate(body, c)).equal(s.bound.vectors().masked()[0, 0])


@pytest.mark.parametrize("name", NAMES)
def test_predicate(name: str, subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    """Every part as a whole: the predicate in the page is the reference at random cells."""
    c, s = cases[name], subjects[name]
    rng = random.Random(name)
    points = [(rng.randrange(c["nq"]), rng.randrange(c["nk"])) for _ in range(400)]
    body = """const { c, points } = data;
        return c.slices.map((_, i) => { const s = openSlice(c, i), env = { nq: s.nq, nk: s.nk, ...s.inputs };
            return points.map(([q, k]) => holds(c.predicate, env, { q, k, h: s.head })); });"""
    found = evaluate(body, {"c": c, "points": points})
    for raw, answers in zip(c["slices"], found, strict=True):
        env = environment(s.bound, raw["item"], raw["head"], c["nq"], c["nk"])
        assert answers == [visible(s.bound.compiled.fn, env, q, k, 0) for q, k in points]


def environment(bound: BoundMask, item: int, head: int, nq: int, nk: int) -> Env:
    given = bound.inputs
    return Env(
        nq,
        nk,
        {n: x if isinstance(x, int) else int(x[0]) for n, x in given.scalars.items()},
        {n: t[min(item, len(t) - 1), min(head, t.shape[1] - 1)].tolist() for n, t in given.vectors.items()},
        {n: list(zip(t.starts[0].tolist(), t.ends[0].tolist(), strict=True)) for n, t in given.sets.items()},
    )


LOCAL = """return data.map(({ c, bounds, owner, world }) => c.slices.map((_, i) => {
    const s = openSlice(c, i), folded = foldCausal(s);
    return Array.from({ length: world }, (_, r) => {
        const map = rowMap(bounds, owner, r), l = localSlice(s, map);
        return { nq: l.nq, vectors: VECTORS.map((n) => l[n] && Array.from(l[n])), folded: VECTORS.map((n) => folded[n] !== null),
                 rows: Array.from({ length: map.length }, (_, x) => map.globalRow(x)) };
    });
}));"""


def test_localization(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    """L, the folded triangle and the local vectors, for regular and ragged chunks and any owners."""
    rng = random.Random(0)
    asked = []
    for name in NAMES:
        nq, world = cases[name]["nq"], rng.choice([2, 3, 5])
        regular = even_bounds(nq, rng.choice([7, 16, 20]))
        ragged = (0, *sorted(rng.sample(range(1, nq), 9)), nq)
        for bounds in (regular, ragged):
            owner = [rng.randrange(world) for _ in bounds[1:]]
            asked.append((name, Layout(world, bounds, tuple(owner))))
    data = [{"c": cases[n], "bounds": y.bounds, "owner": y.owner, "world": y.world} for n, y in asked]
    for (name, rows), found in zip(asked, evaluate(LOCAL, data), strict=True):
        for (_, v), ranks in zip(slices(subjects[name], cases[name]), found, strict=True):
            keys = Layout(1, (0, v.nk), (0,))
            assert ranks[0]["folded"] == [t is not None for t in fold_causal(v).tensors]
            for rank, got in enumerate(ranks):
                want = localize(v, rows, rows.chunks_of(rank), keys, (0,))
                assert got["nq"] == want.nq == RowMap.of(rows, rows.chunks_of(rank)).length
                assert got["vectors"] == [None if t is None else t[0, 0].tolist() for t in want.tensors], (name, rank)
                assert got["rows"] == [x for a, b in rows.ranges(rows.chunks_of(rank)) for x in range(a, b)]


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("hierarchical", [True, False])
def test_exchange(prune: bool, hierarchical: bool, subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    for name in ("causal", "doc_prefix", "global_window", "cross_pairs"):
        s, comm = subjects[name], cases[name]["comm"]
        assert s.scaled is not None
        v = s.scaled.vectors()
        p = plan(v, world_size=8, nodes=2, chunk=chunk_size(v.nq, 32), prune=prune, hierarchical=hierarchical)
        assert comm["rows"]["owner"] == "".join(map(str, p.rows.owner))
        (step,) = p.schedule("all-gather").steps
        want = [[{"src": m.src, "dst": m.dst, "chunk": m.chunk} for m in phase] for phase in step.phases]
        data = {"c": comm, "p": prune, "h": hierarchical}
        assert evaluate("return exchange(data.c, data.p, data.h);", data) == want
        ranks = evaluate("return simulate(data.c, data.p, data.h);", data)
        for rank, r in enumerate(ranks):
            assert {w["chunk"] for w in r["work"]} == p.needed(rank)
            assert sum(len(x["transfers"]) for x in ranks) == sum(map(len, want))
            spent = sum(w["end"] - w["start"] for w in r["work"])
            assert spent == pytest.approx(p.workloads[rank] * comm["seconds_per_cost"])
            starts = [w["start"] for w in r["work"]]
            assert starts == sorted(starts)
