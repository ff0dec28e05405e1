"""Masks of other libraries -> `BoundMask`, and back: exact, or refused with the column that does not fit.

    spec = maskc.convert.from_flashmask(startend_row_indices, causal=True)   # maskc.run takes it
    flex = maskc.convert.to_block_mask(spec, query_heads=32)

| format | from | to |
|---|---|---|
| FlashAttention `cu_seqlens`, windows | `from_cu_seqlens` | `to_cu_seqlens` |
| FlashMask `startend_row_indices` | `from_flashmask` | `to_flashmask` |
| MagiAttention range slices | `from_magi` | `to_magi` |
| FlexAttention `mask_mod` | `from_mask_mod` | `to_mask_mod` |
| FlexAttention `BlockMask` | `from_block_mask` | `to_block_mask` |
| dense bool | `from_dense` | `to_dense` |

Functions load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maskc.convert.dense import from_dense, to_dense
    from maskc.convert.flashmask import FlashMask, from_flashmask, to_flashmask
    from maskc.convert.flex import from_block_mask, from_mask_mod, to_block_mask, to_mask_mod
    from maskc.convert.magi import MagiSlices, from_magi, to_magi
    from maskc.convert.varlen import Varlen, from_cu_seqlens, to_cu_seqlens

_HOMES = {
    "dense": ("from_dense", "to_dense"),
    "flashmask": ("FlashMask", "from_flashmask", "to_flashmask"),
    "flex": ("from_block_mask", "from_mask_mod", "to_block_mask", "to_mask_mod"),
    "magi": ("MagiSlices", "from_magi", "to_magi"),
    "varlen": ("Varlen", "from_cu_seqlens", "to_cu_seqlens"),
}

__all__ = [
    "FlashMask",
    "MagiSlices",
    "Varlen",
    "from_block_mask",
    "from_cu_seqlens",
    "from_dense",
    "from_flashmask",
    "from_magi",
    "from_mask_mod",
    "to_block_mask",
    "to_cu_seqlens",
    "to_dense",
    "to_flashmask",
    "to_magi",
    "to_mask_mod",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"maskc.convert.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'maskc.convert' has no attribute {name!r}")
