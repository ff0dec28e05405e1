"""Masks that users asked for or got wrong elsewhere: each is written in the language and gives exactly the dense mask."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import maskc
from maskc.binding.bound import BoundMask
from maskc.binding.streams import Kept
from maskc.ir.reference import Env, visible
from tests.cases.masks import CASES, WINDOW

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "mask_cases.json").read_text())


def bound(case: dict[str, Any]) -> BoundMask:
    written = CASES[case["id"]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "warning.W102.", maskc.MaskcWarning)  # R13 is what that warns of
        return maskc.compile_text(written.text).bind(nq=case["nq"], nk=case["nk"], **written.inputs)


def as_rows(dense: list[list[bool]]) -> list[str]:
    return ["".join("01"[seen] for seen in row) for row in dense]


def env_of(spec: BoundMask, nq: int, nk: int) -> Env:
    """The data of the first batch item as the oracle takes them."""
    inputs = spec.inputs
    counts = {name: int(t.counts[0]) for name, t in inputs.sets.items()}
    sets = {
        name: list(zip(t.starts[0].tolist(), t.ends[0].tolist(), strict=True))[: counts[name]] for name, t in inputs.sets.items()
    }
    scalars = {name: int(x) for name, x in inputs.scalars.items()}
    return Env(nq, nk, scalars, {name: t[0, 0].tolist() for name, t in inputs.vectors.items()}, sets)


def test_every_case_is_written() -> None:
    assert set(CASES) == {case["id"] for case in TABLE}


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])
def test_vectors_give_the_dense_mask(case: dict[str, Any]) -> None:
    vectors = bound(case).vectors()
    dense = (~vectors.masked()[0, 0]).tolist()
    assert as_rows(dense) == case["visible"]
    assert [i for i, row in enumerate(dense) if not any(row)] == case["empty_rows"]
    assert case["expect"] in ("dense", "dense, beside the free causal triangle")
    if case["expect"] != "dense":
        assert vectors.causal


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])
def test_the_oracle_gives_the_dense_mask(case: dict[str, Any]) -> None:
    spec, nq, nk = bound(case), case["nq"], case["nk"]
    env = env_of(spec, nq, nk)
    assert as_rows([[visible(spec.compiled.fn, env, q, k) for k in range(nk)] for q in range(nq)]) == case["visible"]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])
def test_folding_gives_the_dense_mask(case: dict[str, Any]) -> None:
    spec = bound(case)
    folded = replace(spec, compiled=replace(spec.compiled, program=None), _vectors=Kept())
    assert as_rows((~folded.vectors(case["nq"], case["nk"]).masked()[0, 0]).tolist()) == case["visible"]


def test_an_empty_window_is_refused_where_it_was_ruled_out() -> None:
    mask = maskc.compile_text(WINDOW + "mask m = k <= q < k + window")
    with pytest.raises(maskc.MaskcError, match=r"window = 0, but `window >= 1` was declared \(<text>:1:26\)") as caught:
        mask.bind(nq=4, nk=4, window=0)
    assert caught.value.code == "M402"


def test_a_breadth_first_tree_fits_only_beside_the_triangle() -> None:
    """R31 without `k <= q`: key 1 is seen by rows 1 and 3, which leaves three masked runs."""
    text = "input lo : int per key\ninput hi : int per key\nmask m = q == k or lo[k] <= q < hi[k]"
    with pytest.raises(maskc.MaskcError) as caught:
        maskc.compile_text(text)
    assert caught.value.code == "M301"


def test_packing_is_what_hides_documents_not_positions() -> None:
    """R02: the plain causal mask on two packed documents is another mask than the one with documents."""
    plain = maskc.compile("std:causal").bind(nq=6, nk=6).vectors().masked()
    packed = bound(next(case for case in TABLE if case["id"] == "R02")).vectors().masked()
    assert not torch.equal(plain, packed)
