"""The harness of the new-mask benchmark without a GPU: its table, and workers that come, fail, or hang."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from benchmarks import new_mask
from benchmarks.masks import NAMES, mask_case
from maskc.binding.constructors import SetSource


def row(peer: str, mask: str, **more: Any) -> dict[str, Any]:
    steps = ("tables", "step", "checked") if peer == "maskc" else ("step",)
    figures = {f"{step}_{what}": 1.5 for step in steps for what in ("gpu_ms", "host_ms")}
    return {"peer": peer, "mask": mask, "seqlen": 8192, "heads": 1, **figures, "step_syncs": 0, "checked_syncs": 1, **more}


def test_both_peers_of_a_mask_stand_on_one_line() -> None:
    text = new_mask.table([row("maskc", "causal"), row("maskc", "document"), row("flex", "causal", step_gpu_ms=44.0)])
    lines = text.splitlines()
    assert len(lines) == 3
    assert "44.000" in lines[1]
    assert "44.000" not in lines[2]


def worker(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_rows_come_as_they_are_made() -> None:
    code = "print('ready', flush=True); assert input() == 'time'; print('{\"a\": 1}'); print('{\"a\": 2}')"
    assert list(new_mask._replies(worker(code), time.monotonic() + 20)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "import time; time.sleep(60)", "print('ready', flush=True); input()"])
def test_a_worker_that_fails_or_hangs_costs_its_rows_only(code: str) -> None:
    started = time.monotonic()
    one = worker(code)
    assert list(new_mask._replies(one, started + 1.0)) == []
    one.kill()
    one.wait()
    assert time.monotonic() - started < 20


def test_data_of_every_mask_can_lie_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: moved.append(self) or self)
    for name in NAMES:
        for value in mask_case(name, 512, heads=2).inputs.values():
            there = new_mask._on_gpu(value)
            data = there.data if isinstance(there, SetSource) else there
            assert isinstance(data, int) or data is moved[-1]
