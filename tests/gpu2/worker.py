"""One process: a rank of a pair, or two devices in turn. Prints one JSON line a job after the mark, nothing else counts.

    python -m tests.gpu2.worker pair RANK FILE SECONDS      jobs are numbers of cases, a line each, on standard input
    python -m tests.gpu2.worker soak RANK FILE SECONDS CALLS
    python -m tests.gpu2.worker fault NAME RANK FILE SECONDS
    python -m tests.gpu2.worker devices

FILE: where the ranks meet. SECONDS: after which the group gives up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from maskc.diagnostics import MaskcError
from tests.gpu2 import cases, devices, faults, soak

MARK = "@@"
ON_GPUS = torch.cuda.device_count() >= cases.WORLD


def say(found: dict[str, Any], started: float) -> None:
    print(MARK + json.dumps({**found, "seconds": round(time.monotonic() - started, 3)}), flush=True)


def join(rank: int, path: str, seconds: float) -> Any:
    """The group of both ranks, one process a GPU; over Gloo where there are no two GPUs."""
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if ON_GPUS else "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=cases.WORLD,
        timeout=timedelta(seconds=seconds),
    )
    return dist.group.WORLD


def told(check: Callable[[], str]) -> dict[str, Any]:
    """lost: it ended in the middle, so the other rank may be waiting for this one."""
    try:
        return {"problem": check()}
    except Exception as e:
        return {"problem": f"{type(e).__name__}: {str(e)[:300]}", "lost": True}


def pair(rank: int, path: str, seconds: float) -> None:
    group = join(rank, path, seconds)
    listed = cases.all_cases() if ON_GPUS else [cases.smaller(c) for c in cases.all_cases()]
    for line in sys.stdin:
        started = time.monotonic()
        say(told(lambda case=listed[int(line)]: cases.run_case(case, rank, group)), started)  # type: ignore[misc]


def fault(name: str, rank: int, path: str, seconds: float) -> None:
    """Says what this rank got: the code of maskc's error, or of what else was raised."""
    group = join(rank, path, seconds)
    faults.warm(rank, group)
    started = time.monotonic()
    try:
        faults.FAULTS[name].act(rank, group)
        if ON_GPUS:
            torch.cuda.synchronize()
        say({"problem": "", "code": None}, started)
    except MaskcError as e:
        say({"problem": str(e), "code": e.code}, started)
    except Exception as e:
        say({"problem": f"{type(e).__name__}: {e}"[:400], "code": "other"}, started)
    os._exit(0)  # a group whose peer is gone does not close cleanly


def main() -> None:
    kind, *rest = sys.argv[1:]
    if not ON_GPUS:
        torch.set_num_threads(1)
    match kind:
        case "pair":
            pair(int(rest[0]), rest[1], float(rest[2]))
        case "soak":
            group, started = join(int(rest[0]), rest[1], float(rest[2])), time.monotonic()
            say(told(lambda: soak.run(int(rest[0]), group, int(rest[3]))), started)
        case "fault":
            fault(rest[0], int(rest[1]), rest[2], float(rest[3]))
        case "devices":
            for name, check in devices.checks():
                started = time.monotonic()
                say({"name": name, **told(check)}, started)


if __name__ == "__main__":
    main()
