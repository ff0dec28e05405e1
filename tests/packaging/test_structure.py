"""What a clean clone holds, and that nothing reaches the package by its root links."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import maskc

ROOT = Path(__file__).parents[2]
PARTS = (
    "pyproject.toml",
    "maskc",
    "maskc/frontend",
    "maskc/ir",
    "maskc/codegen",
    "templates",
    "runtime",
    "tests",
    "examples",
    "README.md",
    "LICENSE",
    "Makefile",
    ".ci/run",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_clean_clone_holds(clone: Path, part: str) -> None:
    assert (clone / part).exists(), f"{part} is missing or a link that leads nowhere"


def test_root_links_lead_into_the_package(clone: Path) -> None:
    for name in ("runtime", "templates"):
        assert (clone / name).resolve() == (clone / "maskc" / name).resolve()
    assert (clone / "templates" / "prep.cu.j2").is_file()
    assert (clone / "runtime" / "__init__.py").is_file()


def test_ci_runs_the_tests(clone: Path) -> None:
    assert (clone / ".ci/run").stat().st_mode & 0o111
    assert "make test" in (clone / ".ci/run").read_text()


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == maskc.__version__
    assert f"## {maskc.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_no_module_is_reached_by_a_root_link() -> None:
    for path in (ROOT / "maskc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not {m.split(".")[0] for m in modules} & {"runtime", "templates"}, f"{path} imports past the package"


def test_runtime_refuses_to_be_imported_by_the_root_link() -> None:
    done = subprocess.run([sys.executable, "-c", "import runtime"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError" in done.stderr


def test_import_maskc_is_light() -> None:
    """No package but the standard library comes in with `import maskc`, nor with the command line's help."""
    heavy = ("torch", "numpy", "sympy", "lark", "jinja2", "cuda")
    code = f"import sys, maskc, maskc.cli\nmaskc.cli.parse([])\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    """No module or template grows beyond 500 lines."""
    files = [p for pattern in ("*.py", "*.j2", "*.cuh") for p in (ROOT / "maskc").rglob(pattern)]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 500}
    assert not long
