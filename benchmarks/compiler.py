"""How fast the compiler is: `python -m benchmarks.compiler` prints a table. Nothing here is a test.

Each figure is taken in the way a user meets it: commands in fresh processes, library calls in this one, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maskc.boundary import BoundaryVectors

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
    for name, documents, n, goal in (("131072 keys, 11", 11, 131072, 10), ("1M keys, 10000", 10_000, 1 << 20, 150)):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            seconds, grown = pool.submit(_bind, documents, n).result()
        yield Row(f"bind {name} documents", seconds * 1e3, "ms", goal)
        yield Row(f"bind {name} documents, memory beside the vectors", grown / 2**20, "MiB", 64)


def _bind(documents: int, n: int) -> tuple[float, float]:
    """In a process of its own: (seconds, bytes by which its peak grew beyond the vectors)."""
    import torch

    import maskc

    torch.set_num_threads(1)
    mask = maskc.compile("std:doc_causal")
    lengths = [n // documents] * documents

    def bind(lengths: list[int]) -> BoundaryVectors:
        return mask.bind(doc=maskc.segments(lengths=lengths)).vectors()

    bind([3, 5])  # what a first call imports is not the batch's
    before = _peak()
    vectors = bind(lengths)
    grown = _peak() - before - sum(v.nbytes for v in vectors.tensors if v is not None)
    return _best(lambda: bind(lengths), 5), max(0, grown)


def _peak() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
