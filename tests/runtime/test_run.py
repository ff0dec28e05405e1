"""`maskc.run`: what goes in and out, and every misuse refused before any work."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import maskc
from maskc.diagnostics import MaskcWarning
from maskc.runtime import cpu
from tests.runtime.dense import attend

LENGTHS = [20, 0, 13, 1, 6]
N = sum(LENGTHS)


def operands(n: int = N, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)

    def make(h: int) -> torch.Tensor:
        return torch.randn(batch, n, h, 8, generator=generator, dtype=torch.float64)

    return make(heads), make(kv_heads), make(kv_heads)


def spec() -> Any:
    return maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=LENGTHS))


def dense(n: int = N) -> torch.Tensor:
    """Masked elements of packed causal documents."""
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    ids = torch.cat((ids, torch.full((n - N,), -1)))
    row, key = torch.arange(n)[:, None], torch.arange(n)
    return ~((ids[:, None] == ids) & (key <= row) & (ids >= 0))[None, None]


# ---------------------------------------------------------------- what works


def test_results_and_defaults() -> None:
    q, k, v = operands()
    out, lse = maskc.run(spec(), q, k, v, return_lse=True)
    want, want_lse = attend(dense(), q, k, v, 8**-0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(maskc.run(spec(), q, k, v), out)
    assert lse.shape == (2, 4, N)
    scaled = maskc.run(spec(), q, k, v, scale=0.5)
    torch.testing.assert_close(scaled, attend(dense(), q, k, v, 0.5)[0])


def test_autocast_casts_as_for_sdpa() -> None:
    """Rotary embeddings leave q and k in fp32 beside a v in bf16; fp64 stays what it is."""
    q, k, v = (x.float().requires_grad_() for x in operands())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = maskc.run(spec(), q, k, v.bfloat16())
        sdpa = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
        exact = maskc.run(spec(), *operands())
    assert out.dtype == sdpa.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    assert torch.equal(out, maskc.run(spec(), *(x.bfloat16() for x in (q, k, v))))
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (q, k, v))
    with pytest.raises(maskc.MaskcError, match="M505"):
        maskc.run(spec(), q, k, v.bfloat16())


def test_packed_tensors() -> None:
    q, k, v = operands(batch=1)
    out, lse = maskc.run(spec(), q, k, v, return_lse=True)
    packed, packed_lse = maskc.run(spec(), q[0], k[0], v[0], return_lse=True)
    assert torch.equal(packed, out[0])
    assert torch.equal(packed_lse, lse[0])


@pytest.mark.parametrize("form", ["bound", "compiled", "path", "standard"])
def test_every_way_to_name_a_mask(form: str, tmp_path: Path) -> None:
    q, k, v = operands()
    doc = maskc.segments(lengths=LENGTHS)
    text = "input doc : segments\nmask m = same(doc) and k <= q"
    file = tmp_path / "m.mask"
    file.write_text(text)
    named = {"compiled": maskc.compile_text(text), "path": file, "standard": "std:doc_causal"}
    out = maskc.run(spec(), q, k, v) if form == "bound" else maskc.run(named[form], q, k, v, doc=doc)
    torch.testing.assert_close(out, attend(dense(), q, k, v, 8**-0.5)[0])


def test_one_of_several_masks_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "two.mask"
    file.write_text("mask past = k <= q\nmask all = true\n")
    q, k, v = operands()
    past, everything = (maskc.run(f"{file}:{name}", q, k, v) for name in ("past", "all"))
    torch.testing.assert_close(past[:, -1], everything[:, -1])
    assert not torch.equal(past[:, 0], everything[:, 0])


def test_warnings_point_at_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "m.mask"
    file.write_text("mask m = q <= k\n")
    with pytest.warns(maskc.MaskcWarning, match="W102") as caught:
        maskc.run(file, *operands())
    assert caught[0].filename == __file__


def test_rectangles() -> None:
    q, k, v = operands(9)
    out = maskc.run("std:bottom_right", q[:, :5], k, v)
    row, key = torch.arange(5)[:, None], torch.arange(9)
    torch.testing.assert_close(out, attend((key > row + 4)[None, None], q[:, :5], k, v, 8**-0.5)[0])


def test_batches_of_documents() -> None:
    q, k, v = operands(8)
    doc = [maskc.segments(lengths=[3, 5]), maskc.segments(ids=[0, 0, 0, 0, 0, 0, -1, -1])]
    out = maskc.run("std:doc_full", q, k, v, doc=doc)
    for i, item in enumerate(doc):
        alone = maskc.run("std:doc_full", *(x[i : i + 1] for x in (q, k, v)), doc=item)
        torch.testing.assert_close(out[i : i + 1], alone)
    assert not out[1, 6:].any()


def test_a_group_of_one_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    q, k, v = operands()
    assert torch.equal(maskc.run(spec(), q, k, v, object(), strategy="ring"), maskc.run(spec(), q, k, v))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("M707", {"plan": {"world_size": 2}}),
        ("M706", {"plan": {"lengths": [4, 4]}}),
        ("M511", {"plan": "balanced"}),
        ("M713", {"strategy": "gossip"}),
        ("M710", {"plan": {"lengths": [5, 4]}}),
    ],
)
def test_a_group_of_one_still_checks_its_plan(monkeypatch: pytest.MonkeyPatch, code: str, change: dict[str, Any]) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)

    def docs(lengths: list[int]) -> maskc.BoundMask:
        n = sum(lengths)
        return maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=lengths), nq=n, nk=n)

    if isinstance(given := change.get("plan"), dict):
        change = {"plan": maskc.plan(docs(given.get("lengths", [5, 3])), world_size=given.get("world_size", 1), chunk=2)}
    q, k, v = operands(8)
    good = maskc.plan(docs([5, 3]), world_size=1, chunk=2)
    assert torch.equal(maskc.run(docs([5, 3]), q, k, v, object(), plan=good), maskc.run(docs([5, 3]), q, k, v))
    with pytest.raises(maskc.MaskcError) as e:
        maskc.run(docs([5, 3]), q, k, v, object(), **change)
    assert e.value.code == code


def test_importing_maskc_is_light() -> None:
    heavy = ("torch", "numpy", "sympy", "lark", "jinja2", "cuda")
    code = f"import sys, maskc; dir(maskc); print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_compiling_needs_no_torch() -> None:
    code = "import sys, maskc; m = maskc.compile('std:doc_causal'); m.name; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist() -> None:
    assert all(hasattr(maskc, name) for name in maskc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compyle'"):
        maskc.compyle  # noqa: B018


# ---------------------------------------------------------------- what is refused


def refusal(code: str, *arguments: Any, kind: type[Exception] = maskc.MaskcError, **keywords: Any) -> str:
    """The message with which `run` refuses."""
    with pytest.raises(kind) as caught:
        maskc.run(*arguments, **keywords)
    assert isinstance(caught.value, maskc.MaskcError)
    assert caught.value.code == code
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused call never reaches a backend."""
    if request.function.__name__.startswith("test_refuses"):
        monkeypatch.setattr(cpu, "forward", lambda *a, **k: pytest.fail("the backend was called"))


@pytest.mark.parametrize(
    ("keyword", "says"),
    [
        ("sink", "attention sinks are not supported"),
        ("softcap", "score capping is not supported"),
        ("dropout", "dropout is not supported"),
        ("dropout_p", "dropout is not supported"),
        ("is_causal", "causality is part of the mask"),
        ("return_attn_probs", "`return_lse=True`"),
        ("cu_seqlens_q", "doc=maskc.segments(cu_seqlens=...)"),
        ("attn_mask", "the mask is the first argument"),
        ("retrun_lse", "did you mean `return_lse`?"),
        ("zebra", "keywords: group, plan"),
    ],
)
@pytest.mark.parametrize("mask", ["bound", "std:causal"])
def test_refuses_unknown_keywords(keyword: str, says: str, mask: str) -> None:
    text = refusal("M501", spec() if mask == "bound" else mask, *operands(), kind=TypeError, **{keyword: 3.0})
    assert f"no keyword `{keyword}`" in text
    assert says in text


def test_refuses_missing_and_unused_inputs() -> None:
    """Data that would silently do nothing, and masks that lack data."""
    text = refusal("M410", "std:doc_causal", *operands())
    assert "input `doc`" in text
    assert "std:doc_causal:2:7" in text
    assert "no keyword `doc`" in refusal("M501", "std:causal", *operands(), kind=TypeError, doc=maskc.segments(lengths=[N]))
    text = refusal("M501", "std:doc_causal", *operands(), kind=TypeError, docs=maskc.segments(lengths=[N]))
    assert "did you mean `doc`?" in text


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("M503", lambda q, k, v: (q[0, 0], k, v)),
        ("M503", lambda q, k, v: (q, k[:1], v[:1])),
        ("M503", lambda q, k, v: (q, k[:, :5], v)),
        ("M503", lambda q, k, v: (q, k, v[:, :, :1])),
        ("M503", lambda q, k, v: (q[..., :4], k, v)),
        ("M505", lambda q, k, v: (q.float(), k, v)),
        ("M505", lambda q, k, v: (q.long(), k.long(), v.long())),
        ("M505", lambda q, k, v: tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v))),
        ("M503", lambda q, k, v: (q[..., :0], k[..., :0], v)),
        ("M503", lambda q, k, v: (q, k, v[..., :0])),
        ("M506", lambda q, k, v: (q[:, :, :3], k, v)),
        ("M506", lambda q, k, v: (q[:, :, :0], k, v)),
        ("M504", lambda q, k, v: (q.to("meta"), k, v)),
        ("M508", lambda q, k, v: tuple(x.to("meta") for x in (q, k, v))),
    ],
)
def test_refuses_tensors_that_do_not_fit(code: str, change: Any) -> None:
    refusal(code, "std:causal", *change(*operands()))


@pytest.mark.parametrize(
    ("code", "tensors"), [("M511", (np.zeros(3), 1, 2)), ("M511", (None, None, None)), ("M511", ([1.0], [1.0], [1.0]))]
)
def test_refuses_what_is_no_tensor(code: str, tensors: Any) -> None:
    refusal(code, "std:causal", *tensors, kind=TypeError)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_refuses_nested_tensors(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in (5, 3)], layout=layout)
    assert "segments(cu_seqlens=x.offsets())" in refusal("M511", "std:causal", x, x, x, kind=TypeError)


def in_dual_level(attend: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        return attend(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize(
    "transform",
    [
        lambda attend, q: torch.func.grad(lambda x: attend(x).sum())(q),
        lambda attend, q: torch.func.vmap(attend)(q[None]),
        lambda attend, q: torch.func.jvp(attend, (q,), (q,)),
        in_dual_level,
    ],
    ids=["grad", "vmap", "jvp", "dual"],
)
def test_refuses_function_transforms(transform: Any) -> None:
    """Torch runs an operator without a tangent on dual tensors, and says that its derivative is 0."""
    q, k, v = operands()
    with pytest.raises(maskc.MaskcError, match="M516"):
        transform(lambda x: maskc.run("std:causal", x, k, v), q)


def test_transforms_of_something_else_are_none_of_its_business() -> None:
    q, k, v = operands()
    want = maskc.run("std:causal", q, k, v)
    scaled = torch.func.vmap(lambda s: s * maskc.run("std:causal", q, k, v))(torch.tensor([1.0, 2.0]))
    assert torch.equal(scaled, torch.stack([want, 2 * want]))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(maskc.run("std:causal", q, k, v), want)


@pytest.mark.parametrize(
    ("given", "way"),
    [
        (lambda b, h, q, k: q >= k, "maskc.convert.from_mask_mod"),
        (create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu"), "maskc.convert.from_block_mask"),
        (torch.ones(4, 4, dtype=torch.bool), "maskc.convert.from_dense"),
        (7, "mask.bind(...)"),
    ],
)
def test_refuses_what_is_no_mask(given: Any, way: str) -> None:
    assert way in refusal("M511", given, *operands(), kind=TypeError)


def test_refuses_what_is_no_group() -> None:
    assert "maskc.convert.from_dense" in refusal("M511", "std:causal", *operands(), torch.ones(4, 4).bool(), kind=TypeError)
    assert "group is int, not a process group" in refusal("M511", "std:causal", *operands(), 4, kind=TypeError)


def test_refuses_to_compile_what_is_no_name() -> None:
    with pytest.raises(maskc.MaskcError, match=r"M511.*this is function\n.*maskc.convert.from_mask_mod"):
        maskc.compile(lambda b, h, q, k: q >= k)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [lambda: maskc.compile_text(b"mask a = k <= q"), lambda: maskc.compile_text("mask a = k <= q", 1), lambda: maskc.load(3)],
)
def test_refuses_other_types_by_name(call: Any) -> None:
    with pytest.raises(maskc.MaskcError, match="M511"):
        call()


def test_refuses_backends_by_name() -> None:
    assert 'did you mean "hopper"?' in refusal("M502", "std:causal", *operands(), backend="hoper")
    text = refusal("M507", "std:causal", *operands(), backend="hopper")
    assert 'backend "cpu" or "auto"' in text


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -(10**400), "1", True])
def test_refuses_scales(scale: Any) -> None:
    refusal("M510", "std:causal", *operands(), kind=TypeError, scale=scale)


@pytest.mark.parametrize("name", ["deterministic", "return_lse"])
def test_refuses_switches_that_are_none(name: str) -> None:
    assert f"{name} is 'no'" in refusal("M511", "std:causal", *operands(), kind=TypeError, **{name: "no"})


def test_refuses_plans_without_a_group() -> None:
    refusal("M512", "std:causal", *operands(), plan=object())
    refusal("M512", "std:causal", *operands(), strategy="ring")


def test_refuses_heads_and_batches_of_the_mask() -> None:
    q, k, v = operands(6)
    heads = maskc.compile("std:random_eviction").bind(evict=torch.full((1, 3, 6), 9))
    assert "the mask has 3 heads, which do not divide 4" in refusal("M506", heads, q, k, v)
    batch = maskc.compile("std:random_eviction").bind(evict=torch.full((3, 6), 9))
    assert "bound for 3 batch items, q has 2" in refusal("M503", batch, q, k, v)


def heads_first(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q with four heads, k and v with two, as FlexAttention wants them."""
    q, k, v = (torch.zeros(1, h, tokens, 8) for h in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize(
    "bound", [spec(), maskc.compile("std:causal").bind(nq=N, nk=N), maskc.compile("std:random_eviction").bind(evict=[N] * N)]
)
def test_refuses_heads_before_rows(bound: Any) -> None:
    text = refusal("M503", bound, *heads_first(N))
    assert "4 rows and 2 keys, the mask was bound for 40" in text
    assert "x.transpose(1, 2)" in text


def test_heads_before_rows_are_said_where_nothing_tells() -> None:
    with pytest.warns(MaskcWarning, match=r"W503.*k has 2 keys and 300 heads") as caught:
        maskc.run("std:causal", *heads_first(300))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maskc.run("std:causal", *(x.transpose(1, 2) for x in heads_first(300)))
        maskc.run("std:causal", *(x[:, :, :200] for x in heads_first(300)))  # many heads, but not too many


def test_refuses_data_of_other_sizes() -> None:
    assert "end at 40, the batch has 39 keys" in refusal("M401", spec(), *operands(N - 1))
    q, k, v = operands()
    assert "40 rows and 39 keys" in refusal("M414", spec(), q, k[:, :-1], v[:, :-1])
    ids = maskc.compile("std:doc_causal").bind(doc=maskc.segments(ids=[0] * N))
    assert "was bound for nq = 40, not 41" in refusal("M413", ids, *operands(N + 1))
