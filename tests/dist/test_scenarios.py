"""What users of other context-parallel stacks met, one test each: the mask kept, odd lengths, numerics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import maskc
from maskc.boundary import BoundaryVectors
from maskc.diagnostics import MaskcError, MaskcTypeError
from maskc.runtime.merge import empty, merge
from maskc.runtime.plan import plan
from maskc.runtime.schedule import DIRECT, STRATEGIES
from tests.dist.cases import Case, attend, dense, dense_mask, docs, joined, tensors, vectors, verify
from tests.dist.pool import Pool

WINDOW = "input window : int where window >= 1\nmask sliding_window = k <= q < k + window"
DOC_WINDOW = "input doc : segments\ninput window : int per doc\nmask m = same(doc) and k <= q and q < k + window[k]"
ALL = (*STRATEGIES, *DIRECT)


def check(ranks: Pool, spec: Any, n: int, world: int = 2, **more: Any) -> list[dict[str, Any]]:
    case = Case(world, n, n, **more)
    results = ranks.run(world, attend, case, spec)
    verify(case, spec, results)
    return results


# ---------------------------------------------------------------- the mask never degrades


def perturbed(rank: int, group: Any, spec: Any, token: int | None) -> Tensor:
    p = plan(spec, group=group, order="contiguous", chunk=16)
    q, k, v, _, _ = tensors(Case(2, 128, 0))
    if token is not None:
        k[:, token] += 1.0
        v[:, token] += 1.0
    return maskc.run(spec, p.shard(q, rank), p.shard(k, rank), p.shard(v, rank), group, plan=p)


def test_documents_do_not_leak(ranks: Pool) -> None:
    """Two documents of 64: changing token 3 changes rows 3 to 63 of the first and no bit of the second."""
    spec = docs([64, 64])
    before, after = (torch.cat(ranks.run(2, perturbed, spec, token), 1) for token in (None, 3))
    assert torch.equal(before[:, 64:], after[:, 64:])
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:64], after[:, 3:64])


@pytest.mark.parametrize("strategy", ALL)
def test_every_strategy_keeps_every_mask(ranks: Pool, strategy: str) -> None:
    specs = [
        maskc.compile_text(WINDOW).bind(window=16, nq=128, nk=128),
        maskc.compile("std:causal").bind(nq=128, nk=128),
        docs([50, 70, 8]),
        maskc.compile_text(DOC_WINDOW).bind(doc=maskc.segments(lengths=[50, 70, 8]), window=[16, 3, 100], nq=128, nk=128),
        maskc.compile_text("input prefix : int\nmask m = k <= q or k < prefix").bind(prefix=40, nq=128, nk=128),
    ]
    for spec in specs:
        check(ranks, spec, 128, strategy=strategy, chunk=16)


def unknown_keyword(rank: int, group: Any) -> None:
    x = torch.zeros(1, 4, 1, 8)
    maskc.run("std:causal", x, x, x, group, sink=3.0)


def test_unknown_keywords_are_refused(ranks: Pool) -> None:
    with pytest.raises(MaskcTypeError, match="sink"):
        ranks.run(2, unknown_keyword)


def inputs_left_out(rank: int, group: Any, name: str, inputs: dict[str, Any]) -> None:
    x = torch.zeros(1, 4, 1, 8)
    maskc.run(name, x, x, x, group, **inputs)


@pytest.mark.parametrize(
    ("name", "inputs", "named"),
    [
        ("std:doc_causal", {}, "`doc`"),
        ("std:doc_prefix", {"doc": maskc.segments(lengths=[8])}, "`prefix`"),
        ("std:causal", {"doc": maskc.segments(lengths=[8])}, "`doc`"),
    ],
)
def test_an_input_that_is_missing_or_not_used_is_named(ranks: Pool, name: str, inputs: dict[str, Any], named: str) -> None:
    with pytest.raises((MaskcError, MaskcTypeError), match=named):
        ranks.run(2, inputs_left_out, name, inputs)


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [1],
        [3],
        [5, 3],
        [9, 7, 8, 12, 8, 12],
        [18, 6, 8],
        [18, 6, 8, 12, 8, 12],
        [20, 3, 8],
        [20, 3, 8, 12, 8, 12],
        [3, 9, 20, 1, 13, 12, 6],
        [10, 7, 8],
        [1, 2, 3, 5, 7, 11],
        [0, 0, 31],
    ],
    ids=str,
)
def test_any_document_lengths(ranks: Pool, lengths: list[int]) -> None:
    for order, chunk in (("contiguous", None), ("balanced", 2), ("zigzag", None), ("zigzag-document", None)):
        check(ranks, docs(lengths), sum(lengths), order=order, chunk=chunk)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 127, 129, 384, 385, 1025])
def test_any_sequence_length(ranks: Pool, n: int) -> None:
    check(ranks, maskc.compile("std:causal").bind(nq=n, nk=n), n, chunk=None if n < 100 else 64)


def test_idle_ranks_take_part(ranks: Pool) -> None:
    """65 rows in chunks of 64 on 4 ranks: two ranks hold nothing, return empty tensors and enter every exchange."""
    spec = docs([65])
    for strategy in ALL:
        results = check(ranks, spec, 65, world=4, chunk=64, strategy=strategy)
        assert sorted(r["out"].shape[1] for r in results) == [0, 0, 1, 64]


@pytest.mark.parametrize("strategy", ALL)
def test_more_ranks_than_chunks(ranks: Pool, strategy: str) -> None:
    """Five ranks, 129 rows: chunks of 64 leave two of them none, chunks of 26 leave one a short one."""
    for chunk in (64, 26):
        check(ranks, docs([50, 79]), 129, world=5, strategy=strategy, order="contiguous", chunk=chunk, heads=(4, 2, 1))


@pytest.mark.parametrize("strategy", ALL)
def test_a_batch_without_items(ranks: Pool, strategy: str) -> None:
    check(ranks, docs([14, 26]), 40, world=3, strategy=strategy, chunk=4, batch=(0, 1))


def test_a_tail_outside_all_documents_is_zero(ranks: Pool) -> None:
    """Documents end at 44 of 46 rows: the tail gives 0, -inf and zero gradients."""
    spec = docs([14, 18, 12], n=46)
    case = Case(2, 46, 46)
    got = joined(case, case.plan(spec), check(ranks, spec, 46))
    assert not got["out"][:, 44:].any()
    assert (got["lse"][:, :, 44:] == -torch.inf).all()
    for name in ("dq", "dk", "dv"):
        assert not got[name][:, 44:].any()


def attend_poisoned(rank: int, group: Any, case: Case, spec: Any) -> dict[str, Any]:
    """Fresh tensors are full of NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        return attend(rank, group, case, spec)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strategy", ALL)
def test_what_nobody_writes_is_not_garbage(ranks: Pool, strategy: str) -> None:
    """Documents that end at 944 of 946 rows, and at 0, 0, 31 of 40, in memory that holds NaN."""
    for lengths, n in (([144, 288, 512], 946), ([0, 0, 31], 40)):
        case, spec = Case(2, n, n, strategy=strategy, chunk=8 if n < 100 else 128), docs(lengths, n)
        verify(case, spec, ranks.run(2, attend_poisoned, case, spec))


def test_empty_sides_of_packed_cross_attention(ranks: Pool) -> None:
    """Rows of lengths 0, 0, 31 against keys of lengths 0, 1, 45: pair 1 has a key that no row sees."""
    rows, keys = torch.full((31,), 2), torch.tensor([1] + [2] * 45)
    spec = maskc.compile("std:cross_pairs").bind(row_pair=rows, key_pair=keys)
    for strategy in ALL:
        case = Case(2, 31, 0, nk=46, strategy=strategy, chunk=4)
        results = ranks.run(2, attend_poisoned, case, spec)
        verify(case, spec, results)
        got = joined(case, case.plan(spec), results)
        assert not got["dk"][:, 0].any()
        assert not got["dv"][:, 0].any()


def nan_in_the_tail(rank: int, group: Any, strategy: str) -> bool:
    spec = docs([14, 18, 12], n=46)
    p = plan(spec, group=group, chunk=4)
    whole = tensors(Case(2, 46, 0))[:3]
    for t in whole:
        t[:, 44:] = torch.nan
    x = [p.shard(t, rank).clone().requires_grad_() for t in whole]
    out = maskc.run(spec, *x, group, plan=p, strategy=strategy)
    assert isinstance(out, Tensor)
    out.sum().backward()
    return all(t is not None and bool(torch.isfinite(t).all()) for t in (out, *(t.grad for t in x)))


@pytest.mark.parametrize("strategy", ALL)
def test_nan_that_nobody_sees_stays_where_it_is(ranks: Pool, strategy: str) -> None:
    assert all(ranks.run(2, nan_in_the_tail, strategy))


def test_rows_that_see_nothing(ranks: Pool) -> None:
    """Rows 5 to 7 empty: their neighbours' gradients are those of the dense answer, theirs are zero."""
    lts, lte = (torch.full((1, 1, 16), x, dtype=torch.int32) for x in (5, 8))
    v = BoundaryVectors(16, 16, 1, 1, True, lts=lts, lte=lte)
    for strategy in ALL:
        check(ranks, v, 16, chunk=2, strategy=strategy)


def test_empty_partials_merge_exactly() -> None:
    g = torch.Generator().manual_seed(0)
    part = torch.randn(1, 3, 2, 4, generator=g), torch.randn(1, 2, 3, generator=g)
    part[1][:, :, 1] = -torch.inf
    part[0][:, 1] = 0.0
    nothing = empty(1, 3, 2, 4, torch.float32, torch.device("cpu"))
    for a, b in ((part, nothing), (nothing, part)):
        out, lse = merge(a, b)
        assert torch.equal(out, part[0])
        assert torch.equal(lse, part[1])
    out, lse = merge(nothing, nothing)
    assert not out.any()
    assert (lse == -torch.inf).all()


# ---------------------------------------------------------------- numerics


def low_precision(rank: int, group: Any, strategy: str) -> tuple[Tensor, ...]:
    case = Case(2, 4096, 0, heads=(2, 1, 1), dims=(32, 32))
    spec = maskc.compile("std:causal").bind(nq=4096, nk=4096)
    q, k, v, dout, _ = (t.to(torch.bfloat16) for t in tensors(case))
    single = [t.clone().requires_grad_() for t in (q, k, v)]
    want = [t.double() for t in (q, k, v)]
    if rank == 0:
        ref = [t.requires_grad_() for t in want]
        exact, exact_lse = maskc.run(spec, *ref, return_lse=True)
        exact.backward(dout.double())
        alone, alone_lse = maskc.run(spec, *single, return_lse=True)
        alone.backward(dout)
    p = plan(spec, group=group)
    local = [p.shard(t, rank).clone().requires_grad_() for t in (q, k, v)]
    out, lse = maskc.run(spec, *local, group, plan=p, strategy=strategy, return_lse=True)
    out.backward(p.shard(dout, rank))
    whole = [p.unshard(x.detach(), group) for x in (out, *(t.grad for t in local))]  # type: ignore[misc]
    lses = p.unshard(lse.detach(), group, dim=2)
    if rank:
        return ()
    errors = []
    for mine, theirs, truth in zip(whole, (alone, *(t.grad for t in single)), (exact, *(t.grad for t in ref)), strict=True):
        errors += [(mine.double() - truth).abs().max(), (theirs.double() - truth).abs().max()]  # type: ignore[union-attr]
    errors += [(lses - exact_lse).abs().max(), (alone_lse - exact_lse).abs().max()]
    return tuple(e.detach() for e in errors)


@pytest.mark.parametrize("strategy", ALL)
def test_merging_does_not_lose_precision(ranks: Pool, strategy: str) -> None:
    """bf16, 4096 rows: the error against fp64 is at most 1.5 times that of one process in bf16, lse within 1e-3."""
    errors = ranks.run(2, low_precision, strategy)[0]
    for mine, alone in zip(errors[0:8:2], errors[1:8:2], strict=True):
        assert mine <= 1.5 * alone
    assert errors[8] < 1e-3


def repeated(rank: int, group: Any, strategy: str) -> bool:
    case = Case(group.size(), 200, 3, "lts ute", heads=(4, 2, 2), strategy=strategy, chunk=16, dtype="float32")
    runs = [attend(rank, group, case, vectors(case)) for _ in range(5)]
    return all(torch.equal(runs[0][n], r[n]) for r in runs for n in ("out", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("strategy", ALL)
def test_runs_are_bitwise_equal(ranks: Pool, strategy: str) -> None:
    assert all(ranks.run(4, repeated, strategy))


def strided(rank: int, group: Any) -> dict[str, Tensor]:
    """q, k, v as slices of one tensor, a gradient that is not contiguous."""
    case = Case(2, 40, 4, heads=(2, 2, 1))
    spec = docs([17, 23])
    p = case.plan(spec)
    q, k, v, dout, _ = tensors(case)
    qkv = p.shard(torch.cat((q, k, v), 2), rank).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = maskc.run(spec, qkv[:, :, :2], qkv[:, :, 2:4], qkv[:, :, 4:], group, plan=p)
    out.transpose(1, 2).backward(p.shard(dout, rank).transpose(1, 2))
    assert qkv.grad is not None
    return {"out": out.detach(), "grad": qkv.grad}


def test_strided_tensors(ranks: Pool) -> None:
    case, spec = Case(2, 40, 4, heads=(2, 2, 1)), docs([17, 23])
    p = case.plan(spec)
    q, k, v, dout, _ = tensors(case)
    x = [t.requires_grad_() for t in (q, k, v)]
    out = maskc.run(spec, *x)
    out.backward(dout)
    for rank, got in enumerate(ranks.run(2, strided)):
        torch.testing.assert_close(got["out"], p.shard(out.detach(), rank))
        torch.testing.assert_close(got["grad"], p.shard(torch.cat([t.grad for t in x], 2), rank))  # type: ignore[misc]


def test_bf16_and_fp32_inputs(ranks: Pool) -> None:
    """Every dtype: equal to one process up to the rounding of that dtype."""
    spec = docs([17, 23])
    for dtype in ("float32", "bfloat16", "float16"):
        case = Case(2, 40, 1, dtype=dtype, chunk=4, strategy="staged")
        got = joined(case, case.plan(spec), ranks.run(2, attend, case, spec))
        want = dense(case, dense_mask(case, spec))
        rounding = torch.finfo(getattr(torch, dtype)).eps
        for name, expected in want.items():
            finite = torch.isfinite(expected)
            assert got[name].dtype == (torch.float32 if name == "lse" else getattr(torch, dtype))
            assert (got[name].double() - expected)[finite].abs().max() <= 8 * rounding * max(
                1.0, float(expected[finite].abs().max())
            )
