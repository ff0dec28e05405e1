"""What the ranks of one group share on one host: words that streams wait for and write, and one piece of memory per rank.

Words lie in a file in memory that every rank maps, page-locked for GPUs, so that a host can end waits while streams hang.
The memory of the ranks is torch's symmetric memory on GPUs, without NVLink multicast, and such a file on CPUs. Everything
here that all ranks must enter says so; ranks come to the same answer, also where one of them cannot take part.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor

from maskc.codegen.spec import GATE_SLOTS
from maskc.diagnostics import MaskcError, error
from maskc.runtime import comm
from maskc.runtime.call_order import Calls, calls_size
from maskc.runtime.comm import Peer
from maskc.runtime.driver_streams import StreamWord
from maskc.runtime.overlap import STOPPED, Lasting, Overlapped
from maskc.runtime.protocol import Epochs, Kind, Turn, Word
from maskc.runtime.transport import CudaQueues, HostQueues, Queues, read_word, write_word
from maskc.runtime.watch import Watch

Made = TypeVar("Made")
KINDS: tuple[Kind, ...] = ("open", "gave", "sent", "free")
"""Words between ranks."""
ALIGNMENT = 512
LONGEST = 4000.0
"""Seconds that a kernel's clock can count."""
GROWTH = 1.25
"""Memory is asked for with so much to spare, for sizes change with the plans."""


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


BUFFERS = 2
"""Key buffers of a rank, for models that use several masks in turn."""
PIECES = 2 * GATE_SLOTS
"""Words in a rank's memory, for the pieces of either direction."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes in the memory of each rank: of a key buffer, and of the staging of one reader. Each comes behind its words."""

    buffer: int
    region: int

    def flags_at(self, which: int) -> int:
        """Of the pieces of a key buffer. Not of both: what nobody waits for may come after the next call has begun."""
        return which * (aligned(4 * PIECES) + self.buffer)

    def buffer_at(self, which: int) -> int:
        return self.flags_at(which) + aligned(4 * PIECES)

    def told_at(self, reader: int) -> int:
        """Words of the pieces of one reader, and behind them its staging: what the two share."""
        return self.flags_at(BUFFERS) + reader * (aligned(4 * GATE_SLOTS) + self.region)

    def region_at(self, reader: int) -> int:
        return self.told_at(reader) + aligned(4 * GATE_SLOTS)

    def total(self, world: int) -> int:
        return self.told_at(world)

    def holds(self, other: Room) -> bool:
        return self.buffer >= other.buffer and self.region >= other.region

    def grown(self, other: Room) -> Room:
        """At least both, with something to spare."""
        wanted = (
            max(a, aligned(int(b * GROWTH))) if b > a else a
            for a, b in ((self.buffer, other.buffer), (self.region, other.region))
        )
        return Room(*wanted)


class Link:
    """Made by `link_of`; used by one call of the group after another. It does not know the group, with which it goes.

    memory: per rank its bytes as this process sees them. ranks: this rank over the last few plans, and which key buffers
    these have. epochs: of the calls. given: of every rank that has given keys to this one, the last epoch in which it did.
    timeout: seconds of one wait. complained: this rank has raised M721.
    """

    def __init__(self, peer: Peer, device: torch.device, words: SharedFile, timeout: float) -> None:
        self.rank, self.world, self.device, self.timeout = peer.rank, peer.world, device, timeout
        self.epochs = Epochs()
        self.room = Room(0, 0)
        self.memory: tuple[Tensor, ...] = ()
        self.ranks: dict[Hashable, tuple[Overlapped, int]] = {}
        self.given: dict[int, int] = {}
        self.complained = False
        self.queues: Queues = CudaQueues(device) if device.type == "cuda" else HostQueues(seconds=timeout)
        self._words, self.entering = words, threading.RLock()
        self._given_up = (ctypes.c_uint32 * self.world).from_address(self._broken(0))
        self._keeps: object = None
        if device.type == "cuda":
            _register(words)
        everybody = words.ints(self._failed(0) - words.address, self.world)
        self.lasting = replace(Lasting.of(device), failed=everybody[self.rank : self.rank + 1], everybody=everybody)
        self.calls, self._difference = Calls(self._failed(self.world), self.rank, self.world), ""
        self.watch = Watch(self._trouble, self._stop, 1.5 * timeout + 1.0, self._differs)

    def begin(self, owners: Iterable[int] = (), tag: int = 0) -> Turn:
        """Count a call, see `Epochs.begin`, and tell the others which it is, before anything waits for them."""
        turn = self.epochs.begin(owners)
        self.calls.say(turn.epoch, tag)
        return turn

    def address(self, word: Word) -> int:
        """Of a word between two ranks."""
        world = self.world
        at = (KINDS.index(word.kind) * world + word.holder) * world + word.by
        return self._words.address + 4 * at

    def flags(self, rank: int, which: int) -> Tensor:
        """int32, the words of the pieces of one of a rank's key buffers."""
        at = self.room.flags_at(which)
        return self.memory[rank][at : at + 4 * PIECES].view(torch.int32)

    def told(self, owner: int, reader: int) -> Tensor:
        """int32, in the memory of `owner`, the words of the pieces whose gradients `reader` gives it.

        Zeros where memory is new, and else of epochs before: all of them stand for pieces that are not there.
        """
        at = self.room.told_at(reader)
        return self.memory[owner][at : at + 4 * GATE_SLOTS].view(torch.int32)

    def await_given(self) -> None:
        """The current stream goes on once all keys given to this rank so far are there.

        No kernel has waited for pieces that no row sees. So a buffer needs this before it serves another plan, in which its
        parts belong to other ranks, whose copies are not behind those.
        """
        words = [StreamWord(True, self.address(Word("gave", self.rank, r)), e & 0xFFFFFFFF) for r, e in self.given.items()]
        if words:
            self.queues.on("compute")
            self.queues.words("compute", words)

    def release(self, epoch: int) -> None:
        """End every wait of this rank for a word of up to this epoch."""
        for kind in KINDS:
            for by in range(self.world):
                at = self.address(Word(kind, self.rank, by))
                if ctypes.c_int32(read_word(at) - epoch).value < 0:
                    write_word(at, epoch)

    def give_up(self) -> None:
        """Tell the others that this rank has ended its waits: what they wait for will not come."""
        write_word(self._broken(self.rank), 1)

    def call(self) -> Entered:
        """Around what one call enqueues. The link breaks when that ends in the middle: others wait for the rest of it."""
        return Entered(self)

    def broke_off(self, e: BaseException, before: int) -> None:
        """A call raised, epoch `before` being the one before it."""
        waited = isinstance(e, MaskcError) and e.code == "M721"
        self.complained = self.complained or waited
        if self.complained or self.epochs.epoch != before:
            self._stop()
        if waited and self._differs():
            self.complain()

    def look_after(self) -> None:
        """Let the watch know of all that was enqueued so far."""
        if isinstance(self.queues, CudaQueues):
            event: Any = self.watch.spare() or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.queues.compute)
            self.watch.entered(event)

    def complain(self) -> None:
        """Raise M721 where a rank gave up."""
        if self.device.type == "cpu" and self._differs():  # where no watch looks
            self._stop()
        if any(self._given_up):
            self.complained = True
            why = self._difference or f"rank {', '.join(map(str, self.broken))} gave up"
            raise error("M721", f"rank {self.rank}: {why}, all waits ended", None, "results since are useless")

    def _differs(self) -> str:
        self._difference = self._difference or self.calls.differs()
        return self._difference

    def _trouble(self) -> str:
        if self.broken:
            return f"rank {self.broken[0]} gave up"
        found = read_word(self.lasting.failed.data_ptr())
        return f"a kernel ended its wait for slot {found}" if found else ""

    def _stop(self) -> None:
        """End every wait: of kernels and of streams.

        The kernels of all ranks, before the streams of this one: those go on to write into the buffers of others, whose
        results must be known to be useless then.
        """
        self.give_up()
        for rank in range(self.world):
            if not read_word(self._failed(rank)):
                write_word(self._failed(rank), STOPPED)
        self.release(self.epochs.epoch)

    @property
    def broken(self) -> tuple[int, ...]:
        """Ranks that gave up. The link cannot be used again."""
        return tuple(r for r, gave_up in enumerate(self._given_up) if gave_up)

    def reserve(self, peer: Peer, room: Room) -> None:
        """Have at least this room. All ranks of its group enter, with the same room: it follows from the plan.

        Raises MaskcError M723 on all ranks where one cannot have it.
        """
        if self.room.holds(room):
            return
        grown = self.room.grown(room)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing of this rank uses the old memory
        comm.gather_numbers(peer, [0], peer.home(self.device), "the end of the use of shared memory")
        self.memory, self.room, self._keeps = (), Room(0, 0), None
        self.ranks.clear()
        made = _memory(peer, self.device, grown.total(self.world))
        if isinstance(made, str):
            raise error("M723", made)
        self.memory, self._keeps = made
        self.room = grown

    def _broken(self, rank: int) -> int:
        return self._words.address + 4 * (len(KINDS) * self.world**2 + rank)

    def _failed(self, rank: int) -> int:
        """Of the word that kernels of a rank look at while they wait, `Lasting.failed`."""
        return self._broken(self.world + rank)


class Entered:
    """See `Link.call`."""

    __slots__ = ("_before", "_link")

    def __init__(self, link: Link) -> None:
        self._link, self._before = link, 0

    def __enter__(self) -> None:
        self._link.entering.acquire()
        self._before = self._link.epochs.epoch

    def __exit__(self, _: object, e: BaseException | None, __: object) -> None:
        try:
            if e is not None:
                self._link.broke_off(e, self._before)
        finally:
            self._link.look_after()
            self._link.entering.release()


def words_size(world: int) -> int:
    return 4 * (len(KINDS) * world**2 + 2 * world) + calls_size(world)


# ---------------------------------------------------------------- one link per group

_links: WeakKeyDictionary[Any, dict[torch.device, Link | str]] = WeakKeyDictionary()
"""Per group and device, whose ranks may have tensors on CPUs now and on GPUs then."""
_making = threading.Lock()


def link_of(peer: Peer, device: torch.device) -> Link | str:
    """The link of a group, or why there is none. All ranks enter, at the first call, after a link broke and on new devices.

    Raises MaskcError M721 once where a rank gave up; the call after it makes a new link.
    """
    group = comm.process_group(peer)
    with _making:
        mine = _links.setdefault(group, {})
        known = mine.get(device)
        if isinstance(known, Link) and known.broken:
            del mine[device]
            if not known.complained:
                known.complain()
            known = None
        if known is None:
            known = mine[device] = _make(peer, device)
            if isinstance(known, Link):
                finalize(group, _leave, ref(known.watch)).atexit = False
        return known


def _leave(watch: ref[Watch]) -> None:
    """The group is gone: nobody calls any more. The watch keeps the link until what was enqueued has ended."""
    if (found := watch()) is not None:
        found.leave()


def _make(peer: Peer, device: torch.device) -> Link | str:
    reason = _refusal(device)
    if found := _first(peer, device, reason):
        return found
    words = shared_file(peer, device, words_size(peer.world))
    if isinstance(words, str):
        return words
    link, reason = _tried(lambda: Link(peer, device, words, min(LONGEST, comm.group_timeout(peer))))
    if found := _first(peer, device, reason):
        return found
    assert link is not None
    try:
        link.reserve(peer, Room(ALIGNMENT, ALIGNMENT))
    except MaskcError as e:
        return e.diagnostics[0].message
    return link


def _refusal(device: torch.device) -> str:
    """ "" where this process could share memory of the device."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"`{device.type}` devices share no memory"
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError:
        return "this torch has no symmetric memory"
    return "" if hasattr(symmetric, "rendezvous") and hasattr(symmetric, "empty") else "this torch has another symmetric memory"


def _first(peer: Peer, device: torch.device, reason: str) -> str:
    """The reason of the first rank that has one, in its own words there. All ranks enter."""
    refused = [row[0] for row in comm.gather_numbers(peer, [int(bool(reason))], peer.home(device), "the choice of an executor")]
    if not any(refused):
        return ""
    return reason or f"rank {refused.index(1)} cannot share memory; its own log says why"


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that all ranks of a host map."""

    mapped: mmap.mmap
    address: int
    size: int

    @classmethod
    def at(cls, path: Path, size: int) -> SharedFile:
        with path.open("r+b") as f:
            mapped = mmap.mmap(f.fileno(), size)
        return cls(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)), size)

    def ints(self, at: int, count: int) -> Tensor:
        """int32 [count], so many bytes into it."""
        return torch.frombuffer(self.mapped, dtype=torch.int32, count=count, offset=at)


def shared_file(peer: Peer, device: torch.device, size: int) -> SharedFile | str:
    """A file of zeros that every rank maps, or why not. All ranks enter; its name is gone when they leave."""
    token, reason = secrets.randbits(62), ""
    try:
        if peer.rank == 0:
            try:
                with _shared_path(token).open("xb") as f:
                    f.truncate(size)
            except OSError as e:
                reason = str(e)
        tokens = comm.gather_numbers(peer, [token], peer.home(device), "the name of shared memory")
        opened = None
        if not reason:
            try:
                opened = SharedFile.at(_shared_path(tokens[0][0]), size)
            except (OSError, ValueError) as e:
                reason = f"rank {peer.rank} does not share a host with rank 0: {e}"
        found = _first(peer, device, reason)
    finally:
        if peer.rank == 0:
            _shared_path(token).unlink(missing_ok=True)
    if found:
        return found
    assert opened is not None
    return opened


def _shared_path(token: int) -> Path:
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())) / f"maskc-{token:016x}"


Memory = tuple[tuple[Tensor, ...], object]
"""Bytes of every rank as this process sees them, and what must live as long."""


def _memory(peer: Peer, device: torch.device, size: int) -> Memory | str:
    """So many bytes of every rank. All ranks enter."""
    if device.type == "cpu":
        file = shared_file(peer, device, size * peer.world)
        if isinstance(file, str):
            return file
        whole = torch.frombuffer(file.mapped, dtype=torch.uint8)
        return tuple(whole[r * size : (r + 1) * size] for r in range(peer.world)), file
    made, reason = _tried(lambda: _symmetric(peer, device, size))
    if found := _first(peer, device, reason):
        return found
    assert made is not None
    return _proven(peer, device, made[0]) or made


def _symmetric(peer: Peer, device: torch.device, size: int) -> Memory:
    """Torch's symmetric memory, over addresses of the peers' memory."""
    from torch.distributed import _symmetric_memory as symmetric

    with torch.cuda.device(device):
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(own, comm.process_group(peer))
        own.zero_()
        seen = [own if r == peer.rank else handle.get_buffer(r, (size,), torch.uint8) for r in range(peer.world)]
    return tuple(seen), handle


def _proven(peer: Peer, device: torch.device, memory: Sequence[Tensor]) -> str:
    """ "" if every rank reads from every other what that one wrote. All ranks enter."""

    def write() -> None:
        memory[peer.rank][-8:].fill_((peer.rank + 1) % 256)
        torch.cuda.synchronize(device)

    def read() -> None:
        for r, theirs in enumerate(memory):
            if theirs[-8:].tolist() != [(r + 1) % 256] * 8:
                raise RuntimeError(f"rank {peer.rank} does not read what rank {r} wrote")

    _, reason = _tried(write)
    if found := _first(peer, device, reason):
        return found
    _, reason = _tried(read)
    return _first(peer, device, reason)


def _tried(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """(what it makes, "") or (None, why it failed)."""
    try:
        return make(), ""
    except (MaskcError, RuntimeError, OSError, TypeError, AttributeError) as e:
        return None, f"symmetric memory: {str(e).splitlines()[0] if str(e) else type(e).__name__}"


def _register(words: SharedFile) -> None:
    """Lock the pages, so that GPUs can wait for the words and write them."""
    status = torch.cuda.cudart().cudaHostRegister(words.address, words.size, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise error("M723", f"words in shared memory cannot be locked for the GPU: {status}")
    _locked.append(words)


_locked: list[SharedFile] = []  # streams may still look at words of a link that broke
