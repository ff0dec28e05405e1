"""`python -m tests.gpu2 --limit SECONDS --out FILE`: ranks on as many GPUs, one process a GPU, over NCCL.

Groups of processes share the cases over NCCL, others those that give keys into each other's memory; a group that hangs or
of which a process dies is replaced. Many calls in a row and faults have groups of their own, two devices in one process a
last kind; all run beside each other, for nothing here is timed. The record is written as results come. Without the GPUs:
nothing, unless --host, which runs the same over Gloo on small sizes, or --shared, which runs all but two devices in one
process on one GPU, or with two or more ranks to each of several, over NCCL or Gloo.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.digest import digests
from benchmarks.machine import machine
from maskc.runtime.schedule import DIRECT
from tests.gpu2 import cases, devices, faults, place, soak
from tests.gpu2.worker import main as serve

GROUP_SECONDS = 10.0
CASE_SECONDS = 25.0
START_SECONDS = 45.0
ENDING_SECONDS = 8.0
FAULT_SECONDS = 12.0
NOT_RUN = "not run: out of time"
Record = dict[str, Any]


PROCESSES = multiprocessing.get_context("forkserver")
"""Children of one process that has imported everything: as many imports as processes would take longer than the cases."""
STARTING = threading.Lock()


class Worker:
    """A process of `tests.gpu2.worker`."""

    def __init__(self, *arguments: object, blocking: bool = True, more: dict[str, str] | None = None) -> None:
        environment = {**(more or {}), "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        environment["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking))
        environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"  # torch's watchdog ends a process after four of these
        self._errors = Path(tempfile.mktemp(prefix="maskc-worker-"))
        with STARTING:
            self._pipe, theirs = PROCESSES.Pipe()
            given = (theirs, environment, str(self._errors), *map(str, arguments))
            self.process = PROCESSES.Process(target=serve, args=given, daemon=True)
            self.process.start()
            theirs.close()

    def ask(self, job: int) -> None:
        with suppress(OSError):  # the answer tells
            self._pipe.send(job)

    def answer(self, deadline: float) -> Record | None:
        """The next one; None at the deadline or when the process has ended."""
        try:
            found: Record | None = self._pipe.recv() if self._pipe.poll(max(0.0, deadline - time.monotonic())) else None
        except (EOFError, OSError):
            return None
        return found

    def end(self) -> str:
        """Kill; the last words."""
        self.process.kill()
        self.process.join(5.0)
        said = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        self._errors.unlink(missing_ok=True)
        return said.strip()[-1000:]


def rendezvous() -> str:
    return tempfile.mktemp(prefix="maskc-ranks-")


def new_group() -> list[Worker]:
    path = rendezvous()
    return [Worker("cases", rank, path, GROUP_SECONDS) for rank in range(place.world())]


def run_cases(
    numbered: list[tuple[int, cases.GroupCase]], deadline: float, compiled: Future[Any] | None, found: Callable[[Record], None]
) -> None:
    """compiled: what the first cases wait for, while the processes start."""
    workers = new_group() if numbered else []
    fresh = True
    if compiled is not None:
        wait([compiled], max(0.0, deadline - time.monotonic()))
    for number, case in numbered:
        now = time.monotonic()
        if now > deadline:
            break
        limit = START_SECONDS if fresh else CASE_SECONDS
        fresh = False
        for worker in workers:
            worker.ask(number)
        until = min(now + limit, deadline + 5)
        answers = [worker.answer(until) for worker in workers]
        problems = [f"rank {r}: {a['problem']}" if a else f"rank {r} gave no answer" for r, a in enumerate(answers)]
        wrong = [p for p, a in zip(problems, answers, strict=True) if a is None or a["problem"]]
        if any(a is None or a.get("lost") for a in answers):
            wrong += [worker.end() for worker in workers]
            workers, fresh = new_group(), True
        found({"name": case.name, "problem": "; ".join(wrong), "seconds": round(time.monotonic() - now, 3)})
    for worker in workers:
        worker.end()


def run_fault(name: str, deadline: float) -> Record:
    """What each rank raised, within the timeout of the group and a little more."""
    made, path, started = faults.FAULTS[name], rendezvous(), time.monotonic()
    if deadline - started < FAULT_SECONDS:
        return {"name": f"fault/{name}", "problem": NOT_RUN, "seconds": 0.0}
    workers = [Worker("fault", name, r, path, faults.GROUP_SECONDS, blocking=made.blocking) for r in range(place.world())]
    problems = []
    for rank, worker in enumerate(workers):
        wanted = made.code(rank)
        if wanted is None:
            continue
        got = worker.answer(min(deadline, started + START_SECONDS + 3 * faults.GROUP_SECONDS))
        if wanted == "ends":  # torch's watchdog ends the process, or it raises: anything but a hang or a result
            alive = got is None and not _ended(worker, deadline)
            if alive or (got is not None and not got["problem"]):
                problems.append(f"rank {rank} {f'still runs: {worker.end()}' if alive else 'got a result'}")
        elif got is None:
            problems.append(f"rank {rank} gave no answer, {worker.process.exitcode}: {worker.end()}")
        elif got.get("code") != wanted:
            problems.append(f"rank {rank} got {got.get('code')}: {got['problem'] or 'a result'}, not {wanted}")
        elif got["seconds"] > made.latest:
            problems.append(f"rank {rank} got {wanted} after {got['seconds']} s")
    for worker in workers:
        worker.end()
    return {"name": f"fault/{name}", "problem": "; ".join(problems), "seconds": round(time.monotonic() - started, 3)}


def _ended(worker: Worker, deadline: float) -> bool:
    worker.process.join(max(0.1, min(15.0, deadline - time.monotonic())))
    return worker.process.exitcode is not None


def run_soak(deadline: float, calls: int, queues: int) -> Record:
    """queues: hardware queues of a process, which streams share."""
    path, started = rendezvous(), time.monotonic()
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    until = deadline - ENDING_SECONDS
    workers = [Worker("soak", rank, path, GROUP_SECONDS, calls, until, more=more) for rank in range(place.world())]
    answers = [worker.answer(deadline) for worker in workers]
    last = [worker.end() for worker in workers]
    problems = [a["problem"] if a else f"no answer: {e}" for a, e in zip(answers, last, strict=True)]
    wrong = "; ".join(f"rank {r}: {p}" for r, p in enumerate(problems) if p)
    for line in (line for e in last for line in e.splitlines() if line.startswith("profile")):
        print(line)
    done = min(a["calls"] if a else 0 for a in answers)
    name = f"soak/{done} of {calls} calls, {queues} queues"
    return {"name": name, "problem": wrong, "calls": done, "seconds": round(time.monotonic() - started, 3)}


def run_devices(deadline: float, found: Callable[[Record], None]) -> None:
    worker = Worker("devices")
    for name, _ in devices.checks():
        got = worker.answer(deadline)
        found(got or {"name": name, "problem": f"no answer: {worker.end()}", "seconds": 0.0})
        if got is None:
            break
    worker.end()


class Report:
    """What has been found, in a file that is written anew with every result."""

    def __init__(self, out: Path, wanted: int, started: float, about: Callable[[], Record]) -> None:
        """wanted: results that there are to be."""
        self._out, self._wanted, self._started, self._about = out, wanted, started, about
        self._cases: list[Record] = []
        self._lock = threading.Lock()
        out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, found: Record) -> None:
        with self._lock:
            if found["problem"] != NOT_RUN:
                self._cases.append(found)
            self.write()

    def write(self) -> Record:
        failed = sum(bool(c["problem"]) for c in self._cases)
        record = {
            **machine(),
            "gpus": place.gpus(),
            "ranks": place.world(),
            "over": place.backend(),
            **self._about(),
            "passed": len(self._cases) - failed,
            "failed": failed,
            "not_run": self._wanted - len(self._cases),
            "seconds": round(time.monotonic() - self._started, 1),
            "cases": self._cases,
        }
        self._out.write_text(json.dumps(record, indent=1) + "\n")
        return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="ranks, two or more; all GPUs that there are, else 2")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("gpu2.json"))
    parser.add_argument("--match", default="", help="run what this regular expression finds in the name of")
    parser.add_argument("--soak", type=int, default=1000, help="calls in a row with random masks and delays")
    parser.add_argument("--parallel", type=int, default=0, help="groups of processes at a time; 3 on the host, else 24")
    parser.add_argument("--groups", type=int, default=1, help="of processes that share the cases of a kind")
    parser.add_argument("--host", action="store_true", help="over Gloo, for a machine without GPUs")
    parser.add_argument("--shared", choices=("nccl", "gloo"), help="two or more ranks to a GPU, the group over this")
    parser.add_argument("--left", type=int, default=0, help="multiprocessors that gated kernels leave to copies, if shared")
    args = parser.parse_args()
    if args.gpus == 1:
        parser.error("--gpus 1: two or more")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, the driver starts, and children could not use it
    if args.shared:
        os.environ.update({place.SHARED: args.shared, place.LEFT: str(args.left)})
    os.environ[place.RANKS] = str(args.gpus or max(2, 0 if args.shared else torch.cuda.device_count()))
    if not place.gpus() and not args.host:
        print(f"skipped: needs {place.world()} GPUs")
        return 0
    started = time.monotonic()
    deadline = started + max(5.0, args.limit - ENDING_SECONDS)
    PROCESSES.set_forkserver_preload(["tests.gpu2.worker"])
    wanted = re.compile(args.match).search
    numbered = [(i, c) for i, c in enumerate(cases.all_cases()) if wanted(c.name)]
    soaks = [(args.soak, 8), (args.soak // 5, 32), (args.soak // 5, 1)] if wanted("soak") else []
    faulty = [name for name in faults.names() if wanted(f"fault/{name}")]
    other = len(devices.checks()) if wanted("devices") and not args.shared else 0
    with ThreadPoolExecutor(args.parallel or (3 if args.host else 24)) as pool:
        sources = pool.submit(digests)
        everything = len(numbered) + len(soaks) + len(faulty) + other
        report = Report(args.out, everything, started, lambda: sources.result() if sources.done() else {})
        first = [c for _, c in numbered[: 2 * len(cases.NAMES)]]
        needed = chain(soak.sources(), faults.sources(), devices.sources(), *map(cases.sources_of, first))
        compiled = None if args.host else pool.submit(cases.compile_for, needed)
        ways = [(i, c) for i, c in numbered if c.strategy in DIRECT], [(i, c) for i, c in numbered if c.strategy not in DIRECT]
        running = [
            pool.submit(run_cases, way[share :: args.groups], deadline, compiled, report.add)
            for share in range(args.groups)
            for way in ways
        ]
        running += [pool.submit(lambda w=which: report.add(run_soak(deadline, *w))) for which in soaks]  # type: ignore[misc]
        running += [pool.submit(lambda n=name: report.add(run_fault(n, deadline))) for name in faulty]  # type: ignore[misc]
        running += [pool.submit(run_devices, deadline, report.add)] if other else []
        for f in running:
            f.result()
    record = report.write()
    failed = [r for r in record["cases"] if r["problem"]]
    for r in failed[:40]:
        print(f"{r['name']}: {r['problem'][:260]}")
    print(f"{record['passed']} passed, {record['failed']} failed, {record['not_run']} not run, {record['seconds']} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
