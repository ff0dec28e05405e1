"""One case on the GPU: the call, a dense fp64 reference, a naive low-precision attention, and the conformance rule.

Rule, for X in out, dq, dk, dv: max|X - ref| <= 2 max|naive - ref| + 2 max|(ref + 0.3) - 0.3 - ref|, the last in the low
precision, with ref in fp64 and naive the same attention in the low precision; and the same in the Frobenius norm. LSE:
1e-3 absolute. Infinities and NaN are compared by position first. Rows that see nothing and keys that nobody sees are
exactly zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import maskc
from benchmarks.masks import mask_case
from maskc.boundary import BoundaryVectors
from maskc.runtime import ops
from tests.gpu.cases import Case
from tests.gpu.inputs import random_vectors, suite_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the suite checks itself on the CPU backend
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = 2048  # rows of the dense reference at a time
Tensors = dict[str, torch.Tensor]


def run_case(case: Case) -> str:
    """ "" when the case is right, else what is wrong; "skip: ..." where the mask cannot have this shape."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    bound = _bind(case, rng)
    if bound is None:
        return "skip: the mask cannot have this shape"
    vectors, attend = bound
    call = _operands(case)
    wanted = reference(vectors, call, case.dtype)
    runs = 20 if case.batch * case.heads * case.nq * case.nk < 3 * 10**7 else 2
    first: Tensors = {}
    for repeat in range(runs):
        with poisoned():
            got = _call(case, attend, call)
        if repeat == 0:
            first = got
            if problem := compare(got, wanted, fp32_rounding(call), case):
                return problem
        for name, tensor in got.items():
            stable = name != "dq" or case.deterministic
            if stable and not torch.equal(_bits(tensor), _bits(first[name])):
                return f"{name} differs between run 0 and run {repeat}"
    return ""


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN (and integer maxima), so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _bind(case: Case, rng: random.Random) -> tuple[BoundaryVectors, Callable[..., Any]] | None:
    kind, name = case.mask.split(":")
    if kind == "form":
        batch = case.batch if rng.random() < 0.7 else 1
        vectors = random_vectors(name, case.nq, case.nk, batch, case.mask_heads, case.seed, DEVICE)
        return vectors, lambda q, k, v: ops.attention(vectors, q, k, v, case.head_dim**-0.5, deterministic=case.deterministic)
    if kind == "suite":
        made = suite_mask(name, case.nq, case.nk, rng)
        if made is None:
            return None
        compiled = maskc.compile(str(made[0]))
        inputs = made[1]
    else:
        if case.nq < 8:
            return None
        bench = mask_case(name, case.nq, heads=case.mask_heads)
        compiled, inputs = maskc.compile(bench.mask), dict(bench.inputs)
    on_device = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    spec = compiled.bind(nq=case.nq, nk=case.nk, **on_device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return maskc.run(spec, q, k, v, return_lse=True, deterministic=case.deterministic)

    return spec.vectors(device=torch.device(DEVICE)), attend


def _operands(case: Case) -> Tensors:
    """q, k, v, dout, dlse; strided: slices of one wider tensor, and dout with zero strides in a third of the cases."""
    dtype = DTYPES[case.dtype]

    def make(n: int, heads: int) -> torch.Tensor:
        wide = case.head_dim * (3 if case.strided else 1)
        x = torch.randn(case.batch, n, heads, wide, device=DEVICE, dtype=dtype)
        return x[..., case.head_dim : 2 * case.head_dim] if case.strided else x

    q, k, v = make(case.nq, case.heads), make(case.nk, case.kv_heads), make(case.nk, case.kv_heads)
    dout = torch.randn(case.batch, case.nq, case.heads, case.head_dim, device=DEVICE, dtype=dtype)
    if case.strided and case.seed % 3 == 0:
        dout = dout[:, :1, :1].expand(-1, case.nq, case.heads, -1)
    dlse = torch.randn(case.batch, case.heads, case.nq, device=DEVICE)
    return {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse if case.lse_grad else torch.zeros_like(dlse)}


def _call(case: Case, attend: Callable[..., Any], call: Tensors) -> Tensors:
    q, k, v = (call[n].detach().requires_grad_(case.direction == "bwd") for n in "qkv")
    out, lse = attend(q, k, v)
    if case.direction == "fwd":
        return {"out": out, "lse": lse}
    outputs, grads = ([out, lse], [call["dout"], call["dlse"]]) if case.lse_grad else ([out], [call["dout"]])
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return {"dq": dq, "dk": dk, "dv": dv}


# ---------------------------------------------------------------- reference


def masked_rows(v: BoundaryVectors, item: int, head: int, r0: int, r1: int) -> torch.Tensor:
    """Dense bool [r1 - r0, nk] of one batch item and mask head."""
    q = torch.arange(r0, r1, device=DEVICE)[:, None]
    key = torch.arange(v.nk, device=DEVICE)[None, :]

    def row(t: torch.Tensor) -> torch.Tensor:
        return t[item % t.shape[0], head % t.shape[1]][None, :]

    out = q < key if v.causal else torch.zeros(r1 - r0, v.nk, dtype=torch.bool, device=DEVICE)
    if v.diag is not None:
        out = out | (q < row(v.diag))
    if v.lts is not None:
        out = out | ((q >= row(v.lts)) & (q < row(v.lte) if v.lte is not None else q >= 0))
    if v.ute is not None:
        out = out | ((q < row(v.ute)) & (q >= row(v.uts) if v.uts is not None else q >= 0))
    if v.blocks is not None:
        keep = v.blocks.keep
        table = keep[item % keep.shape[0], head % keep.shape[1]]
        out = out | ~table[(q[:, 0] // v.blocks.block_q)[:, None], (key[0] // v.blocks.block_kv)[None, :]]
    return out


def reference(v: BoundaryVectors, call: Tensors, dtype: str) -> dict[str, Tensors]:
    """{"exact": fp64, "naive": low precision} with out, lse, dq, dk, dv each, and which rows and keys see or are seen."""
    q, k, val = call["q"], call["k"], call["v"]
    batch, nq, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = dim**-0.5
    exact = {n: torch.zeros(s, dtype=torch.float64, device=DEVICE) for n, s in _shapes(call).items()}
    naive = {n: torch.zeros(s, dtype=torch.float32, device=DEVICE) for n, s in _shapes(call).items()}
    sees = torch.zeros(batch, heads, nq, dtype=torch.bool, device=DEVICE)
    seen = torch.zeros(batch, kv_heads, v.nk, dtype=torch.bool, device=DEVICE)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for r0 in range(0, nq, ROWS):
                r1 = min(nq, r0 + ROWS)
                masked = masked_rows(v, b, h // (heads // v.heads), r0, r1)
                sees[b, h, r0:r1] = ~masked.all(1)
                seen[b, g] |= ~masked.all(0)
                part = q[b, r0:r1, h], k[b, :, g], val[b, :, g], call["dout"][b, r0:r1, h], call["dlse"][b, h, r0:r1]
                for store, precision in ((exact, torch.float64), (naive, DTYPES[dtype])):
                    out, lse, dq, dk, dv = _dense(masked, *(x.to(precision) for x in part[:4]), part[4], scale)
                    store["out"][b, r0:r1, h], store["lse"][b, h, r0:r1] = out, lse
                    store["dq"][b, r0:r1, h] = dq
                    store["dk"][b, :, g] += dk
                    store["dv"][b, :, g] += dv
    low = {n: t.to(DTYPES[dtype]).double() if n != "lse" else t.double() for n, t in naive.items()}
    return {"exact": exact, "naive": low, "sees": {"rows": sees, "keys": seen}}


def _shapes(call: Tensors) -> dict[str, tuple[int, ...]]:
    q, k, v = call["q"], call["k"], call["v"]
    out = (*q.shape[:3], v.shape[3])
    return {"out": out, "lse": (q.shape[0], q.shape[2], q.shape[1]), "dq": q.shape, "dk": k.shape, "dv": v.shape}


def _dense(
    masked: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    val: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Attention of one head and its gradients, everything in q's dtype."""
    scores = (q @ (k * scale).T).masked_fill_(masked, -torch.inf)
    lse = torch.logsumexp(scores.double(), 1)
    weights = torch.softmax(scores, 1).masked_fill_(masked.all(1)[:, None], 0.0)
    out = weights @ val
    dweights = dout @ val.T
    delta = (dout.double() * out.double()).sum(1) - dlse.double().masked_fill(masked.all(1), 0.0)
    dscores = (weights * (dweights - delta[:, None].to(q.dtype))).to(q.dtype)
    return out, lse, (dscores @ k) * scale, (dscores.T @ q) * scale, weights.T @ dout


def fp32_rounding(call: Tensors) -> dict[str, float]:
    """What fp32 accumulation alone may cost: where one key is visible dP - delta is exactly 0, and so is naive's error."""
    top = {name: call[name].abs().max().item() for name in ("q", "k", "v", "dout")}
    dim = call["q"].shape[3]
    dscore = 2.0**-22 * dim * top["dout"] * top["v"] * dim**-0.5
    return {"out": 0.0, "dv": 0.0, "dq": dscore * top["k"], "dk": dscore * top["q"]}


def compare(got: Tensors, wanted: dict[str, Tensors], slack: dict[str, float], case: Case) -> str:
    """ "" or the first broken promise, with the worst coordinate."""
    rows, keys = wanted["sees"]["rows"], wanted["sees"]["keys"]
    for name, tensor in got.items():
        exact, naive = wanted["exact"][name], wanted["naive"][name]
        x = tensor.double()
        odd = (~torch.isfinite(x)) != (~torch.isfinite(exact))
        if odd.any():
            where = tuple(odd.nonzero()[0].tolist())
            return f"{name}{list(where)} = {x[where].item()}, expected {exact[where].item():.4g} ({int(odd.sum())} such)"
        if name == "lse":
            finite = torch.isfinite(exact)
            if not torch.equal(finite, rows):
                return "lse: reference and visibility disagree"
            worst = (x - exact)[finite].abs().max().item() if finite.any() else 0.0
            if worst > 1e-3:
                return f"lse is off by {worst:.2e} (limit 1e-3)"
            continue
        error, limit = (x - exact).abs(), (naive - exact).abs()
        low = exact.to(DTYPES[case.dtype])
        rounding = ((low + 0.3) - 0.3 - low).double().abs().max().item()
        bound = 2 * limit.max().item() + 2 * rounding + slack[name]
        if error.max().item() > bound:
            where = tuple((error == error.max()).nonzero()[0].tolist())
            off = f"off by {error.max().item():.2e} > {bound:.2e}"
            return f"{name}{list(where)} = {x[where].item():.5g}, exact {exact[where].item():.5g}: {off}"
        if error.norm() > 2 * limit.norm() + 1e-3 * exact.norm() + slack[name] * error.numel() ** 0.5:
            return f"{name}: Frobenius error {error.norm().item():.2e}, naive {limit.norm().item():.2e}"
        empty = ~rows.transpose(1, 2) if name in ("out", "dq") else ~keys.transpose(1, 2)
        if (x[empty] != 0).any():
            return f"{name} is not exactly zero where nothing is seen"
    return ""
