"""Real masks at 128K: balance, traffic between nodes, and how much of a full gather is never sent.

Two sources of documents: the layouts of tests/data/layouts.json, and random packs that follow a published histogram of
document lengths (uniform inside its bins, documents cut at S / 4, packed greedily; pack s is seeded with s).

Where a pack stays above the bar of BAR times the mean on one node, benchmarks.counting looks for a proof that no assignment
of these chunks reaches it: `above_bar` packs, `bar_impossible` of them proved, `bound_max` the largest proved bound.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

import maskc
from benchmarks.counting import counting_bound
from benchmarks.masks import NAMES, mask_case
from maskc.binding.bound import BoundMask
from maskc.runtime.balance import RUN_TIME, balance, greedy
from maskc.runtime.node_balance import NodeAssignment, Problem, Traffic, by_swaps
from maskc.runtime.plan import AttentionPlan, assigned, plan
from maskc.runtime.plan_report import across_nodes
from maskc.runtime.tile_work import tile_work

SEQUENCE = 131_072
PACKS = 10
BAR = 1.02
"""Peak over mean that is wanted with 8 chunks a rank."""
HISTOGRAM = (  # documents of up to this many tokens, share in percent
    (10, 0.22),
    (50, 2.9),
    (100, 5.2),
    (200, 10.2),
    (500, 28.2),
    (1024, 24.6),
    (2048, 15.7),
    (4096, 7.3),
    (8192, 3.05),
    (16_384, 1.29),
    (32_768, 0.85),
    (65_536, 0.14),
    (131_072, 0.17),
    (196_608, 0.14),
)


def pack(seed: int, length: int = SEQUENCE) -> list[int]:
    """Document lengths that fill one sequence."""
    rng = np.random.default_rng(seed)
    tops = [top for top, _ in HISTOGRAM]
    share = np.array([p for _, p in HISTOGRAM])
    out: list[int] = []
    while (left := length - sum(out)) > 0:
        bin_ = int(rng.choice(len(tops), p=share / share.sum()))
        low = tops[bin_ - 1] + 1 if bin_ else 1
        out.append(min(int(rng.integers(low, tops[bin_] + 1)), length // 4, left))
    return out


def _packed(name: str, seed: int) -> BoundMask:
    lengths = pack(seed)
    prefix = np.random.default_rng(1000 + seed)
    inputs: dict[str, Any] = {"doc": maskc.segments(lengths=lengths)}
    if name == "std:doc_prefix":
        inputs["prefix"] = [int(prefix.integers(0, n + 1)) for n in lengths]
    return maskc.compile(name).bind(nq=SEQUENCE, nk=SEQUENCE, **inputs)


def _layout(name: str, number: int) -> BoundMask:
    return mask_case(name, SEQUENCE, number).spec()


def ways(spec: BoundMask, world: int, nodes: int, kappa: int) -> dict[str, AttentionPlan]:
    """The usual assignments and stage 1 on chunks of S / (P kappa), and the node-aware plan."""
    chunk = SEQUENCE // (world * kappa)
    common: dict[str, Any] = {"world_size": world, "chunk": chunk, "nodes": nodes}
    aware = plan(spec, order="balanced", **common)
    loads = aware.parts[0].workloads
    found = {order: plan(spec, order=order, **common) for order in ("contiguous", "zigzag")}  # type: ignore[arg-type]
    found["heap"] = assigned(aware, greedy(loads, world), "heap")
    found["LPT"] = assigned(aware, balance(loads, world, pairs=False), "LPT")
    found["HCC-IPO"] = assigned(aware, balance(loads, world, RUN_TIME), "HCC-IPO")
    if nodes > 1:
        found["+ stage 2, 3"] = assigned(aware, _stages(aware, spec).assignment, "stages 2 and 3")
        found["node-aware"] = aware
    return found


def _stages(p: AttentionPlan, spec: BoundMask) -> NodeAssignment:
    """Stages 2 and 3 alone, without the node-first way."""
    work = tile_work(spec.vectors(), p.rows, p.keys)
    weights = np.array(p.parts[0].workloads)
    sizes = np.array([p.keys.size_of(c) for c in range(p.keys.chunk_count)])
    problem = Problem(weights, Traffic(sizes, ((1, work.need),)), p.nodes, p.node_size, p.epsilon_ppm, RUN_TIME)
    return by_swaps(problem, balance(weights.tolist(), p.world))


def proved(p: AttentionPlan) -> float:
    """A peak over mean that no assignment of the plan's chunks is below."""
    return counting_bound(p.parts[0].workloads, p.world, p.makespan) * p.world / sum(p.workloads)


def pruned(p: AttentionPlan) -> float:
    """Share of a full gather of K and V (and of a full scatter of their gradients) that is never sent."""
    full = sum(p.keys.length - p.keys.local_length(r) for r in range(p.world))
    return 1 - sum(p.received()) / full


def mask_tables() -> dict[str, Any]:
    return {"balance": balance_table(), "pruned": pruning_table(), "arcs": arcs_table(), "sequence": SEQUENCE, "packs": PACKS}


def balance_table() -> list[dict[str, Any]]:
    sources: dict[str, list[BoundMask]] = {
        "causal": [_layout("causal", 0)],
        "causal document (layouts)": [_layout("causal_document", i) for i in range(5)],
        "prefix-LM document (layouts)": [_layout("prefix_lm_document", i) for i in range(5)],
        "causal document (histogram)": [_packed("std:doc_causal", s) for s in range(PACKS)],
        "document (histogram)": [_packed("std:doc_full", s) for s in range(PACKS)],
        "prefix-LM document (histogram)": [_packed("std:doc_prefix", s) for s in range(PACKS)],
    }
    rows = []
    print("\npeak over mean workload (mean, max over the packs), thousands of rows into the worst node, proved optimal")
    for source, specs in sources.items():
        for world, nodes in ((8, 1), (16, 1), (16, 2), (16, 4)):
            start = time.perf_counter()
            plans = [ways(spec, world, nodes, 8) for spec in specs]
            ms = 1e3 * (time.perf_counter() - start) / len(specs)
            for way in plans[0]:
                peaks = [p[way].imbalance for p in plans]
                inflow = [across_nodes(p[way]) for p in plans] if nodes > 1 else []
                certified = sum(p[way].optimal for p in plans) / len(plans)
                proofs = [proved(p[way]) for p in plans if p[way].imbalance > BAR] if (way, nodes) == ("HCC-IPO", 1) else []
                rows.append(
                    {
                        "mask": source,
                        "world": world,
                        "nodes": nodes,
                        "way": way,
                        "imbalance_mean": statistics.mean(peaks),
                        "imbalance_max": max(peaks),
                        "proved_optimal": certified,
                        "inflow_rows_mean": statistics.mean(inflow) if inflow else None,
                        "above_bar": sum(x > BAR for x in peaks),
                        "bar_impossible": sum(x > BAR for x in proofs),
                        "bound_max": max(proofs, default=None),
                    }
                )
                crossing = f"{statistics.mean(inflow) / 1000:8.1f}" if inflow else ""
                place = f"{source:31} P={world:2} nodes={nodes} {way:13}"
                shown = ", ".join(f"{x:.4f}" for x in proofs)
                proof = f"  above {BAR}; proved impossible below {shown}" if proofs else ""
                print(f"{place} {statistics.mean(peaks):.4f} {max(peaks):.4f} {crossing:8} {certified:4.0%}{proof}")
            print(f"{'':31} all ways of one mask: {ms:.0f} ms", flush=True)
    return rows


def pruning_table() -> list[dict[str, Any]]:
    rows = []
    print("\nshare of gather and scatter bytes that is never sent; chunks of S / (8 P); with epsilon, loads within 2 %")
    print(f"{'mask':24} " + " ".join(f"{f'P={p}':>7} {'eps':>7}" for p in (2, 4, 8, 16)))
    for name in NAMES:
        spec = _layout(name, 0)
        cells = []
        for world in (2, 4, 8, 16):
            plain = plan(spec, world_size=world, chunk=SEQUENCE // (8 * world))
            saving = plan(spec, world_size=world, chunk=SEQUENCE // (8 * world), epsilon=0.02)
            cells += [pruned(plain), pruned(saving)]
            rows.append(
                {
                    "mask": name,
                    "world": world,
                    "pruned": pruned(plain),
                    "imbalance": plain.imbalance,
                    "pruned_epsilon": pruned(saving),
                    "imbalance_epsilon": saving.imbalance,
                }
            )
        print(f"{name:24} " + " ".join(f"{c:7.3f}" for c in cells), flush=True)
    return rows


def arcs_table() -> list[dict[str, Any]]:
    """The default plan against eight chunks a rank: the worst pack of each, rows of keys into the busiest rank and into all."""
    packs = range(PACKS)
    sources: dict[str, list[BoundMask]] = {
        **{name: [_layout(name, i) for i in range(5 if "document" in name else 1)] for name in NAMES},
        "causal document (histogram)": [_packed("std:doc_causal", s) for s in packs],
        "document (histogram)": [_packed("std:doc_full", s) for s in packs],
        "prefix-LM document (histogram)": [_packed("std:doc_prefix", s) for s in packs],
    }
    rows = []
    print("\ndefault plan against eight chunks a rank: plans in arcs; peak over mean; thousands of rows into one rank, into all")
    for source, specs in sources.items():
        for world in (2, 4, 8, 16):
            plain = [plan(spec, world_size=world, chunk=SEQUENCE // (8 * world)) for spec in specs]
            default = [plan(spec, world_size=world) for spec in specs]
            row: dict[str, Any] = {"mask": source, "world": world, "packs": len(specs)}
            row["arcs"] = sum(p.method == "arcs" for p in default)
            for name, made in (("chunks", plain), ("default", default)):
                row[f"imbalance_{name}"] = max(p.imbalance for p in made)
                row[f"received_most_{name}"] = statistics.mean(max(p.received()) for p in made)
                row[f"received_{name}"] = statistics.mean(sum(p.received()) for p in made)
                row[f"rows_most_{name}"] = max(max(map(p.rows.local_length, range(world))) for p in made)
            row["worse_most"] = max(b.imbalance - a.imbalance for a, b in zip(plain, default, strict=True))
            rows.append(row)
            keys = "imbalance", "received_most", "received"
            a, b, c = ((row[f"{k}_chunks"], row[f"{k}_default"]) for k in keys)
            counts = f"{b[0] / 1e3:7.1f} to {b[1] / 1e3:7.1f}  {c[0] / 1e3:7.1f} to {c[1] / 1e3:7.1f}"
            print(f"{source:31} P={world:2} {row['arcs']:2} of {len(specs):2}  {a[0]:.4f} to {a[1]:.4f}  {counts}", flush=True)
    return rows
