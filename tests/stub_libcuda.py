"""A libcuda of the tests' own, which writes down what it is asked, in the place of the driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def built(source: Path, folder: Path) -> Path:
    """The folder of libcuda.so.1 made of `source`; skips where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NO C++ COMPILER: what the driver is asked is not checked here")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", source, "-ldl"], check=True)
    return folder


def told_by(module: str, folder: Path) -> Any:
    """What a module prints as JSON, in a process of its own whose driver is in `folder`."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "STUB_DRIVER_LOG": str(folder / "log")}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
