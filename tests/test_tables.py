"""Figures in the documentation are those of benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import tables

RECORDS = sorted(tables.RESULTS.glob("*.json"))


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: p.name)
def test_figures_of(page: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        page.write_text(tables.fill(text), encoding="utf-8")
    else:
        assert tables.fill(text) == text, f"{page.name} shows other figures: python -m benchmarks.tables"


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: p.name)
def test_every_mark_is_a_place(page: Path) -> None:
    """A misspelt or unclosed mark would stay as it is for ever."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"<!--.*?-->", tables.PLACE.sub("", text))


def test_filling_replaces_what_stood_between_the_marks() -> None:
    line = tables.fill("a <!--passed-->9 of 9<!--/--> b")
    assert line == f"a <!--passed-->{tables.passed()}<!--/--> b"
    assert tables.fill(line) == line
    lines = tables.fill("<!--conformance-->\nold\n<!--/-->\n")
    assert "old" not in lines
    assert lines.count("\n| ") == tables.conformance().count("\n| ") + 1
    assert tables.fill(lines) == lines


def test_what_is_told_of_the_records_is_so() -> None:
    """The words beside the figures: kernels and conformance of one digest, and the three failures that are explained."""
    attention, tests = tables.results("attention"), tables.results("gpu_tests")
    assert attention["digest"] == tests["digest"]
    failed = {c["name"] for c in tests["cases"] if c["problem"]}
    assert len(failed) == tests["failed"]
    text = (tables.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    explained = {"special/bind/lengths", "special/bind/positions", "special/memory/compute-sanitizer"}
    assert failed in (set(), explained) or "Neither changed case" not in text


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.name)
def test_records_are_plain_numbers(record: Path) -> None:
    """Every row of a record has positive times and rates."""
    rows = json.loads(record.read_text(encoding="utf-8")).get("rows", [])
    for row in rows:
        for name, value in row.items():
            if re.fullmatch(r"(fwd|bwd|both|forward|backward)_(ms|tflops|ms_max)", name):
                assert value > 0, f"{record.name}: {row}"
