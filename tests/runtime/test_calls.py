"""Calls that are checked once: what may differ between two calls that are the same, and what must not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import maskc
from maskc.binding.bound import MOST_CALLS, BoundMask
from maskc.binding.streams import Making
from maskc.boundary import BoundaryVectors
from maskc.runtime import run

N = 12


def bound() -> BoundMask:
    return maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[5, N - 5]))


def operands(dtype: torch.dtype = torch.float64, batch: int = 1, grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, N, 4, 8), (batch, N, 2, 8), (batch, N, 2, 8))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call that is checked."""
    seen: list[str] = []
    plain = run.check_tensors

    def check(*tensors: torch.Tensor) -> None:
        seen.append(str(tensors[0].dtype))
        plain(*tensors)

    monkeypatch.setattr(run, "check_tensors", check)
    return seen


def test_the_same_call_is_checked_once(checks: list[str]) -> None:
    spec = bound()
    first, other = operands(), [x * 2 for x in operands()]
    want = maskc.run(bound(), *other, return_lse=True)
    maskc.run(spec, *first)
    checks.clear()
    got = maskc.run(spec, *other, return_lse=True)
    assert all(map(torch.equal, got, want)), "other numbers, the other result too"
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in other]
    assert torch.equal(maskc.run(spec, *strided), want[0])
    assert checks == []


def test_gradients_of_a_known_call(checks: list[str]) -> None:
    spec, leaves = bound(), operands(grad=True)
    grads = [torch.autograd.grad(maskc.run(spec, *leaves).square().sum(), leaves) for _ in range(2)]
    assert len(checks) == 1
    assert all(map(torch.equal, *grads))


def test_packed_tokens(checks: list[str]) -> None:
    spec = bound()
    packed = [x[0] for x in operands()]
    want = maskc.run(spec, *operands(), return_lse=True)
    for _ in range(2):
        got = maskc.run(spec, *packed, return_lse=True)
        assert all(torch.equal(a, b[0]) for a, b in zip(got, want, strict=True))
    assert len(checks) == 2, "with and without a batch axis"
    for _ in range(2):
        assert torch.equal(maskc.run(spec, packed[0], *operands()[1:]), want[0][0]), "an axis of its own for queries alone"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"batch": 2},
        {"scale": 0.5},
        {"deterministic": True},
        {"backend": "cpu"},
    ],
    ids=str,
)
def test_another_call_is_checked(checks: list[str], change: dict[str, Any]) -> None:
    spec = bound()
    maskc.run(spec, *operands())
    checks.clear()
    tensors = operands(**{name: x for name, x in change.items() if name in ("dtype", "batch")})
    maskc.run(spec, *tensors, **{name: x for name, x in change.items() if name not in ("dtype", "batch")})
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"scale": True}, "M510"),
        ({"scale": float("nan")}, "M510"),
        ({"deterministic": 1}, "M511"),
        ({"return_lse": 1}, "M511"),
        ({"backend": "hopper"}, "M507"),
        ({"backend": ["cpu"]}, "M502"),
        ({"strategy": "ring"}, "M512"),
        ({"dropout": 0.0}, "M501"),
    ],
    ids=str,
)
def test_what_equals_a_known_argument_is_still_refused(wrong: dict[str, Any], code: str) -> None:
    spec = bound()
    for known in ({}, {"scale": 1.0}, {"deterministic": True}):
        maskc.run(spec, *operands(), **known)
    for _ in range(2):
        with pytest.raises(maskc.MaskcError) as caught:
            maskc.run(spec, *operands(), **wrong)
        assert caught.value.code == code


def test_tensors_that_do_not_fit_are_refused_every_time() -> None:
    spec = bound()
    q, k, v = operands()
    maskc.run(spec, q, k, v)
    for tensors in ((q, k, v[:, :-1]), (q[..., :4], k, v), (q, k.float(), v), (q[:, :, :3], k, v), (None, k, v)):
        for _ in range(2):
            with pytest.raises(maskc.MaskcError):
                maskc.run(spec, *tensors)  # type: ignore[arg-type]


def test_modes_are_looked_at_every_time(checks: list[str]) -> None:
    spec = bound()
    q, k, v = operands(torch.float32)
    maskc.run(spec, q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert maskc.run(spec, q, k, v).dtype == torch.bfloat16
    with torch.inference_mode():
        maskc.run(spec, q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(maskc.MaskcError, match="M516"):
            maskc.run(spec, dual, k, v)
    with pytest.raises(maskc.MaskcError, match="M516"):
        torch.vmap(lambda x: maskc.run(spec, x, k, v))(q[None])
    assert checks == ["torch.float32", "torch.bfloat16"], "inference mode is left, and then the call is known"


def test_a_copy_of_a_mask_that_was_used_makes_its_own_calls() -> None:
    spec = bound()
    want = maskc.run(spec, *operands())
    assert torch.equal(maskc.run(pickle.loads(pickle.dumps(spec)), *operands()), want)


def test_the_last_calls_are_known(checks: list[str]) -> None:
    spec = maskc.compile("std:causal").bind()
    q, k, v = operands()
    for _ in range(2):
        for n in range(1, N + 1):
            maskc.run(spec, q[:, :n], k[:, :n], v[:, :n])
    assert len(checks) == N
    for n in range(MOST_CALLS):
        maskc.run(spec, q, k, v, scale=1.0 + n)
    assert len(spec._calls.found) == MOST_CALLS
    checks.clear()
    maskc.run(spec, q, k, v, scale=1.0 + n)
    assert checks == []
    maskc.run(spec, q, k, v)
    assert len(checks) == 1, "the first ones were forgotten"


# ---------------------------------------------------------------- streams


def test_a_call_waits_for_the_last_of_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (SimpleNamespace(cuda_stream=n) for n in (1, 2))
    x, y = torch.zeros(1), torch.zeros(2)
    first, last = Making((x,), one, "first"), Making((y,), one, "last")  # type: ignore[arg-type]
    joined = Making.joined([first, last])
    assert joined is not None
    assert (joined.tensors, joined.stream, joined.event) == ((x, y), one, "last")
    assert Making.joined([]) is None
    monkeypatch.setattr(Making, "of", lambda tensors: ("an event of its own", tensors))
    assert Making.joined([first, Making((y,), two, "other")]) == ("an event of its own", (x, y))  # type: ignore[arg-type]


def test_what_a_graph_made_is_not_kept_in_a_call() -> None:
    spec = bound()
    v, cpu = spec.vectors(N, N), torch.device("cpu")
    spec.keep_call(("a",), "call", v, cpu, head_dim=64)
    assert spec.call(("a",)) is None, "its schedule is not kept, so it was made inside a graph"
    spec.schedule(v, 64, lambda v, head_dim: ())
    spec.keep_call(("a",), "call", v, cpu, head_dim=64)
    assert spec.call(("a",)) == "call"
    spec.keep_call(("b",), "call", BoundaryVectors(3, 3, 1, 1, True), cpu, head_dim=None)
    assert spec.call(("b",)) is None
