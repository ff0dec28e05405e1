"""Order between CUDA streams for what is kept with a mask: one stream makes it, any stream may use it.

A kept tensor that another stream reads needs two things that a tensor of one's own needs as well: that stream must wait
until it is made, and its memory must not be reused while that stream still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Making:
    """Where GPU tensors were made: on which stream, and an event behind the last kernel that writes them.

    captured: the kernels were not run but written into a CUDA graph, which makes the tensors anew at every replay.
    users: streams that the allocator knows to wait for.
    """

    tensors: tuple[Tensor, ...]
    stream: torch.cuda.Stream
    event: torch.cuda.Event
    captured: bool
    users: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, value: object) -> Making | None:
        """Of what the current stream has just been given to make; None for a value without GPU tensors."""
        there = tuple(t for t in tensors_of(value) if t.is_cuda)
        if not there:
            return None
        stream, captured = torch.cuda.current_stream(there[0].device), torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(external=not captured)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cls(there, stream, event, captured)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return type(None), ()  # streams and events stay in their process

    def usable(self) -> bool:
        """Tensors of a graph hold nothing outside it."""
        return not self.captured or torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Let the current stream wait for the tensors, and them for it. In a capture the graph waits at its replays.

        The event is external to a graph: waiting for it is a node, legal whether or not it has happened yet. Two graphs
        share nothing: torch raises where the tensors belong to another capture.
        """
        stream = torch.cuda.current_stream(self.stream.device)
        if torch.cuda.is_current_stream_capturing():
            stream.wait_event(self.event)
        elif stream != self.stream:
            stream.wait_event(self.event)
            if stream.cuda_stream not in self.users:
                self.users.add(stream.cuda_stream)
                for t in self.tensors:
                    t.record_stream(stream)


@dataclass(eq=False, slots=True)
class Kept(Generic[Value]):
    """A value that is kept, with the making of its GPU tensors."""

    value: Value
    making: Making | None

    @classmethod
    def of(cls, value: Value) -> Kept[Value]:
        return cls(value, Making.of(value))

    def usable(self) -> bool:
        return self.making is None or torch.compiler.is_compiling() or self.making.usable()

    def get(self) -> Value:
        """The value, in order with the current stream. A graph of torch.compile gets it as it is: it cannot hold events."""
        if self.making is not None and not torch.compiler.is_compiling():
            self.making.wait()
        return self.value


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors in what is kept: tensors, tuples and dataclasses of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_of(getattr(value, f.name))
