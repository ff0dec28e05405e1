"""Few segments are looked at as Python numbers: the same tables, facts and errors as by tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import maskc
from maskc.binding import data as binding_data

MASK = maskc.compile("std:doc_prefix")


def bound(few: int, inputs: dict[str, Any], **how: Any) -> Any:
    """The mask, or what is wrong with the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding_data, "_FEW", few)
        try:
            return MASK.bind(**inputs, **how)
        except maskc.MaskcError as e:
            return [(d.code, d.message) for d in e.diagnostics]


NUMBERS = st.lists(st.integers(-1, 9) | st.sampled_from([2**31 - 1, 2**31, -(2**40)]), min_size=0, max_size=6)


@given(
    numbers=NUMBERS,
    prefix=st.lists(st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**40]), max_size=6),
    form=st.sampled_from(["lengths", "cu_seqlens"]),
    check=st.booleans(),
)
def test_the_same_by_numbers_and_by_tensors(numbers: list[int], prefix: list[int], form: str, check: bool) -> None:
    for data in (numbers, [0, *sorted(n for n in numbers if n >= 0)], torch.tensor(numbers, dtype=torch.int64)):
        inputs = {"doc": maskc.segments(**{form: data}), "prefix": prefix}
        mine, want = (bound(few, inputs, validate=check) for few in (100, -1))
        if isinstance(want, list):
            assert mine == want
            continue
        assert (mine.nq, mine.nk, mine.batch, mine.totals, mine.fill) == (want.nq, want.nk, want.batch, want.totals, want.fill)
        assert [t.dtype for t in mine.inputs.tensors] == [t.dtype for t in want.inputs.tensors]
        assert all(map(torch.equal, mine.inputs.tensors, want.inputs.tensors))
        assert all(t.is_contiguous() for t in mine.inputs.tensors)


def test_only_one_item_of_few_segments_has_edges() -> None:
    one = MASK.bind(doc=maskc.segments(lengths=[3, 0, 4]), prefix=[1, 0, 2]).inputs.sets["doc"]
    assert one.edges == (0, 3, 3, 7)
    for lengths in ([[3, 4], [5, 2]], [1] * 200):
        prefix = torch.zeros(torch.tensor(lengths).shape, dtype=torch.int64)
        assert MASK.bind(doc=maskc.segments(lengths=lengths), prefix=prefix).inputs.sets["doc"].edges is None
