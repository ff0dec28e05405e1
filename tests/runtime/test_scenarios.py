"""What users of other attention libraries ran into, each tried here on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import maskc
from maskc import segments
from maskc.boundary import BoundaryVectors
from maskc.runtime import ops
from tests.runtime.dense import reference

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operands(nq: int, nk: int | None = None, batch: int = 1, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> Tensors:
    generator = torch.Generator().manual_seed(nq)

    def make(n: int, h: int) -> torch.Tensor:
        return torch.randn(batch, n, h, dim, generator=generator, dtype=torch.float64).requires_grad_()

    nk = nq if nk is None else nk
    return make(nq, heads), make(nk, kv_heads), make(nk, kv_heads)


def assert_right(spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """(out, lse, grads), equal to dense fp64 attention; the gradient of lse takes part."""
    out, lse = maskc.run(spec, q, k, v, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    vectors = spec.vectors(q.shape[1], k.shape[1])
    want = reference(vectors, q, k, v, q.shape[3] ** -0.5, dout, dlse)
    torch.testing.assert_close((out, lse, *grads), (want[0], want[1], *want[2]))
    return out, lse, grads


def test_one_token_changes_its_own_document_only() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=segments(lengths=[64, 64]))
    q, k, v = (x.detach() for x in operands(128))
    before = maskc.run(spec, q, k, v)
    for x in (q, k, v):
        x[:, 3] += 1.0
    after = maskc.run(spec, q, k, v)
    assert torch.equal(after[:, 64:], before[:, 64:])
    assert not torch.equal(after[:, 3:64], before[:, 3:64])


@pytest.mark.usefixtures("poisoned")
def test_a_tail_behind_the_last_document_is_zero_not_garbage() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=segments(cu_seqlens=[0, 144, 432, 944]))
    out, lse, grads = assert_right(spec, *operands(946, heads=2, kv_heads=1))
    assert not out[:, 944:].any()
    assert torch.all(lse[..., 944:] == -torch.inf)
    assert all(not g[:, 944:].any() for g in grads)


@pytest.mark.usefixtures("poisoned")
def test_empty_sides_of_packed_cross_attention() -> None:
    """Rows of lengths 0, 0, 31 against keys of lengths 0, 1, 45: pair 1 has keys but no row."""
    rows, keys = torch.full((31,), 2), torch.tensor([1] + [2] * 45)
    spec = maskc.compile("std:cross_pairs").bind(row_pair=rows, key_pair=keys)
    _, _, (_, dk, dv) = assert_right(spec, *operands(31, 46))
    assert not dk[:, 0].any()
    assert not dv[:, 0].any()


def test_strided_slices_of_one_projection() -> None:
    """q, k and v cut from one tensor, and an output gradient that is a transposed view."""
    joint = torch.randn(2, 70, 3, 4, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = joint.unbind(2)
    spec = maskc.compile("std:causal").bind(nq=70, nk=70)
    weight = torch.randn(2, 16, 70, 4, dtype=torch.float64).permute(0, 2, 3, 1)
    (grad,) = torch.autograd.grad(maskc.run(spec, q, k, v), joint, weight)
    _, _, want = reference(spec.vectors(), q, k, v, 0.25, weight)
    torch.testing.assert_close(grad, torch.stack(want, 2))


@pytest.mark.usefixtures("poisoned")
def test_rows_without_keys_leave_the_others_alone() -> None:
    text = "input hole : spans\nmask m = k <= q and q in hole\n"
    with pytest.raises(maskc.MaskcError, match="M201"):
        maskc.compile_text(text)
    mask = maskc.compile_text("input a : int\ninput b : int where a <= b\nmask m = k <= q and (q < a or b <= q)")
    spec = mask.bind(a=5, b=8, nq=20, nk=20)
    q, k, v = operands(20)
    out, lse, (dq, _, _) = assert_right(spec, q, k, v)
    assert not out[:, 5:8].any()
    assert torch.all(lse[..., 5:8] == -torch.inf)
    assert not dq[:, 5:8].any()
    plain = maskc.run("std:causal", q, k, v)
    torch.testing.assert_close(out[:, 8:], plain[:, 8:])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 31, 127, 128, 129, 385])
def test_any_length(n: int) -> None:
    assert_right(maskc.compile("std:causal").bind(nq=n, nk=n), *operands(n, heads=2, kv_heads=1))


def test_documents_of_any_length() -> None:
    for lengths in ([7], [1], [3], [5, 3], [9, 7, 8, 12, 8, 12], [20, 3, 8], [3, 9, 20, 1, 13, 12, 6], [1, 2, 3, 5, 7, 11]):
        spec = maskc.compile("std:doc_causal").bind(doc=segments(lengths=lengths))
        assert_right(spec, *operands(sum(lengths), heads=2, kv_heads=1))


def test_more_query_rows_than_keys_from_the_bottom_right() -> None:
    """Rows before the first key see nothing."""
    mask = maskc.compile_text("mask m = k <= q + (nk - nq)")
    out, lse, _ = assert_right(mask.bind(nq=9, nk=6), *operands(9, 6))
    assert not out[:, :3].any()
    assert torch.all(lse[..., :3] == -torch.inf)


def test_thousands_of_short_sequences() -> None:
    q, k, v = (x.detach() for x in operands(32, batch=2840, heads=2, kv_heads=1, dim=4))
    out = maskc.run("std:causal", q, k, v)
    for item in (0, 1419, 2839):
        torch.testing.assert_close(out[item : item + 1], maskc.run("std:causal", *(x[item : item + 1] for x in (q, k, v))))


def test_an_exception_leaves_no_state_behind() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=segments(lengths=[10]))
    q, k, v = operands(10)
    before = maskc.run(spec, q, k, v)
    with pytest.raises(maskc.MaskcError):
        maskc.run(spec, q, k[:, :9], v[:, :9])
    assert torch.equal(maskc.run(spec, q, k, v), before)


@pytest.mark.parametrize(
    "vectors",
    [
        pytest.param({"lts": [5, 2**31 - 1, 12, 13]}, id="bounds past the last row"),
        pytest.param({"lts": [0, 0, 0, 0]}, id="everything masked"),
        pytest.param(
            {"lts": [3, 0, 9, 0], "lte": [7, 2, 4, 12], "uts": [0, 2, 0, 12], "ute": [3, 12, 1, 12]}, id="swapped, touching"
        ),
    ],
)
def test_awkward_vectors(vectors: dict[str, list[int]]) -> None:
    v = BoundaryVectors(12, 4, 1, 1, False, **{n: torch.tensor(x, dtype=torch.int32)[None, None] for n, x in vectors.items()})
    q, k, val = operands(12, 4)
    out, lse = ops.attention(v, q, k, val, 0.25)
    want = reference(v, q, k, val, 0.25, torch.ones_like(out))
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, val)), want[2])


def test_repeated_runs_are_bitwise_equal() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=segments(lengths=[200, 100]))
    q, k, v = operands(300)
    runs = []
    for _ in range(5):
        out, lse = maskc.run(spec, q, k, v, return_lse=True, deterministic=True)
        runs.append((out, lse, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_the_twelve_masks_of_the_family() -> None:
    from benchmarks.masks import NAMES, mask_case

    for name in NAMES:
        case = mask_case(name, 200, heads=2)
        spec = maskc.compile(case.mask).bind(nq=200, nk=200, **case.inputs)
        assert_right(spec, *operands(200, heads=4, kv_heads=2))
