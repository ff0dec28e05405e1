"""The GPU cases of overlapped attention, their own logic run on host queues."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maskc.runtime.transport import HostQueues, Loopback
from tests.gpu import overlap_pairing, overlap_random, special_overlap


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = overlap_pairing.Near

    def near(*args: Any, **named: Any) -> Loopback:
        return pinned(*args, pinned=False, **named)

    monkeypatch.setattr(overlap_pairing, "DEVICE", "cpu")
    monkeypatch.setattr(overlap_pairing, "CudaQueues", lambda device: HostQueues(5.0))
    monkeypatch.setattr(overlap_pairing, "Near", near)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("name", overlap_pairing.MASKS)
def test_bits(host: None, name: str) -> None:
    assert special_overlap.bits(name, 2, 16, 32, 1, 200) == ""


def test_random_calls(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_random, "LENGTHS", (200, 256))
    monkeypatch.setattr(overlap_random, "CHUNKS", (32, 48))
    monkeypatch.setattr(overlap_random, "IN_A_ROW", 3)
    assert overlap_random.random_calls(7, 1) == (7, "")


def test_keys_that_are_not_awaited_are_told(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is NaN before each call, so a call that skipped its copies cannot pass."""
    monkeypatch.setattr(overlap_random, "LENGTHS", (200,))
    monkeypatch.setattr(overlap_random, "CHUNKS", (32,))
    monkeypatch.setattr(overlap_random, "MASKS", ("01_full",))
    monkeypatch.setattr(Loopback, "pull", lambda *args: None)
    assert overlap_random.random_calls(1, 1) == (0, "call 0: not the same bits: out differs by nan")


def test_differences_are_told(host: None) -> None:
    one = torch.zeros(2), torch.zeros(2)
    assert overlap_pairing.different(one, (torch.ones(2), torch.zeros(2))).startswith("not the same bits")
    bad = torch.tensor([float("nan")]), torch.zeros(1)
    assert overlap_pairing.different(bad, bad)


def test_names_are_unique() -> None:
    names = [name for name, _ in special_overlap.special_cases()]
    assert len(set(names)) == len(names)
