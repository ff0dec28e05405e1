"""What is written as a test is run as one."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    """pytest leaves out folders called `dist` or `build` unless it is told otherwise, and says nothing."""
    left_out = request.config.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parent.parts}
    assert "dist" in folders
    assert not [f for f in folders if any(fnmatch(f, pattern) for pattern in left_out)]
