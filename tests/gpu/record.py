"""What a run of the suite leaves, as JSON: {"device", "torch", digests, "passed", "failed", "not_run", "seconds", "cases"}."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.gpu.pool import Outcome

IMPOSSIBLE = "skip: the mask cannot have this shape"
EVERY = 5.0
"""Seconds between two versions of the file, so that a run that is cut leaves what it has seen."""


class Record:
    """passed and failed count `cases`. A case that had no verdict is named under "left", with its reason: not run
    ("not_run" counts these) or without the tool that it needs."""

    def __init__(self, path: Path, about: dict[str, Any], total: int) -> None:
        self.path, self.about, self.total = path, about, total
        self.started = self.written = time.monotonic()
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.ran and outcome.problem and not outcome.problem.startswith("skip"):
            print(f"{outcome.name}: {outcome.problem[:220]}", flush=True)
        if time.monotonic() > self.written + EVERY:
            told = self.write()
            print(f"{len(self.outcomes)} of {self.total} after {told['seconds']} s", flush=True)

    def finish(self, about: dict[str, Any]) -> int:
        """The exit status: 0 where every case ran and was right."""
        self.about |= about
        told = self.write()
        impossible = sum(o.problem == IMPOSSIBLE for o in self.outcomes)
        print(
            f"{told['passed']} passed, {told['failed']} failed, {told['not_run']} not run, {impossible} impossible shapes, "
            f"{told['seconds']} s"
        )
        return 1 if told["failed"] or told["not_run"] else 0

    def write(self) -> dict[str, Any]:
        ran = sorted((o for o in self.outcomes if o.ran and not o.problem.startswith("skip")), key=lambda o: o.name)
        failed = sum(bool(o.problem) for o in ran)
        unable = [o for o in self.outcomes if o.problem.startswith("skip") and o.problem != IMPOSSIBLE]
        left = {o.name: o.problem for o in (*unable, *(o for o in self.outcomes if not o.ran))}
        not_run = self.total - len(self.outcomes) + sum(not o.ran for o in self.outcomes)
        told: dict[str, Any] = {
            "passed": len(ran) - failed,
            "failed": failed,
            "not_run": not_run,
            "seconds": round(time.monotonic() - self.started, 1),
        }
        cases = [{"name": o.name, "problem": o.problem, "seconds": o.seconds} for o in ran]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.new")
        partial.write_text(json.dumps({**self.about, **told, "left": left, "cases": cases}, indent=1) + "\n")
        partial.replace(self.path)  # whoever reads it sees a whole one
        self.written = time.monotonic()
        return told


def last_seconds(path: Path) -> dict[str, float]:
    """Seconds of each case in an earlier record; empty where there is none."""
    if not path.exists():
        return {}
    return {case["name"]: case["seconds"] for case in json.loads(path.read_text())["cases"]}
