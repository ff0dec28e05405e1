"""The examples with several processes run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_equal_one() -> None:
    """In double precision, where nothing but a wrong row or formula is left to see."""
    found = re.findall(r"^(\w+): largest difference from one process (\S+)$", output("run_context_parallel.py"), re.M)
    assert [name for name, _ in found] == ["out", "dq", "dk", "dv"]
    assert all(float(value) < 1e-12 for _, value in found)


def test_plans_are_made_in_loader_workers() -> None:
    assert len(re.findall(r"^step \d: \d+ rows", output("plan_in_loader.py"), re.M)) == 3


def test_fsdp_and_context_parallelism_equal_one_process() -> None:
    found = re.findall(r"^(loss|gradients): .*difference from one process (\S+)$", output("train_fsdp_context_parallel.py"), re.M)
    assert [name for name, _ in found] == ["loss", "gradients"]
    assert all(float(value) < 1e-12 for _, value in found)
