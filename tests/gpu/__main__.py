"""`python -m tests.gpu`: the conformance suite on a Hopper GPU, recorded with the digest of the sources it ran.

One worker process per (direction, head dim, dtype), each case with a time limit; a worker that hangs or loses its context
costs its case only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.gpu.cases import all_cases

Item = tuple[str, dict[str, Any]]  # name, what the worker reads
SPECIAL_GROUP = 8  # special cases of one worker


def run_group(items: list[Item], limit: float, deadline: float, report: Callable[[dict[str, Any]], None]) -> None:
    """Reports every case as it ends; the worker is restarted after a hang or a lost context. Ends with the deadline."""
    worker: subprocess.Popen[str] | None = None
    for name, item in items:
        if time.monotonic() > deadline:
            report({"name": name, "problem": "not run: out of time", "seconds": 0.0})
            continue
        if worker is None or worker.poll() is not None:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            limit_now = limit + 60  # the first case also imports and compiles
        else:
            limit_now = limit
        limit_now = min(limit_now, max(1.0, deadline - time.monotonic()))
        assert worker.stdin is not None
        assert worker.stdout is not None
        timer = threading.Timer(limit_now, worker.kill)
        timer.start()
        try:
            worker.stdin.write(json.dumps(item) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            report({"name": name, **json.loads(line)})
        else:
            worker.kill()
            _, err = worker.communicate()
            report({"name": name, "problem": f"worker died or ran out of time: {err.strip()[-300:]}", "seconds": limit_now})
            worker = None
    if worker is not None:
        worker.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_tests.json"))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="every n-th case of the cover")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a case")
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds for all")
    parser.add_argument("--no-special", action="store_true")
    args = parser.parse_args()
    import torch

    from benchmarks.digest import digest
    from tests.gpu.warm import compile_all
    from tests.gpu.worker import special_cases

    cases = [c for c in all_cases() if args.match in c.name][:: args.every]
    groups: list[list[Item]] = [
        [(c.name, c.as_json()) for c in found]
        for _, found in groupby(sorted(cases, key=lambda c: c.group), key=lambda c: c.group)
    ]
    if not args.no_special:
        items: list[Item] = [(f"special/{n}", {"special": n}) for n in special_cases() if args.match in n]
        count = -(-len(items) // SPECIAL_GROUP)
        groups = [items[i::count] for i in range(count)] + groups  # slow neighbours apart, and all of them first
    started = time.monotonic()
    record = Record(args.out, {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "digest": digest()}, started)
    print(compile_all(cases), flush=True)
    with ThreadPoolExecutor(args.parallel) as pool:
        for done in [pool.submit(run_group, g, args.limit, started + args.timeout, record.add) for g in groups]:
            done.result()
    return record.finish()


class Record:
    """What `--out` holds; written every few seconds, so that a run that is cut leaves what it has seen."""

    def __init__(self, path: Path, about: dict[str, Any], started: float) -> None:
        self.path, self.about, self.started = path, about, started
        self.results: list[dict[str, Any]] = []
        self.lock, self.written = threading.Lock(), started

    def add(self, result: dict[str, Any]) -> None:
        with self.lock:
            self.results.append(result)
            if result["problem"] and not result["problem"].startswith(("skip", "not run")):
                print(f"{result['name']}: {result['problem'][:220]}", flush=True)
            if time.monotonic() > self.written + 5:
                self._write()

    def finish(self) -> int:
        failed = self._write()
        impossible = sum(r["problem"].startswith("skip") for r in self.results)
        passed = len(self.results) - impossible - failed
        print(f"{passed} passed, {failed} failed, {impossible} impossible shapes, {time.monotonic() - self.started:.1f} s")
        return 1 if failed else 0

    def _write(self) -> int:
        ran = sorted((r for r in self.results if not r["problem"].startswith("skip")), key=lambda r: str(r["name"]))
        failed = sum(bool(r["problem"]) for r in ran)
        told = {"passed": len(ran) - failed, "failed": failed, "seconds": round(time.monotonic() - self.started, 1)}
        cases = [{"name": r["name"], "problem": r["problem"], "seconds": r["seconds"]} for r in ran]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.about, **told, "cases": cases}, indent=1) + "\n")
        self.written = time.monotonic()
        return failed


if __name__ == "__main__":
    raise SystemExit(main())
