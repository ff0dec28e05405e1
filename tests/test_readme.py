"""Every code block of README.md and docs/ is run; what they show is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maskc.codes import errors_page
from tests.blocks import ROOT, Folder, blocks

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


def test_errors_page_is_current(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "errors.md"
    if request.config.getoption("--update-golden"):
        page.write_text(errors_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == errors_page(), "docs/errors.md is stale: pytest --update-golden"
