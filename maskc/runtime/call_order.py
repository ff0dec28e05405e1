"""What every rank of a link has called, in words that all of them see: a call that the others do not make is noticed.

A rank writes what it is going to enqueue, and no stream or host waits for it. Of two ranks that differ in a call the later one
finds both. Layers of one mask and shape call alike, so that their order is not told apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from functools import lru_cache
from zlib import crc32

ENTRIES = 256
"""Calls of a rank that are kept: more than it makes between two looks."""
EPOCHS = 1 << 16
"""That are told apart, in the lower half of a word. The upper one says what was called: both are there or neither."""


def calls_size(world: int) -> int:
    """Bytes of the words of all ranks."""
    return 4 * ENTRIES * world


@lru_cache(maxsize=1024)
def tag_of(*what: Hashable) -> int:
    """Of equal calls the same on all ranks, from 1 to 65535; of others another, but for one in so many."""
    return 1 + crc32(repr(what).encode()) % (EPOCHS - 1)


class Calls:
    """Of one rank. address: of the words, zeros. `say` is for whoever calls, `differs` for one thread that looks now and then."""

    def __init__(self, address: int, rank: int, world: int) -> None:
        self._words = (ctypes.c_uint32 * (ENTRIES * world)).from_address(address)
        self._rank, self._others = rank, [r for r in range(world) if r != rank]
        self._said = self._seen = 0

    def say(self, epoch: int, tag: int) -> None:
        """This rank has made the call of this epoch."""
        self._words[self._at(self._rank, epoch)] = tag * EPOCHS + epoch % EPOCHS
        self._said = epoch

    def differs(self) -> str:
        """The first call since the last look in which another rank differs, or "". One that is behind will look itself."""
        said = self._said
        for epoch in range(max(self._seen, said - ENTRIES) + 1, said + 1):
            mine = self._words[self._at(self._rank, epoch)]
            for rank in self._others:
                theirs = self._words[self._at(rank, epoch)]
                if theirs and theirs != mine and theirs % EPOCHS == mine % EPOCHS:
                    return f"call {epoch} of rank {rank} is another than that of rank {self._rank}"
            self._seen = epoch
        return ""

    def _at(self, rank: int, epoch: int) -> int:
        return rank * ENTRIES + epoch % ENTRIES
