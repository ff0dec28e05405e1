"""A simple model of the machine, for choices and predictions: rates with their meaning, nothing measured at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from maskc.runtime.tile_work import TileCosts

FORWARD_FLOPS = 4
"""Per cell, head and head dimension: two products of two operations each."""
BACKWARD_FACTOR = 2.5
"""Backward over forward: five products instead of two."""
DIRECTIONS = 3
"""K, V forward; K, V again and dK, dV backward: a chunk crosses a link three times in a training step."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one GPU and its links. The defaults are round figures for an H200 with NVLink and one 400 Gbit/s port.

    flops: of the attention kernels. intra, inter: bytes/s into a rank inside its node, into a node. latency: seconds
    per exchange. heads, heads_kv, head_dim: assumed where the plan was not told.
    """

    flops: float = 600e12
    intra: float = 370e9
    inter: float = 50e9
    latency: float = 20e-6
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    itemsize: int = 2

    def compute_seconds(
        self, workload: float, costs: TileCosts, tile: tuple[int, int], heads: int | None, head_dim: int | None
    ) -> float:
        """Forward seconds for a workload in tile costs, every UNMASKED tile at full rate."""
        cells = workload / costs.unmasked * tile[0] * tile[1]
        return cells * (heads or self.heads) * (head_dim or self.head_dim) * FORWARD_FLOPS / self.flops

    def bytes_per_row(self, heads_kv: int, head_dim: int) -> int:
        """K and V of one row."""
        return 2 * heads_kv * head_dim * self.itemsize

    def apart(self, compute: float, rows: int, heads_kv: int | None, head_dim: int | None) -> float:
        """Seconds of a training step inside a node: forward seconds of attention, and keys of so many rows that come in.

        One after the other: keys twice, and their gradients, which have twice the bytes, go back.
        """
        moved = rows * self.bytes_per_row(heads_kv or self.heads_kv, head_dim or self.head_dim)
        return compute * (1 + BACKWARD_FACTOR) + 4 * moved / self.intra

    def step_cost(
        self, costs: TileCosts, tile: tuple[int, int], heads: int | None, heads_kv: int | None, head_dim: int | None
    ) -> Callable[[int, int], float]:
        """Seconds of a training step from (makespan, rows into the busiest node): compute or link, whichever takes longer."""
        hk, d = heads_kv or self.heads_kv, head_dim or self.head_dim

        def seconds(makespan: int, rows: int) -> float:
            compute = self.compute_seconds(makespan, costs, tile, heads, head_dim) * (1 + BACKWARD_FACTOR)
            return max(compute, rows * self.bytes_per_row(hk, d) * DIRECTIONS / self.inter + self.latency)

        return seconds


DEFAULT_MACHINE = Machine()
