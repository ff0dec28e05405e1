"""`maskc bench`: agreement is checked before anything is timed; the report says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import maskc
from maskc import bench
from maskc.cli import main
from maskc.inputs import read_inputs

SMALL = bench.Setting(heads=2, kv_heads=1, head_dim=8, dtype="fp32", device="cpu")


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data of one batch, and no repetitions."""
    monkeypatch.setattr(bench, "_SECONDS", 0.0)
    monkeypatch.setattr(bench, "_ROUNDS", 1)
    file = tmp_path / "inputs.json"
    file.write_text(
        json.dumps({"nq": 40, "nk": 40, "inputs": {"doc": {"segments": {"lengths": [20, 13, 5]}}, "prefix": [3, 0, 5]}})
    )
    return file


def test_a_report(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--heads", "2", "--head-dim", "8", "--dtype", "fp32", "--device", "cpu"]
    assert main(["bench", "std:doc_prefix", "--inputs", str(inputs), *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tiles"] == {"skip": 0, "partial": 1, "unmasked": 0}
    assert report["distance"]["out"] <= report["allowed"]
    assert report["flex"]["backward"] is None  # none on a CPU
    assert main(["bench", "std:doc_prefix", "--inputs", str(inputs), *sizes]) == 0
    text = capsys.readouterr().out
    assert "doc_prefix: 40 rows x 40 keys, batch 1, 2 heads (2 kv), head dim 8, fp32" in text
    assert "step with a new mask" in text


def test_disagreement_is_an_error(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench._step
    monkeypatch.setattr(bench, "_step", lambda side, *rest: tuple(x + 0.1 * side.differentiable for x in right(side, *rest)))
    with pytest.raises(maskc.MaskcError) as caught:
        bench.bench(maskc.compile("std:doc_prefix"), read_inputs(inputs), SMALL)
    assert caught.value.code == "M514"


def test_too_much_for_a_cpu_is_an_error(inputs: Path) -> None:
    with pytest.raises(maskc.MaskcError) as caught:
        bench.bench(
            maskc.compile("std:doc_prefix"), read_inputs(inputs), replace(SMALL, heads=1 << 20, kv_heads=1, head_dim=1, batch=1)
        )
    assert caught.value.code == "M515"


def test_heads_and_batches_of_the_mask(tmp_path: Path, inputs: Path) -> None:
    del inputs  # for what it switches off
    file = tmp_path / "batch.json"
    evict = torch.randint(41, 60, (2, 40)).tolist()
    file.write_text(json.dumps([{"nq": 30, "nk": 40, "inputs": {"evict": row}} for row in evict]))
    steps: list[str] = []
    report = bench.bench(maskc.compile("std:random_eviction"), read_inputs(file), SMALL, steps.append)
    assert len(steps) == bench.STEPS - 2  # of three rounds one
    assert (report.nq, report.nk) == (30, 40)
    assert report.distance["out"] <= report.allowed
