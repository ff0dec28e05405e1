"""Long masks are worked on in slices of columns; here every mask is, three columns at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import maskc
from maskc.binding import columns
from tests.binding.suite import SUITE
from tests.binding.test_vectors import WANTED, assert_dense, environments, inputs_of


@pytest.mark.parametrize("name", WANTED)
def test_slices_of_columns_are_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluated and folded: whether rows before a key are free is a matter of all slices."""
    monkeypatch.setattr(columns, "_SLICE", 3)
    mask = maskc.compile(SUITE / f"{name}.mask")
    for env in environments(mask, random.Random(4), 6):
        for one in (mask, replace(mask, program=None)):
            assert_dense(mask, env, ~one.bind(nq=env.nq, nk=env.nk, **inputs_of(mask, env)).vectors().masked()[0])


def test_rows_before_a_key_are_seen_in_one_slice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_SLICE", 2)
    mask = replace(maskc.compile_text("input late : bool per key\nmask m = k <= q or late[k]"), program=None)
    vectors = mask.bind(nq=6, late=[0, 0, 0, 0, 0, 1]).vectors()
    assert not vectors.causal
    assert (~vectors.masked()[0, 0]).sum(0).tolist() == [6, 5, 4, 3, 2, 6]
