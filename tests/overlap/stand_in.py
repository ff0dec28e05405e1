"""A GPU that is none: tensors on the host that say they are on one, and streams and events that are written down.

For a process of its own, over the libcuda of stub_streams.cpp: what reaches it and what torch's events do is in one file, in
the order in which it was enqueued. No kernel runs, and nothing is copied.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from maskc.boundary import BoundaryVectors

GPU = torch.device("cuda", 0)
PROCESSORS = 12
STREAMS = {"compute": 7, "copy": 11, "send": 12, "sum": 13}
"""Handles; those of a rank's own are made in this order."""

CAPTURING = "STUB_DRIVER_CAPTURING"
"""In the environment while streams are captured into a graph."""


class OnGpu(torch.Tensor):
    """What it holds is in host memory."""

    device = GPU  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        note(f"keep {self.data_ptr()} {self.numel() * self.element_size()} stream {stream.cuda_stream}")

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        note(f"torch copies stream {current[-1].cuda_stream}")
        return super().copy_(source)


class StandIn(TorchFunctionMode):
    """What is made on a GPU, or brought there, is made on the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        there = any(isinstance(a, torch.device) and a == GPU for a in (*args, named.get("device")))
        back = not there and any(isinstance(a, torch.device | str) and str(a) == "cpu" for a in (*args, named.get("device")))
        args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args)
        if "device" in named:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        if function is torch.Tensor.new_zeros and isinstance(args[0], OnGpu):
            note(f"torch zeros stream {current[-1].cuda_stream}")
        if function is torch.Tensor.sum and isinstance(args[0], OnGpu):
            note(f"torch sums {args[0].data_ptr()} stream {current[-1].cuda_stream}")
        if function is torch.Tensor.to and there and not isinstance(args[0], OnGpu):
            note(f"torch brings {args[0].numel()} numbers, stream {current[-1].cuda_stream}")
        made = function(*args, **named)
        if isinstance(made, torch.Tensor) and (there or back):
            return made.as_subclass(OnGpu if there else torch.Tensor)
        return made


class Stream:
    made = cycle(list(STREAMS.values())[1:])

    def __init__(self, *_: object, handle: int = 0, **__: object) -> None:
        self.cuda_stream = handle or next(Stream.made)
        self.device = GPU

    def wait_event(self, event: Event) -> None:
        note(f"follow event {event.number} stream {self.cuda_stream}")

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("torch waits")


class Event:
    count = 0

    def __init__(self, *_: object, **__: object) -> None:
        Event.count += 1
        self.number = self.cuda_event = Event.count  # its handle

    def record(self, stream: Stream | None = None) -> None:
        note(f"record event {self.number} stream {(stream or current[-1]).cuda_stream}")

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current[-1]).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Inside:
    """As `torch.cuda.stream`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        current.append(self._stream)

    def __exit__(self, *_: object) -> None:
        current.pop()


current = [Stream(handle=STREAMS["compute"])]


def note(text: str) -> None:
    with open(os.environ["STUB_DRIVER_LOG"], "a") as log:
        log.write(text + "\n")


def install() -> StandIn:
    """In place of torch's CUDA, for the rest of this process; to be entered around what uses it."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, Inside
    cuda.current_stream = lambda *_: current[-1]
    cuda.current_device = lambda: 0
    cuda.device = nullcontext
    cuda.synchronize = lambda *_: None
    cuda.is_current_stream_capturing = lambda: CAPTURING in os.environ
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=PROCESSORS)
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]
    from maskc.binding import streams
    from maskc.runtime import gated  # whatever compiles kernels is imported with it

    assert gated.__name__ in sys.modules
    streams._raw_stream = None
    image = b"\x7fELF"
    for module in [m for name, m in sys.modules.items() if name.startswith("maskc.") and hasattr(m, "compile_cubin")]:
        module.compile_cubin = lambda source, *_, **__: SimpleNamespace(image=image + str(hash(source)).encode())  # type: ignore[attr-defined]
    return StandIn()


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(OnGpu)


def vectors_on_gpu(v: BoundaryVectors) -> BoundaryVectors:
    held = {f.name: getattr(v, f.name) for f in fields(v)}
    return replace(v, **{name: on_gpu(t) for name, t in held.items() if isinstance(t, torch.Tensor)})
