"""What streams are asked without cuda-python, whose objects cost the host several times what the driver does.

An overlapped call has some dozens of these: copies, words that are waited for and written, events. The context of the device is
the current one, as it is once torch has used the device.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from maskc.runtime.driver_api import failed, libcuda

MOST_WORDS = 255
"""That the driver takes in one operation of a stream."""


def copy(into: int, source: int, size: int, stream: int) -> None:
    """Enqueue a copy of `size` bytes between addresses of any kind on `stream`."""
    if status := _stream_calls().copy(into, source, size, stream):
        raise failed("cuMemcpyAsync", status)


def copy_pieces(into: int, source: int, width: int, pieces: int, pitches: tuple[int, int], stream: int) -> None:
    """Enqueue a copy of `pieces` pieces of `width` bytes, `pitches` bytes apart at both ends, on `stream`."""
    Copy2D(into, width, pieces, pitches).enqueue(source, stream)


class Copy2D:
    """`copy_pieces` whose source alone changes."""

    __slots__ = ("_by_reference", "_what")

    def __init__(self, into: int, width: int, pieces: int, pitches: tuple[int, int]) -> None:
        self._what = _Copy2D(srcMemoryType=_UNIFIED, dstMemoryType=_UNIFIED, dstDevice=into)
        self._what.srcPitch, self._what.dstPitch, self._what.WidthInBytes, self._what.Height = (
            pitches[1],
            pitches[0],
            width,
            pieces,
        )
        self._by_reference = ctypes.byref(self._what)

    def enqueue(self, source: int, stream: int) -> None:
        """By one thread at a time."""
        self._what.srcDevice = source
        if status := _stream_calls().copy_pieces(self._by_reference, stream):
            raise failed("cuMemcpy2DAsync", status)


def write_value(address: int, value: int, stream: int) -> None:
    """Write a 32-bit word at a device address once everything before it on `stream` is done."""
    if status := _stream_calls().write(stream, address, value, 0):
        raise failed("cuStreamWriteValue32", status)


def wait_value(address: int, value: int, stream: int) -> None:
    """Hold `stream` until the 32-bit word at a device address is at least `value` (in cyclic order)."""
    if status := _stream_calls().wait(stream, address, value, _AT_LEAST):
        raise failed("cuStreamWaitValue32", status)


class StreamWord(NamedTuple):
    """A 32-bit word at a device address that a stream waits for (`waits`), as `wait_value`, or writes, as `write_value`."""

    waits: bool
    address: int
    value: int


def stream_words(words: Sequence[StreamWord], stream: int) -> None:
    """Enqueue that the words are waited for and written one after the other, in one operation of `stream` for MOST_WORDS."""
    if len(words) <= 1:
        for waits, address, value in words:
            (wait_value if waits else write_value)(address, value, stream)
        return
    for at in range(0, len(words), MOST_WORDS):
        some = words[at : at + MOST_WORDS]
        _batch(stream, len(some), b"".join(_packed(word) for word in some))


def _batch(stream: int, count: int, packed: Any) -> None:
    if status := _stream_calls().words(stream, count, packed, 0):
        raise failed("cuStreamBatchMemOp", status)


class StreamWords:
    """`stream_words` of words whose values alone change: each is one of some numbers, by its place in `StreamWord.value`."""

    __slots__ = ("_batches", "_one")

    def __init__(self, words: Sequence[StreamWord]) -> None:
        self._one = words[0] if len(words) == 1 else None
        batches = [] if self._one else [words[at : at + MOST_WORDS] for at in range(0, len(words), MOST_WORDS)]
        self._batches = [
            (
                [(_VALUE_AT + i * _MEMORY_OPERATION.size, word.value) for i, word in enumerate(some)],
                ctypes.create_string_buffer(b"".join(map(_packed, some)), len(some) * _MEMORY_OPERATION.size),
            )
            for some in batches
        ]

    def enqueue(self, stream: int, numbers: Sequence[int]) -> None:
        """By one thread at a time. numbers: below 2**32."""
        if self._one is not None:
            waits, address, place = self._one
            (wait_value if waits else write_value)(address, numbers[place], stream)
        for places, packed in self._batches:
            for at, place in places:
                _VALUE.pack_into(packed, at, numbers[place])
            _batch(stream, len(places), packed)


def _packed(word: StreamWord) -> bytes:
    return _MEMORY_OPERATION.pack(1 if word.waits else 2, word.address, word.value, _AT_LEAST)


def follow(stream: int, other: int, event: int) -> None:
    """Hold `stream` until everything enqueued on the other one so far is complete. event: by its handle; what it tells ends."""
    calls = _stream_calls()
    if status := calls.record(event, other) or calls.wait_event(stream, event, 0):
        raise failed("an event of a stream", status)


def is_capturing(stream: int) -> bool:
    """Whether what is enqueued on a stream becomes part of a CUDA graph."""
    found = ctypes.c_int()
    if status := _stream_calls().capturing(stream, ctypes.byref(found)):
        raise failed("cuStreamIsCapturing", status)
    return found.value != 0


_UNIFIED, _AT_LEAST = 4, 0  # CU_MEMORYTYPE_UNIFIED, CU_STREAM_WAIT_VALUE_GEQ
_MEMORY_OPERATION = struct.Struct("<I4xQQI20x")
"""CUstreamBatchMemOpParams: operation (wait 1, write 2), address, value, flags; an alias of the address; 48 bytes in all."""
_VALUE, _VALUE_AT = struct.Struct("<Q"), 16


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("srcXInBytes", "srcY")),
        ("srcMemoryType", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("srcHost", "srcDevice", "srcArray")),
        *((name, ctypes.c_size_t) for name in ("srcPitch", "dstXInBytes", "dstY")),
        ("dstMemoryType", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("dstHost", "dstDevice", "dstArray")),
        *((name, ctypes.c_size_t) for name in ("dstPitch", "WidthInBytes", "Height")),
    ]


class _StreamCalls(NamedTuple):
    copy: Callable[..., int]
    copy_pieces: Callable[..., int]
    write: Callable[..., int]
    wait: Callable[..., int]
    words: Callable[..., int]
    record: Callable[..., int]
    wait_event: Callable[..., int]
    capturing: Callable[..., int]


@cache
def _stream_calls() -> _StreamCalls:
    word, address, stream, event = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p
    library = libcuda()
    made = []
    for name, kinds in (
        ("cuMemcpyAsync", (address, address, ctypes.c_size_t, stream)),
        ("cuMemcpy2DAsync_v2", (ctypes.c_void_p, stream)),
        ("cuStreamWriteValue32_v2", (stream, address, word, word)),
        ("cuStreamWaitValue32_v2", (stream, address, word, word)),
        ("cuStreamBatchMemOp_v2", (stream, word, ctypes.c_char_p, word)),
        ("cuEventRecord", (event, stream)),
        ("cuStreamWaitEvent", (stream, event, word)),
        ("cuStreamIsCapturing", (stream, ctypes.c_void_p)),
    ):
        call = getattr(library, name)
        call.argtypes = kinds
        made.append(call)
    return _StreamCalls(*made)
