"""Why a mark of docs/performance.md is missed, by mask or by the mark's name (`benchmarks.tables_marks`)."""

from __future__ import annotations

_POWER = (
    "power: at 690 W the clock is 1515 to 1560 MHz and the kernel does 78 % of what the tensor cores could at that clock;"
    " what is left is energy per tile, and no skipped tile gives any back"
)
WHY = {
    "full": _POWER,
    "causal": _POWER,
    "prefix_lm_causal": _POWER,
    "full, 128K, TFLOP/s forward / backward": _POWER,
    "causal, 128K, TFLOP/s forward / backward": _POWER,
}
