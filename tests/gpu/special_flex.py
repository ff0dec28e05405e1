"""The backend "flex" on a GPU: what `auto` takes where there is no Hopper one, against dense attention in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import maskc
from maskc.runtime import flex

N = 1000
DOCS = maskc.segments(lengths=[300, 1, 0, 500, 120])  # and a tail of 79 that sees nothing
CASES = {
    "documents": ("std:doc_causal", lambda: {"doc": DOCS}),
    "per head": ("std:duo_heads", lambda: {"doc": DOCS, "streaming": [0, 1], "window": 64, "sinks": 4}),
    "four vectors": ("std:global_window", lambda: {"globals": 16, "window": 100}),
}


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((f"flex/{name}", partial(_equals_dense, name)) for name in CASES),
        ("flex/compiles", _compiles),
    ]


def _equals_dense(name: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    """Out, log-sum-exp and gradients, within twice the error that dense attention has in the same precision."""
    target, inputs = CASES[name]
    vectors = maskc.compile(target).bind(**inputs()).vectors(N, N, device)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, N, h, 64, device=device, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    dout, dlse = torch.randn_like(q), torch.randn(2, 4, N, device=device)
    got = _results(lambda *x: flex.attention(vectors, *x, 0.125), (q, k, v), dout, dlse)
    exact, naive = (
        _results(partial(_dense, vectors.masked(), 0.125), [x.detach().to(t).requires_grad_() for x in (q, k, v)], dout, dlse)
        for t in (torch.float64, dtype)
    )
    for part, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), got, exact, naive, strict=True):
        finite = y.isfinite()
        if bool((x[~finite].double() != y[~finite]).any()):
            return f"{part}: rows that see nothing differ"
        error, allowed = ((t.double() - y)[finite].abs().max().item() for t in (x, z))
        if error > 2 * allowed + 1e-3 * y[finite].abs().max().item():
            return f"{part}: error {error:.2e}, dense {dtype} has {allowed:.2e}"
    return ""


def _dense(masked: torch.Tensor, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    hidden = masked.repeat_interleave(q.shape[2] // masked.shape[1], 1)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale).masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, values), lse


def _results(
    attend: Callable[..., tuple[torch.Tensor, ...]], leaves: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    out, lse = attend(*leaves)
    seen = lse != -torch.inf
    total = (out * dout.to(out.dtype)).sum() + (lse.masked_fill(~seen, 0.0) * dlse.to(lse.dtype)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)


def _compiles() -> str:
    """Nothing is compiled for new documents of the same form."""
    mask = maskc.compile("std:doc_causal")
    q, k, v = (torch.randn(1, N, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    counts = []
    for lengths in ([N], [400, 600], [1, 998, 1]):
        maskc.run(mask.bind(doc=maskc.segments(lengths=lengths)), q, k, v, backend="flex")
        counts.append(sum(torch._dynamo.utils.counters["stats"].values()))
    return "" if counts[1] == counts[2] else f"compilations counted after each mask: {counts}"
