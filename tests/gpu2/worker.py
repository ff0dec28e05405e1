"""One process: a rank of a group, or two devices in turn. Each job has one answer, on a pipe.

    cases RANK FILE SECONDS      jobs are numbers of cases, which come by the pipe
    soak RANK FILE SECONDS CALLS UNTIL      UNTIL: on the machine's clock, after which no more calls are begun
    fault NAME RANK FILE SECONDS
    devices

FILE: where the ranks meet. SECONDS: after which the group gives up. All are children of one process that has imported what
they need, and has not touched a GPU.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.profiler

from maskc.diagnostics import MaskcError
from tests.gpu2 import cases, devices, faults, place, soak
from tests.gpu2.ways import leaving

Pipe = Connection


def say(pipe: Pipe, found: dict[str, Any], started: float) -> None:
    pipe.send({**found, "seconds": round(time.monotonic() - started, 3)})


def join(rank: int, path: str, seconds: float) -> Any:
    """The group of all ranks."""
    place.enter(rank)
    dist.init_process_group(
        place.backend(),
        init_method=f"file://{path}",
        rank=rank,
        world_size=place.world(),
        timeout=timedelta(seconds=seconds),
    )
    return dist.group.WORLD


def told(check: Callable[[], str]) -> dict[str, Any]:
    """lost: it ended in the middle, so other ranks may be waiting for this one."""
    try:
        return {"problem": check()}
    except Exception as e:
        return {"problem": f"{type(e).__name__}: {str(e)[:300]}", "lost": True}


def run_cases(pipe: Pipe, rank: int, path: str, seconds: float) -> None:
    group = join(rank, path, seconds)
    listed = cases.all_cases() if place.gpus() else [cases.smaller(c) for c in cases.all_cases()]
    while True:
        case = listed[pipe.recv()]
        started = time.monotonic()
        say(pipe, told(lambda case=case: cases.run_case(case, rank, group)), started)  # type: ignore[misc]


def fault(pipe: Pipe, name: str, rank: int, path: str, seconds: float) -> None:
    """Says what this rank got: the code of maskc's error, or of what else was raised."""
    group = join(rank, path, seconds)
    faults.warm(rank, group)
    started = time.monotonic()
    faulthandler.dump_traceback_later(20, file=sys.__stderr__)  # for one that hangs
    made = faults.FAULTS[name]
    try:
        with leaving(made.way(rank)):
            made.act(rank, group)
        if place.gpus():
            torch.cuda.synchronize()
        say(pipe, {"problem": "", "code": None}, started)
    except MaskcError as e:
        say(pipe, {"problem": str(e), "code": e.code}, started)
    except Exception as e:
        say(pipe, {"problem": f"{type(e).__name__}: {e}"[:400], "code": "other"}, started)
    os._exit(0)  # a group whose peer is gone does not close cleanly


def main(pipe: Pipe, environment: dict[str, str], errors: str, kind: str, *rest: str) -> None:
    """The target of a child. errors: the file that takes what it writes to standard error."""
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    if not place.gpus():
        torch.set_num_threads(1)
    match kind:
        case "cases":
            run_cases(pipe, int(rest[0]), rest[1], float(rest[2]))
        case "soak":
            group, started = join(int(rest[0]), rest[1], float(rest[2])), time.monotonic()
            found: list[int] = []

            def check() -> str:
                problem, done = soak.run(int(rest[0]), group, int(rest[3]), float(rest[4]))
                found.append(done)
                return problem

            say(pipe, {**told(check), "calls": sum(found)}, started)
        case "fault":
            fault(pipe, rest[0], int(rest[1]), rest[2], float(rest[3]))
        case "devices":
            for name, check in devices.checks():
                started = time.monotonic()
                say(pipe, {"name": name, **told(check)}, started)
    os._exit(0)
