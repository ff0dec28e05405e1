"""The backend "flex" against the CPU backend and dense fp64: outputs, log-sum-exp and both gradients.

FlexAttention refuses gradients on CPU tensors, but its own dense operators have them: `flex_gradients` lifts the refusal,
so that the path a GPU takes is the one that runs here.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

import maskc
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import MaskcError, MaskcWarning
from maskc.runtime import cpu, flex, ops
from maskc.runtime.run import backend_for
from tests.runtime.dense import reference

N = 200
VECTORS = ("lts", "lte", "uts", "ute", "diag")


@pytest.fixture(autouse=True)
def flex_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex_module, "_validate_device", lambda q, k, v: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def _masks() -> dict[str, BoundaryVectors]:
    g = torch.Generator().manual_seed(1)
    docs = maskc.segments(lengths=[70, 1, 0, 90, 30])

    def bound(name: str, nq: int = N, nk: int = N, **inputs: Any) -> BoundaryVectors:
        return maskc.compile(f"std:{name}").bind(**inputs).vectors(nq, nk)

    def ints() -> torch.Tensor:
        return torch.randint(0, N + 1, (2, 2, N), generator=g, dtype=torch.int32)

    causal = bound("causal")
    return {
        "full": bound("full", 130, 200),
        "causal": causal,
        "documents with a padded tail": bound("doc_causal", doc=docs),
        "prefixes": bound("doc_prefix", doc=docs, prefix=[30, 0, 0, 90, 3]),
        "global window": bound("global_window", globals=3, window=9),
        "bottom right with empty rows": bound("bottom_right", 140, 140),
        "four vectors per batch item and head": BoundaryVectors(N, N, 2, 2, False, ints(), ints(), ints(), ints()),
        "with a diagonal": replace(causal, causal=False, diag=ints()[:1, :1].contiguous()),
        "block table": replace(causal, heads=2, blocks=BlockTable(torch.rand(1, 2, 4, 4, generator=g) < 0.5, 64, 64)),
    }


MASKS = _masks()


def _tensors(v: BoundaryVectors, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, v.nq, 4, 16), (2, v.nk, 2, 16), (2, v.nk, 2, 8), (2, v.nq, 4, 8))
    return [*(torch.randn(s, dtype=dtype) for s in shapes), torch.randn(2, 4, v.nq, dtype=dtype)]


@pytest.mark.parametrize("name", MASKS)
def test_equals_dense_and_cpu(name: str) -> None:
    v = MASKS[name]
    q, k, val, dout, dlse = _tensors(v)
    out, lse, grads = reference(v, q, k, val, 0.3, dout, dlse)
    leaves = [x.clone().requires_grad_() for x in (q, k, val)]
    mine, my_lse = flex.attention(v, *leaves, 0.3)
    seen = lse != -torch.inf
    torch.testing.assert_close(mine, out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(my_lse, lse, rtol=1e-10, atol=1e-10)
    assert bool((mine.transpose(1, 2)[~seen] == 0).all())
    total = (mine * dout).sum() + (my_lse.masked_fill(~seen, 0.0) * dlse).sum()
    for got, wanted in zip(torch.autograd.grad(total, leaves), grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((mine, my_lse), cpu.forward(v, q, k, val, 0.3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["documents with a padded tail", "global window"])
def test_backward_is_a_share_of_a_merged_result(name: str) -> None:
    """`out` and `lse` belong to all keys, the call to half of them: as the steps of a context-parallel run."""
    v = MASKS[name]
    q, k, val, dout, dlse = _tensors(v)
    out, lse, grads = reference(v, q, k, val, 0.3, dout, dlse)
    half = v.nk // 2
    parts = []
    for c0, c1 in ((0, half), (half, v.nk)):
        cut = {name: t[..., c0:c1].contiguous() for name in VECTORS if (t := getattr(v, name)) is not None}
        if v.causal:
            low = torch.arange(c0, c1, dtype=torch.int32).expand(v.batch, v.heads, -1)
            cut["diag"] = torch.maximum(low, cut["diag"]) if "diag" in cut else low.contiguous()
        local = replace(v, nk=c1 - c0, causal=False, **cut)
        parts.append(flex.backward(local, q, k[:, c0:c1], val[:, c0:c1], out, lse, dout, dlse, 0.3))
    merged = sum(p[0] for p in parts), *(torch.cat([p[i] for p in parts], 1) for i in (1, 2))
    for got, wanted in zip(merged, grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_unseen_keys_may_hold_nan() -> None:
    v = MASKS["documents with a padded tail"]
    q, k, val, *_ = _tensors(v)
    clean = flex.forward(v, q, k, val, 0.3)
    k[:, 191:], val[:, 191:] = torch.nan, torch.nan
    for a, b in zip(flex.forward(v, q, k, val, 0.3), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("nq", "nk", "batch"), [(0, 5, 1), (5, 0, 1), (1, 1, 1), (5, 5, 0)])
def test_edge_sizes(nq: int, nk: int, batch: int) -> None:
    v = maskc.compile("std:full").bind().vectors(nq, nk)
    q, k, val, dout, _ = (x[:batch] for x in _tensors(v))
    leaves = [x.requires_grad_() for x in (q, k, val)]
    out, lse = flex.attention(v, *leaves, 0.3)
    wanted = cpu.forward(v, q.detach(), k.detach(), val.detach(), 0.3)
    torch.testing.assert_close((out, lse), wanted)
    for x, g in zip(leaves, torch.autograd.grad((out * dout).sum(), leaves), strict=True):
        assert g.shape == x.shape


def test_run_takes_it_by_name() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[50, 90]))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 140, h, 16, dtype=torch.float32) for h in (4, 2, 2))
    out, lse = maskc.run(spec, q, k, v, backend="flex", return_lse=True)
    other = maskc.run(spec, q, k, v, backend="cpu", return_lse=True)
    torch.testing.assert_close((out, lse), other)
    with pytest.raises(MaskcError, match="M529"):
        maskc.run(spec, q.requires_grad_(), k, v, backend="flex")
    assert ops.backend_module("flex") is flex


def test_auto_takes_it_on_other_gpus_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    flex.say_once.cache_clear()
    q = torch.empty(1, device="meta")
    elsewhere = type("Elsewhere", (), {"device": torch.device("cuda", 0), "dtype": q.dtype})()
    with pytest.warns(MaskcWarning, match=r"W520.*Some GPU"):
        assert backend_for(elsewhere, "auto") == "flex"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for(elsewhere, "auto") == "flex"
        assert backend_for(elsewhere, "hopper") == "hopper"  # which then says why it cannot
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend_for(elsewhere, "auto") == "hopper"


def test_what_it_cannot_run_on_a_gpu() -> None:
    v = MASKS["causal"]

    class OnGpu:
        def __init__(self, dtype: torch.dtype, dim: int) -> None:
            self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (1, N, 2, dim)

    def code(dtype: torch.dtype, dim: int) -> str | None:
        x: Any = OnGpu(dtype, dim)
        found = flex.why_not(v, x, x, x)
        return found.code if found is not None else None

    assert code(torch.bfloat16, 64) is None
    assert code(torch.float64, 64) == "M505"
    assert code(torch.bfloat16, 8) == "M528"


def test_new_masks_of_one_form_compile_nothing() -> None:
    """The compiled call is guarded by sizes and by the form of the mask, not by its data."""
    torch._dynamo.reset()
    compiles = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph

    call = torch.compile(flex._flex("cpu"), fullgraph=True, backend=backend)
    mask = maskc.compile("std:doc_causal")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 140, 16) for _ in range(3))
    for lengths in ([50, 90], [100, 40], [1, 2, 137]):
        vectors = mask.bind(doc=maskc.segments(lengths=lengths)).vectors(140, 140)
        out, lse = call(q, k, v, flex._prepared(vectors, 2, 2).mask, 0.25, False)
        wanted = cpu.forward(vectors, *(x.transpose(1, 2) for x in (q, k, v)), 0.25)
        torch.testing.assert_close((out.transpose(1, 2), lse), wanted)
    assert compiles == 1


def test_what_is_kept_of_a_batch_goes_with_it() -> None:
    vectors = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[50, 90])).vectors(140, 140)
    made = flex._prepared(vectors, 2, 2)
    assert flex._prepared(vectors, 2, 2) is made
    mask = ref(made.mask)
    del made, vectors
    gc.collect()
    assert mask() is None
