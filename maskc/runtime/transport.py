"""Where the words and the keys of other ranks lie, and the queues that copy them: what `maskc.runtime.overlap` stands on.

`CudaQueues` are two streams of one GPU; copies run on copy engines. `HostQueues` do every operation at once, for tests
without a GPU. `Loopback` keeps the keys of other ranks in pinned host memory, so that one GPU can run and measure what
a rank does over a link of host-memory speed; what the other ranks would do is done by calling `post`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from maskc.diagnostics import error
from maskc.runtime import driver_api
from maskc.runtime.layout import Layout
from maskc.runtime.protocol import HALVES, Stream, Word

Pair = tuple[Tensor, Tensor]
"""(K, V) [rows, B, Hk, D] and [rows, B, Hk, Dv]: rows of a chunk are one piece of memory."""


@dataclass(frozen=True, slots=True)
class KeyShape:
    """Shape of keys and values but for their rows."""

    batch: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype

    def empty(self, rows: int, device: torch.device | str, pinned: bool = False) -> Pair:
        """Zeros: what is never copied must be finite, for 0 * NaN is NaN."""
        k, v = (
            torch.zeros(rows, self.batch, self.heads, d, dtype=self.dtype, device=device, pin_memory=pinned)
            for d in (self.dim_k, self.dim_v)
        )
        return k, v


# ---------------------------------------------------------------- queues


class Queues(Protocol):
    """The two streams of a rank. Everything is enqueued in the order of the calls and returns at once."""

    def on(self, stream: Stream) -> Any:
        """Context in which torch's operations go to that stream."""

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        """Hold the stream until the word reaches the epoch."""

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        """Write the word once everything before it in the stream is complete."""

    def kernel_ended(self) -> None:
        """Hold the copy stream until the kernels launched so far are complete."""

    def copies_ended(self) -> None:
        """Hold the compute stream until the copies enqueued so far are complete."""

    def kernel_launched(self) -> None:
        """The compute stream now holds a kernel that `kernel_ended` refers to."""

    def idle(self) -> bool:
        """Nothing enqueued is still to be done."""


class CudaQueues:
    """torch's current stream for kernels, a stream of high priority for copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.copies.wait_stream(torch.cuda.current_stream(device))
        self._kernel: torch.cuda.Event | None = None

    def on(self, stream: Stream) -> Any:
        return torch.cuda.stream(self.copies) if stream == "copy" else nullcontext()

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        driver_api.wait_value(address, epoch & 0xFFFFFFFF, self._stream(stream).cuda_stream)

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        driver_api.write_value(address, epoch & 0xFFFFFFFF, self._stream(stream).cuda_stream)

    def kernel_ended(self) -> None:
        if self._kernel is not None:
            self.copies.wait_event(self._kernel)

    def copies_ended(self) -> None:
        self._stream("compute").wait_stream(self.copies)

    def kernel_launched(self) -> None:
        self._kernel = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._kernel.record(self._stream("compute"))

    def idle(self) -> bool:
        copied = bool(self.copies.query())
        return copied and (self._kernel is None or bool(self._kernel.query()))  # type: ignore[no-untyped-call]

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self.copies if stream == "copy" else torch.cuda.current_stream(self.device)


class HostQueues:
    """Every operation is done when it is enqueued, so a word that is waited for must be there: else M721."""

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        yield

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        if ctypes.c_int32(read_word(address) - epoch).value < 0:
            raise error("M721", f"a word stands at {read_word(address)} where epoch {epoch} is waited for")

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        write_word(address, epoch)

    def kernel_ended(self) -> None: ...

    def copies_ended(self) -> None: ...

    def kernel_launched(self) -> None: ...

    def idle(self) -> bool:
        return True


def read_word(address: int) -> int:
    """A word in host memory."""
    return ctypes.c_uint32.from_address(address).value


def write_word(address: int, value: int) -> None:
    """Write a word in host memory, which GPUs may be reading."""
    ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


# ---------------------------------------------------------------- transports


class Transport(Protocol):
    """How a rank reaches the others."""

    def address(self, word: Word) -> int:
        """Address of a "ready" or "done" word that streams of this GPU can wait for and write."""

    def pull(self, rank: int, half: int, chunk: int, into: Pair) -> None:
        """Enqueue on torch's current stream: a chunk from a half of another rank's source buffer."""

    def own(self, half: int) -> Pair | None:
        """A half of this rank's source buffer, None where nobody reads it."""

    def release(self, epoch: int) -> None:
        """From the host, while streams hang: end every wait for a word of up to this epoch on this rank."""


class Loopback:
    """Other ranks in host memory. Nobody reads this rank's keys.

    keys: the key layout. peers: the ranks that this one copies from. pinned: page-locked memory, which copy engines need
    (False without a GPU). slowness: times that each chunk is copied, for a link of that fraction of the rate.
    """

    def __init__(
        self, keys: Layout, rank: int, peers: Iterable[int], shape: KeyShape, pinned: bool = True, slowness: int = 1
    ) -> None:
        self.keys, self.rank, self.shape, self.slowness = keys, rank, shape, slowness
        self._halves = {
            r: tuple(shape.empty(keys.local_length(r), "cpu", pinned) for _ in range(HALVES)) for r in peers if r != rank
        }
        self._index = {r: i for i, r in enumerate(self._halves)}
        words = torch.zeros(2 * max(1, len(self._halves)), dtype=torch.int32)
        self._words = words.pin_memory() if pinned else words

    def address(self, word: Word) -> int:
        peer = word.by if word.kind == "ready" else word.holder
        return self._words.data_ptr() + 4 * (2 * self._index[peer] + (word.kind == "done"))

    def pull(self, rank: int, half: int, chunk: int, into: Pair) -> None:
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(rank) if c < chunk)
        rows = slice(start, start + self.keys.size_of(chunk))
        for mine, theirs in zip(into, self._halves[rank][half], strict=True):
            for _ in range(self.slowness):
                mine.copy_(theirs[rows], non_blocking=True)

    def own(self, half: int) -> Pair | None:
        return None

    def release(self, epoch: int) -> None:
        for rank in self._halves:
            write_word(self.address(Word("ready", self.rank, rank)), epoch)

    # ---- what the other ranks do

    def post(self, rank: int, epoch: int, fill: Callable[[Pair], None] | None = None, timeout: float = 10.0) -> None:
        """Rank `rank` makes its keys of an epoch readable: waits for its reader, fills the half, says ready.

        Raises TimeoutError when this rank does not finish copying the epoch that lies in the half.
        """
        done = self.address(Word("done", rank, self.rank))
        deadline = time.monotonic() + timeout
        while epoch > HALVES and read_word(done) < epoch - HALVES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"epoch {epoch - HALVES} of rank {rank} was not copied in {timeout} s")
            time.sleep(1e-5)
        if fill is not None:
            fill(self._halves[rank][epoch % HALVES])
        write_word(self.address(Word("ready", self.rank, rank)), epoch)
