"""`maskc plan` as somebody who has not read the documentation uses it: what is wrong is named, and nothing is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maskc.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
DOC_PREFIX, PACKED = str(EXAMPLES / "doc_prefix.mask"), str(EXAMPLES / "packed_8k.json")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(["plan", *arguments])
    except SystemExit as e:
        status = int(e.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), "M540", "--inputs, --world"),
        (("--world", "four"), "M540", "'four' is not a positive number"),
        (("--world", "6", "--nodes", "4"), "M716", "6 ranks do not stand in 4 nodes"),
        (("--world", "5000"), "M701", "at most 4096 ranks"),
        (("--world", "4", "--chunk", "1"), "M714", "choose a larger chunk"),
        (("--world", "4", "--order", "fastest"), "M713", "one of contiguous, zigzag, zigzag-document, balanced"),
        (("--world", "2", "--assign", "0,x,1"), "M540", "such as 0,1,1,0"),
        (("--world", "2", "--assign", "0,1,1,5"), "M702", "ranks 0 to 1"),
        (("--world", "2", "--assign", "0,1", "--chunk", "64"), "M702", "assign has 2 owners"),
        (("--world", "2", "--assign", "0,1", "--order", "zigzag"), "M702", "give one of them"),
        (("--world", "2", "--order", "contiguous", "--epsilon", "0.02"), "M717", "order contiguous leaves no chunk to swap"),
        (("--world", "2", "--epsilon", "-1"), "M717", "0.02 means 2 %"),
        (("--world", "2", "--documents", "page"), "M712", "`page`"),
        (("--world", "2", "--head-dim", "0"), "M540", "'0' is not a positive number"),
        (("--world", "2", "--emit", "picture"), "M540", "choose from"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], code: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ("--inputs", PACKED) if arguments else ()
    status, out, err = plan(capsys, DOC_PREFIX, *inputs, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error[{code}]: ")
    assert words in err


@pytest.mark.parametrize(
    ("text", "order", "code", "words"),
    [
        ("{", "balanced", "M542", "not JSON"),
        ("{}", "balanced", "M711", "in a JSON file of inputs it is the key nq"),
        ('{"nq": "64", "nk": 64}', "balanced", "M542", 'nq = "64" is not a size'),
        ('{"nq": 64, "nk": 64, "doc": [64]}', "balanced", "M542", "unknown key 'doc'"),
        ('{"nq": 64, "nk": 64}', "zigzag-document", "M712", "these masks have none"),
    ],
)
def test_what_is_wrong_with_the_data_is_named(
    text: str, order: str, code: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(text)
    status, out, err = plan(capsys, "std:causal", "--inputs", str(path), "--world", "2", "--order", order)
    assert (status, out) == (2, "")
    assert err.startswith(f"error[{code}]: ")
    assert words in err


def test_every_option_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps({"nq": 16, "nk": 16}))
    given = ("std:causal", "--inputs", str(path), "--world", "2", "--chunk", "4")
    first = {
        order: plan(capsys, *given, "--emit", "local-vectors", "--order", order)[1].splitlines()[0]
        for order in ("contiguous", "zigzag")
    }
    assert first["contiguous"] == "rank 0: rows 0-7 are local rows 0-7"
    assert first["zigzag"] == "rank 0: rows 0-3 12-15 are local rows 0-7"
    _, text, _ = plan(capsys, *given, "--order", "zigzag", "--heads", "4", "--heads-kv", "2", "--head-dim", "64")
    assert "4 query heads, 2 key heads, head dim 64" in text
    assert "K and V sent forward" in text
    row = 2 * 2 * 64 * 2
    assert f"{8 * row / 1024:.1f} KiB" in text  # rank 0 needs rows 4 to 11
