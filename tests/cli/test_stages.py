"""`maskc compile`: every stage of the table, its golden text, the dump folder, the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maskc.cli import main
from maskc.driver import STAGES, Job, Request

EXAMPLES = Path(__file__).parents[2] / "examples"
MASKS = sorted(p.stem for p in EXAMPLES.glob("*.mask"))
DOC_PREFIX = str(EXAMPLES / "doc_prefix.mask")
INPUTS = str(EXAMPLES / "doc_prefix_16.json")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", ["ir", "intervals"])
@pytest.mark.parametrize("name", MASKS)
def test_text_of(name: str, stage: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    golden(f"{name}.{stage}", shown(capsys, "compile", str(EXAMPLES / f"{name}.mask"), "--emit", stage))


@pytest.mark.parametrize("stage", ["ast", "proof", "vectors", "tiles", "spec"])
def test_text_of_doc_prefix(stage: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    tile = ("--block-q", "4", "--block-kv", "4") if stage == "tiles" else ()
    kernel = ("--kernel", "prep") if stage == "spec" else ()
    suffix = next(s.suffix for s in STAGES if s.name == stage)
    text = shown(capsys, "compile", DOC_PREFIX, "--emit", stage, "--inputs", INPUTS, *tile, *kernel)
    golden(f"doc_prefix.{suffix}", text)


def test_source_of_doc_prefix(golden: Callable[[str, str], None]) -> None:
    """What is generated for the mask, without the headers that are the same for all."""
    (kernel,) = Job(Request(DOC_PREFIX, kernels=("prep",))).kernels
    golden("doc_prefix.cu", kernel.source.text)


@pytest.mark.parametrize("name", MASKS)
def test_explanation_of(name: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    golden(f"{name}.explain", shown(capsys, "explain", str(EXAMPLES / f"{name}.mask")))


def test_explanation_with_data(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    golden("doc_prefix_16.explain", shown(capsys, "explain", DOC_PREFIX, "--inputs", INPUTS))
    told = json.loads(shown(capsys, "explain", DOC_PREFIX, "--inputs", INPUTS, "--json"))
    cells = "".join(line.split(maxsplit=1)[1] for line in told["data"]["picture"] if line)
    assert told["data"]["visible"] == cells.count("#")
    assert sum(told["data"]["tiles"].values()) == 1


def test_a_build_is_dumped_and_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump"
    shown(capsys, "compile", "std:causal", "--kernel", "prep", "--dump-dir", str(dump), "--check", "2")
    assert {p.name.split("-")[1].split(".")[0] for p in dump.iterdir()} == {
        s.name for s in STAGES[: [s.name for s in STAGES].index("cubin") + 1] if s.needs != "data"
    }


def test_every_stage_can_be_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "compile", DOC_PREFIX, "--emit", "cubin", "-o", str(tmp_path / "out"), "--kernel", "prep", "--inputs", INPUTS,
          "--dump-dir", str(tmp_path / "dump"), "--check", "2")  # fmt: skip
    dumped = sorted(p.name.split("-")[1].split(".")[0] for p in (tmp_path / "dump").iterdir())
    upto = [s.name for s in STAGES[: [s.name for s in STAGES].index("cubin") + 1]]
    assert dumped == sorted(upto)
    (cubin,) = (tmp_path / "out").iterdir()
    assert cubin.name == "doc_prefix.prep.cubin"
    assert cubin.read_bytes()[:4] == b"\x7fELF"


def test_times_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", DOC_PREFIX, "--emit", "intervals", "--time"]) == 0
    assert "intervals" in capsys.readouterr().err


def test_a_bundle_names_all_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "compile", DOC_PREFIX, "--kernel", "prep", "-o", str(tmp_path))
    assert out.splitlines()[0].startswith("prep ")
    assert "0 bytes spilled" in out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["mask"] == "doc_prefix"
    assert [k["name"] for k in manifest["kernels"]] == ["prep"]
