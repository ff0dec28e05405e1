"""Figures of a plan for a training log: plain numbers in one dict, all read off the plan, none measured."""

from __future__ import annotations

from maskc.diagnostics import error
from maskc.runtime.machine import DEFAULT_MACHINE, Machine
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.schedule import check_strategy

Metrics = dict[str, float | int | bool | None]


def metrics(
    plan: AttentionPlan,
    *,
    batch: int = 1,
    itemsize: int = 2,
    strategy: str = "all-gather",
    machine: Machine = DEFAULT_MACHINE,
) -> Metrics:
    """What a step with this plan costs, per layer of its first mask; bytes and times need the plan's heads and head_dim.

    imbalance: largest workload over the mean; gap: largest workload over the proven lower bound, minus 1. rows_received,
    bytes_received: K and V rows of the busiest rank, forward; gradients go back the same ways in fp32. pruned_share: the
    part of the rows of other ranks that nobody has to send. compute_ms, communication_ms: busiest rank, forward, by the
    model of `maskc.runtime.machine`. exposed_ms: what the exchange adds to the step, known for "all-gather" (all of it),
    None where the schedule hides a part that only a measurement tells.

    Raises MaskcError M511 for what is no plan, M713 for an unknown strategy.
    """
    if not isinstance(plan, AttentionPlan):
        raise error("M511", f"plan is {type(plan).__name__}, not what maskc.plan returns")
    check_strategy(strategy)
    needed = plan.received()
    others = [plan.keys.length - plan.keys.local_length(r) for r in range(plan.world)]
    total_needed, total = sum(needed), sum(others)
    pruned = 1.0 - total_needed / total if plan.prune and total else 0.0
    out: Metrics = {
        "ranks": plan.world,
        "rows": plan.rows.length,
        "chunks": plan.rows.chunk_count,
        "imbalance": plan.imbalance,
        "gap": plan.makespan / plan.proven_bound - 1 if plan.proven_bound else 0.0,
        "optimal": plan.optimal,
        "rows_received": max(needed),
        "pruned_share": pruned,
        "bytes_received": None,
        "compute_ms": None,
        "communication_ms": None,
        "exposed_ms": None,
    }
    if plan.heads is None or plan.head_dim is None:
        return out
    kv_heads = plan.heads_kv or plan.heads
    received = (max(needed) if plan.prune else max(others)) * batch * kv_heads * 2 * plan.head_dim * itemsize
    bandwidth = machine.inter if plan.nodes > 1 else machine.intra
    sending = received / bandwidth * 1e3
    working = machine.compute_seconds(max(plan.part_workloads()), plan.costs, plan.tile, plan.heads, plan.head_dim) * 1e3
    return out | {
        "bytes_received": received,
        "compute_ms": working,
        "communication_ms": sending,
        "exposed_ms": sending if strategy == "all-gather" else None,
    }
