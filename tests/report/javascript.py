"""Run the page's own logic with Node, beside the library."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from maskc.report.page import LOGIC, asset

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed; `make browser` covers the same")


def evaluate(body: str, data: object) -> Any:
    """The value of a function body of `data`, with the functions of the page's logic in reach."""
    script = "\n".join([*map(asset, LOGIC), 'const data = JSON.parse(require("fs").readFileSync(0, "utf8"));'])
    script += f"\nprocess.stdout.write(JSON.stringify((() => {{ {body} }})()));"
    done = subprocess.run(["node", "-e", script], input=json.dumps(data), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
