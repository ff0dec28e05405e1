"""What strategy="auto" takes, and the reason it gives."""

from __future__ import annotations

import pytest

from maskc.boundary import BoundaryVectors
from maskc.runtime.context_parallel import _choose
from maskc.runtime.plan import plan

CAUSAL = BoundaryVectors(65_536, 65_536, 1, 1, True)


@pytest.mark.parametrize(
    ("device", "row_bytes", "row_elements", "switches", "strategy", "reason"),
    [
        ("cpu", 512, 4096, {}, "all-gather", "nothing is gained by stages"),
        ("cuda", 512, 64 * 128, {"nodes": 8}, "all-gather", "one local call is faster"),
        ("cuda", 512, 64 * 128, {}, "all-gather", "one local call is faster"),
        ("cuda", 8192, 64 * 128, {}, "gated", "% of the compute time"),
        ("cuda", 16_384, 32 * 128, {}, "gated", "copy engines hide it"),
        ("cuda", 16_384, 32 * 128, {"overlap": False}, "all-gather", "overlap is off"),
        ("cuda", 16_384, 32 * 128, {"nodes": 4}, "staged", "stages hide it"),
        ("cuda", 16_384, 32 * 128, {"nodes": 4, "overlap": False}, "all-gather", "overlap is off"),
        ("cuda", 65_536, 32 * 128, {}, "ring", "would take 4096 MiB on a rank"),
        ("cpu", 65_536, 32 * 128, {}, "ring", "would take 4096 MiB on a rank"),
    ],
)
def test_auto(device: str, row_bytes: int, row_elements: int, switches: dict, strategy: str, reason: str) -> None:
    choice = _choose(plan(CAUSAL, world_size=8, **switches), 0, row_bytes, row_elements, device, True)
    assert choice.strategy == strategy
    assert reason in choice.reason


def test_auto_where_memory_is_not_shared() -> None:
    choice = _choose(plan(CAUSAL, world_size=8), 0, 16_384, 32 * 128, "cuda", False)
    assert choice.strategy in ("staged", "all-gather")
