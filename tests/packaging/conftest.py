"""A folder as a clean clone would make it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked(*under: str) -> list[str]:
    """Paths that git knows; also in a checkout that belongs to another user."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", *under]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file() | (ROOT / name).is_symlink()]


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracked files and links, nothing else."""
    folder = tmp_path_factory.mktemp("clone") / "maskc"
    for name in tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder
