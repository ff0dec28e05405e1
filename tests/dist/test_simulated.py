"""The one-device simulation that the GPU suite runs, here on the CPU, where it must agree to the last digits of fp64."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.special_context import MASKS, STRATEGIES, check, special_cases, unseen


@pytest.mark.parametrize("name", MASKS)
def test_ranks_in_turn(name: str) -> None:
    strategy, world = STRATEGIES[MASKS.index(name) % 3], (2, 4, 8)[MASKS.index(name) % 3]
    assert check(name, world, strategy, 300, "cpu", torch.float32) == ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_that_nobody_sees(strategy: str) -> None:
    assert unseen(strategy, "cpu", torch.float64) == ""


def test_every_case_has_its_own_name() -> None:
    names = [name for name, _ in special_cases()]
    assert len(names) == len(set(names)) == 3 * len(MASKS) + len(STRATEGIES)
