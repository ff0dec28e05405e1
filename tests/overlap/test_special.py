"""The GPU cases of overlapped attention, their own logic run on host queues."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maskc.runtime.transport import HostQueues, Loopback
from tests.gpu import special_overlap


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def loopback(*args: Any, **named: Any) -> Loopback:
        return Loopback(*args, pinned=False, **named)

    monkeypatch.setattr(special_overlap, "DEVICE", "cpu")
    monkeypatch.setattr(special_overlap, "CudaQueues", lambda device: HostQueues())
    monkeypatch.setattr(special_overlap, "Loopback", loopback)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("name", special_overlap.MASKS)
def test_bits(host: None, name: str) -> None:
    assert special_overlap.bits(name, 2, 16, 32, 1, 200) == ""


def test_differences_are_told(host: None) -> None:
    one = torch.zeros(2), torch.zeros(2)
    assert special_overlap.different(one, (torch.ones(2), torch.zeros(2))).startswith("not the same bits")
    bad = torch.tensor([float("nan")]), torch.zeros(1)
    assert special_overlap.different(bad, bad)


def test_names_are_unique() -> None:
    names = [name for name, _ in special_overlap.special_cases()]
    assert len(set(names)) == len(names)
