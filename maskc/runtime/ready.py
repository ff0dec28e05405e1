"""Launches that are made again and again: all is settled but the stream and where some tensors lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from maskc.runtime.driver_api import (
    TENSOR_MAP_BYTES,
    Arguments,
    Dim3,
    Kernel,
    configuration,
    launch_configured,
    replace_address,
    room_of,
)

Launch = Callable[..., None]
"""`maskc.runtime.driver_api.launch`, or what does more."""


class Ready:
    """One of them. `first` and `words`: the words of its struct that change, so many of 8 bytes from that field on."""

    __slots__ = ("_at", "_configurations", "_contents", "_how", "_kernel", "_maps", "_words")

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim3,
        threads: int,
        arguments: Arguments,
        first: str,
        words: int,
        *,
        shared: int = 0,
        overlap_previous: bool = False,
    ) -> None:
        self._kernel, self._how = kernel, (grid, threads, shared, overlap_previous)
        self._maps, self._contents = len(arguments.maps), b"".join((*arguments.maps, arguments.body))
        self._at = self._maps * TENSOR_MAP_BYTES + getattr(type(arguments.body), first).offset
        self._words = struct.Struct(f"{words}Q")
        self._configurations: dict[int, Any] = {}

    def start(self, stream: int, addresses: Sequence[int], words: Sequence[int]) -> None:
        """Launch it on `stream`, by handle, in the current context; `shared` is allowed. Raises M605.

        addresses: of the tensors of its maps, multiples of 16 bytes.
        """
        room = room_of(self._maps, len(self._contents))
        room.contents[:] = self._contents
        for slot, address in zip(room.slots, addresses):  # noqa: B905  (the last slot is the struct)
            replace_address(slot, address)
        self._words.pack_into(room.contents, self._at, *words)
        configured = self._configurations.get(stream)
        if configured is None:
            grid, threads, shared, overlap_previous = self._how
            configured = configuration(grid, threads, shared, stream, None, overlap_previous)
            self._configurations[stream] = configured
        launch_configured(self._kernel, configured, room.pointers)
