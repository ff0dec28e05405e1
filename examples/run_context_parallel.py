"""Context parallelism on a laptop: two processes, one packed sequence, the same result as one process. Needs no GPU.

    python examples/run_context_parallel.py [--world 2]

Every process makes the plan by itself, holds its own rows, and calls `maskc.run` with the group. The gradients are those
of the whole sequence; `loss_weight` makes their mean over the ranks exact, which is what data-parallel wrappers compute.
"""

from __future__ import annotations

import argparse
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import maskc

HERE = Path(__file__).parent
LENGTHS = [3, 170, 41, 298]  # documents of any length; nothing has to divide


def whole_sequence() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    n = sum(LENGTHS)
    q, k, v = (torch.randn(1, n, heads, 32, dtype=torch.float64) for heads in (4, 2, 2))
    return q, k, v


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    group = dist.group.WORLD

    spec = maskc.compile(HERE / "doc_causal.mask").bind(doc=maskc.segments(lengths=LENGTHS))
    n = sum(LENGTHS)
    plan = maskc.plan(spec, world_size=world, nq=n, nk=n, chunk=32)  # no communication: equal on every rank

    q, k, v = (plan.shard(x, rank).clone().requires_grad_() for x in whole_sequence())
    out = maskc.run(spec, q, k, v, group, plan=plan)
    loss = out.square().mean() * plan.loss_weight(rank)  # averaged over the ranks: the mean over the whole sequence
    loss.backward()

    gathered = [plan.unshard(x, group) for x in (out.detach(), q.grad, k.grad, v.grad)]
    if rank == 0:
        report(spec, plan, gathered)
    dist.destroy_process_group()


def report(spec: maskc.BoundMask, plan: maskc.AttentionPlan, gathered: list[torch.Tensor]) -> None:
    """Compare with one process. The ranks' losses add up to `world` times the mean, and so do their gradients."""
    q, k, v = (x.requires_grad_() for x in whole_sequence())
    out = maskc.run(spec, q, k, v)
    out.square().mean().backward()
    world = plan.world
    print(plan)
    for rank in range(world):
        print(f"rank {rank}: {plan.rows.local_length(rank)} rows, workload {plan.workloads[rank]}")
    for name, mine, alone in zip(("out", "dq", "dk", "dv"), gathered, (out, q.grad, k.grad, v.grad), strict=True):
        mean = mine if name == "out" else mine / world
        print(f"{name}: largest difference from one process {(mean - alone).abs().max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="number of processes")
    world = parser.parse_args().world
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(r, world, f"{folder}/rendezvous")) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
