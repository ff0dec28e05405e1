"""What the special cases of the forward kernel share: operands, vectors from columns, and the check of a sampled answer."""

from __future__ import annotations

import math
import random

import torch

from maskc.boundary import BoundaryVectors
from tests.gpu.check import masked_rows

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SCALE = 128**-0.5
KEY = torch.arange(1 << 18)


def operands(b: int, nq: int, nk: int, hq: int, hk: int, d: int = 128, seed: int = 0) -> Tensors:
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def make(n: int, h: int) -> torch.Tensor:
        return torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16, generator=gen)

    return make(nq, hq), make(nk, hk), make(nk, hk)


def verify(
    v: BoundaryVectors,
    qkv: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    samples: int = 3,
    rows: int = 512,
    scale: float | None = None,
) -> str:
    """ "" or what is wrong, on a few (batch item, head, row range) of the answer, by the rule of `tests.gpu.check`."""
    q, k, val = qkv
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rng = random.Random(7)
    for i in range(samples):
        b, h = (
            (0, 0)
            if i == 0
            else (q.shape[0] - 1, q.shape[2] - 1)
            if i == 1
            else (rng.randrange(q.shape[0]), rng.randrange(q.shape[2]))
        )
        r0 = 0 if i == 0 else max(0, v.nq - rows) if i == 1 else rng.randrange(max(1, v.nq - rows))
        r1 = min(v.nq, r0 + rows)
        g, m = h // (q.shape[2] // k.shape[2]), h // (q.shape[2] // v.heads)
        hidden = masked_rows(v, b, m, r0, r1)
        clean = hidden.all(0)[:, None]
        answers = []
        for dtype in (torch.float64, q.dtype):
            kk, vv = k[b, :, g].to(dtype).masked_fill(clean, 0), val[b, :, g].to(dtype).masked_fill(clean, 0)
            s = (q[b, r0:r1, h].to(dtype) @ (kk * scale).T).masked_fill(hidden, -math.inf)
            p = torch.softmax(s, 1).masked_fill(hidden.all(1)[:, None], 0)
            answers.append(((p @ vv).double(), torch.logsumexp(s.double(), 1)))
        (exact, exact_lse), (naive, _) = answers
        got, got_lse = out[b, r0:r1, h].double(), lse[b, h, r0:r1].double()
        where = f"item {b} head {h} rows {r0}-{r1}"
        if not torch.equal(torch.isfinite(got_lse), ~hidden.all(1)) or not torch.isfinite(got).all():
            return f"{where}: wrong infinities or NaN"
        low = exact.to(q.dtype)
        limit = 2 * (naive - exact).abs().max() + 2 * ((low + 0.3 - 0.3) - low).double().abs().max()
        if (got - exact).abs().max() > limit:
            return f"{where}: error {(got - exact).abs().max().item():.2e}, limit {limit.item():.2e}"
        finite = torch.isfinite(exact_lse)
        if finite.any() and (got_lse - exact_lse)[finite].abs().max() > 1e-3:
            return f"{where}: lse is off by {(got_lse - exact_lse)[finite].abs().max().item():.2e}"
    return ""


def columns(n: int, nk: int | None = None, on: str = "cuda", **parts: torch.Tensor | int) -> BoundaryVectors:
    nk = nk or n
    causal = bool(parts.pop("causal", 0))
    shaped = {name: torch.as_tensor(t, device=on).to(torch.int32).expand(1, 1, nk).contiguous() for name, t in parts.items()}
    return BoundaryVectors(n, nk, 1, 1, causal, **shaped)


def global_window(n: int, window: int, on: str = "cuda") -> BoundaryVectors:
    key = torch.arange(n, device=on)
    made = {
        "lts": torch.where(key < 16, n, key + window + 1), "lte": torch.full_like(key, n),
        "uts": torch.where(key <= 16 + window, 0, 16), "ute": torch.where(key <= 16 + window, 0, key - window),
    }  # fmt: skip
    shaped = {name: t.clamp(0, n).to(torch.int32).view(1, 1, n).contiguous() for name, t in made.items()}
    return BoundaryVectors(n, n, 1, 1, False, **shaped)
