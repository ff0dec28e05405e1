"""Calls that launch again what a first call of their layout launched: the same bits as calls that are made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import attention
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import HEAD_DIMS
from maskc.runtime import hopper, ops
from maskc.runtime.prepared import Prepared
from tests.gpu.inputs import random_vectors

FORMS = [(form, dim) for form in ("causal+lts", "lts+ute", "lts+lte+uts+ute") for dim in HEAD_DIMS]
FORMS += [("blocks", 128), ("causal", 128)]
NQ, NK, BATCH, HEADS = 200, 330, 2, 4
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    calls = [(f"again/{form}/{dim}/{kv}", partial(_again, form, dim, kv)) for form, dim in FORMS for kv in (1, HEADS)]
    return [*calls, ("again/streams", _streams), ("again/graph", _graph)]


def sources() -> Iterator[CudaSource]:
    for form, dim in FORMS:
        mask = hopper.mask_form(random_vectors(form, 64, 64, 1, 1, 0, "cpu"))
        yield from attention(mask, dim, _dtype(dim), deterministic=(False, True))


def _dtype(dim: int) -> str:
    return "f16" if dim == 64 else "bf16"


def _calls(form: str, dim: int, heads_kv: int, deterministic: bool) -> tuple[ops.Call, Prepared]:
    """One that is made anew each time, and one that launches again."""
    rows = NK if "causal" in form else NQ
    v = random_vectors(form, rows, NK, BATCH, 1, 3, "cuda")
    given = v, hopper.schedule(v, dim), dim**-0.5, deterministic
    q, k, _, _ = _operands("apart", 0, rows, dim, heads_kv)
    return ops.Call(*given), Prepared.of(*given, q, k)


def _operands(layout: str, seed: int, rows: int, dim: int, heads_kv: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, each time elsewhere."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def made(length: int, heads: int) -> Tensor:
        x = torch.randn(BATCH, length, heads, dim, device="cuda", generator=generator)
        return x.to(DTYPES[_dtype(dim)])

    q, keys, dout = made(rows, HEADS), made(NK, 2 * heads_kv), made(rows, HEADS)
    k, v = keys.split(heads_kv, 2)  # as one projection gives them
    match layout:
        case "apart":
            return q, k.contiguous(), v.contiguous(), dout
        case "heads first":
            q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
            return q, k, v, dout
        case "misaligned":
            k, v = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (k, v))
            return q, k, v, dout
        case _:
            return q, k, v, dout


def _again(form: str, dim: int, heads_kv: int) -> str:
    for deterministic in (False, True):
        anew, again = _calls(form, dim, heads_kv, deterministic)
        for turn in range(4):
            for layout in ("joined", "apart", "heads first", "misaligned"):
                *qkv, dout = _operands(layout, turn, anew.v.nq, dim, heads_kv)
                results = []
                for call in (anew, again):
                    out, lse = call.forward(*qkv)
                    results.append((out, lse, *call.backward(*qkv, out, lse, dout, None)))
                for name, want, got in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
                    if name == "dq" and not deterministic:  # sums of it come in any order
                        continue
                    if not torch.equal(want, got):
                        return f"{layout}, call {turn}, deterministic {deterministic}: {name} differs"
        assert again.kind.backward is not None
        ready = [sum(map(bool, of.ready.values())) for of in (again.kind.forward, again.kind.backward)]
        if ready != [3, 3]:
            return f"ready for {ready} layouts, not 3"
    return ""


def _streams() -> str:
    """Launches go to the stream of each call."""
    anew, again = _calls("causal+lts", 128, HEADS, False)
    q, k, v, _ = _operands("apart", 1, NK, 128, HEADS)
    want = anew.forward(q, k, v)[0]
    for _ in range(2):
        again.forward(q, k, v)
    for _ in range(3):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            scaled = q * 1  # there is no q for a kernel on another stream yet
            late = again.forward(scaled, k, v)[0]
            early = stream.query()
        torch.cuda.synchronize()
        if early:
            return "the stream was not late: nothing was tested"
        if not torch.equal(late, want):
            return "a call did not wait for its own stream"
    return ""


def _graph() -> str:
    """What is ready is captured like any other launch."""
    anew, again = _calls("causal+lts", 128, 1, True)
    *qkv, dout = _operands("apart", 1, NK, 128, 1)
    for call in (anew, again, again):
        out, lse = call.forward(*qkv)
        call.backward(*qkv, out, lse, dout, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = again.forward(*qkv)
        grads = again.backward(*qkv, out, lse, dout, None)
    for turn in range(2, 5):
        *other, gradient = _operands("apart", turn, NK, 128, 1)
        for into, x in zip((*qkv, dout), (*other, gradient), strict=True):
            into.copy_(x)
        graph.replay()
        want, want_lse = anew.forward(*other)
        wanted = (want, want_lse, *anew.backward(*other, want, want_lse, gradient, None))
        torch.cuda.synchronize()
        if not all(map(torch.equal, (out, lse, *grads), wanted)):
            return f"replay {turn} differs"
    return ""
