"""Jobs with every fault that `tests.gpu.pool` is to survive, on two workers of two kinds: prints outcomes as JSON.

python -m tests.gpu.faulty SECONDS
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict

from tests.gpu.pool import Job, Outcome, run_jobs

ENDED, ALIVE = os.pipe()
"""Whatever is started here holds the second until it ends: then the first is at its end."""


def right() -> str:
    time.sleep(0.01)
    return ""


def wrong() -> str:
    return "dq differs"


def raises() -> str:
    raise ValueError("a bad value")


def crashes() -> str:
    print("the last words", flush=True)
    os._exit(7)


def hangs() -> str:
    """With a process of its own, which must not stay either."""
    return str(subprocess.run(["sleep", "1000"], check=False, pass_fds=[ALIVE]))


def loses_its_context() -> str:
    os.environ["LOST"] = "1"
    return "RuntimeError: CUDA error: an illegal memory access was encountered"


def after_a_loss() -> str:
    return "runs in the worker that lost its context" if "LOST" in os.environ else ""


def gpu() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    outcomes: list[Outcome] = []
    faults = [Job(f.__name__, "faults", f) for f in (wrong, raises, crashes, loses_its_context)]
    jobs = [
        Job("hangs", "faults", hangs, expected=9.0),
        *faults,
        *(Job(f"right {i}", f"kind {i % 2}", right) for i in range(20)),
        *(Job(f"after {i}", "faults", after_a_loss, expected=0.1) for i in range(5)),
        *(Job(f"gpu {i}", f"gpu {i}", gpu) for i in range(8)),
    ]
    started = time.monotonic()
    environments = [{"CUDA_VISIBLE_DEVICES": name} for name in ("2", "5")]
    said = run_jobs(
        jobs, environments, outcomes.append, begin=lambda: f"GPU {gpu()}", limit=1.0, start_limit=20.0,
        deadline=started + float(sys.argv[1]),
    )  # fmt: skip
    seconds = time.monotonic() - started
    os.close(ALIVE)
    alone = bool(select.select([ENDED], [], [], 10.0)[0])
    told = {"outcomes": [asdict(o) for o in outcomes], "said": sorted(said), "seconds": seconds, "alone": alone}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
