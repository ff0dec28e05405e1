"""Training over ranks: recomputation, accumulation, sharded parameters, compiled graphs, plans that travel, calls without one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maskc
from maskc.diagnostics import MaskcError
from maskc.runtime import context_parallel
from maskc.runtime.plan import plan
from tests.dist.cases import Case, docs, tensors
from tests.dist.pool import Pool


def shard_inputs(p: Any, rank: int, n: int, seed: int) -> list[Tensor]:
    whole = tensors(Case(2, n, seed, heads=(2, 2, 1)))[:3]
    return [p.shard(t, rank).clone(memory_format=torch.contiguous_format).requires_grad_() for t in whole]


def checkpointed(rank: int, group: Any, strategy: str) -> bool:
    spec = docs([17, 23])
    p = plan(spec, group=group, chunk=4)
    plain, again = (shard_inputs(p, rank, 40, 0) for _ in range(2))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return maskc.run(spec, q, k, v, group, plan=p, strategy=strategy)

    attention(*plain).square().sum().backward()
    checkpoint(attention, *again, use_reentrant=False).square().sum().backward()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(plain, again, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["auto", "gated"])
def test_activation_checkpointing(ranks: Pool, strategy: str) -> None:
    assert all(ranks.run(2, checkpointed, strategy))


def accumulated(rank: int, group: Any) -> bool:
    """Gradients of micro-batches with other documents add up in parameters that all ranks average."""
    weight = torch.eye(8, dtype=torch.float64).requires_grad_()
    alone = torch.eye(8, dtype=torch.float64).requires_grad_()
    for seed, lengths in enumerate(([17, 23], [40], [3, 30, 7])):
        spec = docs(lengths)
        p = plan(spec, group=group, chunk=4)
        q, k, v, _, _ = tensors(Case(2, 40, seed, heads=(2, 2, 1)))
        loss = maskc.run(spec, p.shard(q @ weight, rank), p.shard(k, rank), p.shard(v @ weight, rank), group, plan=p).square()
        (loss.mean() * p.loss_weight(rank)).backward()
        maskc.run(spec, q @ alone, k, v @ alone).square().mean().backward()
    grad = weight.grad
    assert grad is not None
    torch.distributed.all_reduce(grad, group=group)  # what FSDP does: the mean of the gradients over the ranks
    return torch.allclose(grad / 2, alone.grad, rtol=1e-10)  # type: ignore[arg-type]


def test_gradient_accumulation_and_averaging(ranks: Pool) -> None:
    """One documented rule, `loss_weight`: gradients averaged over the ranks equal those of one process."""
    assert all(ranks.run(2, accumulated))


class Layer(torch.nn.Module):
    """Projections around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.out = torch.nn.Linear(16, 1, dtype=torch.float64)

    def forward(self, x: Tensor, spec: Any, group: Any = None, p: Any = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        return self.out(maskc.run(spec, q, k, v, group, plan=p).flatten(2)).clone()


def fully_sharded(rank: int, group: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    spec = docs([17, 23])
    p = plan(spec, group=group, chunk=4)
    torch.manual_seed(0)
    model, alone, x = Layer(), Layer(), torch.randn(1, 40, 16, dtype=torch.float64)
    alone.load_state_dict(model.state_dict())
    alone(x, spec).square().mean().backward()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    (model(p.shard(x, rank), spec, group, p).square().mean() * p.loss_weight(rank)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-10, atol=1e-12) for a, b in pairs)  # type: ignore[union-attr, arg-type]


def test_fsdp2_gradients_equal_one_process(ranks: Pool) -> None:
    assert all(ranks.run(2, fully_sharded))


def compiled(rank: int, group: Any, strategy: str) -> tuple[bool, int]:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, spec: Any, p: Any) -> Tensor:
        return maskc.run(spec, x, 2 * x, x.sin(), group, plan=p, strategy=strategy) + x

    fast = torch.compile(block, fullgraph=True, backend=counter)
    same = True
    for seed, lengths in enumerate([[17, 23], [40], [3, 30, 7], [1] * 40, [20, 20]]):
        spec = docs(lengths)
        p = plan(spec, group=group, chunk=4)
        a, b = (shard_inputs(p, rank, 40, seed)[0] for _ in range(2))
        fast(a, spec, p).square().sum().backward()
        block(b, spec, p).square().sum().backward()
        same &= torch.allclose(a.grad, b.grad, rtol=1e-12)  # type: ignore[arg-type]
    return same, counter.frame_count


@pytest.mark.parametrize("strategy", ["auto", "gated"])
def test_torch_compile_needs_one_graph(ranks: Pool, strategy: str) -> None:
    """fullgraph=True, forward and backward, five batches of other documents: compiled once."""
    assert ranks.run(2, compiled, strategy) == [(True, 1), (True, 1)]


def after_an_exception(rank: int, group: Any) -> bool:
    spec = docs([17, 23])
    p = plan(spec, group=group, chunk=4)
    q, k, v = shard_inputs(p, rank, 40, 0)
    before = maskc.run(spec, q, k, v, group, plan=p)
    with pytest.raises(MaskcError):
        maskc.run(spec, q[:, :-1], k, v, group, plan=p)
    return torch.equal(before, maskc.run(spec, q, k, v, group, plan=p))


def test_an_error_leaves_nothing_behind(ranks: Pool) -> None:
    assert all(ranks.run(2, after_an_exception))


def from_pickles(rank: int, group: Any, data: bytes) -> Tensor:
    spec, p = pickle.loads(data)
    q, k, v, _, _ = tensors(Case(2, 40, 0))
    return maskc.run(spec, p.shard(q, rank), p.shard(k, rank), p.shard(v, rank), group, plan=p)


def test_plans_travel_between_processes(ranks: Pool) -> None:
    spec = docs([17, 23])
    p = plan(spec, world_size=2, chunk=4)
    q, k, v, _, _ = tensors(Case(2, 40, 0))
    out = maskc.run(spec, q, k, v)
    for rank, got in enumerate(ranks.run(2, from_pickles, pickle.dumps((spec, p)))):
        torch.testing.assert_close(got, p.shard(out, rank))


def without_a_plan(rank: int, group: Any) -> Tensor:
    """The contiguous equal split; the mask does not know its length, the ranks do."""
    spec = maskc.compile("std:causal").bind()
    q, k, v, _, _ = (t.split([15, 14], dim)[rank] for t, dim in zip(tensors(Case(2, 29, 0)), (1, 1, 1, 1, 2), strict=True))
    return maskc.run(spec, q, k, v, group)


def test_no_plan_means_the_contiguous_split(ranks: Pool) -> None:
    q, k, v, _, _ = tensors(Case(2, 29, 0))
    out = maskc.run("std:causal", q, k, v)
    torch.testing.assert_close(torch.cat(ranks.run(2, without_a_plan), 1), out)


def growing(rank: int, group: Any) -> list[Tensor]:
    """One mask without a size, longer sequences from call to call: the first rank holds 15 rows of 29 and of 30."""
    spec = maskc.compile("std:causal").bind()
    outs = []
    for n in (29, 30, 29, 15):
        q, k, v = (t.split(-(-n // 2), 1)[rank] for t in tensors(Case(2, n, 0))[:3])
        outs.append(maskc.run(spec, q, k, v, group))
    return outs  # type: ignore[return-value]


def test_sizes_may_change_from_call_to_call(ranks: Pool) -> None:
    for n, parts in zip((29, 30, 29, 15), zip(*ranks.run(2, growing), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), maskc.run("std:causal", *tensors(Case(2, n, 0))[:3]))


def packed(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    """[T, H, D] in and out, lse [H, T]."""
    spec = docs([17, 23])
    p = plan(spec, group=group, chunk=4)
    q, k, v = (p.shard(t[0], rank, 0) for t in tensors(Case(2, 40, 0))[:3])
    return maskc.run(spec, q, k, v, group, plan=p, return_lse=True)  # type: ignore[return-value]


def test_packed_tensors(ranks: Pool) -> None:
    spec = docs([17, 23])
    p = plan(spec, world_size=2, chunk=4)
    out, lse = maskc.run(spec, *(t[0] for t in tensors(Case(2, 40, 0))[:3]), return_lse=True)
    for rank, (mine, mine_lse) in enumerate(ranks.run(2, packed)):
        torch.testing.assert_close(mine, p.shard(out, rank, 0))
        torch.testing.assert_close(mine_lse, p.shard(lse, rank, 1))


def unsharded(rank: int, group: Any) -> tuple[bool, bool]:
    p = plan(docs([5, 8]), group=group, chunk=2)
    x = torch.arange(26.0, dtype=torch.float64).view(1, 13, 2)
    mine = p.shard(x, rank).clone().requires_grad_()
    whole = p.unshard(mine, group)
    (whole * (rank + 1) * x).sum().backward()
    return torch.equal(whole, x), torch.equal(mine.grad, p.shard(3 * x, rank))  # type: ignore[arg-type]


def test_unshard_is_differentiable(ranks: Pool) -> None:
    assert ranks.run(2, unsharded) == [(True, True)] * 2


def test_auto_says_why() -> None:
    spec = docs([17, 23])
    q = torch.zeros(1, 20, 2, 8)
    for switches in ({}, {"overlap": False}):
        p = plan(spec, world_size=2, chunk=4, **switches)  # type: ignore[arg-type]
        choice = context_parallel.choose(p, 0, q, q, q)
        assert choice.strategy == "all-gather"
        assert choice.reason
