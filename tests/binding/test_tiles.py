"""SKIP and UNMASKED are promises; for the masks people use they are also exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.tiles import TileClass, block_minmax, classify
from tests.binding.strategies import boundary_vectors
from tests.binding.suite import SUITE, large_inputs

INEXACT = ("07_global_window", "20_block_diffusion")


def true_classes(masked: torch.Tensor, block_q: int, block_kv: int) -> torch.Tensor:
    """The classes of a dense mask [batch, heads, nq, nk], tile by tile."""
    rows = [t.all(2) for t in masked.split(block_q, 2)], [t.any(2) for t in masked.split(block_q, 2)]
    every, some = (torch.stack(part, 2) for part in rows)
    skip = torch.stack([t.all(3) for t in every.split(block_kv, 3)], 3)
    touched = torch.stack([t.any(3) for t in some.split(block_kv, 3)], 3)
    return torch.where(skip, TileClass.SKIP, torch.where(touched, TileClass.PARTIAL, TileClass.UNMASKED)).to(torch.uint8)


def assert_promises_kept(v: BoundaryVectors, block_q: int, block_kv: int) -> None:
    classes, truth = classify(v, block_q, block_kv), true_classes(v.masked(), block_q, block_kv)
    assert classes.shape == truth.shape
    assert classes.dtype == torch.uint8
    assert torch.all((classes == truth) | (classes == TileClass.PARTIAL))


@settings(max_examples=300, deadline=None)
@given(boundary_vectors(), st.sampled_from([1, 4, 8, 64]), st.sampled_from([1, 3, 16, 64]))
def test_promises_are_kept(v: BoundaryVectors, block_q: int, block_kv: int) -> None:
    assert_promises_kept(v, block_q, block_kv)


def class_by_the_rule(v: BoundaryVectors, rows: range, columns: range) -> TileClass:
    """Of one tile of the first item and head, as `classify` says, from each row that every column of the tile masks."""

    def least(name: str, absent: int) -> tuple[int, int]:
        vector = getattr(v, name)
        part = [absent] if vector is None else vector[0, 0, columns.start : columns.stop].tolist()
        return min(part), max(part)

    slots = [
        (least(a, 0), least(b, v.nq))
        for a, b in (("lts", "lte"), ("uts", "ute"))
        if any(getattr(v, n) is not None for n in (a, b))
    ]
    diag = least("diag", 0)
    masked = [range(columns.start if v.causal else 0), range(diag[0]), *(range(start[1], end[0]) for start, end in slots)]
    if all(any(row in part for part in masked) for row in rows):
        return TileClass.SKIP
    apart = (rows.stop <= start[0] or end[1] <= rows.start or end[1] <= start[0] for start, end in slots)
    clear = (not v.causal or rows.start >= columns.stop - 1) and rows.start >= diag[1] and all(apart)
    return TileClass.UNMASKED if clear else TileClass.PARTIAL


@settings(max_examples=300, deadline=None)
@given(boundary_vectors(blocks=False), st.sampled_from([1, 4, 8, 64]), st.sampled_from([1, 3, 16, 64]))
def test_classes_are_those_of_the_rule(v: BoundaryVectors, block_q: int, block_kv: int) -> None:
    for i, by_row in enumerate(classify(v, block_q, block_kv)[0, 0].tolist()):
        rows = range(i * block_q, min((i + 1) * block_q, v.nq))
        for j, found in enumerate(by_row):
            columns = range(j * block_kv, min((j + 1) * block_kv, v.nk))
            assert found == class_by_the_rule(v, rows, columns)


@settings(max_examples=100, deadline=None)
@given(boundary_vectors(blocks=False))
def test_single_columns_are_classified_exactly(v: BoundaryVectors) -> None:
    """A block of one column has nothing to lose: its extremes are its bounds."""
    classes, truth = classify(v, 5, 1), true_classes(v.masked(), 5, 1)
    assert torch.equal(classes == TileClass.SKIP, truth == TileClass.SKIP)


@settings(max_examples=100, deadline=None)
@given(boundary_vectors(), st.sampled_from([1, 3, 7, 64]))
def test_block_extremes(v: BoundaryVectors, block_kv: int) -> None:
    found = block_minmax(v, block_kv)
    for name in ("lts", "lte", "uts", "ute", "diag"):
        vector, extremes = getattr(v, name), getattr(found, name)
        assert (vector is None) == (extremes is None)
        if vector is not None:
            assert torch.equal(extremes.low, torch.stack([t.amin(2) for t in vector.split(block_kv, 2)], 2))
            assert torch.equal(extremes.high, torch.stack([t.amax(2) for t in vector.split(block_kv, 2)], 2))


@pytest.mark.parametrize(("name", "inputs"), list(large_inputs()), ids=[name for name, _ in large_inputs()])
def test_suite_masks_are_exact(name: str, inputs: dict[str, Any]) -> None:
    spec = maskc.compile(SUITE / f"{name}.mask").bind(nk=4096, nq=1024 if "dflash" in name else 4096, **inputs)
    v = spec.vectors()
    classes, truth = classify(v, 128, 128), true_classes(v.masked(), 128, 128)
    if name in INEXACT:
        assert torch.all((classes == truth) | (classes == TileClass.PARTIAL))
    else:
        assert torch.equal(classes, truth)


def make(nq: int, nk: int, causal: bool = False, **vectors: int | list[int]) -> BoundaryVectors:
    tensors = {
        name: torch.tensor(x if isinstance(x, list) else [x] * nk, dtype=torch.int32)[None, None] for name, x in vectors.items()
    }
    return BoundaryVectors(nq, nk, 1, 1, causal, **tensors)


@pytest.mark.parametrize(
    "v",
    [
        pytest.param(make(256, 128, lts=100, lte=200, uts=0, ute=100), id="touching"),
        pytest.param(make(256, 128, lts=100, lte=200, uts=50, ute=150), id="overlapping"),
        pytest.param(make(256, 128, lts=0, lte=100, uts=100, ute=256), id="swapped"),
        pytest.param(make(256, 128, lts=256, lte=256, uts=0, ute=0), id="both empty"),
        pytest.param(make(256, 128, lts=40, lte=10, uts=200, ute=90), id="ends before starts"),
        pytest.param(make(130, 128, lts=130), id="nothing below, ragged rows"),
        pytest.param(make(130, 130, lts=0), id="everything masked"),
        pytest.param(make(130, 129, causal=True, lts=[*range(129)]), id="hidden from its own row"),
    ],
)
@pytest.mark.parametrize("block_q", [64, 128])
def test_awkward_intervals(v: BoundaryVectors, block_q: int) -> None:
    assert torch.equal(classify(v, block_q, 128) == TileClass.SKIP, true_classes(v.masked(), block_q, 128) == TileClass.SKIP) or (
        v.causal
    )
    assert_promises_kept(v, block_q, 128)


def test_rows_past_the_end_do_not_matter() -> None:
    """The last tile holds rows 128 and 129 only, and all keys hide them."""
    assert classify(make(130, 128, lts=128), 128, 128).flatten().tolist() == [TileClass.UNMASKED, TileClass.SKIP]


def test_a_block_table_lowers_classes() -> None:
    keep = torch.tensor([[True, False], [True, True]])[None, None]
    v = BoundaryVectors(256, 256, 1, 1, True, blocks=BlockTable(keep, 128, 128))
    assert classify(v, 128, 128)[0, 0].tolist() == [[1, 0], [2, 1]]
    assert classify(v, 256, 256)[0, 0].tolist() == [[1]]
    assert classify(v, 64, 64)[0, 0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]


def test_large_masks_need_no_square_memory() -> None:
    """128 K rows and keys: the dense mask would take 16 GB."""
    n = 1 << 17
    v = BoundaryVectors(n, n, 1, 1, True, lts=torch.arange(n, dtype=torch.int32).add_(1024).clamp_(max=n)[None, None])
    classes = classify(v, 128, 128)[0, 0]
    assert int((classes == TileClass.UNMASKED).sum()) == sum(min(i, 7) for i in range(1024))
