"""Where the words and the keys of other ranks lie, and the queues that copy them: what `maskc.runtime.overlap` stands on.

`CudaQueues` are streams of one GPU; copies run on copy engines. `HostQueues` do every operation at once, for tests
without a GPU. `Loopback` keeps the keys of other ranks in pinned host memory, so that one GPU can run and measure what
a rank does over a link of host-memory speed; what the other ranks would do is done by calling `post` and
`post_gradients`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never

import torch
from torch import Tensor

from maskc.diagnostics import error
from maskc.runtime import driver_streams
from maskc.runtime.copies import Copy, copy
from maskc.runtime.driver_streams import StreamWord
from maskc.runtime.layout import Layout
from maskc.runtime.merge import accumulator
from maskc.runtime.overlap_plan import Cut
from maskc.runtime.protocol import HALVES, Epochs, Kind, Stream, Turn, Word

Room = TypeVar("Room")
Pair = tuple[Tensor, Tensor]
"""(K, V) [Hk, rows, B, D] and [Hk, rows, B, Dv]: rows of a head are one piece of memory. Of gradients, (dK, dV)
[B, Hk, padded rows, D] and [B, Hk, padded rows, Dv] in fp32 (fp64 for fp64), rows of a head and batch item being one piece."""
OCTET = 8
"""Rows of gradients that gated kernels store together, in an order of their own: each chunk begins with new ones."""


def padded(rows: int) -> int:
    """Rows that the gradients of a chunk of so many take."""
    return -(-rows // OCTET) * OCTET


def head_major(t: Tensor) -> Tensor:
    """[B, rows, H, D] as a view [H, rows, B, D], or the other way round."""
    return t.permute(2, 1, 0, 3)


@dataclass(frozen=True, slots=True)
class KeyShape:
    """Shape of keys and values but for their rows."""

    batch: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype

    def empty(self, rows: int, device: torch.device | str, pinned: bool = False) -> Pair:
        """Zeros: what is never copied must be finite, for 0 * NaN is NaN. One piece of memory where that is possible."""
        made = partial(torch.zeros, dtype=self.dtype, device=device, pin_memory=pinned)
        shape = self.heads, rows, self.batch
        if self.dim_k == self.dim_v:
            k, v = made((2, *shape, self.dim_k))
        else:
            k, v = (made((*shape, d)) for d in (self.dim_k, self.dim_v))
        return k, v

    @property
    def gradient_bytes(self) -> int:
        """Of a row of a head: dK and dV of all batch items."""
        return self.batch * (self.dim_k + self.dim_v) * accumulator(self.dtype).itemsize

    def gradients(self, rows: int, device: torch.device | str, pinned: bool = False) -> Pair:
        """Room for dK and dV of a chunk of so many rows."""
        acc = accumulator(self.dtype)
        k, v = (
            torch.empty(self.batch, self.heads, padded(rows), d, dtype=acc, device=device, pin_memory=pinned)
            for d in (self.dim_k, self.dim_v)
        )
        return k, v


# ---------------------------------------------------------------- queues


class Queues(Protocol):
    """The streams of a rank. Everything is enqueued in the order of the calls and returns at once."""

    def on(self, stream: Stream) -> Any:
        """Context in which torch's operations go to that stream; "compute" is torch's current stream from here on."""

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        """Hold the stream until the word reaches the epoch."""

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        """Write the word once everything before it in the stream is complete."""

    def words(self, stream: Stream, words: Sequence[StreamWord]) -> None:
        """Wait for words and write them in this order, at less cost than one by one."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """Hold the stream until everything enqueued on the other one so far is complete."""

    def keep(self, stream: Stream, tensors: Iterable[Tensor]) -> None:
        """The stream uses these tensors: their memory is not given away before what is enqueued on it is complete."""

    def idle(self) -> bool:
        """Nothing enqueued is still to be done."""


class CudaQueues:
    """torch's current stream for kernels, others of high priority for keys, for what leaves, and for what is summed before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams = (torch.cuda.Stream(device, priority=-1) for _ in range(3))  # type: ignore[no-untyped-call]
        self.copies, self.sends, self.sums = streams
        self.compute = torch.cuda.current_stream(device)
        self._events: dict[Stream, torch.cuda.Event] = {}  # recorded and waited for at once, so one each will do

    def on(self, stream: Stream) -> Any:
        if stream != "compute":
            return torch.cuda.stream(self._stream(stream))
        self.compute = torch.cuda.current_stream(self.device)
        return nullcontext()

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        driver_streams.wait_value(address, epoch & 0xFFFFFFFF, self._stream(stream).cuda_stream)

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        driver_streams.write_value(address, epoch & 0xFFFFFFFF, self._stream(stream).cuda_stream)

    def words(self, stream: Stream, words: Sequence[StreamWord]) -> None:
        driver_streams.stream_words(words, self._stream(stream).cuda_stream)

    def follow(self, stream: Stream, other: Stream) -> None:
        event = self._events.get(other)
        if event is None:
            event = self._events[other] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(other))
        self._stream(stream).wait_event(event)

    def handle(self, stream: Stream) -> int:
        handle: int = self._stream(stream).cuda_stream
        return handle

    def event(self, other: Stream) -> int:
        """The handle of that by which others followed this stream."""
        handle: int = self._events[other].cuda_event
        return handle

    def keep(self, stream: Stream, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            t.record_stream(self._stream(stream))

    def idle(self) -> bool:
        return all(s.query() for s in (self.compute, self.copies, self.sends, self.sums))

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        match stream:
            case "copy":
                return self.copies
            case "send":
                return self.sends
            case "sum":
                return self.sums
            case "compute":
                return self.compute
            case _:
                assert_never(stream)


class HostQueues:
    """Every operation is done when it is enqueued, so a word that is waited for must come within `seconds`: else M721."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        yield

    def wait(self, stream: Stream, address: int, epoch: int) -> None:
        deadline = time.monotonic() + self.seconds
        while ctypes.c_int32(read_word(address) - epoch).value < 0:
            if time.monotonic() >= deadline:
                raise error("M721", f"a word stands at {read_word(address)} where epoch {epoch} is waited for")
            time.sleep(1e-5)

    def put(self, stream: Stream, address: int, epoch: int) -> None:
        write_word(address, epoch)

    def words(self, stream: Stream, words: Sequence[StreamWord]) -> None:
        for waits, address, value in words:
            (self.wait if waits else self.put)(stream, address, value)

    def follow(self, stream: Stream, other: Stream) -> None: ...

    def keep(self, stream: Stream, tensors: Iterable[Tensor]) -> None: ...

    def idle(self) -> bool:
        return True


def read_word(address: int) -> int:
    """A word in host memory."""
    return _word(address).value


def write_word(address: int, value: int) -> None:
    """Write a word in host memory, which GPUs may be reading."""
    _word(address).value = value & 0xFFFFFFFF


@lru_cache(maxsize=4096)
def _word(address: int) -> ctypes.c_uint32:
    """No more than the address: to make it is an audit event of Python, whose hooks can be slow."""
    return ctypes.c_uint32.from_address(address)


# ---------------------------------------------------------------- transports


class Prepared(NamedTuple):
    """Copies that are made again and again, and the bytes that count as sent.

    Each is of one of two tensors, and its source counts from the first byte of that.
    """

    copies: tuple[tuple[int, Copy], ...]
    bytes: int


class Transport(Protocol):
    """How a rank reaches the others.

    joins: whether copies take more rows than those of a chunk: of chunks behind it in its rank's keys, too.
    one_engine: whether a single copy engine makes the copies of both directions; gradients then leave after the last keys,
    for which kernels wait.
    gives, pulls: by which of the two keys come. takes: None where gradients are always pushed.
    """

    joins: bool
    one_engine: bool

    @property
    def gives(self) -> Giving | None: ...

    @property
    def takes(self) -> Taking | None: ...

    @property
    def pulls(self) -> Pulling | None: ...

    def begin(self, owners: Iterable[int] = (), tag: int = 0) -> Turn:
        """Count a call, see `Epochs.begin`. tag: see `call_order`, where ranks tell each other what they call."""

    def address(self, word: Word) -> int:
        """Address of a word between ranks that streams of this GPU can wait for and write; "flag" and others see `Giving`."""

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        """Enqueue on torch's current stream: this rank's gradients of heads of a chunk to the staging of its owner.

        grads: [B, heads, padded rows, D], also of chunks behind it, in ascending order, each padded.
        """

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        """The same for some padded rows of the gradients of a kernel, of all heads and one shape in every call."""

    def staged(self, reader: int, chunk: int) -> Pair:
        """Staging of what another rank has of the gradients of an own chunk, in this GPU's reach."""

    def release(self, epoch: int) -> None:
        """From the host, while streams hang: end every wait for a word of up to this epoch on this rank."""


class Giving(Protocol):
    """Owners write keys to where readers attend to them."""

    def flags(self, rank: int) -> Tensor:
        """int32, the words of the pieces of a rank's key buffer, in either direction."""

    def buffer(self, rank: int, rows: int) -> Pair:
        """The key buffer of a rank, of so many rows."""

    def give(self, reader: int, cut: Cut, piece: int, own: Pair, by_kernel: bool = False) -> None:
        """Enqueue on torch's current stream: own keys [B, rows, Hk, D] to a piece of a reader's buffer, which `cut` cuts.

        by_kernel: by multiprocessors, not by copy engines.
        """

    def given(self, reader: int, cut: Cut, piece: int, own: Pair) -> Prepared:
        """What `give` enqueues by copy engines, of keys of these strides: copies of K (0) and V (1)."""


class Taking(Protocol):
    """Owners take gradients of their keys from kernels of readers, which write them to where owners add them up."""

    def place(self, owner: int, chunk: int) -> Pair:
        """Where this rank's gradients of a chunk go, in the memory of its owner, of which it is the staging."""

    def told(self, owner: int, reader: int) -> Tensor:
        """int32 in the memory of `owner`: a word for each piece of the backward of `reader`, as that one numbers them."""

    def pushed(self, owner: int, chunk: int, heads: slice, rows: slice | None, grads: Pair) -> Prepared:
        """What `push_rows` enqueues, or `push` (rows: None), of dense gradients of these shapes: copies of dK (0) and dV (1)."""


class Pulling(Protocol):
    """Readers take keys out of the memory of others."""

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        """Enqueue on torch's current stream: heads of a chunk from a half of another rank's memory.

        into: [heads, rows, B, D].
        """

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        """What `pull` copies, as tensors that a kernel on this GPU can read."""


def by_chunk(keys: Layout, chunk: int, rows: int) -> Iterator[tuple[int, slice]]:
    """(chunk, which of so many padded rows are its) from a chunk on, in the order of its owner's keys."""
    at = 0
    for c in keys.chunks_of(keys.owner[chunk]):
        if c >= chunk and at < rows:
            yield c, slice(at, at + padded(keys.size_of(c)))
            at += padded(keys.size_of(c))


class Pulls:
    """The copies of pieces of one transport, prepared once. half_of: the half of a rank's buffer that a call's half lies in."""

    def __init__(self, transport: Pulling, half_of: Callable[[int, int], int]) -> None:
        self._transport, self._half_of = transport, half_of
        self._made: dict[tuple[int, ...], tuple[Copy, ...]] = {}

    def of(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> tuple[Copy, ...]:
        """What `Pulling.pull` copies to the memory of a GPU."""
        rows, half = into[0].shape[1], self._half_of(rank, half)
        key = rank, half, chunk, heads.start, heads.stop, rows, into[0].data_ptr()
        found = self._made.get(key)
        if found is None:
            found = Copy.both(*map(Copy.of, into, self._transport.readable(rank, half, chunk, heads, rows)))
            self._made[key] = found
        return found


class Loopback:
    """Other ranks in host memory. Nobody reads this rank's keys; `lends` of its plan says who pushes gradients.

    keys: the key layout. peers: the ranks that this one copies from. pinned: page-locked memory, which copy engines need
    (False without a GPU). slowness: times that each chunk is copied, for a link of that fraction of the rate. halves: 1
    where the keys of others never change.
    """

    joins = True
    one_engine = False
    gives = takes = None

    def __init__(
        self,
        keys: Layout,
        rank: int,
        peers: Iterable[int],
        shape: KeyShape,
        pinned: bool = True,
        slowness: int = 1,
        lends: Iterable[tuple[int, tuple[int, ...]]] = (),
        halves: int = HALVES,
    ) -> None:
        self.keys, self.rank, self.shape, self.pinned, self.slowness = keys, rank, shape, pinned, slowness
        self._halves = {
            r: tuple(shape.empty(keys.local_length(r), "cpu", pinned) for _ in range(halves)) for r in peers if r != rank
        }
        self.lends = dict(lends)
        self._index = {r: i for i, r in enumerate(sorted({*self._halves, *self.lends}))}
        words = torch.zeros(len(_LOOPED) * max(1, len(self._index)), dtype=torch.int32)
        self._words = words.pin_memory() if pinned else words
        self._epochs = Epochs()
        self._pulls = Pulls(self, lambda r, half: half % len(self._halves[r]))
        self._sent: dict[int, Pair] = {}  # by chunk: what this rank pushed
        self._staged: dict[tuple[int, int], Pair] = {}

    @property
    def pulls(self) -> Loopback:
        return self

    def begin(self, owners: Iterable[int] = (), tag: int = 0) -> Turn:
        return self._epochs.begin(owners)

    def address(self, word: Word) -> int:
        mine = word.holder == self.rank
        peer = word.by if mine else word.holder
        return self._words.data_ptr() + 4 * (len(_LOOPED) * self._index[peer] + _LOOPED.index((word.kind, mine)))

    def pull(self, rank: int, half: int, chunk: int, heads: slice, into: Pair) -> None:
        if into[0].device.type != "cuda":
            for mine, theirs in zip(into, self.readable(rank, half, chunk, heads, into[0].shape[1]), strict=True):
                self._copy(mine, theirs)
            return
        stream = torch.cuda.current_stream(into[0].device).cuda_stream
        for one in self._pulls.of(rank, half, chunk, heads, into):
            for _ in range(self.slowness):
                one.enqueue(stream)

    def readable(self, rank: int, half: int, chunk: int, heads: slice, rows: int) -> Pair:
        halves = self._halves[rank]
        start = sum(self.keys.size_of(c) for c in self.keys.chunks_of(rank) if c < chunk)
        k, v = (t[heads, start : start + rows] for t in halves[half % len(halves)])
        return k, v

    def push(self, owner: int, chunk: int, heads: slice, grads: Pair) -> None:
        for c, rows in by_chunk(self.keys, chunk, grads[0].shape[2]):
            for there, mine in zip(self.pushed(c), grads, strict=True):
                self._copy(there[:, heads], mine[:, :, rows])

    def push_rows(self, owner: int, chunk: int, heads: slice, rows: slice, grads: Pair) -> None:
        self.push(owner, chunk, heads, (grads[0][:, heads, rows], grads[1][:, heads, rows]))

    def staged(self, reader: int, chunk: int) -> Pair:
        """In host memory, which kernels read as it is."""
        return self._room(self._staged, (reader, chunk), chunk)

    def release(self, epoch: int) -> None:
        for peer in self._index:
            for kind, mine in _LOOPED:
                if mine:
                    write_word(self.address(Word(kind, self.rank, peer)), epoch)

    def _copy(self, into: Tensor, source: Tensor) -> None:
        for _ in range(self.slowness):
            copy(into, source)

    # ---- what the other ranks do

    def post(self, rank: int, epoch: int, fill: Callable[[Pair], None] | None = None, timeout: float = 10.0) -> None:
        """Rank `rank` makes its keys of an epoch readable: waits for its reader, fills the half, says ready.

        Raises TimeoutError when this rank does not finish copying the epoch that lies in the half.
        """
        self._expect(Word("done", rank, self.rank), epoch - HALVES, timeout)
        if fill is not None:
            fill(self._halves[rank][epoch % len(self._halves[rank])])
        write_word(self.address(Word("ready", self.rank, rank)), epoch)

    def post_gradients(self, reader: int, epoch: int, fill: Callable[[int, Pair], object], last: int = 0) -> None:
        """Rank `reader` pushes its gradients; fill(chunk, (dK, dV)). last: the epoch of its last push, which was added up."""
        self._expect(Word("free", reader, self.rank), last)
        for chunk in self.lends[reader]:
            fill(chunk, self.staged(reader, chunk))
        write_word(self.address(Word("sent", self.rank, reader)), epoch)

    def pushed(self, chunk: int) -> Pair:
        """What this rank pushed of a chunk last."""
        return self._room(self._sent, chunk, chunk)

    def _room(self, rooms: dict[Room, Pair], key: Room, chunk: int) -> Pair:
        """Gradients of a chunk under a key. Peers may ask from a thread of their own: whoever comes second gets the first's."""
        found = rooms.get(key)
        return found or rooms.setdefault(key, self.shape.gradients(self.keys.size_of(chunk), "cpu", self.pinned))

    def take(self, owner: int, epoch: int, use: Callable[[], None] | None = None) -> None:
        """Rank `owner` adds up what this rank pushed in an epoch."""
        self._expect(Word("sent", owner, self.rank), epoch)
        if use is not None:
            use()
        write_word(self.address(Word("free", self.rank, owner)), epoch)

    def _expect(self, word: Word, epoch: int, timeout: float = 10.0) -> None:
        address, deadline = self.address(word), time.monotonic() + timeout
        while epoch > 0 and read_word(address) < epoch:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {word.by} did not say {word.kind} of epoch {epoch} in {timeout} s")
            time.sleep(1e-5)


_LOOPED: Sequence[tuple[Kind, bool]] = tuple((kind, mine) for kind in ("ready", "done", "sent", "free") for mine in (True, False))
"""Words between this rank and a peer: kind, and whether this rank holds it."""
