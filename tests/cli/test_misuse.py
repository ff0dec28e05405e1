"""Whatever is typed, the answer is one coded error and a status: never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maskc.cli import COMMANDS, main
from maskc.command_line import build_parser

Run = Callable[..., tuple[int, str, str]]
Told = Callable[[str], str]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DOC_PREFIX = str(EXAMPLES / "doc_prefix.mask")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return run


@pytest.fixture
def told_of(run: Run, tmp_path: Path) -> Told:
    """What stderr says of a file of inputs with this text; the status is 2."""

    def told_of(text: str) -> str:
        path = tmp_path / "inputs.json"
        path.write_text(text)
        status, _, err = run("explain", DOC_PREFIX, "--inputs", str(path))
        assert status == 2
        return err

    return told_of


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("compil",), "M540"),
        (("transmogrify",), "M540"),
        (("explain", "std:"), "M009"),
        (("compile",), "M540"),
        (("compile", DOC_PREFIX, "--emit", "sas"), "M540"),
        (("compile", DOC_PREFIX, "--head-dim", "big"), "M540"),
        (("compile", DOC_PREFIX, "--kernel", "forward"), "M540"),
        (("compile", DOC_PREFIX, "--emit", "spec", "--head-dim", "96"), "M611"),
        (("compile", DOC_PREFIX, "--emit", "vectors"), "M544"),
        (("compile", DOC_PREFIX, "--emit", "tiles", "--block-q", "0"), "M540"),
        (("compile", "no_such.mask"), "M009"),
        (("compile", f"{DOC_PREFIX}:other"), "M124"),
        (("compile", "std:no_such"), "M009"),
        (("check", str(EXAMPLES)), "M009"),
        (("check", f"{DOC_PREFIX}:other"), "M124"),
        (("explain", "M999"), "M545"),
        (("explain", "M99"), "M545"),
        (("explain",), "M540"),
        (("explain", "--html", "x.html"), "M540"),
        (("explain", "M301", "--html", "x.html"), "M540"),
        (("explain", "M301", "--json"), "M540"),
        (("explain", "M301", "--inputs", "no_such.json"), "M540"),
        (("explain", DOC_PREFIX, "--gallery"), "M540"),
        (("explain", DOC_PREFIX, "--html", "x.html", "--json"), "M540"),
        (("explain", DOC_PREFIX, "--inputs", "no_such.json"), "M541"),
        (("explain", DOC_PREFIX, "--inputs", str(EXAMPLES)), "M541"),
        (("fmt", "no_such.mask"), "M541"),
        (("fmt", str(EXAMPLES)), "M541"),
        (("plan", DOC_PREFIX, "--inputs", str(EXAMPLES / "packed_8k.json"), "--world", "-1"), "M540"),
        pytest.param(
            ("bench", DOC_PREFIX, "--inputs", str(EXAMPLES / "doc_prefix_16.json"), "--device", "cuda"),
            "M540",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU"),
        ),
        (("cache", "burn"), "M540"),
    ],
)
def test_misuse_ends_with_status_2(run: Run, arguments: tuple[str, ...], code: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error[{code}]: ")


def test_nothing_at_all_shows_the_help(run: Run) -> None:
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "explain" in err


@pytest.mark.parametrize("text", [b"\xff\xfe\x00mask", b"\x00\x01\x02"])
def test_a_binary_file_is_not_a_mask(run: Run, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "binary.mask"
    path.write_bytes(text)
    status, _, err = run("check", str(path))
    assert status in (1, 2)
    assert err.startswith("error[M0")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"nq": 16,\n "nk": }', ":2:8"),
        ('{"nq": 16 "nk": 16}', ":1:11"),
        ("", ":1:1"),
    ],
)
def test_broken_json_is_shown_with_its_place(told_of: Told, text: str, place: str) -> None:
    err = told_of(text)
    assert err.startswith("error[M542]: not JSON")
    assert f"inputs.json{place}\n" in err


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "empty"),
        ([1], "object"),
        ({"rows": 3}, "'rows'"),
        ({"nq": -1, "inputs": {}}, "nq = -1"),
        ({"inputs": [1]}, "`inputs`"),
        ({"inputs": {"doc": {"segment": {}}, "prefix": [0]}}, "`doc`"),
        ({"inputs": {"doc": {"segments": {"lenghts": [1]}}, "prefix": [0]}}, "did you mean 'lengths'?"),
        ({"batch": 2, "inputs": {}}, "a batch is a list"),
        ([{"nq": 4, "inputs": {"doc": 1}}, {"nq": 5, "inputs": {"doc": 1}}], "one nq"),
        ([{"inputs": {"doc": 1}}, {"inputs": {"prefix": 1}}], "item 1"),
    ],
)
def test_json_of_another_shape(told_of: Told, data: object, says: str) -> None:
    err = told_of(json.dumps(data))
    assert err.startswith("error[M542]: ")
    assert says in err.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"nq": 4, "nk": 4, "nq": 5}', "'nq' is given twice"),
        ('{"inputs": {"doc": 1, "prefix": [1], "doc": 2}}', "'doc' is given twice"),
        ("[" * 100_000, "deeper than any input"),
    ],
)
def test_json_that_says_things_twice_or_without_end(told_of: Told, text: str, says: str) -> None:
    err = told_of(text)
    assert err.startswith("error[M542]: ")
    assert says in err.splitlines()[0]


def test_data_that_do_not_fit_are_the_data_s_fault(told_of: Told) -> None:
    err = told_of('{"nq": 4, "nk": 4, "inputs": {"doc": {"segments": {"lengths": [2, 9]}}, "prefix": [0, 0]}}')
    assert err.startswith("error[M4")
    assert "`doc`" in err


@pytest.mark.parametrize("name", ["MASKC_CHECK", "MASKC_TRACE"])
def test_environment_values_are_checked(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "loud")
    status, _, err = run("check", DOC_PREFIX)
    assert status == 2
    assert err.startswith("error[M543]: ")
    assert name in err


def test_an_internal_error_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskc.checking.check_targets", lambda _: 1 // 0)
    status, _, err = run("check", DOC_PREFIX)
    assert status == 70
    assert err.startswith("error[M599]: ")
    monkeypatch.setenv("MASKC_TRACE", "1")
    with pytest.raises(ZeroDivisionError):
        main(["check", DOC_PREFIX])


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m maskc compile {DOC_PREFIX} --kernel prep --emit cuda | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.stderr == ""


def test_a_command_that_is_not_there_is_guessed(run: Run) -> None:
    assert "did you mean `maskc compile`?" in run("compil")[2]
    assert "there are compile, check, " in run("transmogrify")[2]


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["help"], ["help", "diff"]):
        with pytest.raises(SystemExit) as left:
            main(line)
        assert left.value.code == 0
        assert capsys.readouterr().out.startswith(" ".join(["usage: maskc", *line[1:]]))


def test_every_argument_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, names = build_parser()
    assert {*names, None} == COMMANDS.keys()
    for name in names:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert "std:NAME" in out or name in ("fmt", "doctor", "cache")
        assert ("maskc explain M542" in out) == ("--inputs" in out)


def test_a_missing_input_is_told_in_the_words_of_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text('{"nq": 4, "nk": 4, "inputs": {}}')
    status, _, err = run("explain", DOC_PREFIX, "--inputs", str(path))
    assert status == 2
    assert err.startswith("error[M410]: input `doc`")
    assert '"lengths": [7, 5, 4]' in err
    assert "bind(" not in err


def child(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    start = f"import sys; {code}; from maskc.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(
        command, **{"stdout": subprocess.PIPE, "cwd": EXAMPLES.parent} | options, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("package", ["lark", "torch"])
def test_a_missing_package_is_not_a_fault_of_maskc(package: str) -> None:
    batch = str(EXAMPLES / "doc_prefix_16.json")
    done = child(f"sys.modules['{package}'] = None", "explain", DOC_PREFIX, "--inputs", batch)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error[M546]: this needs the package '{package}'")
    assert f"pip install {package}" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_not_a_fault_of_maskc() -> None:
    with open("/dev/full", "w") as full:
        done = child("pass", "check", DOC_PREFIX, stdout=full)
    assert (done.returncode, done.stderr) == (2, "error[M541]: cannot write the output: no space left on device\n")


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = child("pass", "check", DOC_PREFIX, stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_the_letter_shows_its_number(tmp_path: Path) -> None:
    (tmp_path / "maß.mask").write_text("mask a = k <= q")
    done = child(
        "pass", "check", "maß.mask", cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (0, "ma\\xdf.mask: a is proved (causal)\n")


def test_without_nvrtc_the_error_names_the_extra(tmp_path: Path) -> None:
    """In a process where the bindings cannot be imported."""
    code = "import sys; sys.modules['cuda.bindings'] = None; from maskc.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "compile", DOC_PREFIX, "--kernel", "prep", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("error[M601]: ")
    assert "maskc[cuda]" in done.stderr
