"""The runner itself: over Gloo everywhere, over NCCL where there are two GPUs or more."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.gpu.inputs import NAMES
from tests.gpu2 import cases
from tests.gpu2.ways import WAYS


def run(tmp_path: Path, *arguments: str) -> dict[str, object]:
    out = tmp_path / "gpu2.json"
    command = [sys.executable, "-m", "tests.gpu2", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_every_mask_comes_in_every_way() -> None:
    listed = cases.all_cases()
    assert len({c.name for c in listed}) == len(listed)
    assert {(c.mask, c.strategy, c.order, c.prune) for c in listed} == {
        (m, *w) for m in NAMES for w in (*cases.WAYS, *cases.DIRECT_WAYS)
    }
    assert [c.mask for c in listed[: len(NAMES)]] == list(NAMES)
    gated = [c for c in listed if c.strategy == "gated"]
    assert {(c.leaving(0), c.leaving(1)) for c in gated} == set(product(WAYS, WAYS))


TWO = ["09_doc_prefix", "fault/refuses", "fault/killed between, ", "devices", "soak"]
THREE = ["34_teacher.*/gated|soak"]


@pytest.mark.parametrize(("match", "ranks"), [*product(TWO, (2,)), *product(THREE, (3,))])
def test_over_gloo(tmp_path: Path, match: str, ranks: int) -> None:
    how = "--host", "--gpus", str(ranks), "--limit", "120", "--groups", "2", "--soak", "100"
    record = run(tmp_path, *how, "--match", match)
    assert record["passed"]
    assert not record["failed"]
    assert record["ranks"] == ranks


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two Hopper GPUs")
def test_over_nccl(tmp_path: Path) -> None:
    assert run(tmp_path, "--limit", "160", "--groups", "4")["not_run"] == 0
