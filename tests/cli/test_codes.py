"""Every code that the sources raise is explained, once, and every explanation is of a code that they raise."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from maskc.cli import main
from maskc.codes import FAMILIES, TABLES, all_codes

PACKAGE = Path(__file__).parents[2] / "maskc"
LITERAL = re.compile(r"""["']([MW]\d{3})\b""")


def raised() -> dict[str, str]:
    """Code -> a module that mentions it, tables of codes aside."""
    entry = re.compile(r'^    "[MW]\d{3}": .*?""",$|^    "[MW]\d{3}": \(.*?^    \),$', re.MULTILINE | re.DOTALL)
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = entry.sub("", path.read_text()) if path.name == "codes.py" else path.read_text()
        found.update(dict.fromkeys(LITERAL.findall(text), str(path.relative_to(PACKAGE))))
    return found


def test_every_code_that_is_raised_is_explained() -> None:
    missing = {code: path for code, path in raised().items() if code not in all_codes()}
    assert not missing


def test_every_explained_code_is_raised() -> None:
    assert sorted(set(all_codes()) - set(raised())) == []


def test_every_code_is_provoked_by_a_test() -> None:
    tests = Path(__file__).parents[1]
    named = {code for path in tests.rglob("*.py") for code in re.findall(r"\b[MW]\d{3}\b", path.read_text())}
    assert sorted(set(all_codes()) - named) == []


def test_no_two_tables_explain_one_code() -> None:
    seen: dict[str, str] = {}
    for name in TABLES:
        for code in importlib.import_module(name).CODES:
            assert code not in seen, f"{code} stands in {seen[code]} and in {name}"
            seen[code] = name


@pytest.mark.parametrize("code", sorted(all_codes()))
def test_explanation_of(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code.lower()]) == 0
    title, _, body = capsys.readouterr().out.partition("\n")
    assert title.startswith(f"{code}: ")
    assert len(body.strip()) > 20
    assert any(code.startswith(prefix) for prefix, _ in FAMILIES)
