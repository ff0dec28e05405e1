"""`maskc doctor`, `cache` and `fmt`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from maskc.cli import main
from maskc.diagnostics import error
from maskc.doctor import examine
from maskc.options import Options, default_cache_dir

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBES = ["maskc", "torch", "bindings", "NVRTC", "nvdisasm", "driver", "GPU", "cache", "settings", "backend", "next"]


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == PROBES
    assert not [line for line in lines if "not usable" in line]


def test_doctor_survives_whatever_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "maskc.codegen.disasm", "maskc.runtime.driver_api"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == PROBES
    assert [line.split()[0] for line in lines if "not usable" in line] == ["torch", "nvdisasm", "driver", "GPU", "backend"]
    assert lines[-1].split(maxsplit=1)[1].startswith("pip install torch: ")


@pytest.mark.parametrize(
    ("torch_there", "cuda", "driver", "compiler", "says"),
    [
        (False, None, None, False, "pip install torch"),
        (True, None, None, True, "`maskc compile FILE -o DIR` makes kernels here"),
        (True, None, None, False, "`maskc fuzz std:doc_prefix` tries it"),
        (True, None, (13, 0), True, "this torch is built without CUDA"),
        (True, "13.0", (13, 0), True, "torch cannot use it"),
    ],
)
def test_doctor_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch,
    torch_there: bool,
    cuda: str | None,
    driver: tuple[int, int] | None,
    compiler: bool,
    says: str,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if torch_there else None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("maskc.runtime.driver_api.driver_version", lambda: driver)
    monkeypatch.setattr("maskc.codegen.nvrtc.missing", lambda: None if compiler else error("M601", "no NVRTC"))
    *_, last = examine(Options(default_cache_dir()))
    assert last.startswith("next ")
    assert says in last


def test_doctor_says_that_the_cache_is_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MASKC_CACHE_DIR", str(tmp_path / "file"))
    assert main(["doctor"]) == 0
    assert "NOT a folder" in capsys.readouterr().out


def test_doctor_says_that_a_compiler_is_too_new(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("maskc.codegen.nvrtc")
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5.37")
    assert main(["doctor"]) == 0
    assert '13.5.37, TOO NEW: some kernels come out slow (W613): pip install "nvidia-cuda-nvrtc<13.3"' in capsys.readouterr().out


def test_doctor_shows_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASKC_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("MASKC_CHECK", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'here'}: 0 entries" in out
    assert "MASKC_CHECK=1" in out


def test_cache_is_counted_and_cleared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASKC_CACHE_DIR", str(tmp_path))
    causal = str(EXAMPLES / "causal.mask")
    assert main(["compile", causal, "--kernel", "prep"]) == 0
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 1 entry, ")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"1 entry deleted from {tmp_path}\n"
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 0 entries, ")


def test_fmt_rewrites_and_then_has_nothing_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ugly.mask"
    path.write_text("input   doc:segments\nmask m=same( doc )and k<=q   # the usual\n")
    assert main(["fmt", "--check", str(path)]) == 1
    assert capsys.readouterr().out == f"would reformat {path}\n"
    assert main(["fmt", str(path)]) == 0
    assert capsys.readouterr().out == f"reformatted {path}\n"
    assert "# the usual" in path.read_text()
    assert main(["fmt", "--check", str(path)]) == 0


def test_examples_are_formatted() -> None:
    assert main(["fmt", "--check", *map(str, EXAMPLES.glob("*.mask"))]) == 0
