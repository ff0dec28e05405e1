"""Groups and ranks as programs have them: subgroups, meshes, ranks outside, groups that end, modes of autograd."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import maskc
from maskc.diagnostics import MaskcError
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.schedule import DIRECT
from tests.dist.cases import docs
from tests.dist.pool import Pool
from tests.runtime.dense import reference

LENGTHS = [5, 7, 9, 3]
N = sum(LENGTHS)


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, N, heads, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    return q, k, v


def plan(group: Any) -> AttentionPlan:
    return maskc.plan(docs(LENGTHS), group=group, chunk=3)


def own(p: AttentionPlan, rank: int, seed: int = 0) -> list[Tensor]:
    """This rank's q, k, v, leaves with gradients."""
    axes = ("rows", "keys", "keys")
    return [p.shard(x, rank, of=of).clone().requires_grad_() for x, of in zip(operands(seed), axes, strict=True)]  # type: ignore[arg-type]


def check(group: Any, strategy: str, seed: int = 0) -> None:
    """Output and gradients of this rank are those of dense fp64 attention."""
    rank, p = dist.get_rank(group), plan(group)
    out_grad = torch.randn(2, N, 4, 8, generator=torch.Generator().manual_seed(seed + 99), dtype=torch.float64)
    want, _, grads = reference(docs(LENGTHS).vectors(N, N), *operands(seed), 8**-0.5, out_grad)
    mine = own(p, rank, seed)
    out = maskc.run(docs(LENGTHS), *mine, group, plan=p, strategy=strategy)
    assert isinstance(out, Tensor)
    out.backward(p.shard(out_grad, rank))
    torch.testing.assert_close(out, p.shard(want, rank))
    for x, grad in zip(mine, grads, strict=True):
        torch.testing.assert_close(x.grad, p.shard(grad, rank))


def refusal(group: Any, *tensors: Tensor, **keywords: Any) -> str:
    try:
        maskc.run(docs(LENGTHS), *tensors, group, **keywords)
    except MaskcError as e:
        return str(e)
    return "it ran"


# ---------------------------------------------------------------- groups


def in_turn(rank: int, whole: Any) -> None:
    groups = {members: dist.new_group(list(members)) for members in ((3, 1), (0, 2, 4))}
    for seed, strategy in enumerate(("all-gather", "ring", "gated")):
        for members, group in groups.items():
            if rank in members:
                check(group, strategy, seed)
        check(whole, strategy, seed)


def test_subgroups_and_the_whole_in_turn(ranks: Pool) -> None:
    ranks.run(8, in_turn)


def outsider(rank: int, whole: Any) -> str:
    group = dist.new_group([0, 1])
    return refusal(group, *operands()) if rank == 2 else ""


def over_a_mesh(rank: int, whole: Any) -> tuple[str, str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("cp",))
    check(mesh.get_group("cp"), "all-gather")
    spread = [distribute_tensor(x, mesh, [Replicate()]) for x in operands()]
    return refusal(mesh, *operands()), refusal(None, *spread), refusal(mesh.get_group(), *spread)


def test_a_rank_outside_is_refused(ranks: Pool) -> None:
    """It would attend to its own rows alone, which is another result."""
    assert "M511" in ranks.run(8, outsider)[2]


def test_meshes_and_what_is_spread_over_them_are_refused(ranks: Pool) -> None:
    for mesh, alone, together in ranks.run(8, over_a_mesh):
        assert 'mesh.get_group("cp")' in mesh
        assert "to_local()" in alone
        assert "to_local()" in together


def made_and_ended(rank: int, whole: Any) -> list[int]:
    """Mappings of shared memory after each of three groups that shared some and ended."""
    mapped = []
    for _ in range(3):
        group = dist.new_group([0, 1])
        if rank < 2:
            check(group, "gated")
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        mapped.append(Path("/proc/self/maps").read_text().count("maskc-"))
    return mapped


def test_a_group_that_ends_takes_its_shared_memory_along(ranks: Pool) -> None:
    for first, second, third in ranks.run(8, made_and_ended):
        assert first == second == third


def ungatherable(rank: int, group: Any) -> list[str]:
    p = plan(group)
    told = []
    for x, more in ((3, {}), (torch.tensor(1.0), {}), (torch.zeros(1, 3), {}), (torch.zeros(1, 12), {"dim": 9})):
        try:
            p.unshard(x, group, **more)  # type: ignore[arg-type]
        except MaskcError as e:
            told.append(e.code)
    try:
        p.unshard(torch.zeros(1, 12), 3)  # type: ignore[arg-type]
    except MaskcError as e:
        told.append(e.code)
    return told


def test_what_cannot_be_gathered_is_refused(ranks: Pool) -> None:
    assert ranks.run(2, ungatherable) == [["M710"] * 4 + ["M701"]] * 2


# ---------------------------------------------------------------- modes of autograd


def twice(rank: int, group: Any, strategy: str) -> list[str]:
    """A penalty on gradients, whose own gradient torch would take for zero; then gradients with a graph that nobody uses."""
    p = plan(group)
    q, k, v = own(p, rank)
    told = []
    for loss in (torch.sum, lambda x: x.square().sum()):
        (dq,) = torch.autograd.grad(
            loss(maskc.run(docs(LENGTHS), q, k, v, group, plan=p, strategy=strategy)), q, create_graph=True
        )
        try:
            dq.square().sum().backward()
        except MaskcError as e:
            told.append(e.code)
    return told


@pytest.mark.parametrize("strategy", ["all-gather", "gated"])
def test_second_derivatives_are_refused(ranks: Pool, strategy: str) -> None:
    assert ranks.run(2, twice, strategy) == [["M509", "M509"]] * 2


def on_flex(rank: int, group: Any, strategy: str) -> str:
    p = plan(group)
    with torch.no_grad():
        return refusal(group, *(x.detach().float() for x in own(p, rank)), plan=p, strategy=strategy, backend="flex")


@pytest.mark.parametrize("strategy", DIRECT)
def test_kernels_of_maskc_are_not_those_of_flex(ranks: Pool, strategy: str) -> None:
    assert all("M722" in text for text in ranks.run(2, on_flex, strategy))


def infer_then_train(rank: int, group: Any, strategy: str) -> None:
    p = plan(group)
    with torch.inference_mode():
        maskc.run(docs(LENGTHS), *(x.detach() for x in own(p, rank)), group, plan=p, strategy=strategy)
    check(group, strategy)


@pytest.mark.parametrize("strategy", ["all-gather", "gated"])
def test_memory_made_in_inference_mode_serves_training(strategy: str) -> None:
    pool = Pool((2,))  # which shares no memory yet
    try:
        pool.run(2, infer_then_train, strategy)
    finally:
        pool.close()


# ---------------------------------------------------------------- graphs


def compiled_step(rank: int, group: Any) -> list[bool]:
    """Gradients of a graph whose mask and plan nobody holds by the time of the backward, and those of an eager call."""

    def step(x: Tensor, y: Tensor, z: Tensor, run: Any) -> Any:
        p = plan(group)
        return run(docs(LENGTHS), x, y, z, group, plan=p)

    graph = torch.compile(maskc.run, backend="aot_eager", fullgraph=True)
    mine, others = own(plan(group), rank), own(plan(group), rank)
    out, want = step(*mine, graph), step(*others, maskc.run)  # type: ignore[arg-type]
    gc.collect()
    out.square().sum().backward()
    want.square().sum().backward()
    return [torch.equal(a.grad, b.grad) for a, b in zip(mine, others, strict=True)]  # type: ignore[arg-type]


def test_graphs_keep_masks_and_plans_for_the_backward(ranks: Pool) -> None:
    assert ranks.run(2, compiled_step) == [[True] * 3] * 2
