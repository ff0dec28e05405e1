"""How well chunks are balanced: random instances against proven bounds, and real masks with their traffic.

    python -m benchmarks.balance [--instances 200] [--seconds 2] [--only random|masks|arcs]

Random instances: (N, P, chunks per rank, largest weight) of the paper, weights i.i.d. uniform in [1, w_max] or on the ramp
U{1..ceil(w_max (i + 1) / N)}; instance s uses numpy's default generator seeded with s. `above_lb` is the share above the
lower bound (cardinality bounds included), `above_optimum` the share whose makespan is not proved optimal, by the search
itself or by benchmarks.exact; gaps are over the lower bound, in percent. Writes benchmarks/results/balance.json and
balance_masks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: times are those of one thread

import numpy as np

from benchmarks.exact import solve
from maskc.runtime.balance import RUN_TIME, THOROUGH, Assignment, Effort, balance

RESULTS = Path(__file__).parent / "results"
CONFIGS = ((64, 16, 4, 1_000), (64, 16, 4, 10_000), (64, 8, 8, 200), (128, 16, 8, 200))
NODES_PER_SECOND = 200_000
"""Cover nodes that take about a second: the search counts work, not time, so that it ends alike everywhere."""
EXACT_NODES = 20_000


@dataclass(frozen=True)
class Method:
    name: str
    solve: Callable[[Sequence[int], int], Assignment]


def methods(effort: Effort) -> tuple[Method, ...]:
    return (
        Method("LPT", lambda w, p: balance(w, p, effort, pairs=False)),
        Method("+P2", lambda w, p: balance(w, p, effort, covers=False)),
        Method("+P2+P3", lambda w, p: balance(w, p, effort)),
    )


def instance(generator: str, n: int, top: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    if generator == "uniform":
        return [int(x) for x in rng.integers(1, top + 1, n)]
    return [int(rng.integers(1, -(-top * (i + 1) // n) + 1)) for i in range(n)]


def random_rows(instances: int, effort: Effort) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of balance.json, and per configuration how far the optimum itself is known."""
    rows, brackets = [], []
    for n, ranks, k, top in CONFIGS:
        count = instances // 2 if n == 128 else instances
        for generator in ("uniform", "ramp"):
            weights = [instance(generator, n, top, seed) for seed in range(count)]
            found: dict[str, list[tuple[Assignment, float]]] = {}
            for method in methods(effort):
                found[method.name] = [_timed(method, w, ranks) for w in weights]
            best = [min(found[m][i][0].makespan for m in found) for i in range(count)]
            proven = [max(found[m][i][0].proven_bound for m in found) for i in range(count)]
            for i, w in enumerate(weights):
                if proven[i] < best[i]:
                    proven[i] = max(proven[i], solve(w, ranks, EXACT_NODES, best[i]).low)
            config = [n, ranks, k, top]
            for name, results in found.items():
                gaps = [100 * (a.makespan / a.lower_bound - 1) for a, _ in results]
                row = {
                    "config": config,
                    "generator": generator,
                    "method": name,
                    "instances": count,
                    "above_lb": sum(a.makespan > a.lower_bound for a, _ in results) / count,
                    "above_optimum": sum(a.makespan > p for (a, _), p in zip(results, proven, strict=True)) / count,
                    "gap_mean": statistics.mean(gaps),
                    "gap_max": max(gaps),
                    "ms_median": 1e3 * statistics.median(t for _, t in results),
                }
                rows.append(row)
                print(_line(row), flush=True)
            open_ = [100 * (b / p - 1) for b, p in zip(best, proven, strict=True) if b > p]
            brackets.append(
                {
                    "config": config,
                    "generator": generator,
                    "optimum_proved": 1 - len(open_) / count,
                    "bracket_max_percent": max(open_, default=0.0),
                }
            )
            print(f"{'':52}optimum proved {1 - len(open_) / count:6.1%}, else within {max(open_, default=0.0):.4f} %", flush=True)
    return rows, brackets


def _timed(method: Method, weights: Sequence[int], ranks: int) -> tuple[Assignment, float]:
    """The assignment and its seconds: CPU time of this thread, so that other work on the machine does not count."""
    start = time.thread_time()
    a = method.solve(weights, ranks)
    return a, time.thread_time() - start


def _line(row: dict[str, Any]) -> str:
    config = ", ".join(map(str, row["config"]))
    return (
        f"({config:>18}) {row['generator']:8} {row['method']:7} {row['instances']:4}  above bound {row['above_lb']:6.1%}  "
        f"not proved optimal {row['above_optimum']:6.1%}  gap {row['gap_mean']:.4f} % mean {row['gap_max']:.4f} % max  "
        f"{row['ms_median']:9.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2.0, help="work of one cover search, in seconds of a usual CPU")
    parser.add_argument("--only", choices=("random", "masks", "arcs"), help="arcs: of the masks, the default plan against chunks")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if args.only in (None, "random"):
        effort = Effort(gap_ppm=0, splits=THOROUGH.splits, nodes=round(args.seconds * NODES_PER_SECOND))
        print("to the bound:", effort)
        rows, brackets = random_rows(args.instances, effort)
        print("as a plan does by default:", RUN_TIME)
        default, _ = random_rows(args.instances, RUN_TIME)
        data = {"rows": rows, "optimum": brackets, "run_time_default": default, "seeds": f"0..{args.instances - 1}"}
        (RESULTS / "balance.json").write_text(json.dumps(data, indent=1) + "\n")
    if args.only != "random":
        from benchmarks.balance_masks import arcs_table, mask_tables

        file = RESULTS / "balance_masks.json"
        made = json.loads(file.read_text()) | {"arcs": arcs_table()} if args.only == "arcs" else mask_tables()
        file.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
