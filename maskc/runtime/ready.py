"""Launches that are made again and again: all is settled but the stream and where some tensors lie."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskc.runtime.driver_api import (
    TENSOR_MAP_BYTES,
    Arguments,
    Dim3,
    Kernel,
    configuration,
    launch,
    launch_configured,
    replace_address,
    room_of,
)

Launch = Callable[..., None]
"""`maskc.runtime.driver_api.launch`, or what does more."""
Words = tuple[tuple[str, int], ...]
"""Of a kernel's struct, those that change: from a field on ("inner.field" of a struct in it), so many of 8 bytes."""


class Ready:
    """One of them. `words` of its struct change."""

    __slots__ = ("_configurations", "_contents", "_how", "_kernel", "_maps", "_words")

    def __init__(
        self,
        kernel: Kernel,
        grid: Dim3,
        threads: int,
        arguments: Arguments,
        words: Words,
        *,
        shared: int = 0,
        overlap_previous: bool = False,
    ) -> None:
        self._kernel, self._how = kernel, (grid, threads, shared, overlap_previous)
        self._maps, self._contents = len(arguments.maps), b"".join((*arguments.maps, arguments.body))
        start, body = self._maps * TENSOR_MAP_BYTES, arguments.body
        self._words = tuple((struct.Struct(f"{count}Q").pack_into, start + _offset(body, name)) for name, count in words)
        self._configurations: dict[int, Any] = {}

    def start(self, stream: int, addresses: Sequence[int], *words: Sequence[int]) -> None:
        """Launch it on `stream`, by handle, in the current context; `shared` is allowed. Raises M605.

        addresses: of the tensors of its maps, multiples of 16 bytes. words: in the order of `Words`.
        """
        self.launch(stream, self.filled(addresses, *words))

    def filled(self, addresses: Sequence[int], *words: Sequence[int]) -> int:
        """Its arguments, by the address of the pointers to them, for launches of this thread at once.

        They serve whatever else was made with the same ones, too.
        """
        room = room_of(self._maps, len(self._contents))
        room.contents[:] = self._contents
        for slot, address in zip(room.slots, addresses):  # noqa: B905  (the last slot is the struct)
            replace_address(slot, address)
        for (pack_into, at), values in zip(self._words, words, strict=True):
            pack_into(room.contents, at, *values)
        return room.pointers

    def launch(self, stream: int, pointers: int) -> None:
        """`start`, with what is `filled` already."""
        configured = self._configurations.get(stream)
        if configured is None:
            grid, threads, shared, overlap_previous = self._how
            configured = configuration(grid, threads, shared, stream, None, overlap_previous)
            self._configurations[stream] = configured
        launch_configured(self._kernel, configured, pointers)


@dataclass(frozen=True, slots=True)
class Fresh:
    """What each call allocates: a contiguous tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Fresh:
        return cls(tuple(shape), torch.empty(shape, device="meta").stride(), dtype)

    def on(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)  # `empty` takes longer


def _offset(body: ctypes.Structure, name: str) -> int:
    """In bytes, of a field, also of a struct in it."""
    outer, _, inner = name.partition(".")
    at: int = getattr(type(body), outer).offset
    return at + _offset(getattr(body, outer), inner) if inner else at


def keeping(made: list[Ready], words: Iterable[Words]) -> Launch:
    """A `launch` that also makes it ready: the first launch with the first of these words, and so on."""
    left = iter(words)

    def start(kernel: Kernel, grid: Dim3, threads: int, arguments: Arguments, *, device: torch.device, **how: Any) -> None:
        launch(kernel, grid, threads, arguments, device=device, **how)
        made.append(Ready(kernel, grid, threads, arguments, next(left), **how))

    return start
