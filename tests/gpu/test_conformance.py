"""pytest -m gpu: the conformance suite. `python -m tests.gpu` prints and records more."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import FACTORS, all_cases


def test_the_cover_is_pairwise_and_of_the_promised_size() -> None:
    cases = all_cases()
    assert 300 <= len(cases) <= 640
    assert {c.mask for c in cases} == set(FACTORS["mask"])
    assert {(c.mask, c.head_dim) for c in cases} == {(m, d) for m in FACTORS["mask"] for d in FACTORS["head_dim"]}
    assert len({c.name + str(c.seed) for c in cases}) == len(cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a Hopper GPU")
def test_conformance(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path / "gpu.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
