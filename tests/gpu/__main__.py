"""`python -m tests.gpu`: the conformance suite on Hopper GPUs, recorded with the digest of the sources it ran.

Everything is imported once, without touching a GPU; kernels are compiled side by side; then workers forked from this
process (`tests.gpu.pool`) take cases from one queue, longest first by the last record. Each case has a time limit; one
that hangs or loses its context costs itself only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from pathlib import Path

LAST = Path("benchmarks/results/gpu_tests.json")
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch looks for GPUs without a context, which a fork could not use
    "OMP_NUM_THREADS": "1",  # a pool of threads does not outlive a fork, and workers share the cores
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=LAST)
    parser.add_argument("--match", nargs="+", default=[""], metavar="TEXT", help="only cases whose name contains one of these")
    parser.add_argument("--every", type=int, default=1, help="every n-th case")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="numbers among the visible ones, to share the cases")
    parser.add_argument("--parallel", type=int, default=12, help="workers")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds a case")
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds for all")
    parser.add_argument("--no-special", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.timeout
    os.environ.update(ENVIRONMENT)  # before torch is imported

    import torch

    from benchmarks.digest import digests
    from tests.gpu.pool import run_jobs
    from tests.gpu.record import Record, last_seconds
    from tests.gpu.suite import Suite, begin, compile_ahead, kernels_kept

    suite = Suite(args.match, args.every, not args.no_special, last_seconds(LAST))
    about = {"device": "none", "gpus": len(args.gpus), "torch": torch.__version__, **digests()}
    if any(args.match) or args.every > 1 or args.no_special:
        about["selection"] = {"match": args.match, "every": args.every, "special": not args.no_special}
    record = Record(args.out, about, len(suite.jobs))
    print(compile_ahead(suite.sources(), deadline), flush=True)
    ahead = kernels_kept()
    if driver_is_up():
        parser.exit(2, "the CUDA driver was initialised before the workers start: a fork could not use it\n")
    gpus = [visible(args.gpus[i % len(args.gpus)]) for i in range(args.parallel)]
    environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    started = f"{len(suite.jobs)} cases, {len(gpus)} workers on {len(set(gpus))} GPUs"
    print(f"{started}, {time.monotonic() - record.started:.1f} s", flush=True)
    names = run_jobs(
        suite.jobs, environments, record.add, begin=begin, limit=args.limit, start_limit=90.0, deadline=deadline
    )  # fmt: skip
    if late := kernels_kept() - ahead:
        print(f"{len(late)} kernels were compiled by the cases themselves")
    return record.finish({"device": ", ".join(sorted(names)) or "none"})


def visible(number: int) -> str:
    """The n-th of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if named is None else named.split(",")[number].strip()


def driver_is_up() -> bool:
    """Whether anything in this process initialised the CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialised = 3
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialised


if __name__ == "__main__":
    raise SystemExit(main())
