"""cu_seqlens, FlashMask indices and range slices, against what their own documentation says, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import maskc
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.convert import (
    from_cu_seqlens,
    from_dense,
    from_flashmask,
    from_magi,
    from_mask_mod,
    to_block_mask,
    to_cu_seqlens,
    to_dense,
    to_flashmask,
    to_magi,
)
from maskc.diagnostics import MaskcError
from tests.binding.suite import SUITE, large_inputs
from tests.convert.strategies import equal, seen, vectors

# ---------------------------------------------------------------- cu_seqlens


def _varlen(cu_q: list[int], cu_k: list[int], causal: bool, window: tuple[int, int], nq: int, nk: int) -> torch.Tensor:
    out = torch.zeros(nq, nk, dtype=torch.bool)
    left, right = window
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                at = i + (k1 - k0) - (q1 - q0)
                ok = (not causal or j <= at) and (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
                out[q0 + i, k0 + j] = ok
    return out


lengths = st.lists(st.integers(0, 6), min_size=0, max_size=4)


@given(lengths, lengths, st.booleans(), st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 2))
def test_varlen_rectangles(a: list[int], b: list[int], causal: bool, left: int, right: int, tail: int) -> None:
    m = min(len(a), len(b))
    cu_q, cu_k = ([sum(x[:i]) for i in range(m + 1)] for x in (a, b))
    nq, nk = cu_q[-1] + tail, cu_k[-1] + tail
    spec = from_cu_seqlens(torch.tensor(cu_q), torch.tensor(cu_k), causal=causal, window_size=(left, right), nq=nq, nk=nk)
    assert torch.equal(to_dense(spec)[0, 0], _varlen(cu_q, cu_k, causal, (left, right), nq, nk))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans(), st.integers(0, 2))
def test_cu_seqlens_round_trip(docs: list[int], causal: bool, tail: int) -> None:
    cu = torch.tensor([0, *docs]).cumsum(0)
    n = int(cu[-1]) + tail
    spec = from_cu_seqlens(cu, causal=causal, nq=n)
    assert torch.equal(to_dense(spec)[0, 0], _varlen(cu.tolist(), cu.tolist(), causal, (-1, -1), n, n))
    back = to_cu_seqlens(spec)
    if causal or max(docs) > 1:
        assert torch.equal(back.cu_seqlens_q.long(), cu)
        assert back.causal == causal or max(docs) == 1
    assert back.max_seqlen_q == max(docs)
    assert torch.equal(to_dense(from_cu_seqlens(back.cu_seqlens_q, causal=back.causal, nq=n)), to_dense(spec))


def test_documents_of_a_batch_are_packed_in_order() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=[maskc.segments(lengths=[3, 5]), maskc.segments(lengths=[8])])
    assert to_cu_seqlens(spec).cu_seqlens_k.tolist() == [0, 3, 8, 16]
    short = maskc.compile("std:doc_causal").bind(doc=[maskc.segments(lengths=[3, 4]), maskc.segments(lengths=[8])], nk=8)
    with pytest.raises(MaskcError, match=r"M453.*\n.*unpad"):
        to_cu_seqlens(short)


def test_what_documents_cannot_say_is_refused_with_a_cell() -> None:
    spec = maskc.compile("std:sliding_window").bind(window=3)
    with pytest.raises(MaskcError, match=r"not packed documents: row \d, key \d differs"):
        to_cu_seqlens(spec, 8, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_cu_seqlens([3, 4], causal=True),
        lambda: from_cu_seqlens([0, 4, 2], causal=True),
        lambda: from_cu_seqlens([0.0, 4.0], causal=True),
        lambda: from_cu_seqlens([[0, 4]], causal=True),
        lambda: from_cu_seqlens([0, 4], [0, 2, 4], causal=True),
        lambda: from_cu_seqlens([0, 4], causal=True, window_size=(-2, 0)),
        lambda: from_cu_seqlens([0, 4], [0, 5], causal=True, nk=4),
    ],
)
def test_malformed_offsets(call: Any) -> None:
    with pytest.raises(MaskcError, match="M451"):
        call()


# ---------------------------------------------------------------- FlashMask


def _flashmask(indices: torch.Tensor, causal: bool, nq: int) -> torch.Tensor:
    """Column by column, as the format is documented."""
    batch, heads, nk, columns = indices.shape
    out = torch.ones(batch, heads, nq, nk, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for k in range(nk):
                x = indices[b, h, k].tolist()
                for q in range(nq):
                    if causal:
                        hidden = k > q + nk - nq or (x[0] <= q and (columns == 1 or q < x[1]))
                    elif columns == 2:
                        hidden = q >= x[0] or q < x[1]
                    else:
                        hidden = x[0] <= q < x[1] or x[2] <= q < x[3]
                    out[b, h, q, k] = not hidden
    return out


@given(
    st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 16)
)
def test_flashmask_indices(form: tuple[bool, int], nq: int, nk: int, seed: int) -> None:
    """Values below 0 and above nq, empty and swapped intervals included."""
    causal, columns = form
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-2, nq + 3, (2, 2, nk, columns), generator=generator, dtype=torch.int32)
    spec = from_flashmask(indices, causal=causal, nq=nq)
    wanted = _flashmask(indices, causal, nq)
    assert torch.equal(to_dense(spec).expand_as(wanted), wanted)
    back = to_flashmask(spec)
    again = from_flashmask(back.startend_row_indices, causal=back.causal, nq=nq, nk=nk)
    assert torch.equal(to_dense(again).expand_as(wanted), wanted)
    assert back.startend_row_indices is None or back.startend_row_indices.shape[3] <= columns or back.causal != causal


@given(vectors())
def test_flashmask_of_any_mask_is_exact_or_refused(v: BoundaryVectors) -> None:
    try:
        out = to_flashmask(v)
    except MaskcError as e:
        assert e.code == "M453"  # noqa: PT017
        assert not _two_runs(v)
        return
    dense = seen(v)
    if out.startend_row_indices is None:
        wanted = _flashmask(torch.full((1, 1, v.nk, 1), v.nq), True, v.nq) if out.causal else torch.ones_like(dense)
    else:
        wanted = _flashmask(out.startend_row_indices, out.causal, v.nq)
    assert bool((wanted == dense).all())


def _two_runs(v: BoundaryVectors) -> bool:
    masked = torch.nn.functional.pad(v.masked(), (0, 0, 1, 0))
    return int((masked[..., 1:, :] & ~masked[..., :-1, :]).sum(-2).max()) <= 2


def test_smallest_form_is_chosen() -> None:
    def columns(name: str, n: int = 32, **inputs: Any) -> tuple[bool, int]:
        out = to_flashmask(maskc.compile(f"std:{name}").bind(**inputs), n, n)
        return out.causal, 0 if out.startend_row_indices is None else out.startend_row_indices.shape[3]

    docs = maskc.segments(lengths=[10, 22])
    assert columns("full") == (False, 0)
    assert columns("causal") == (True, 0)
    assert columns("doc_causal", doc=docs) == (True, 1)
    assert columns("qk_sparse", drop=maskc.spans(ranges=[(4, 9)])) == (True, 2)
    assert columns("doc_full", doc=docs) == (False, 2)
    assert columns("global_window", globals=2, window=3) == (False, 4)


def test_bottom_right_alignment() -> None:
    """causal with fewer rows than keys is std:bottom_right, and with more rows its first ones see nothing."""
    for nq, nk in ((4, 9), (9, 4), (6, 6)):
        spec = from_flashmask(None, causal=True, nq=nq, nk=nk)
        wanted = torch.ones(nq, nk, dtype=torch.bool).tril(nk - nq)
        assert torch.equal(to_dense(spec)[0, 0], wanted)
        out = to_flashmask(spec)
        assert out.causal
        assert out.startend_row_indices is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_flashmask(torch.zeros(1, 1, 8, 4, dtype=torch.int32), causal=True),
        lambda: from_flashmask(torch.zeros(1, 1, 8, 1, dtype=torch.int32), causal=False),
        lambda: from_flashmask(torch.zeros(1, 1, 8, 3, dtype=torch.int32), causal=False),
        lambda: from_flashmask(torch.zeros(1, 8, 1, dtype=torch.int32), causal=True),
        lambda: from_flashmask(torch.zeros(1, 1, 8, 1), causal=True),
        lambda: from_flashmask(torch.zeros(1, 1, 8, 1, dtype=torch.int32), causal=True, nk=9),
        lambda: from_flashmask(None, causal=True),
    ],
)
def test_malformed_indices(call: Any) -> None:
    with pytest.raises(MaskcError, match="M451"):
        call()


def test_block_tables_have_no_place() -> None:
    v = BoundaryVectors(8, 8, 1, 1, True)
    v = replace(v, blocks=BlockTable(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4, 4))
    with pytest.raises(MaskcError, match="M453"):
        to_flashmask(v)


# ---------------------------------------------------------------- MagiAttention


def _magi(q_ranges: list[Any], k_ranges: list[Any], types: list[int], nq: int, nk: int) -> torch.Tensor:
    out = torch.zeros(nq, nk, dtype=torch.bool)
    for (qs, qe), (ks, ke), kind in zip(q_ranges, k_ranges, types, strict=True):
        for q in range(qs, qe):
            for k in range(ks, ke):
                causal, inverse = k - ke <= q - qe, k - ks >= q - qs
                out[q, k] |= (causal or kind not in (1, 3)) and (inverse or kind not in (2, 3))
    return out


@st.composite
def ranges(draw: st.DrawFn, size: int) -> tuple[int, int]:
    a, b = draw(st.integers(0, size)), draw(st.integers(0, size))
    return min(a, b), max(a, b)


@given(st.data())
def test_slices(data: st.DataObject) -> None:
    nq, nk, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
    q_ranges = [data.draw(ranges(nq)) for _ in range(m)]
    k_ranges = [data.draw(ranges(nk)) for _ in range(m)]
    types = [data.draw(st.integers(0, 3)) for _ in range(m)]
    wanted = _magi(q_ranges, k_ranges, types, nq, nk)
    try:
        expected = to_dense(from_dense(wanted))
    except MaskcError:
        with pytest.raises(MaskcError, match="M450"):
            from_magi(q_ranges, k_ranges, types, nq=nq, nk=nk)
        return
    assert torch.equal(to_dense(from_magi(q_ranges, k_ranges, types, nq=nq, nk=nk)), expected)


@given(vectors(single=True))
def test_slices_of_any_mask_show_the_same(v: BoundaryVectors) -> None:
    out = to_magi(v)
    shown = [_magi([q], [k], [t], v.nq, v.nk) for q, k, t in zip(out.q_ranges, out.k_ranges, out.types, strict=True)]
    total = torch.stack(shown).sum(0) if shown else torch.zeros(v.nq, v.nk)
    assert torch.equal(total == 1, seen(v)[0, 0])
    assert int(total.max()) <= 1, "slices overlap"


@pytest.mark.parametrize(
    ("name", "inputs"), [(n, i) for n, i in large_inputs() if n[:2] in ("02", "03", "04", "05", "06", "08", "09", "13")]
)
def test_slices_of_the_suite(name: str, inputs: dict[str, Any]) -> None:
    """Few slices, and the same mask back: straight bounds become one to three slices a stretch, whatever their length."""
    v = maskc.compile(SUITE / f"{name}.mask").bind(**inputs).vectors(4096, 4096)
    out = to_magi(v)
    assert len(out.types) <= 40
    assert equal(from_magi(out.q_ranges, out.k_ranges, out.types, nq=4096, nk=4096).vectors(), v)


@pytest.mark.parametrize(
    "call",
    [
        lambda: from_magi([(0, 4)], [(0, 9)], 0, nq=8, nk=8),
        lambda: from_magi([(4, 0)], [(0, 8)], 0, nq=8, nk=8),
        lambda: from_magi([(0, 4)], [(0, 8)], 4, nq=8, nk=8),
        lambda: from_magi([(0, 4)], [], 0, nq=8, nk=8),
        lambda: from_magi([(0, 1.5)], [(0, 8)], 0, nq=8, nk=8),
        lambda: from_magi([0, 4], [0, 8], 0, nq=8, nk=8),
        lambda: from_magi(None, None, 0, nq=8, nk=8),
        lambda: from_magi([], [], 0, nq=-1, nk=8),
    ],
)
def test_malformed_slices(call: Any) -> None:
    with pytest.raises(MaskcError, match="M451"):
        call()


def test_slices_may_be_tensors() -> None:
    given = torch.tensor([[0, 2], [2, 5]])
    spec = from_magi(given, given, torch.tensor([1, 0]), nq=5, nk=5)
    assert torch.equal(to_dense(spec), to_dense(from_magi(given.tolist(), given.tolist(), [1, 0], nq=5, nk=5)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: from_flashmask("a", causal=True), "startend_row_indices is no tensor: 'a'"),
        (lambda: from_flashmask(None, causal=True, nk=-2), "nk = -2 is no integer from 0 on"),
        (lambda: from_flashmask(torch.zeros(1, 1, 3, 1, dtype=torch.int32), causal=True, nq=2.5), "nq = 2.5 is no integer"),
        (lambda: from_cu_seqlens(None, causal=True), "cu_seqlens_q is no tensor: None"),
        (lambda: from_cu_seqlens([False, True], causal=True), "cu_seqlens_q is torch.bool"),
        (lambda: from_cu_seqlens([0, 3], causal=True, window_size=3), "window_size is 3"),
        (lambda: from_cu_seqlens([0, 3], causal=True, window_size=(1.5, 0)), "window_size is (1.5, 0)"),
        (lambda: from_dense([[True], [True, False]]), "the dense mask is no tensor: [[True], [True, False]]"),
        (lambda: from_dense(torch.ones(2, 2, dtype=torch.bool).to_sparse()), "the dense mask is a sparse tensor"),
        (lambda: from_mask_mod(lambda b, h, q, k: q >= k, -1, 2), "nq = -1 is no integer from 0 on"),
        (lambda: to_block_mask(maskc.compile("std:causal").bind(nq=3, nk=3), block=0), "block[0] = 0 is no integer from 1 on"),
        (lambda: to_dense(maskc.compile("std:causal")), "converters take a bound mask, not CompiledMask"),
    ],
)
def test_arguments_are_refused_by_name(call: Any, says: str) -> None:
    with pytest.raises(MaskcError) as caught:
        call()
    assert caught.value.code in ("M451", "M511")
    assert says in str(caught.value)
