"""Options and fixtures that every folder of tests shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, a process for every core


# one seed for everybody, so that a red run is red again; `make fuzz` draws anew. Never a deadline: machines differ.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what the code gives now")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels compiled by tests are shared between the workers of one run, and never with the user's own."""
    if "MASKC_CACHE_DIR" not in os.environ:
        root = tmp_path_factory.getbasetemp()
        os.environ["MASKC_CACHE_DIR"] = str((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "maskc-cache")
    for name in ("MASKC_DUMP_DIR", "MASKC_CHECK", "MASKC_TRACE"):
        os.environ.pop(name, None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; `pytest --update-golden` writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {name}; make it with: pytest --update-golden, then read it"
        assert text == path.read_text(encoding="utf-8"), f"{name} has changed; if it should: pytest --update-golden"

    return compare
