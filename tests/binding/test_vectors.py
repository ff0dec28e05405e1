"""Boundary vectors of bound masks against the element-by-element oracle, for every suite mask and way to give data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskc
from maskc import CompiledMask, segments, spans
from maskc.frontend import parse_text
from maskc.ir.reference import Env, dense, visible
from maskc.ir.samples import random_env
from maskc.ir.verdict import Unknown
from tests.binding.suite import SUITE

WANTED = sorted(path.stem for path in SUITE.glob("*.mask") if not path.stem.startswith(("90_", "91_", "92_")))


def inputs_of(mask: CompiledMask, env: Env) -> dict[str, Any]:
    """An oracle environment as keywords of `bind`."""
    given: dict[str, Any] = {}
    for d in mask.fn.inputs:
        if d.is_set:
            given[d.name] = (segments if d.kind.value == "segments" else spans)(ranges=list(env.sets[d.name]))
        elif d.block is not None:
            given[d.name] = env.tables[d.name]
        else:
            given[d.name] = env.scalars[d.name] if d.per is None else list(env.vectors[d.name])
    return given


def environments(mask: CompiledMask, rng: random.Random, count: int) -> Iterator[Env]:
    """Random data that obey every declared fact."""
    program = mask.program
    assert program is not None
    while count > 0:
        nk = rng.randint(1, 14)
        nq = nk if mask.fn.square else rng.randint(1, 14)
        env = random_env(mask.fn, rng, nq, nk, frozenset(program.hole_free), frozenset(program.tiling))
        if env is not None:
            count -= 1
            yield env


def assert_dense(mask: CompiledMask, env: Env, seen: torch.Tensor) -> None:
    """`seen` [heads, nq, nk] is what the oracle says, head by head."""
    for h, head in enumerate(seen):
        assert head.tolist() == dense(mask.fn, env, h)


def test_a_read_at_a_constant_place_where_there_is_none() -> None:
    """Row 1 of no rows is outside, and outside is false: proved or folded, no read leaves its tensor."""
    mask = maskc.compile_text("input x : int per row\nmask m = k <= q and x[1] >= k")
    for m in (mask, CompiledMask(mask.fn, Unknown("for the test"), None)):
        assert m.bind(nk=4, x=[]).vectors().masked().shape == (1, 1, 0, 4)
        assert bool(m.bind(nk=4, x=[7]).vectors().masked().all())


@pytest.mark.parametrize("name", WANTED)
def test_suite_against_the_oracle(name: str) -> None:
    mask = maskc.compile(SUITE / f"{name}.mask")
    for env in environments(mask, random.Random(1), 12):
        spec = mask.bind(nq=env.nq, nk=env.nk, **inputs_of(mask, env))
        assert_dense(mask, env, ~spec.vectors().masked()[0])


@pytest.mark.parametrize("name", WANTED)
def test_folding_gives_the_same(name: str) -> None:
    """The path of masks that are neither proved nor refuted, on masks that are proved."""
    mask = maskc.compile(SUITE / f"{name}.mask")
    undecided = replace(mask, program=None)
    for env in environments(mask, random.Random(2), 12):
        spec = undecided.bind(nq=env.nq, nk=env.nk, **inputs_of(mask, env))
        assert_dense(mask, env, ~spec.vectors().masked()[0])


def test_a_batch_is_its_items() -> None:
    """Items with different numbers of segments, one `same` for each."""
    for name in ("09_doc_prefix", "06_share_question", "08_causal_blockwise", "22_transfusion", "37_cross_pairs", "28_duo_heads"):
        mask = maskc.compile(SUITE / f"{name}.mask")
        rng = random.Random(3)
        for _ in range(6):
            envs: list[Env] = []
            while len(envs) < 3:
                env = random_env(mask.fn, rng, 11, 11)
                if env is not None and (not envs or _same_heads(mask, env, envs[0])):
                    envs.append(env)
            items = [inputs_of(mask, env) for env in envs]
            together = {key: [item[key] for item in items] for key in items[0]}
            vectors = mask.bind(nq=11, nk=11, **together).vectors()
            for env, seen in zip(envs, (~vectors.masked()).expand(3, -1, -1, -1), strict=True):
                assert_dense(mask, env, seen)


def _same_heads(mask: CompiledMask, a: Env, b: Env) -> bool:
    return all(len(a.vectors[d.name]) == len(b.vectors[d.name]) for d in mask.fn.inputs if d.per == "head")


def test_vectors_per_head_and_batch() -> None:
    mask = maskc.compile("std:random_eviction")
    evict = torch.randint(8, 12, (2, 3, 8))
    vectors = mask.bind(evict=evict, nq=8).vectors()
    assert (vectors.batch, vectors.heads) == (2, 3)
    assert vectors.lts is not None
    assert torch.equal(vectors.lts, evict.clamp(max=8).int())
    shared = mask.bind(evict=evict[:1, :1], nq=8, batch=2).vectors()
    assert (shared.batch, shared.heads) == (1, 1)


@pytest.mark.parametrize(
    ("name", "key", "value", "wrap"),
    [
        ("std:random_eviction", "evict", torch.full((5,), 9, dtype=torch.int32), lambda t: t),
        ("std:sliding_window", "window", torch.tensor([5, 5], dtype=torch.int32), lambda t: t),
        ("std:doc_causal", "doc", torch.tensor([5], dtype=torch.int32), lambda t: segments(lengths=t)),
        ("std:doc_causal", "doc", torch.tensor([[0, 5]], dtype=torch.int32), lambda t: segments(ranges=t)),
    ],
)
def test_a_buffer_may_be_filled_anew(name: str, key: str, value: torch.Tensor, wrap: Callable[[torch.Tensor], object]) -> None:
    """What was checked is what runs, whatever becomes of the tensor that was given."""
    mask = maskc.compile(name)
    wanted = mask.bind(**{key: wrap(value.clone())}).vectors(5, 5)
    spec = mask.bind(**{key: wrap(value)})
    value.fill_(1)
    assert torch.equal(spec.vectors(5, 5).masked(), wanted.masked())


def test_scalars_per_batch_item() -> None:
    mask = maskc.compile("std:sliding_window")
    vectors = mask.bind(window=[2, 5], nq=9, nk=9).vectors()
    assert vectors.lts is not None
    assert vectors.lts[:, 0, :3].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert mask.bind(window=2, nq=9, nk=9).vectors().batch == 1


def test_bounds_beyond_32_bits_are_exact() -> None:
    vectors = maskc.compile("std:sliding_window").bind(window=2**31 - 1, nq=9, nk=9).vectors()
    assert vectors.lts is not None
    assert vectors.lts.flatten().tolist() == [9] * 9


def test_defaults() -> None:
    mask = maskc.compile_text("input window : int = 3 where window >= 1\nmask m = k <= q < k + window")
    assert torch.equal(mask.bind(nq=6, nk=6).vectors().masked(), mask.bind(nq=6, nk=6, window=3).vectors().masked())
    assert not torch.equal(mask.bind(nq=6, nk=6).vectors().masked(), mask.bind(nq=6, nk=6, window=2).vectors().masked())


def test_inputs_that_a_mask_does_not_read_may_stay_away(tmp_path: Path) -> None:
    file = tmp_path / "two.mask"
    file.write_text("input doc : segments\ninput w : int\nmask a = same(doc)\nmask b = k <= q < k + w\n")
    assert maskc.compile(f"{file}:a").bind(doc=segments(lengths=[3])).vectors().nk == 3
    assert maskc.compile(f"{file}:b").bind(w=3, doc=segments(lengths=[3])).vectors().nk == 3


SAME = "input doc : segments\nmask m = same(doc)"


@pytest.mark.parametrize(
    "form",
    [
        {"lengths": [3, 0, 2, 1]},
        {"cu_seqlens": [0, 3, 3, 5, 6]},
        {"ids": [7, 7, 7, 2, 2, 9, -1]},
        {"ids": [7, 7, 7, 2, 2, 9, 0], "pad": 0},
        {"ranges": [(0, 3), (3, 5), (5, 6)]},
        {"lengths": torch.tensor([[3, 0, 2, 1]])},
        {"cu_seqlens": [[0, 3, 5, 6]]},
        {"ranges": [[(0, 3), (3, 5), (5, 6)]]},
    ],
    ids=lambda form: " ".join(form),
)
def test_forms_say_the_same(form: dict[str, Any]) -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    seen = torch.zeros(7, 7, dtype=torch.bool)
    seen[:6, :6] = ids[:, None] == ids
    assert torch.equal(~maskc.compile_text(SAME).bind(nk=7, doc=segments(**form)).vectors().masked()[0, 0], seen)


def test_positions_and_ends_of_sequences() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    for form in (
        {"positions": [0, 1, 2, 0, 1, 0]},
        {"eos": [0, 0, 1, 0, 1, 0]},
        {"eos": [False, False, True, False, True, True]},
    ):
        seen = ~maskc.compile_text(SAME).bind(doc=segments(**form)).vectors().masked()[0, 0]
        assert torch.equal(seen, ids[:, None] == ids)


@pytest.mark.parametrize(
    "form",
    [
        {"lengths": [[3, 1], [0], [2, 0, 3]]},
        {"cu_seqlens": [[0, 3, 4], [0, 0], [0, 2, 2, 5]]},
        {"ranges": [[(0, 3), (3, 4)], [(0, 0)], [(0, 2), (2, 2), (2, 5)]]},
    ],
    ids=lambda form: " ".join(form),
)
def test_room_to_spare_is_empty_and_behind_the_last_segment(form: dict[str, Any]) -> None:
    table = maskc.compile_text(SAME).bind(nk=5, doc=segments(**form)).inputs.sets["doc"]
    assert table.counts.tolist() == [2, 1, 3]
    assert table.starts.tolist() == [[0, 3, 4], [0, 0, 0], [0, 2, 2]]
    assert table.ends.tolist() == [[3, 4, 4], [0, 0, 0], [2, 2, 5]]


def test_what_a_head_does_may_follow_from_its_number() -> None:
    """Where some input says how many heads there are; else all would be head 0 (M415)."""
    given = {
        "input evict : int per key\nmask m = k <= q < evict[k] + 2 * h": {"evict": torch.tensor([[[1, 2, 3, 4]] * 3])},
        "input wide : int per head\nmask m = k <= q < k + wide[h] + 2 * h": {"wide": [1, 1, 1], "nk": 4},
    }
    for text, inputs in given.items():
        lts = maskc.compile_text(text).bind(**inputs).vectors().lts
        assert lts is not None
        assert lts[0].tolist() == [[1, 2, 3, 4], [3, 4, 4, 4], [4, 4, 4, 4]]


@pytest.mark.parametrize("read", [list, torch.tensor, np.array])
def test_ragged_batches(read: Callable[[list[int]], Any]) -> None:
    mask = maskc.compile_text(
        "input doc : segments\ninput n : int per doc where n >= 1\nmask m = same(doc) and k <= q < k + n[k]"
    )
    lengths, values = ([read(item) for item in items] for items in ([[3, 2], [5], [1, 1, 3]], [[1, 2], [3], [4, 5, 6]]))
    spec = mask.bind(doc=segments(lengths=lengths), n=values)
    singles = [mask.bind(doc=segments(lengths=a), n=b).vectors().masked() for a, b in zip(lengths, values, strict=True)]
    assert torch.equal(spec.vectors().masked(), torch.cat(singles))
    listed = mask.bind(doc=[segments(lengths=a) for a in lengths], n=values)
    assert torch.equal(listed.vectors().masked(), spec.vectors().masked())
    assert spec.inputs.sets["doc"].counts.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    "form", [{"lengths": []}, {"ids": []}, {"ids": [-1, -1]}, {"ranges": []}, {"cu_seqlens": [0]}, {"eos": []}]
)
def test_no_segments_at_all(form: dict[str, Any]) -> None:
    n = 2 if form.get("ids") else 0
    assert maskc.compile_text(SAME).bind(doc=segments(**form)).vectors(n, n).masked().all()
    assert maskc.compile("std:qk_sparse").bind(drop=spans(**form)).vectors(n, n).nk == n


def test_sizes_come_from_inputs_or_from_the_call() -> None:
    spec = maskc.compile_text(SAME).bind(doc=segments(lengths=[3, 2]))
    assert (spec.nq, spec.nk) == (None, None)
    assert (spec.vectors().nq, spec.vectors(9, 9).nk) == (5, 9)
    assert spec.vectors(9, 9) is spec.vectors(9, 9)
    assert spec.vectors(9, 9).masked()[0, 0, 5:].all()
    by_key = maskc.compile("std:random_eviction").bind(evict=[9] * 4)
    assert (by_key.nq, by_key.nk, by_key.vectors().nq, by_key.vectors(7).nq) == (None, 4, 4, 7)


def test_block_tables_are_anded() -> None:
    mask = maskc.compile_text(
        "input a : bool per block(4, 4)\ninput b : bool per block(2, 6)\n"
        "mask m = k <= q and a[q // 4, k // 4] and b[q // 2, k // 6]"
    )
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(3, 3, generator=generator) < 0.6, torch.rand(2, 6, 2, generator=generator) < 0.6
    vectors = mask.bind(nq=11, nk=10, a=a, b=b).vectors()
    assert vectors.blocks is not None
    assert (vectors.batch, vectors.blocks.block_q, vectors.blocks.block_kv) == (2, 2, 2)
    for item in range(2):
        env = Env(11, 10, tables={"a": a.tolist(), "b": b[item].tolist()})
        assert (~vectors.masked()[item, 0]).tolist() == [[visible(mask.fn, env, q, k) for k in range(10)] for q in range(11)]


# ---------------------------------------------------------------- what the proof does not cover

FID = "input part : segments\nmask fid = same(part) or (k <= q and q in last(part))"


def test_a_padded_tail_that_breaks_the_proof_is_folded_or_refused() -> None:
    """The lowering of `fid` needs parts that fill all keys; with a tail the data decide."""
    mask = maskc.compile_text(FID)
    assert mask.program is not None
    assert mask.program.tiling == ("part",)
    exact = mask.bind(part=segments(lengths=[3, 2]), nk=5)
    assert exact.vectors().nk == 5
    two = mask.bind(part=segments(lengths=[3]), nk=5)
    assert_dense(mask, Env(5, 5, sets={"part": [(0, 3)]}), ~two.vectors().masked()[0])
    with pytest.raises(maskc.MaskcError) as caught:
        mask.bind(part=segments(lengths=[2, 2, 2, 2]), nk=9)
    assert caught.value.code == "M416"
    assert "key 2 of `fid` needs 3 masked runs" in str(caught.value)
    assert "masked rows: 0-1 | 4-5 | 8" in str(caught.value)


def test_an_undecided_mask_runs_where_the_data_allow_it() -> None:
    mask = replace(maskc.compile("std:doc_full"), program=None)
    spec = mask.bind(doc=segments(lengths=[2, 3]))
    assert torch.equal(
        spec.vectors().masked(), maskc.compile("std:doc_full").bind(doc=segments(lengths=[2, 3])).vectors().masked()
    )


def test_a_column_with_three_runs_is_named() -> None:
    (fn,) = parse_text("input a : int per key\ninput b : int per key\nmask m = k <= q and (q == a[k] or q == b[k])").masks
    undecided = CompiledMask(fn, Unknown("not asked"), None)
    assert undecided.bind(a=[0, 1, 2, 3, 4], b=[2, 1, 2, 3, 4]).vectors().causal
    with pytest.raises(maskc.MaskcError) as caught:
        undecided.bind(a=[1, 1, 2, 3, 4, 5], b=[3, 1, 2, 3, 4, 5], nq=6).vectors()
    assert caught.value.code == "M416"
    assert "key 0 of `m` needs 3 masked runs" in str(caught.value)
    assert "masked rows: 0 | 2 | 4-5 (beside the free triangle)" in str(caught.value)


def test_a_million_keys_need_no_square() -> None:
    n = 1 << 20
    lengths = torch.full((10_000,), n // 10_000)
    vectors = maskc.compile("std:doc_causal").bind(doc=segments(lengths=lengths)).vectors(n, n)
    assert vectors.lts is not None
    assert vectors.lts[0, 0, [0, 103, 104, n - 1]].tolist() == [104, 104, 208, 0]  # the last key lies behind the last document


@pytest.mark.parametrize("validate", [True, False])
def test_tables_with_room_to_spare(validate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the number of segments is not known while a table is made; it is cut after the one read, if there is one."""
    mask = maskc.compile("std:doc_prefix")
    given = {"doc": segments(ids=[[5, 5, 1, 1, 1, -1], [3, 2, 2, 7, 7, 7]]), "prefix": [[1, 2], [1, 0, 3]]}
    want = mask.bind(**given)
    monkeypatch.setattr("maskc.binding.sets._room", lambda counts, n: n)
    roomy = mask.bind(validate=validate, **given)
    assert roomy.inputs.sets["doc"].size == roomy.inputs.vectors["prefix"].shape[2] == (3 if validate else 6)
    assert torch.equal(roomy.vectors().masked(), want.vectors().masked())
    with pytest.raises(maskc.MaskcError, match=r"ids\[0\]\[2\] = 5 comes back"):
        mask.bind(doc=segments(ids=[[5, 1, 5], [0, 0, 0]]), prefix=[[0, 0, 0]] * 2)


def test_a_block_size_may_be_an_input() -> None:
    """Products of such a size and a floor by it stay near what was divided, so they are not taken for large ones."""
    text = """
input B : int where B >= 1
input L : int where 1 <= L, nk == 2 * L
let noisy(t) = t < L
let block(t) = (t - L) // B
mask m =
     (noisy(q) and noisy(k) and q // B == k // B)
  or (noisy(q) and not noisy(k) and q // B > block(k))
  or (not noisy(q) and not noisy(k) and block(q) >= block(k))
"""
    mask = maskc.compile_text(text)
    for size in (1, 3, 4, 2**31 - 1):
        env = Env(12, 12, {"B": size, "L": 6})
        assert_dense(mask, env, ~mask.bind(nq=12, nk=12, B=size, L=6).vectors().masked()[0])


def test_products_that_leave_64_bits_are_refused() -> None:
    with pytest.raises(maskc.MaskcError, match=r"M609.*a\[k\].* may need more than 64 bits"):
        maskc.compile_text("input a : int per key\ninput b : int\nmask m = k <= q + a[k] * b * b")
    two = maskc.compile_text("input a : int per key\ninput b : int\nmask m = k <= q + a[k] * b")
    assert two.bind(a=[-(2**31), 2**31 - 1], b=2**31 - 1).vectors().masked()[0, 0].tolist() == [[True, False]] * 2


def test_choices_between_reads() -> None:
    """`if` picks a value per key; where its condition reads an outside token, neither branch counts."""
    text = "input image : spans\ninput a : int per image\nmask m = k <= q < k + (if image.len[k] > 2 then a[k] else 2)"
    mask = maskc.compile_text(text)
    env = Env(9, 9, vectors={"a": [4, 9]}, sets={"image": [(1, 5), (6, 8)]})
    assert_dense(mask, env, ~mask.bind(nq=9, nk=9, **inputs_of(mask, env)).vectors().masked()[0])
