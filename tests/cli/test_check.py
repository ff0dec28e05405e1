"""`maskc check`: statuses, reports, and every error of every file in one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import maskc
from maskc.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SUITE = Path(__file__).parents[1] / "data" / "suite"


def test_proved_masks_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(str(p) for p in EXAMPLES.glob("*.mask"))
    assert main(["check", "--strict", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == files
    assert all("is proved" in line for line in lines)


def test_refused_masks_end_with_1_and_do_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = str(SUITE / "91_bad_scatter.mask"), str(EXAMPLES / "causal.mask")
    assert main(["check", bad, good]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error[M201]: ")
    assert "scatter is refused" in err
    assert f"{good}: causal is proved" in out


def test_all_masks_of_a_file_are_checked_unless_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.mask"
    path.write_text("mask a = k <= q\nmask b = true\n")
    assert main(["check", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["check", f"{path}:b"]) == 0
    assert capsys.readouterr().out.count("proved") == 1


def test_a_file_without_masks_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.mask"
    path.write_text("")
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} holds no mask\n"


def test_an_undecided_mask_warns_and_is_refused_under_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its third gap shows only in sequences longer than the search tries."""
    path = tmp_path / "far.mask"
    path.write_text("mask far = k <= q < k + 2 or k + 40 <= q < k + 60 or k + 80 <= q < k + 90\n")
    assert main(["check", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("warning[W301]: ")
    assert out.endswith(f"{path}: far is undecided\n")
    assert main(["check", "--strict", str(path)]) == 1
    assert main(["explain", str(path)]) == 0
    assert "undecided" in capsys.readouterr().out
    with pytest.warns(maskc.MaskcWarning, match="W301"):
        assert [w.code for w in maskc.compile(path).warnings] == ["W301"]
    for compiled in (lambda: maskc.compile(path, strict=True), lambda: maskc.compile_text(path.read_text(), strict=True)):
        with pytest.raises(maskc.MaskcError, match="W301"):
            compiled()


def test_an_undecided_claim_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the table of a batch knows whether it leaves a row without a key."""
    path = tmp_path / "table.mask"
    path.write_text("input keep : bool per block(2, 2)\nmask m = k <= q and keep[q // 2, k // 2]\ncheck no_empty_row\n")
    assert main(["check", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("warning[W302]: `check no_empty_row` is neither proved nor refuted")
    assert "because: a block table may hide every key of a row" in out
    assert f"{path}: m is proved" in out


def test_every_error_of_a_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two_errors.mask"
    path.write_text("input window : int\nmask a = q < windw\nmask b = k < widow\n")
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().err.count("error[M101]") == 2


def test_a_claim_that_does_not_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claim.mask"
    path.write_text("mask full = true\ncheck causal\n")
    assert main(["check", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error[M303]: `check causal` does not hold for `full`")
    assert f"{path}:2:1" in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(SUITE / "91_bad_scatter.mask"), str(EXAMPLES / "doc_causal.mask")]) == 1
    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["outcome"], good["outcome"]) == ("refused", "proved")
    assert bad["diagnostics"][0]["code"] == "M201"
    assert bad["diagnostics"][0]["line"] == 2
    assert (good["causal"], good["vectors"], good["claims"]) == (True, ["lts"], 2)
