"""Every code block of README.md and docs/ is run; what they show is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from maskc.codes import errors_page
from tests.blocks import FENCE, ROOT, Folder, blocks

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_of(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = Folder(tmp_path / "page", update=request.config.getoption("--update-golden"))
    for block in blocks(page):
        folder.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of(page: Path) -> None:
    """Links between files of the repository lead somewhere."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_by(page: Path) -> None:
    """Files that a page names in `code` are there."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = re.findall(r"`((?:maskc|examples|docs|tests|benchmarks|templates|runtime)/[\w./]+\.\w+)`", prose)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_errors_page_is_current(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "errors.md"
    if request.config.getoption("--update-golden"):
        page.write_text(errors_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == errors_page(), "docs/errors.md is stale: pytest --update-golden"


def test_demo_prints_what_readme_shows(request: pytest.FixtureRequest) -> None:
    """Up to what differs from machine to machine and run to run: the numbers after "maskc.run on"."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    now = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    start, end = text.index("$ make demo\n") + len("$ make demo\n"), text.index("$ make test\n")
    if request.config.getoption("--update-golden"):
        page.write_text(text[:start] + now + text[end:], encoding="utf-8")
    else:
        assert _fixed(now) == _fixed(text[start:end]), "README's demo is stale: pytest --update-golden"


def _fixed(output: str) -> tuple[str, str]:
    told, _, measured = output.partition("maskc.run on ")
    return told, re.sub(r"[\d.]+(e-\d+)?", "N", re.sub("cuda|cpu|bfloat16|float32", "X", measured))
