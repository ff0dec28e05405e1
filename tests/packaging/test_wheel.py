"""The built wheel and sdist hold everything, and the wheel works from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

DATA = (
    "maskc/py.typed",
    "maskc/frontend/mask.lark",
    "maskc/report/assets/core.js",
    "maskc/report/page.html.j2",
    "maskc/std/causal.mask",
    "maskc/templates/prep.cu.j2",
    "maskc/templates/device/mbarrier.cuh",
)


@pytest.fixture(scope="module")
def dist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.fixture(scope="module")
def names(dist: Path) -> dict[str, list[str]]:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as z, tarfile.open(sdist) as t:
        return {"wheel": z.namelist(), "sdist": [n.partition("/")[2] for n in t.getnames()]}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_holds_the_data_files(names: dict[str, list[str]], kind: str) -> None:
    assert not [n for n in DATA if n not in names[kind]]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_holds_each_file_of_the_package_once(clone: Path, names: dict[str, list[str]], kind: str) -> None:
    packed = sorted(n for n in names[kind] if n.startswith("maskc/") and not n.endswith("/") and "." in Path(n).name)
    assert packed == sorted(str(p.relative_to(clone)) for p in (clone / "maskc").rglob("*") if p.is_file())


def test_wheel_has_no_root_links(names: dict[str, list[str]]) -> None:
    assert not [n for n in names["wheel"] if n.startswith(("runtime", "templates", "tests", "examples"))]


PROGRAM = """
import torch, maskc
assert "site" in maskc.__file__, maskc.__file__
mask = maskc.compile("std:doc_causal")
spec = mask.bind(doc=maskc.segments(lengths=[5, 3]))
q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
maskc.run(spec, q, k, v).sum().backward()
assert all(t.grad.isfinite().all() for t in (q, k, v))
"""


def test_wheel_works_from_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    """Import, prove, bind, run, and render and compile a kernel, with no source tree in sight."""
    (wheel,) = dist.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True, capture_output=True)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=empty, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-c", PROGRAM)
    assert "doc_causal" in run("-m", "maskc", "check", "std:doc_causal")
    run("-m", "maskc", "compile", "std:doc_causal", "--kernel", "prep", "-o", "out")
    assert {"manifest.json"} < {p.name for p in (empty / "out").iterdir()}
    shutil.rmtree(empty / "out")
