"""Calls that were made before: what a first one enqueued is enqueued again, with other epochs and addresses.

Calls between GPUs of one mask, layout and stream differ in nothing else. Between two of them a host does other things, and its
caches hold those: what a call looks at costs more than what it computes, and so it looks at as little as may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from maskc.boundary import BoundaryVectors
from maskc.runtime import comm, driver_streams, hopper
from maskc.runtime.driver_streams import StreamWord, StreamWords
from maskc.runtime.exchange import Run
from maskc.runtime.overlap_grads import Gradients
from maskc.runtime.overlap_places import laid
from maskc.runtime.overlap_sum import over_splits
from maskc.runtime.protocol import Put, Stream, Turn, Wait
from maskc.runtime.ready import Fresh, Ready, Words
from maskc.runtime.transport import CudaQueues, Pair, Prepared, Queues

Addresses: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[object, ...]
Copied: TypeAlias = Literal["own", "parts", "sums"]
"""Of what copies are made: see `Now`."""
MOST = 16
"""Layouts that calls of one mask are kept of."""

# Words of the structs that each call gives.
FORWARD: tuple[Words, ...] = ((("out", 2), ("gate.timeout", 1)),)
BACKWARD: tuple[Words, ...] = ((("out", 14),), (("dq", 6), ("turns", 5), ("gate.timeout", 1)), (("acc", 2),))
SUM: tuple[Words, ...] = ((("own", 2), ("out", 2), ("epoch", 1)),)
SPOIL: tuple[Words, ...] = ((("words", 2),),)


@dataclass(slots=True)
class Now:
    """What is other in each call.

    numbers: its epoch, then those of `Turn.before`. pair: K and V. own: where they lie. given: where what the kernels read and
    write lies, see `forward_kernel` and `backward_kernels`. parts: where the gradients do that they leave, which are `left`.
    sums: what was last summed of them over several CTAs.
    """

    numbers: tuple[int, ...]
    pair: Pair
    own: tuple[int, int]
    given: Addresses
    parts: tuple[int, int] = (0, 0)
    left: Gradients | None = None
    sums: tuple[Tensor, ...] = ()


Action: TypeAlias = Callable[[Now], None]


class Tape:
    """What a call enqueues, in order, written down while it is made."""

    def __init__(self, queues: CudaQueues) -> None:
        self.queues = queues
        self.stream = queues.handle("compute")
        self._actions: list[Action] = []
        self._places: dict[str, int] = {}
        self._sent: dict[tuple[str, int], int] = {}

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def words(self, stream: Stream, words: Sequence[StreamWord]) -> None:
        """values: places in `Now.numbers`."""
        made, handle = StreamWords(words), self.queues.handle(stream)
        self.add(lambda now: made.enqueue(handle, now.numbers))

    def follow(self, stream: Stream, other: Stream) -> None:
        """After the queues have done so, whose event it is."""
        given = self.queues.handle(stream), self.queues.handle(other), self.queues.event(other)
        self.add(lambda now: driver_streams.follow(*given))

    def copies(self, stream: Stream, of: Copied, to: tuple[str, int], made: Prepared) -> None:
        """to: as what, and to which rank, its bytes are sent."""
        handle = self.queues.handle(stream)
        for which, copy in made.copies:
            self.add(_copying(copy.ready(), handle, of, which))
        self.sent(*to, made.bytes)

    def sent(self, kind: str, rank: int, count: int) -> None:
        self._sent[kind, rank] = self._sent.get((kind, rank), 0) + count

    def here(self, name: str) -> None:
        """What is `put` later comes here."""
        self._places[name] = len(self._actions)
        self._actions.append(_missing)

    def put(self, name: str, action: Action) -> None:
        self._actions[self._places[name]] = action

    def play(self, now: Now) -> None:
        """In the context of the device."""
        for action in self._actions:
            action(now)
        for (kind, rank), count in self._sent.items():
            comm.count_sent(kind, rank, count)


def _missing(now: Now) -> None:
    raise AssertionError("nothing was put here")


def _copying(enqueue: Callable[[int, int], None], stream: int, of: Copied, which: int) -> Action:
    match of:
        case "own":
            return lambda now: enqueue(stream, now.own[which])
        case "parts":
            return lambda now: enqueue(stream, now.parts[which])
        case "sums":
            return lambda now: enqueue(stream, now.sums[which].data_ptr())
        case _:
            assert_never(of)


@dataclass(frozen=True, slots=True)
class Replay:
    """A call that was made. fresh: what each allocates. keep: what its kernels read that nothing else may keep."""

    tape: Tape
    compute: torch.cuda.Stream
    fresh: tuple[Fresh, ...]
    keep: object


@dataclass(slots=True)
class Replays:
    """Of one key buffer, by mask and layout, as long as the mask lives."""

    _of: WeakKeyDictionary[BoundaryVectors, dict[Key, Replay]] = field(default_factory=WeakKeyDictionary)

    def find(self, mask: BoundaryVectors, key: Key, tensors: Sequence[Tensor]) -> Replay | None:
        """None also where a tensor lies so that kernels would read a copy of it."""
        found = self._of.get(mask)
        made = None if found is None else found.get(key)
        if made is not None:
            for t in tensors:
                if t.data_ptr() % 16:
                    return None
        return made

    def keep(self, mask: BoundaryVectors, key: Key, made: Replay) -> None:
        found = self._of.setdefault(mask, {})
        found[key] = made
        if len(found) > MOST:
            found.pop(next(iter(found)))


def key_of(stream: int, *how: object, tensors: Sequence[Tensor]) -> Key:
    """stream: by handle. What was made on it before need not be waited for again."""
    return (stream, *how, *[t.shape for t in tensors], *[t.stride() for t in tensors])


def plain(mask: BoundaryVectors, tensors: Sequence[Tensor]) -> bool:
    """Whether kernels read all of them where they are."""
    dense = mask.blocks is None or mask.blocks.keep.is_contiguous()
    return dense and all(hopper.addressable(t) is t for t in tensors)


def addresses(tensors: Iterable[Tensor]) -> Addresses:
    return tuple([t.data_ptr() for t in tensors])


def ahead(parts: Iterable[Tensor], wholes: Iterable[Tensor]) -> Addresses:
    """How far into each tensor a part of it begins, in bytes."""
    return tuple(part.data_ptr() - whole.data_ptr() for part, whole in zip(parts, wholes, strict=True))


def numbers_of(turn: Turn) -> tuple[int, ...]:
    return turn.epoch & 0xFFFFFFFF, *[epoch & 0xFFFFFFFF for _, epoch in turn.before]


def place_of(op: Wait | Put, turn: Turn) -> int:
    """Of the epoch of an operation, in `numbers_of`."""
    return 0 if op.epoch == turn.epoch else 1 + [owner for owner, _ in turn.before].index(op.word.by)


@dataclass(frozen=True, slots=True)
class Places:
    """Of what kernels read, and how long they wait, in ticks.

    buffer: where keys and values lie. own: how far into K and V own ones do that kernels read there, if any.
    """

    buffer: Addresses
    own: Addresses | None
    ticks: int

    def keys(self, now: Now) -> Addresses:
        """Of own ones."""
        k, v = now.own
        return self.buffer if self.own is None else (k + self.own[0], v + self.own[1])

    def gate(self, now: Now) -> tuple[int]:
        """`timeout` and `epoch` of both `GateTables`."""
        return (self.ticks | now.numbers[0] << 32,)


def forward_kernel(ready: Ready, stream: int, places: Places) -> Action:
    """Given q, out, lse."""

    def start(now: Now) -> None:
        q, out, lse = now.given
        ready.start(stream, (q, *places.buffer, out, *places.keys(now)), (out, lse), places.gate(now))

    return start


@dataclass(frozen=True, slots=True)
class Space:
    """Where the parts of a backward's workspace lie, in bytes, in the order of `pre::Params` from `lse2` on.

    falling: the main kernel takes its tiles in an order that the workspace holds.
    """

    offsets: tuple[int, ...]
    falling: bool


def backward_kernels(ready: Sequence[Ready], stream: int, places: Places, whole: Addresses | None, space: Space) -> Action:
    """Given q, out, lse, dout, dq, dk, dv and the workspace.

    whole: how far into dK and dV those of own keys lie that the kernel completes, if it does.
    """
    pre, main, post = ready

    def start(now: Now) -> None:
        q, out, lse, dout, dq, dk, dv, base = now.given
        stores = places.buffer if whole is None else (dk + whole[0], dv + whole[1])
        lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order = [base + offset for offset in space.offsets]
        pre.start(stream, (), (out, dout, lse, 0, lse2, dpsum, dead, acc, turns, ticket, zeroed, tiles, order, 0))
        words = acc, lse2, dpsum, dead, tiles, order if space.falling else 0
        tensors = q, dout, *places.buffer, *stores, *places.keys(now)
        main.start(stream, tensors, words, (turns, ticket, zeroed, *now.parts), places.gate(now))
        post.start(stream, (), (acc, dq))

    return start


def gradient_sum(sums: Sequence[Ready], spoil: Ready, stream: int, added: bool) -> Action:
    """The sum of what everybody has of the gradients of own keys, and NaN in it where somebody gave up.

    added: it looks at what the backward kernel has added of this epoch.
    """

    def start(now: Now) -> None:
        *_, dk, dv, _ = now.given
        for one in sums:
            one.start(stream, (), now.parts, (dk, dv), (now.numbers[0] if added else 0,))
        spoil.start(stream, (), (dk, dv))

    return start


def spoiled(ready: Ready, stream: int) -> Action:
    """NaN in the log-sum-exp where somebody gave up."""
    return lambda now: ready.start(stream, (), (now.given[2], 0))


# What is noted of a call holds neither its rank nor its tensors: buffers are to be freed as soon as nobody uses the rank.


def laid_again(into: Pair, runs: Sequence[Run], now: Now) -> None:
    laid(now.pair, into, runs)


def summed_again(queues: Queues, heads: slice, rows: slice, now: Now) -> None:
    """Sums over CTAs of gradients that are pushed next."""
    assert now.left is not None
    with queues.on("sum"):
        dk, dv = (over_splits(t[:, :, heads, rows]) for t in now.left.pair)
    queues.keep("send", (dk, dv))
    now.sums = dk, dv  # the allocator must not be given them back before their copies are enqueued
