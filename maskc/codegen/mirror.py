"""The KV index in plain Python: the same classes, tags and order as templates/device/kv_index.cuh.j2, one step a line.

Tests compare it with brute force on the dense mask, and the queues that a debug kernel records with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maskc.codegen.spec import CAUSAL, DIAG, LTE, LTS, SKIP, TAIL, UNSEEN, UTE, UTS, KernelSpec

_BEYOND = 1 << 31


@dataclass(frozen=True)
class Columns:
    """One mask of a batch: vectors by name (each of `cols` ints), and the block table's entries as [Q tile][KV tile]."""

    rows: int
    cols: int
    vectors: dict[str, Sequence[int]]
    keep: Sequence[Sequence[bool]] | None = None

    def range_of(self, name: str, first: int, last: int) -> tuple[int, int]:
        """(min, max) of a vector over keys [first, last); what an absent one reads as."""
        vector = self.vectors.get(name)
        if vector is None:
            absent = {"lts": _BEYOND, "lte": self.rows, "uts": 0, "ute": 0, "diag": 0}[name]
            return absent, absent
        return min(vector[first:last]), max(vector[first:last])


def first_kept_row(row: int, causal_below: int, low: tuple[int, int], high: tuple[int, int], diag: int) -> int:
    """The first row from `row` on outside [0, causal_below), [0, diag) and the two ranges."""
    for _ in range(4):
        row = max(row, causal_below, diag)
        for start, end in (low, high):
            if start <= row < end:
                row = end
    return row


def is_unseen(spec: KernelSpec, m: Columns, key: int) -> bool:
    """Whether no row sees this key, block table included."""
    at = {name: m.range_of(name, key, key + 1)[0] for name in ("lts", "lte", "uts", "ute", "diag")}
    low, high = (at["lts"], at["lte"]), (at["uts"], at["ute"])
    causal = key if spec.form.causal else 0

    def sees(start: int, end: int) -> bool:
        return first_kept_row(start, causal, low, high, at["diag"]) < end

    if m.keep is None:
        return not sees(0, m.rows)
    tiles = range(len(m.keep))
    step = spec.block_q
    return not any(m.keep[i][key // spec.block_kv] and sees(i * step, min((i + 1) * step, m.rows)) for i in tiles)


def classify(spec: KernelSpec, m: Columns, q_block: int, block: int) -> int:
    """Tag of a tile: SKIP, 0 (UNMASKED), or the tests that its elements need."""
    row0, col0 = q_block * spec.block_q, block * spec.block_kv
    row1, col1 = min(row0 + spec.block_q, m.rows), min(col0 + spec.block_kv, m.cols)
    (lts0, lts1), (lte0, lte1) = m.range_of("lts", col0, col1), m.range_of("lte", col0, col1)
    (uts0, uts1), (ute0, ute1) = m.range_of("uts", col0, col1), m.range_of("ute", col0, col1)
    diag0, diag1 = m.range_of("diag", col0, col1)
    causal = col0 if spec.form.causal else 0
    if first_kept_row(row0, causal, (lts1, lte0), (uts1, ute0), diag0) >= row1:
        return SKIP
    if m.keep is not None and not m.keep[q_block][block]:
        return SKIP
    tag = TAIL if col1 - col0 < spec.block_kv else 0
    if spec.form.causal and row0 < col1 - 1:
        tag |= CAUSAL
    if row0 < lte1 and row1 > lts0 and lts0 < lte1:
        tag |= (LTS if row0 < lts1 else 0) | (LTE if row1 > lte0 else 0)
    if row0 < ute1 and row1 > uts0 and uts0 < ute1:
        tag |= (UTS if row0 < uts1 else 0) | (UTE if row1 > ute0 else 0)
    if row0 < diag1:
        tag |= DIAG
    if tag and spec.zero_unseen and any(is_unseen(spec, m, key) for key in range(col0, col1)):
        tag |= UNSEEN
    return tag


def queue(spec: KernelSpec, m: Columns, q_block: int) -> list[tuple[int, int]]:
    """(KV block, tag) of every tile of a Q block that is not SKIP, right to left: what the loader consumes."""
    tagged = ((block, classify(spec, m, q_block, block)) for block in reversed(range(-(-m.cols // spec.block_kv))))
    return [(block, tag) for block, tag in tagged if tag != SKIP]
