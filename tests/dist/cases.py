"""What the ranks of a test run, and the answer it must have: dense fp64 attention over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import maskc
from maskc.binding.bound import BoundMask
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.runtime import comm, context_parallel
from maskc.runtime.plan import AttentionPlan, plan

Spec = BoundMask | BoundaryVectors


@dataclass(frozen=True)
class Case:
    """One attention call on `world` ranks, of a bound mask or of random vectors of the given form (see `vectors`)."""

    world: int
    n: int
    seed: int
    form: str = "lts"
    causal: bool = True
    strategy: str = "all-gather"
    order: str = "balanced"
    chunk: int | None = None
    heads: tuple[int, int, int] = (2, 1, 1)
    """Query, key and mask heads."""
    batch: tuple[int, int] = (1, 1)
    """Batch, and batch of the mask."""
    dims: tuple[int, int] = (8, 8)
    nk: int | None = None
    dtype: str = "float64"
    switches: dict[str, Any] = field(default_factory=dict)

    def plan(self, spec: Spec) -> AttentionPlan:
        sizes = {"nq": self.n, "nk": self.nk or self.n}
        return plan(spec, world_size=self.world, order=self.order, chunk=self.chunk, **sizes, **self.switches)  # type: ignore[arg-type]


FORMS = ("none", "lts", "lts lte", "ute", "uts ute", "lts ute", "lts lte ute", "lts lte uts ute", "blocks", "lts blocks")


def vectors(case: Case) -> BoundaryVectors:
    """Random intervals: short, long, empty and inverted ones, per batch item and mask head."""
    g = torch.Generator().manual_seed(case.seed)
    n, nk, batch, heads = case.n, case.nk or case.n, case.batch[1], case.heads[2]
    names = case.form.split()

    def vector() -> Tensor:
        steps = torch.randint(0, n + 1, (batch, heads, nk // 8 + 1), generator=g)
        return steps.repeat_interleave(8, -1)[..., :nk].to(torch.int32).contiguous()

    def table() -> BlockTable:
        keep = torch.rand(batch, heads, -(-n // 4), -(-nk // 8), generator=g) < 0.5
        return BlockTable(keep, 4, 8)

    v = BoundaryVectors(n, nk, batch, heads, case.causal)
    v = replace(v, **{name: vector() for name in names if name in ("lts", "lte", "uts", "ute")})
    return replace(v, blocks=table()) if "blocks" in names else v


def docs(lengths: list[int], n: int | None = None) -> BoundMask:
    """Causal documents of these lengths, in `n` rows (default: their sum)."""
    total = n or sum(lengths)
    mask = maskc.compile_text("input doc : segments\nmask doc_causal = same(doc) and k <= q")
    return mask.bind(doc=maskc.segments(lengths=lengths), nq=total, nk=total)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout, dlse of the whole sequence."""
    g = torch.Generator().manual_seed(case.seed + 1)
    (hq, hk, _), (d, dv), n, nk, b = case.heads, case.dims, case.n, case.nk or case.n, case.batch[0]
    shapes = (b, n, hq, d), (b, nk, hk, d), (b, nk, hk, dv), (b, n, hq, dv), (b, hq, n)
    return tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)  # type: ignore[return-value]


def dense(case: Case, v: BoundaryVectors, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv by autograd through the dense score matrix. Empty rows give 0, -inf and no gradient."""
    q, k, val, dout, dlse = (t.to(dtype) for t in tensors(case))
    q, k, val = (t.requires_grad_() for t in (q, k, val))
    hq, hk, hm = case.heads
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(hq // hk, 2)) * q.shape[3] ** -0.5
    masked = v.masked().repeat_interleave(hq // hm, 1).expand(scores.shape)
    scores = scores.masked_fill(masked, -torch.inf)
    empty = masked.all(-1)
    lse = torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), -1)
    weights = torch.exp(scores - lse[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", weights, val.repeat_interleave(hq // hk, 2))
    ((out * dout).sum() + (lse * dlse).masked_fill(empty, 0.0).sum()).backward()
    lse = lse.detach().masked_fill(empty, -torch.inf)
    assert q.grad is not None
    assert k.grad is not None
    assert val.grad is not None
    return {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": val.grad}


def dense_mask(case: Case, spec: Spec) -> BoundaryVectors:
    return spec if isinstance(spec, BoundaryVectors) else spec.vectors(case.n, case.nk or case.n)


def attend(rank: int, group: Any, case: Case, spec: Spec) -> dict[str, Any]:
    """A rank's results and the bytes it sent, by kind and destination."""
    p = case.plan(spec)
    dtype = getattr(torch, case.dtype)
    run = context_parallel.run if isinstance(spec, BoundaryVectors) else maskc.run
    q, k, val, dout, dlse = (t.to(dtype) for t in tensors(case))
    q = p.shard(q, rank).clone().requires_grad_()
    k, val = (p.shard(t, rank, of="keys").clone().requires_grad_() for t in (k, val))
    with comm.count_traffic() as ledger:
        out, lse = run(spec, q, k, val, group, plan=p, strategy=case.strategy, return_lse=True)
        dlse = p.shard(dlse, rank, 2).to(lse.dtype).masked_fill(lse.detach() == -torch.inf, 0.0)
        torch.autograd.backward((out, lse), (p.shard(dout, rank), dlse))
    result = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": val.grad}
    return {n: t.detach() for n, t in result.items() if t is not None} | {
        "sent": ledger.sent,
        "digest": p.digest,
    }


def joined(case: Case, p: AttentionPlan, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' parts in the order of the sequence."""
    out = {}
    for name, axis, dim in (("out", p.rows, 1), ("lse", p.rows, 2), ("dq", p.rows, 1), ("dk", p.keys, 1), ("dv", p.keys, 1)):
        order = torch.cat([torch.arange(s, e) for r in range(p.world) for s, e in axis.ranges(axis.chunks_of(r))])
        whole = torch.cat([r[name] for r in results], dim)
        out[name] = torch.empty_like(whole).index_copy_(dim, order, whole)
    return out


def verify(case: Case, spec: Spec, results: list[dict[str, Any]], tolerance: float = 1e-10) -> None:
    """The ranks together equal the dense answer, sent what the plan said, and made the same plan."""
    p = case.plan(spec)
    assert {r["digest"] for r in results} == {p.digest}
    got, want = joined(case, p, results), dense(case, dense_mask(case, spec))
    for name, expected in want.items():
        finite = torch.isfinite(expected)
        assert torch.equal(torch.isfinite(got[name]), finite), f"{name}: finite elsewhere in {case}"
        error = (got[name] - expected)[finite].abs().max() if finite.any() else torch.zeros(())
        assert error <= tolerance, f"{name} is off by {error} in {case}"
    travelled = [dict(r["sent"]) for r in results]
    rows = p.schedule(case.strategy, p.part(spec)).rows_sent(p.keys)
    row_bytes = case.batch[0] * case.heads[1] * sum(case.dims) * 8
    if case.dims[0] == case.dims[1]:
        sized = replace(p, heads_kv=case.heads[1], head_dim=case.dims[0])
        told = [sized.traffic(case.strategy, 0, d, case.batch[0], 8) for d in ("forward", "backward")]  # type: ignore[arg-type]
        sent = [[sum(n for (_, to), n in t.items() if to == dst) for dst in range(case.world)] for t in travelled]
        assert sent == [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*told, strict=True)], f"bytes in {case}"
    for src, mine in enumerate(travelled):
        for dst in range(case.world):
            forward, backward = mine.get(("kv", dst), 0), mine.get(("grad", dst), 0)
            assert forward == 2 * rows[src][dst] * row_bytes, f"{src} -> {dst}: K, V bytes of forward and backward in {case}"
            assert backward == rows[dst][src] * row_bytes, f"{src} -> {dst}: gradient bytes in {case}"
