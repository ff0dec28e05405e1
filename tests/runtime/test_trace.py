"""Decoding of forward traces from events as the kernel writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maskc.codegen.spec import STATES
from maskc.runtime import trace

START = (1 << 32) + 5_000_000_000  # a global timer beyond 32 bits


def line(events: list[tuple[int, str, int]], size: int = 8, clock: int = 1000) -> list[list[int]]:
    words = [[clock, START], *([c, STATES.index(state) << 32 | argument] for c, state, argument in events)]
    return words + [[0, 0]] * (size - len(words))


def lines() -> torch.Tensor:
    """One CTA, two cycles a nanosecond; the second role never came to its end."""
    end = (START + 1000) & 0xFFFFFFFF
    whole = line([(1100, "slot", 0), (1300, "index", 7), (2000, "slot", 0), (3000, "end", end)])
    cut = line([(1100, "queue", 0), (1200, "issue", 3)])
    consumer = line([(1000, "tile", 1), (1500, "softmax", 1), (3000, "end", end)])
    return torch.tensor([[whole, cut, consumer]])


def test_intervals() -> None:
    found = list(trace.intervals(lines()))
    assert [(i.role, i.state, i.at) for i in found] == [
        (0, "slot", 0),
        (0, "index", 7),
        (0, "slot", 0),
        (2, "tile", 1),
        (2, "softmax", 1),
    ]
    assert [i.length for i in found] == [100, 350, 500, 250, 750]
    assert found[0].start == START + 50


def test_shares() -> None:
    found = trace.shares(lines())
    assert found["MMA Consumer"] == {"softmax": 0.75, "tile": 0.25}
    assert found["KV Index Generator"]["slot"] == pytest.approx(600 / 950)
    assert "KV Loader" not in found, "a line without an end is left out"


def test_chrome_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.write_chrome(lines(), path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 5
    assert min(e["ts"] for e in spans) == 0
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"KV Index Generator", "MMA Consumer 0"}
