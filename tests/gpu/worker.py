"""Runs cases one after another and prints one JSON line each: {"name", "problem", "seconds"}."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable

from tests.gpu.cases import Case

SPECIAL = (
    "tests.gpu.special_prep",
    "tests.gpu.special_context",
    "tests.gpu.special_bind",
    "tests.gpu.special_fwd",
    "tests.gpu.special_reorder",
    "tests.gpu.special_bwd",
    "tests.gpu.special_overlap",
    "tests.gpu.special_flex",
    "tests.gpu.special_transformers",
    "tests.gpu.special_tools",
)


def special_cases() -> dict[str, Callable[[], str]]:
    """Regressions and protocol checks that are no point of the cover, by name."""
    found: dict[str, Callable[[], str]] = {}
    for module in SPECIAL:
        if importlib.util.find_spec(module) is not None:
            found.update(dict(importlib.import_module(module).special_cases()))
    return found


def main() -> None:
    for line in sys.stdin:
        item = json.loads(line)
        started = time.perf_counter()
        try:
            problem = special_cases()[item["special"]]() if "special" in item else _run(Case(**item))
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        seconds = round(time.perf_counter() - started, 3)
        print(json.dumps({"problem": problem, "seconds": seconds}), flush=True)
        if "CUDA error" in problem or "illegal" in problem or "launch failure" in problem:
            return  # the context is gone: the parent starts a new worker


def _run(case: Case) -> str:
    from tests.gpu.check import run_case

    return run_case(case)


if __name__ == "__main__":
    main()
