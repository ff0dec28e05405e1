"""Order between CUDA streams for what is kept with a mask: one stream makes it, any stream may use it.

A kept tensor that another stream reads needs two things that a tensor of one's own needs as well: that stream must wait
until it is made, and its memory must not be reused while that stream still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Making:
    """Where GPU tensors were made: on which stream, and an event behind the last kernel that writes them.

    users: streams that the allocator knows to wait for.
    """

    tensors: tuple[Tensor, ...]
    stream: torch.cuda.Stream
    event: torch.cuda.Event
    users: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Making | None:
        """Of GPU tensors that the current stream has just been given to make; None where there are none, and inside graphs."""
        if not tensors or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        stream = current_stream(tensors[0].device)
        event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cls(tensors, stream, event)

    @classmethod
    def joined(cls, parts: Sequence[Making]) -> Making | None:
        """Of the tensors of all of them; without an event of its own where one stream made them, the last one last."""
        if len({part.stream.cuda_stream for part in parts}) > 1:
            return cls.of(tuple(t for part in parts for t in part.tensors))
        return cls(tuple(t for part in parts for t in part.tensors), parts[-1].stream, parts[-1].event) if parts else None

    def wait(self) -> None:
        """Let the current stream wait for the tensors, and their memory for it.

        The event is external to CUDA graphs: in a capture, waiting for it is a node of the graph, which is legal whether
        or not the tensors are made by then.
        """
        device, capturing = self.stream.device, torch.cuda.is_current_stream_capturing()
        if not capturing and current_handle(device) == self.stream.cuda_stream:
            return
        stream = current_stream(device)
        stream.wait_event(self.event)
        if not capturing and stream.cuda_stream not in self.users:
            self.users.add(stream.cuda_stream)
            for t in self.tensors:
                t.record_stream(stream)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return type(None), ()  # streams and events stay in their process


@dataclass(eq=False, slots=True)
class Kept(Generic[Key, Value]):
    """What was made once, by key, for use on any stream.

    In a CUDA graph, what is kept from before is used, but what is made there is not kept: its memory holds nothing until
    the graph is replayed. A graph of torch.compile gets what is kept as it is; it cannot hold events.
    """

    found: dict[Key, tuple[Value, Making | None]] = field(default_factory=dict)

    def __contains__(self, key: Key) -> bool:
        return key in self.found

    def __getitem__(self, key: Key) -> Value:
        value, making = self.found[key]
        if making is not None and not torch.compiler.is_compiling():
            making.wait()
        return value

    def get(self, key: Key) -> Value | None:
        """What is kept, or None."""
        value, making = self.found.get(key, (None, None))
        if making is not None and not torch.compiler.is_compiling():
            making.wait()
        return value

    def keep(self, key: Key, value: Value) -> Value:
        """`value`, which the current stream has just made."""
        tensors = gpu_tensors(value)
        making = Making.of(tensors)
        if making is not None or not tensors:
            self.found[key] = value, making
        return value

    def made(self, key: Key) -> Making | None:
        """Where and when what is kept was made."""
        return self.found[key][1]


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a torch without CUDA has none


def current_handle(device: torch.device) -> int:
    """Of the current stream of a CUDA device by number; its object would take the host ten times as long."""
    handle: int = torch.cuda.current_stream(device).cuda_stream if _raw_stream is None else _raw_stream(device.index)
    return handle


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Of a CUDA device; its object is made once for each handle."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device)
    key = device.index, _raw_stream(device.index)
    found = _streams.get(key)
    return _streams.setdefault(key, torch.cuda.current_stream(device)) if found is None else found


def gpu_tensors(value: object) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors_of(value) if t.is_cuda)


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a value: itself, or those of tuples and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    kind: type = type(value)
    items = value if isinstance(value, tuple) else [getattr(value, name) for name in _field_names(kind)]
    return [t for item in items if type(item) not in _PLAIN for t in tensors_of(item)]


_PLAIN = frozenset({type(None), bool, int, float, str})
"""Hold no tensors; most fields are of these."""


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass; none of anything else."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()
