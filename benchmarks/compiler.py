"""How fast the compiler is: `python -m benchmarks.compiler` prints a table. Nothing here is a test.

Each figure is taken in the way a user meets it: commands in fresh processes, library calls in this one, on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests" / "data" / "suite"


@dataclass(frozen=True, slots=True)
class Row:
    """value and goal in `unit`; the goal is an upper bound."""

    what: str
    value: float
    unit: str
    goal: float


def rows() -> Iterator[Row]:
    bare = _process("-c", "pass")
    yield Row("import maskc (no torch)", _process("-c", "import maskc") - bare, "s", 0.25)
    times = prove_times()
    yield Row(f"parse + prove, median of {len(times)} suite masks", statistics.median(times.values()) * 1e3, "ms", 10)
    worst = max(times, key=lambda name: times[name])
    yield Row(f"parse + prove, worst ({worst})", times[worst] * 1e3, "ms", 200)
    suite = sorted(str(p) for p in SUITE.glob("*.mask"))
    yield Row(f"maskc check, {len(suite)} suite files", _process("-m", "maskc", "check", *suite, expect=1), "s", 6)
    yield from _compile_rows()
    yield from _bind_rows()


def prove_times() -> dict[str, float]:
    """Seconds of parse + prove for each mask of the suite that is meant to be proved, caches warm."""
    from maskc.targets import load

    good = [p for p in sorted(SUITE.glob("*.mask")) if "_bad_" not in p.name]
    load(good[0])
    return {p.stem: _best(lambda p=p: load(p), 3) for p in good}  # type: ignore[misc]


def _compile_rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "maskc", "compile", str(ROOT / "examples/doc_prefix.mask"), "-o", f"{folder}/out")
        yield Row("maskc compile, cold cache", _process(*command, cache=folder, repeat=1), "s", 6)
        yield Row("maskc compile, warm cache", _process(*command, cache=folder), "s", 0.6)


def _bind_rows() -> Iterator[Row]:
    import torch

    import maskc

    torch.set_num_threads(1)
    mask = maskc.compile("std:doc_causal")
    for name, documents, n, goal in (("131072 keys, 11", 11, 131072, 10), ("1M keys, 10000", 10_000, 1 << 20, 150)):
        cuts = torch.linspace(0, n, documents + 1).long().tolist()
        lengths = [b - a for a, b in itertools.pairwise(cuts)]

        def bind(lengths: list[int] = lengths) -> object:
            return mask.bind(doc=maskc.segments(lengths=lengths)).vectors()

        yield Row(f"bind {name} documents", _best(bind, 5) * 1e3, "ms", goal)
        yield Row(f"bind {name} documents, memory beside the vectors", _memory(bind) / 2**20, "MiB", 64)


def _memory(call: Callable[[], object]) -> float:
    """Peak bytes of Python objects and CPU tensors that are gone again after the call."""
    from torch.profiler import ProfilerActivity, profile

    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = call()
    objects = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    peak = held = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del kept
    return objects + max(0, peak - held)


def _best(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _process(*arguments: str, cache: str | None = None, repeat: int = 3, expect: int = 0) -> float:
    """Seconds of a fresh Python process; the best of several."""
    env = os.environ | ({"MASKC_CACHE_DIR": cache} if cache is not None else {})

    def run() -> None:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode != expect:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")

    return _best(run, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast the compiler is.")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    a = parser.parse_args()
    done = []
    for row in rows():
        done.append(row)
        verdict = "" if row.value <= row.goal else "   over"
        print(f"{row.what:<64} {row.value:9.2f} {row.unit:<4} (goal {row.goal:g}){verdict}", flush=True)
    if a.json is not None:
        a.json.write_text(json.dumps([asdict(row) for row in done], indent=1) + "\n")


if __name__ == "__main__":
    main()
