"""Tests and cases that the documentation names are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_named_by(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file} has no {name}"


def test_cases_named_by_the_page_of_faults() -> None:
    known = {case["id"] for case in json.loads((ROOT / "tests" / "data" / "mask_cases.json").read_text(encoding="utf-8"))}
    named = set(re.findall(r"\bR\d\d\b", (ROOT / "docs" / "elsewhere.md").read_text(encoding="utf-8")))
    assert named
    assert named <= known
