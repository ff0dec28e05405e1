"""The torch operators: what torch itself checks, compilation, checkpointing, strides, several masks at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import maskc
from maskc.binding.streams import Making
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.runtime import cpu, ops
from tests.runtime.dense import reference

SCALE = 0.3
N = 70


def vectors(seed: int = 0, **more: object) -> BoundaryVectors:
    generator = torch.Generator().manual_seed(seed)
    return BoundaryVectors(
        N, N, 1, 2, True, lts=torch.randint(0, N + 1, (1, 2, N), generator=generator, dtype=torch.int32), **more
    )


def operands(seed: int = 1, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, N, 4, 8), (2, N, 2, 8), (2, N, 2, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(grad) for s in shapes]


def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()


def attend(v: BoundaryVectors, q: torch.Tensor, k: torch.Tensor, val: torch.Tensor) -> torch.Tensor:
    return loss(*ops.attention(v, q, k, val, SCALE))


FORMS: dict[str, Callable[[], BoundaryVectors]] = {
    "one vector": vectors,
    "no vector": lambda: BoundaryVectors(N, N, 1, 1, True),
    "block table": lambda: vectors(blocks=BlockTable(torch.rand(1, 1, 9, 18) < 0.5, 8, 4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str) -> None:
    v, tensors = FORMS[form](), operands()
    mask = (*ops._flat(v, ()), SCALE, False)
    results = torch.library.opcheck(torch.ops.maskc.forward.default, (*tensors, *mask))
    assert set(results.values()) == {"SUCCESS"}
    out, lse = (x.detach() for x in ops.attention(v, *tensors, SCALE))
    plain = [x.detach() for x in tensors]
    for dlse in (torch.randn_like(lse), None):
        arguments = (torch.randn_like(out), dlse, *plain, out, lse, *mask)
        assert set(torch.library.opcheck(torch.ops.maskc.backward.default, arguments).values()) == {"SUCCESS"}


def test_gradients_by_finite_differences() -> None:
    tensors = [x[:1, :9].detach().requires_grad_() for x in operands()]
    v = BoundaryVectors(9, 9, 1, 1, True, lts=torch.tensor([[[3, 9, 9, 4, 9, 9, 6, 9, 9]]], dtype=torch.int32))
    assert torch.autograd.gradcheck(partial(attend, v), tensors)


NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_compiles_without_graph_breaks(backend: str) -> None:
    torch.compiler.reset()
    tensors, v = operands(), vectors()
    compiled = torch.compile(partial(attend, v), fullgraph=True, backend=backend)
    mine = torch.autograd.grad(compiled(*tensors), tensors)
    for got, want in zip(mine, torch.autograd.grad(attend(v, *tensors), tensors), strict=True):
        torch.testing.assert_close(got, want)


def test_new_documents_never_recompile() -> None:
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    mask = maskc.compile("std:doc_causal")
    q, k, val = operands(grad=False)

    @partial(torch.compile, fullgraph=True, backend=count)
    def block(spec: object, x: torch.Tensor) -> torch.Tensor:
        return x + maskc.run(spec, x, k, val[..., :6]).sum()

    for i in range(50):
        spec = mask.bind(doc=maskc.segments(lengths=[i % 7, 5 + i, N - 5 - i - i % 7]))
        spec.vectors(N, N)
        want = q + maskc.run(spec, q, k, val[..., :6]).sum()
        torch.testing.assert_close(block(spec, q), want)
    assert len(graphs) == 1


def test_vectors_inside_a_graph_are_refused_by_name() -> None:
    torch.compiler.reset()
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[N]))
    compiled = torch.compile(lambda *x: maskc.run(spec, *x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="M513"):
        compiled(*operands())


@pytest.mark.parametrize("inside", ["name", "bind"])
def test_masks_inside_a_graph_are_refused_by_name(inside: str) -> None:
    torch.compiler.reset()
    mask = maskc.compile("std:doc_causal")

    def attend(*x: torch.Tensor) -> object:
        return maskc.run("std:causal", *x) if inside == "name" else maskc.run(mask, *x, doc=maskc.segments(lengths=[N]))

    with pytest.raises(Exception, match=r"M513: .*bind the mask once per batch"):
        torch.compile(attend, fullgraph=True, backend="eager")(*operands())
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager")(*operands()), attend(*operands()))


def test_vectors_are_made_outside_where_a_graph_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    traced = []
    plain = Making.of

    def of(tensors: tuple[torch.Tensor, ...]) -> Making | None:
        traced.append(torch.compiler.is_compiling())
        return plain(tensors)

    monkeypatch.setattr(Making, "of", of)
    compiled = torch.compile(lambda spec, *x: maskc.run(spec, *x) + 0, backend="eager")
    for lengths in ([30, 40], [70], [1, 69]):
        spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=lengths))
        x = operands()
        torch.testing.assert_close(compiled(spec, *x), maskc.run(spec, *x))
    assert traced
    assert not any(traced)


def test_calls_on_a_gpu_enter_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with fake tensors, so that it needs no GPU: nothing on the way asks for what a graph cannot hold."""
    torch.compiler.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[40, 24]))
    graphs = []

    def keep(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, val = (torch.empty(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        there = torch.empty(1, 1, 64, device="cuda", dtype=torch.int32)
        spec._vectors.found[64, 64, "cuda:0"] = replace(spec.vectors(64, 64), lts=there), None
        out = torch.compile(lambda *x: maskc.run(spec, *x), fullgraph=True, backend=keep)(q, k, val)
    assert out.shape == q.shape
    (graph,) = graphs
    assert torch.ops.maskc.forward in {node.target for node in graph.graph.nodes}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain = cpu.forward

    def forward(*arguments: object, **keywords: object) -> object:
        calls.append(1)
        return plain(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "forward", forward)
    return calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    v, tensors = vectors(), operands()
    want = torch.autograd.grad(attend(v, *tensors), tensors)
    calls = counted(monkeypatch)
    checkpoint(partial(attend, v), *tensors, use_reentrant=reentrant).backward()
    assert len(calls) == 2
    for x, grad in zip(tensors, want, strict=True):
        assert torch.equal(x.grad, grad)


def test_selective_checkpoint_keeps_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(context: object, op: object, *arguments: object, **keywords: object) -> CheckpointPolicy:
        keep = op == torch.ops.maskc.forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    v, tensors = vectors(), operands()
    calls = counted(monkeypatch)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(partial(attend, v), *tensors, use_reentrant=False, context_fn=contexts).backward()
    assert len(calls) == 1


def test_two_masks_alive_at_once() -> None:
    """Forward A, forward B, backward A, backward B."""
    a, b, tensors = vectors(3), vectors(4), operands()
    alone = [torch.autograd.grad(attend(v, *tensors), tensors) for v in (a, b)]
    losses = [attend(v, *tensors) for v in (a, b)]
    for total, want in zip(losses, alone, strict=True):
        for got, grad in zip(torch.autograd.grad(total, tensors), want, strict=True):
            assert torch.equal(got, grad)


def test_strides_do_not_matter() -> None:
    v = vectors()
    wide = torch.randn(2, 4, N, 3 * 8, dtype=torch.float64).transpose(1, 2)
    q, k, val = wide[..., :8], wide[:, :, ::2, 8:16], wide[:, :, 1::2, 16:]
    assert not q.is_contiguous()
    packed = [x.contiguous().requires_grad_() for x in (q, k, val)]
    strided = [x.requires_grad_() for x in (q, k, val)]
    for got, want in zip(
        torch.autograd.grad(attend(v, *strided), strided), torch.autograd.grad(attend(v, *packed), packed), strict=True
    ):
        assert torch.equal(got, want)


def test_expanded_gradients() -> None:
    """`out.sum()` hands the backward a gradient with zero strides."""
    v, tensors = vectors(), operands()
    out, _ = ops.attention(v, *tensors, SCALE)
    grads = torch.autograd.grad(out.sum(), tensors)
    _, _, want = reference(v, *tensors, SCALE, torch.ones_like(out))
    for got, exact in zip(grads, want, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_either_result_alone(used: str) -> None:
    v, tensors = vectors(), operands()
    out, lse = ops.attention(v, *tensors, SCALE)
    weight = torch.randn_like(lse)
    total = out.sum() if used == "out" else (lse.masked_fill(lse == -torch.inf, 0.0) * weight).sum()
    want = reference(
        v, *tensors, SCALE, torch.ones_like(out) if used == "out" else torch.zeros_like(out), None if used == "out" else weight
    )
    for got, exact in zip(torch.autograd.grad(total, tensors), want[2], strict=True):
        torch.testing.assert_close(got, exact)


def test_second_derivatives_are_refused() -> None:
    v, tensors = vectors(), operands()
    (first,) = torch.autograd.grad(attend(v, *tensors), tensors[:1], create_graph=True)
    with pytest.raises(maskc.MaskcError) as caught:
        first.sum().backward()
    assert caught.value.code == "M509"


class Seen(TorchDispatchMode):
    """Who looks at operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator, misc]


class Labelled(torch.Tensor):
    """A subclass that does nothing of its own."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("used", ["both", "out", "lse"])
def test_operators_are_seen_and_a_plain_call_gives_the_same_bits(form: str, used: str) -> None:
    v, tensors = FORMS[form](), operands()

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = ops.attention(v, *tensors, SCALE, deterministic=True)
        total = {"both": loss(out, lse), "out": out.sum(), "lse": lse.masked_fill(lse == -torch.inf, 0.0).sum()}[used]
        return out, lse, *torch.autograd.grad(total, tensors)

    plain, seen = step(), Seen()
    with seen:
        looked_at = step()
    assert [name for name in seen.names if name.startswith("maskc")] == ["maskc.forward.default", "maskc.backward.default"]
    assert all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(plain, ops.attention(v, *tensors, SCALE), strict=False))


def test_who_looks_at_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    v, tensors = vectors(), operands()
    calls: list[str] = []
    plain = ops._flat

    def flat(*arguments: object) -> object:  # on the way to an operator only
        calls.append("operator")
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "_flat", flat)
    out, _ = ops.attention(v, *tensors, SCALE)
    torch.autograd.grad(out.sum(), tensors)
    ops.attention(v, *[torch.nn.Parameter(x.detach()) for x in tensors], SCALE)
    assert calls == []
    ops.attention(v, tensors[0].as_subclass(Labelled), *tensors[1:], SCALE)
    assert len(calls) == 1
    with torch.device("cpu"):  # a mode for functions
        ops.attention(v, *tensors, SCALE)
    assert len(calls) == 2
    out, _ = ops.attention(v, *tensors, SCALE)
    torch.autograd.grad(out.sum(), tensors, create_graph=True)
    assert len(calls) == 3
    with pytest.raises(RuntimeError, match="functorch"):  # which operators in Python do not take
        torch.func.grad(lambda q: ops.attention(v, q, *tensors[1:], SCALE)[0].sum())(tensors[0].detach())
    assert len(calls) == 4


@pytest.mark.parametrize("bound_inside", [False, True])
def test_what_is_made_in_inference_mode_serves_training(bound_inside: bool) -> None:
    """Graphs save the vectors of a mask, which torch refuses for tensors of inference mode."""

    def bind() -> maskc.BoundMask:
        return maskc.compile("std:doc_causal").bind(doc=maskc.segments(ids=[0] * N))

    spec = None if bound_inside else bind()
    with torch.inference_mode():
        spec = spec or bind()
        maskc.run(spec, *operands(grad=False))
    q, k, v = operands()
    torch.compile(partial(maskc.run, spec), backend="aot_eager", fullgraph=True)(q, k, v).sum().backward()
    assert q.grad is not None


def test_masks_are_not_kept_alive() -> None:
    import gc
    import weakref

    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[N]))
    out = maskc.run(spec, *operands())
    out.sum().backward()
    held = weakref.ref(spec), weakref.ref(spec.vectors(N, N).lts)
    del spec, out
    gc.collect()
    assert [ref() for ref in held] == [None, None]
