"""The KV index in plain Python: the same classes, tags and order as templates/device/kv_index.cuh.j2, one step a line.

Tests compare it with brute force on the dense mask, and the queues that a debug kernel records with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from maskc.codegen.spec import CAUSAL, DIAG, HIDDEN, LTE, LTS, SKIP, TAIL, UNSEEN, UTE, UTS, VECTORS, KernelSpec

_BEYOND = 1 << 31
Range = tuple[int, int]


@dataclass(frozen=True)
class KvIndex:
    """One mask of a batch: vectors by name (each of `cols` ints), and the block table's entries as [Q tile][KV tile].

    elsewhere: keys that rows of other ranks see.
    """

    spec: KernelSpec
    rows: int
    cols: int
    vectors: dict[str, Sequence[int]]
    keep: Sequence[Sequence[bool]] | None = None
    elsewhere: Sequence[bool] | None = None

    def queue(self, q_block: int) -> list[tuple[int, int]]:
        """(KV block, tag) of every tile of a Q block that is not SKIP, right to left: what the loader consumes."""
        tagged = ((block, self.tag(q_block, block)) for block in reversed(range(len(self.extremes))))
        return [(block, tag) for block, tag in tagged if tag != SKIP]

    def tag(self, q_block: int, block: int) -> int:
        """SKIP, 0 (UNMASKED), or the tests that the elements of a tile need; 8 bits for each row group."""
        spec = self.spec
        if self.keep is not None and not self.keep[q_block][block]:
            return SKIP
        height = spec.block_q // spec.row_groups
        first = q_block * spec.block_q
        tags = [self.tag_of_rows(row, min(row + height, self.rows), block) for row in range(first, first + spec.block_q, height)]
        if all(tag == SKIP for tag in tags):
            return SKIP
        return sum((HIDDEN if tag == SKIP else tag) << 8 * g for g, tag in enumerate(tags))

    def tag_of_rows(self, row0: int, row1: int, block: int) -> int:
        """SKIP or the tag of rows [row0, row1) of a tile, whatever the block table says."""
        spec = self.spec
        col0 = block * spec.block_kv
        col1 = min(col0 + spec.block_kv, self.cols)
        (lts0, lts1), (lte0, lte1), (uts0, uts1), (ute0, ute1), (diag0, diag1) = self.extremes[block]
        causal = col0 if spec.form.causal else 0
        if first_kept_row(row0, causal, (lts1, lte0), (uts1, ute0), diag0) >= row1:
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
        if tag and spec.zero_unseen and self.unseen[block]:
            tag |= UNSEEN
        return tag

    @cached_property
    def extremes(self) -> list[tuple[Range, ...]]:
        """Per KV block, (min, max) of lts, lte, uts, ute, diag; of an absent one, what it reads as."""
        absent = {"lts": _BEYOND, "lte": self.rows, "uts": 0, "ute": 0, "diag": 0}

        def over(name: str, first: int) -> Range:
            if name not in self.vectors:
                return absent[name], absent[name]
            part = self.vectors[name][first : first + self.spec.block_kv]
            return min(part), max(part)

        return [tuple(over(name, first) for name in VECTORS) for first in range(0, self.cols, self.spec.block_kv)]

    @cached_property
    def unseen(self) -> list[bool]:
        """Per KV block, whether it holds a key that no row sees, block table included."""
        size = self.spec.block_kv
        blocks = (range(first, min(first + size, self.cols)) for first in range(0, self.cols, size))
        return [not all(self._is_seen(key) for key in keys) for keys in blocks]

    def _is_seen(self, key: int) -> bool:
        if self.elsewhere is not None and self.elsewhere[key]:
            return True
        causal = key if self.spec.form.causal else 0
        low = (self._at("lts", key, _BEYOND), self._at("lte", key, self.rows))
        high = (self._at("uts", key, 0), self._at("ute", key, 0))
        diag = self._at("diag", key, 0)

        def sees(start: int, end: int) -> bool:
            return first_kept_row(start, causal, low, high, diag) < end

        if self.keep is None:
            return sees(0, self.rows)
        step, column = self.spec.block_q, key // self.spec.block_kv
        return any(line[column] and sees(i * step, min((i + 1) * step, self.rows)) for i, line in enumerate(self.keep))

    def _at(self, name: str, key: int, absent: int) -> int:
        return self.vectors[name][key] if name in self.vectors else absent


def first_kept_row(row: int, causal_below: int, low: Range, high: Range, diag: int) -> int:
    """The first row from `row` on outside [0, causal_below), [0, diag) and the two ranges."""
    for _ in range(4):
        row = max(row, causal_below, diag)
        for start, end in (low, high):
            if start <= row < end:
                row = end
    return row
