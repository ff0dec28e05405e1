"""Why a mark of docs/performance.md is missed (`benchmarks.tables_marks`)."""

from __future__ import annotations

_POWER = (
    "power: at 690 W the clock is 1515 to 1560 MHz, and at that clock the forward does 88 % of what the tensor cores could; the"
    " backward moves more bytes of shared memory a product and stays below"
)
_BACKWARD = (
    "the backward, three quarters of the time, is level with theirs: traffic of shared memory bounds it, 76 to 78 % of the pipe"
    " by the counters; the forward is ahead by a tenth and more"
)
_ROUNDS = (
    "8 or 16 heads of 8K are 344 or 688 work items of 192 rows for 132 multiprocessors: 2.6 or 5.2 each, so the last round is"
    " half empty; a call takes 8 us before and after its tiles; rows that straddle documents are 51 to 84 PARTIAL tiles in one"
    " CTA. Rows cut into equal shares win where rows are long and lose where they are short ([measured](tuning.md#few-heads))"
)
_KERNELS = (
    "512 or 1024 key tiles for 132 multiprocessors, and a call is three kernels one after the other, 3 to 5 us between two of"
    " them: a tenth of a call of 0.15 ms"
)
_GLOBAL_ROW = (
    "the first Q block sees every KV block, 128 tiles one after the other in one CTA: 0.13 ms, while all work spread evenly would"
    " take 0.07 ms with 8 heads; rows cut over CTAs take 0.10 with 8 heads and 0.18 with 16 ([measured](tuning.md#few-heads))"
)
_GLOBAL_KEY = (
    "the tile of the global keys is seen by every row: 128 blocks one after the other in one CTA, 1.9 us each, 0.24 ms"
    " ([measured](tuning.md#backward))"
)

WHY = {
    "full": _POWER,
    "causal": _POWER,
    "prefix_lm_causal": _POWER,
    "qk_sparse": _POWER,
    **dict.fromkeys(
        ("causal_blockwise", "prefix_lm_document", "causal_document", "document", "global_sliding_window"), _BACKWARD
    ),
    "full, 128K, TFLOP/s forward / backward": _POWER,
    "causal, 128K, TFLOP/s forward / backward": _POWER,
    "forward": _ROUNDS,
    "backward": _KERNELS,
    **{f"global_sliding_window, forward, {n} heads": _GLOBAL_ROW for n in (8, 16)},
    **{f"global_sliding_window, backward, {n} heads": _GLOBAL_KEY for n in (8, 16)},
}
"""By the name of a mark or mask; of kernels with few heads by cell, or by direction for all others."""
