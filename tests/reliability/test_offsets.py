"""Numbers beyond 32 bits: cells, bytes, and places in memory. On a GPU: case "size/offsets beyond 2^31" of tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import maskc
from benchmarks.records import results
from maskc.pictures import visible_pairs
from tests.runtime.test_driver_api import calls, stub_library

__all__ = ["stub_library"]  # a fixture

ROWS, HEADS, DIM = 34, 2, 16
STRIDE = 2**26  # elements from row to row: the last row begins beyond 2^31 elements


def test_cells_are_counted_exactly() -> None:
    n = 131_072
    assert visible_pairs(maskc.compile("std:full").bind(nq=n, nk=n).vectors()) == n * n
    assert visible_pairs(maskc.compile("std:causal").bind(nq=n, nk=n).vectors()) == n * (n + 1) // 2
    million = maskc.compile("std:causal").bind(nq=2**20, nk=2**20).vectors()
    assert visible_pairs(million) == 2**20 * (2**20 + 1) // 2


def test_a_plan_counts_bytes_exactly() -> None:
    """Two ranks of a full mask swap halves: K and V of 65536 rows, 64 heads of 256 numbers of two bytes, both ways."""
    n = 131_072
    spec = maskc.compile("std:full").bind(nq=n, nk=n)
    plan = maskc.plan(spec, world_size=2, heads_kv=64, head_dim=256, order="contiguous")
    assert sum(map(sum, plan.traffic("all-gather"))) == 2 * (n // 2) * 64 * 256 * 2 * 2 > 2**32


@pytest.fixture
def spread(tmp_path: Path) -> torch.Tensor:
    """fp16 [1, ROWS, HEADS, DIM] in a file with holes; its last elements lie beyond 2^31 elements and 2^32 bytes."""
    size = ROWS * STRIDE
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(2 * size)
    memory = torch.from_file(str(tmp_path / "holes"), shared=True, size=size, dtype=torch.float16)
    return memory.as_strided((1, ROWS, HEADS, DIM), (size, STRIDE, DIM, 1))


def test_operands_may_span_more_than_32_bits(spread: torch.Tensor) -> None:
    torch.manual_seed(0)
    dense = torch.randn(1, ROWS, HEADS, DIM).half()
    spread.copy_(dense)
    assert (ROWS - 1) * STRIDE > 2**31
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[20, 14]))
    out = maskc.run(spec, spread, spread, spread)
    assert torch.equal(out, maskc.run(spec, dense, dense, dense))


def test_tensor_maps_hold_strides_beyond_32_bits(stub_library: Path, tmp_path: Path) -> None:
    row, batch = 2**33, 2**38  # bytes
    code = f"d.tensor_map(4096, torch.bfloat16, (128, 100, 4, 2), (1, {row // 2}, 128, {batch // 2}), (64, 128, 1, 1))"
    assert any(f"| 100 {row} 128 1 |" in line and f"| 2 {batch} 1 1" in line for line in calls(stub_library, tmp_path, code))


def test_the_case_on_a_gpu_is_recorded() -> None:
    (case,) = (c for c in results("gpu_tests")["cases"] if c["name"] == "special/size/offsets beyond 2^31")
    assert case["problem"] == ""
