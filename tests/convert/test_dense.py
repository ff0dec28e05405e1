"""Dense masks: read exactly or refused with the column; and the comparison of masks by their columns."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskc
from maskc.boundary import BoundaryVectors
from maskc.convert import from_dense, to_dense
from maskc.convert.columns import difference
from maskc.diagnostics import MaskcError
from tests.convert.strategies import equal, seen, vectors


@given(vectors())
@settings(max_examples=50)
def test_round_trip(v: BoundaryVectors) -> None:
    dense = seen(v)
    back = from_dense(dense) if _fits(dense) else None
    if back is None:
        with pytest.raises(MaskcError, match="M450"):
            from_dense(dense)
    else:
        assert torch.equal(to_dense(back).expand_as(dense), dense)
        assert equal(back.vectors(), v)


def _fits(dense: torch.Tensor) -> bool:
    """Whether every column has at most two masked runs, beside the triangle if no key is seen by an earlier row."""
    *_, nq, nk = dense.shape
    causal = not any(dense[..., q, k].any() for q in range(nq) for k in range(q + 1, nk))
    for column in dense.transpose(-1, -2).reshape(-1, nk, nq).unbind(0):
        for k in range(nk):
            hidden = [not x for x in column[k].tolist()]
            start = min(k, nq) if causal else 0
            runs = sum(h and (q == start or not hidden[q - 1]) for q, h in enumerate(hidden) if q >= start)
            if runs > 2:
                return False
    return True


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 16))
def test_any_bool_mask_is_exact_or_refused(nq: int, nk: int, seed: int) -> None:
    dense = torch.rand(nq, nk, generator=torch.Generator().manual_seed(seed)) < 0.5
    if _fits(dense[None, None]):
        assert torch.equal(to_dense(from_dense(dense))[0, 0], dense)
    else:
        with pytest.raises(MaskcError, match="M450"):
            from_dense(dense)


def test_a_column_that_does_not_fit_is_named() -> None:
    dense = torch.ones(9, 4, dtype=torch.bool)
    dense[[0, 2, 3, 6], 2] = False
    with pytest.raises(MaskcError) as caught:
        from_dense(dense)
    assert caught.value.diagnostics[0].message == "key 2 of the dense mask needs 3 masked runs; the column form holds 2"
    assert caught.value.diagnostics[0].notes == (("masked rows", "0 | 2-3 | 6"),)
    dense[[4, 8], 3] = False
    dense[[1, 6], 2] = True
    dense[[0, 2], 3] = False
    dense[6, 3] = False
    with pytest.raises(MaskcError, match="key 3 of the dense mask needs 5 masked runs"):
        from_dense(dense)


def test_the_free_triangle_is_found() -> None:
    n = 12
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    v = from_dense(causal).vectors()
    assert v.causal
    assert v.tensors == (None,) * 5
    causal[9:, 3] = causal[5, 3] = False  # two runs beside the triangle
    assert torch.equal(to_dense(from_dense(causal))[0, 0], causal)


@pytest.mark.parametrize("bad", [torch.zeros(4, 4), torch.ones(4, dtype=torch.bool), torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)])
def test_what_is_no_dense_mask(bad: torch.Tensor) -> None:
    with pytest.raises(MaskcError, match="M451"):
        from_dense(bad)


def test_sizes_and_limits() -> None:
    assert to_dense(from_dense(torch.ones(0, 5, dtype=torch.bool))).shape == (1, 1, 0, 5)
    assert to_dense(from_dense(torch.ones(5, 0, dtype=torch.bool))).shape == (1, 1, 5, 0)
    spec = maskc.compile("std:causal").bind()
    with pytest.raises(MaskcError, match="M452"):
        to_dense(spec, 4096, 4096, limit=1000)


def test_run_takes_it() -> None:
    torch.manual_seed(0)
    dense = torch.ones(20, 20, dtype=torch.bool).tril()
    q, k, v = torch.randn(3, 1, 20, 2, 8, dtype=torch.float64)
    assert torch.equal(maskc.run(from_dense(dense), q, k, v), maskc.run("std:causal", q, k, v))
    with pytest.raises(MaskcError, match="M413"):
        maskc.run(from_dense(dense), q[:, :10], k, v)


def test_it_plans_and_pickles() -> None:
    spec = from_dense(torch.ones(40, 40, dtype=torch.bool).tril())
    again = pickle.loads(pickle.dumps(spec))
    assert maskc.plan(spec, world_size=2, chunk=8).digest == maskc.plan(again, world_size=2, chunk=8).digest


@given(vectors(), st.integers(0, 1 << 16))
def test_difference_finds_the_first_cell(a: BoundaryVectors, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lts = torch.randint(0, a.nq + 1, (1, 1, a.nk), generator=generator, dtype=torch.int32)
    b = a if seed % 3 == 0 else BoundaryVectors(a.nq, a.nk, 1, 1, a.causal, lts)
    cells = (seen(a) != seen(b)).nonzero().tolist()
    found = difference(a, b)
    if not cells:
        assert found is None
    else:
        assert found is not None
        assert found.cells == len(cells)
        first = min(q * a.nk + k for _, _, q, k in cells)
        assert found.row * a.nk + found.key == first
        assert [found.batch, found.head, found.row, found.key] in cells
