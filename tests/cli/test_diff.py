"""`maskc diff` and `maskc fuzz`: what they print, their status, and that faults are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from maskc import fuzz as fuzzing
from maskc.cli import main
from maskc.runtime import cpu
from maskc.targets import load

MASKS = """\
input doc : segments
mask a = same(doc) and k <= q
mask b = doc.start[q] <= k <= q
mask c = same(doc) and k <= q < k + 40
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("x.mask").write_text(MASKS)
    return Path("x.mask")


def _inputs(lengths: list[int]) -> str:
    Path("in.json").write_text(json.dumps({"inputs": {"doc": {"segments": {"lengths": lengths}}}}))
    return "in.json"


def test_equal_masks_are_proved(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "x.mask:a", "x.mask:b"]) == 0
    assert capsys.readouterr().out == "x.mask:a and x.mask:b are equal: proved for every input that obeys the declared facts\n"


def test_smallest_difference(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "x.mask:a", "std:causal"]) == 1
    assert capsys.readouterr().out == (
        "x.mask:a and std:causal differ: row 0 sees key 0 in std:causal only\n"
        "1 of 1 cells differ (1 x 1)\n"
        "smallest input found: doc = []\n"
        "\n"
        "    x.mask:a    std:causal\n"
        "    0 .         0 #\n"
    )


def test_a_difference_that_small_inputs_do_not_show(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "x.mask:a", "x.mask:c"]) == 0
    assert "neither proved equal nor found to differ" in capsys.readouterr().out
    assert main(["diff", "--strict", "x.mask:a", "x.mask:c"]) == 1
    capsys.readouterr()
    assert main(["diff", "x.mask:a", "x.mask:c", "--inputs", _inputs([40, 30])]) == 0
    assert capsys.readouterr().out == "x.mask:a and x.mask:c are equal on these data (70 rows, 70 keys)\n"
    assert main(["diff", "x.mask:a", "x.mask:c", "--inputs", _inputs([30, 50, 20])]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "x.mask:a and x.mask:c differ: row 70 sees key 30 in x.mask:a only"
    assert out[1] == "55 of 10000 cells differ (100 x 100)"
    assert out[2] == "the pictures begin with key 14"
    assert out[4:] == [
        f"    {'x.mask:a':<35}    x.mask:c",
        *(f"    {q} {_row(q, 30, 14)}    {q} {_row(q, max(30, q - 39), 14)}" for q in range(54, 80)),
        *(f"    {q} {'.' * 32}    {q} {'.' * 32}" for q in range(80, 86)),
    ]


def _row(q: int, first: int, c0: int) -> str:
    """Keys c0 to c0 + 31 of a row that sees the keys from `first` to its own."""
    return "".join("#" if first <= k <= q else "." for k in range(c0, c0 + 32))


def test_one_size_is_enough(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """std:causal does not know its size; the documents of the other mask do."""
    assert main(["diff", "std:causal", "x.mask:a", "--inputs", _inputs([50])]) == 0
    assert "are equal on these data (50 rows" in capsys.readouterr().out
    Path("in.json").write_text(json.dumps({"nk": 4, "inputs": {"docs": {"segments": {"lengths": [4]}}}}))
    assert main(["diff", "std:causal", "x.mask:a", "--inputs", "in.json"]) == 2
    assert "M411" in capsys.readouterr().err


def test_block_tables_are_compared_by_element(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.mask").write_text("input keep : bool per block(2, 2)\nmask t = k <= q and keep[q // 2, k // 2]\n")
    Path("in.json").write_text(json.dumps({"nq": 4, "nk": 4, "inputs": {"keep": [[True, True], [False, True]]}}))
    assert main(["diff", "t.mask", "std:causal", "--inputs", "in.json", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cell"] == {"batch": 0, "head": 0, "row": 2, "key": 0, "seen_by": "std:causal"}
    assert (found["differing"], found["cells"]) == (4, 16)


def test_fuzz_agrees(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "std:doc_prefix", "--cases", "6", "--largest", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failure"] is None
    assert found["ways"] == {"vectors": 6, "cpu": 6, "all-gather": 3, "staged": 3, "ring": 3, "flex": 1}


def test_fuzz_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forward = cpu.forward

    def wrong(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(*arguments, **keywords)
        if out.shape[1] > 5:
            out[:, 5] *= 1.001
        return out, lse

    monkeypatch.setattr(cpu, "forward", wrong)
    assert main(["fuzz", "std:full", "--cases", "12"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("cpu is wrong: out[0, 5, ")
    assert "smallest case found: n" in out[2]


def test_fuzz_finds_a_wrong_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "merge", lambda a, b: b)
    report = fuzzing.fuzz(load("std:causal"), cases=12)
    assert report.failure is not None
    assert report.failure.way in ("staged", "ring")
