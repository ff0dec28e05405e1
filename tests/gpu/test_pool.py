"""The pool of the GPU suite, on the CPU: every fault costs its own job, and nothing outlives the deadline."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.__main__ import visible
from tests.gpu.pool import Job, Outcome, Queue
from tests.gpu.record import IMPOSSIBLE, Record, last_seconds


def faulty(seconds: float) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.faulty", str(seconds)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def all_faults() -> dict[str, Any]:
    return faulty(30)


def outcomes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert len({o["name"] for o in found["outcomes"]}) == len(found["outcomes"]) == 38
    return {o["name"]: o for o in found["outcomes"]}


def test_a_fault_costs_its_own_job(all_faults: dict[str, Any]) -> None:
    found = outcomes(all_faults)
    assert all(o["ran"] for o in found.values())
    assert found["hangs"]["problem"].startswith("no answer within 1 s, in ")
    assert "subprocess.py" in found["hangs"]["problem"]  # where it waits
    assert found["crashes"]["problem"] == "the worker died, exit status 7, after it said: the last words"
    assert found["raises"]["problem"] == "ValueError: a bad value"
    assert found["wrong"]["problem"] == "dq differs"
    assert {found[f"right {i}"]["problem"] for i in range(20)} == {""}


def test_nothing_follows_in_a_lost_context(all_faults: dict[str, Any]) -> None:
    found = outcomes(all_faults)
    assert "illegal" in found["loses_its_context"]["problem"]
    assert {found[f"after {i}"]["problem"] for i in range(5)} == {""}


def test_workers_are_dealt_over_the_gpus(all_faults: dict[str, Any]) -> None:
    assert all_faults["said"] == ["GPU 2", "GPU 5"]
    assert {outcomes(all_faults)[f"gpu {i}"]["problem"] for i in range(8)} <= {"2", "5"}


def test_the_deadline_ends_everything() -> None:
    found = faulty(0.5)  # before the limit of the job that hangs
    cut = outcomes(found)["hangs"]
    assert found["seconds"] < 30
    assert found["alone"]
    assert not cut["ran"]
    assert "by the deadline, in " in cut["problem"]
    late = faulty(0.0)
    assert all(not o["ran"] and o["problem"] == "no time was left" for o in outcomes(late).values())


def test_what_a_job_started_ends_with_it(all_faults: dict[str, Any]) -> None:
    assert outcomes(all_faults)["hangs"]["ran"]
    assert all_faults["alone"]


@pytest.mark.parametrize(
    ("environment", "number", "named"), [(None, 1, "1"), ("3", 0, "3"), ("0,5", 1, "5"), ("GPU-a, GPU-b", 1, "GPU-b")]
)
def test_gpus_are_numbers_among_the_visible(
    environment: str | None, number: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if environment is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment)
    assert visible(number) == named


def test_long_jobs_first_then_a_worker_keeps_its_kind() -> None:
    jobs = [
        Job("a", "x", str, 1.0),
        Job("b", "y", str, 2.0),
        Job("c", "x", str, 9.0),
        Job("d", "x", str, 0.5),
        Job("e", "y", str, 4.0),
    ]
    queue = Queue(jobs)
    order = [jobs[i].name for kind in (None, "x", "x", "x", None) if (i := queue.take(kind)) is not None]
    assert order == ["c", "e", "a", "d", "b"]
    assert not queue
    assert queue.take("x") is None


def test_a_record_tells_wrong_from_not_run(tmp_path: Path) -> None:
    path = tmp_path / "out" / "gpu.json"
    record = Record(path, {"digest": "d"}, total=7)
    for outcome in (
        Outcome("right", "", 1.5),
        Outcome("wrong", "dq differs", 0.5),
        Outcome("shape", IMPOSSIBLE, 0.0),
        Outcome("tool", "skip: compute-sanitizer is not installed", 0.0),
        Outcome("late", "no time was left", 0.0, ran=False),
    ):
        record.add(outcome)
    assert record.finish({"device": "none"}) == 1
    told = json.loads(path.read_text())
    assert (told["passed"], told["failed"], told["not_run"], told["device"]) == (1, 1, 3, "none")
    assert [case["name"] for case in told["cases"]] == ["right", "wrong"]
    assert told["left"] == {"tool": "skip: compute-sanitizer is not installed", "late": "no time was left"}
    assert last_seconds(path) == {"right": 1.5, "wrong": 0.5}


def test_only_a_whole_run_is_a_success(tmp_path: Path) -> None:
    record = Record(tmp_path / "a.json", {}, total=2)
    record.add(Outcome("one", "", 1.0))
    assert record.finish({}) == 1  # the other never reported
    record.add(Outcome("two", "", 1.0))
    assert record.finish({}) == 0
    assert last_seconds(tmp_path / "none.json") == {}


def test_the_suite_runs_without_a_gpu(tmp_path: Path) -> None:
    """A few small cases of the cover, from the command line, on two workers."""
    command = [sys.executable, "-m", "tests.gpu", "--match", "fwd-d64-bf16/form:empty_rows", "--no-special", "--parallel", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "gpu.json")], capture_output=True, text=True, timeout=120)
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["passed"] == len(told["cases"]) > 0
    assert told["selection"] == {"match": ["fwd-d64-bf16/form:empty_rows"], "every": 1, "special": False}
    assert told["not_run"] == told["failed"] == 0
