"""What ranks say to each other, over torch.distributed alone: chunk exchanges, the check at first use, whole sequences.

Every exchange is one `all_to_all_single` that all ranks of the group enter, with sizes both sides read off the plan; a
pair with nothing to send sends nothing. Payloads travel as bytes, so every dtype does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from maskc.diagnostics import MaskcError, error
from maskc.runtime.layout import Layout
from maskc.runtime.localize import take
from maskc.runtime.plan_data import expect
from maskc.runtime.schedule import Route

DEFAULT_TIMEOUT = 600.0
Pair = tuple[torch.Tensor, torch.Tensor]
"""(K, V) or (dK, dV) of one chunk: [B, rows, Hk, D] and [B, rows, Hk, Dv], of one dtype."""


@dataclass(slots=True)
class Ledger:
    """Bytes this process sent while the ledger was open, per destination rank, and per kind ("kv" or "grad")."""

    sent: dict[tuple[str, int], int] = field(default_factory=dict)

    def total(self, kind: str | None = None) -> int:
        return sum(n for (k, _), n in self.sent.items() if kind in (None, k))

    def to(self, rank: int, kind: str | None = None) -> int:
        return sum(n for (k, r), n in self.sent.items() if r == rank and kind in (None, k))


_open_ledgers: list[Ledger] = []


@contextmanager
def count_traffic() -> Iterator[Ledger]:
    """Count the payload bytes of every exchange of this process inside the `with` block."""
    ledger = Ledger()
    _open_ledgers.append(ledger)
    try:
        yield ledger
    finally:
        _open_ledgers.remove(ledger)


def count_sent(kind: str, rank: int, count: int) -> None:
    """So many bytes leave for a rank."""
    for ledger in _open_ledgers:
        ledger.sent[kind, rank] = ledger.sent.get((kind, rank), 0) + count


@dataclass(frozen=True, slots=True)
class Peer:
    """This process in its group."""

    group: Any  # ProcessGroup or None for the default group
    rank: int
    world: int

    @classmethod
    def of(cls, group: Any) -> Peer:
        """Raises MaskcError M701 where there is no group yet, or for what is none, and on ranks outside."""
        if not dist.is_initialized():
            raise error("M701", "torch.distributed has no process group yet", None, "call init_process_group first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            outside = group is dist.GroupMember.NON_GROUP_MEMBER
            text = "this rank is not in the group" if outside else f"group is {type(group).__name__}, not a process group"
            raise error("M701", text)
        known = dist.group.WORLD if group is None else group
        place = _places.get(known)
        if place is None:
            place = _places[known] = dist.get_rank(group), dist.get_world_size(group)
        return cls(group, *place)

    def speaks(self, device: torch.device) -> bool:
        """The group can send tensors of such a device."""
        return device.type in _device_types(self.group)

    def home(self, x: object) -> torch.device:
        """Where numbers for all ranks lie, near x, a tensor or a device: of one device type, whatever x is on each rank."""
        host = torch.device("cpu")
        if self.speaks(host):
            return host
        near = x.device if isinstance(x, torch.Tensor) else x
        if isinstance(near, torch.device) and self.speaks(near):
            return near
        return torch.device(_device_types(self.group)[0])


_places: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
"""Of this process in its groups: rank and number of ranks, which torch looks up in many steps."""


def _device_types(group: Any) -> tuple[str, ...]:
    """Device types of a group's backends, from a description such as "cpu:gloo,cuda:nccl"."""
    return tuple(part.split(":")[0] for part in dist.get_backend_config(group).split(","))


def process_group(peer: Peer) -> Any:
    """The group object, the default one where none was named."""
    return peer.group if peer.group is not None else dist.group.WORLD


def group_timeout(peer: Peer) -> float:
    """Seconds after which the group gives up; torch tells it in no public way."""
    group = process_group(peer)
    try:
        found = group._get_backend(torch.device(_device_types(group)[0])).options._timeout
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT
    return found.total_seconds() if isinstance(found, timedelta) else DEFAULT_TIMEOUT


@dataclass(frozen=True, slots=True)
class Template:
    """Shape of a chunk pair but for its rows."""

    batch: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    device: torch.device

    def elements(self, rows: int) -> int:
        return self.batch * rows * self.heads * (self.dim_k + self.dim_v)

    def unpack(self, flat: torch.Tensor, rows: int) -> Pair:
        k = self.batch * rows * self.heads * self.dim_k
        return (
            flat[:k].view(self.batch, rows, self.heads, self.dim_k),
            flat[k:].view(self.batch, rows, self.heads, self.dim_v),
        )

    def zeros(self, rows: int) -> Pair:
        return self.unpack(torch.zeros(self.elements(rows), dtype=self.dtype, device=self.device), rows)


class Exchange:
    """One phase of moves under way: posted on construction, `wait` returns what came in, as (source, chunk) -> pair."""

    def __init__(
        self,
        peer: Peer,
        route: Route,
        keys: Layout,
        template: Template,
        outgoing: Callable[[int], Pair],
        kind: str,
        what: str,
    ) -> None:
        self.peer, self.keys, self.template, self.what, self.incoming = peer, keys, template, what, route.receives
        parts: list[torch.Tensor] = []
        send, receive = [0] * peer.world, [0] * peer.world
        size = template.dtype.itemsize
        for m in route.sends:
            parts += [t.reshape(-1) for t in outgoing(m.chunk)]
            send[m.dst] += template.elements(keys.size_of(m.chunk)) * size
        for m in self.incoming:
            receive[m.src] += template.elements(keys.size_of(m.chunk)) * size
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=template.dtype, device=template.device)
        self.buffer = torch.empty(sum(receive) // size, dtype=template.dtype, device=template.device)
        self.sending = flat  # kept alive until the exchange is over
        for rank, count in enumerate(send):
            if count:
                count_sent(kind, rank, count)
        with named_failure(what, peer):
            self.work = dist.all_to_all_single(
                self.buffer.view(torch.uint8), flat.view(torch.uint8), receive, send, group=peer.group, async_op=True
            )

    def wait(self) -> dict[tuple[int, int], Pair]:
        with named_failure(self.what, self.peer):
            self.work.wait()
        out: dict[tuple[int, int], Pair] = {}
        at = 0
        for m in self.incoming:
            rows = self.keys.size_of(m.chunk)
            n = self.template.elements(rows)
            out[m.src, m.chunk] = self.template.unpack(self.buffer[at : at + n], rows)
            at += n
        return out


@contextmanager
def named_failure(what: str, peer: Peer) -> Iterator[None]:
    """Turn what torch.distributed raises (a lost peer, a timeout, sizes that do not match) into M709."""
    try:
        yield
    except MaskcError:
        raise
    except RuntimeError as e:
        raise error(
            "M709",
            f"rank {peer.rank} of {peer.world}: {what} failed: {str(e).splitlines()[0]}",
            None,
            "a peer died, stalled past the timeout of the group, or made another call; the group cannot be used again",
        ) from e


# ---------------------------------------------------------------- the check at first use


Fields = Mapping[str, object]


def agree(peer: Peer, fields: Fields, refused: bool, device: torch.device) -> None:
    """Compare what this rank is about to do with all other ranks; every rank raises when they differ or one cannot.

    Raises:
        MaskcError: M708, naming the first field that differs and the value of each rank (numbers as they are, anything
            else as a digest), or the rank that refused.
    """
    mine = [_number(v) for v in fields.values()] + [int(refused)]
    everyone = gather_numbers(peer, mine, device, "the check at first use")
    check_refusals([bool(row[-1]) for row in everyone])
    for i, (name, value) in enumerate(fields.items()):
        values = [row[i] for row in everyone]
        if len(set(values)) > 1:
            shown = isinstance(value, (int, bool))
            text = ", ".join(f"rank {r}: {v if shown else format(v & (1 << 63) - 1, 'x')[:8]}" for r, v in enumerate(values))
            raise error(
                "M708",
                f"ranks disagree on {name} ({text})",
                None,
                "every rank must make the same call with a plan of the same batch",
            )


def check_refusals(refused: Sequence[bool]) -> None:
    """Raise M708 when some rank does not make the call."""
    if any(refused):
        raise error("M708", f"rank {refused.index(True)} refused the call, so no rank runs it; its own error says why")


def gather_numbers(peer: Peer, mine: Sequence[int], device: torch.device, what: str) -> list[list[int]]:
    """Every rank's integers (as many on each). The host waits for them, but not for what its GPU still has to do."""
    with torch.cuda.stream(_aside(device)) if device.type == "cuda" else nullcontext():
        own = torch.tensor(mine, dtype=torch.int64, device=device)
        rows = [torch.empty_like(own) for _ in range(peer.world)]
        with named_failure(what, peer):
            work = dist.all_gather(rows, own, group=peer.group, async_op=True)
            # named, a timeout ends waiting over NCCL too, whose waits are the stream's
            work.wait(timedelta(seconds=group_timeout(peer)))
        return [row.tolist() for row in rows]


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nothing else is enqueued."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _number(value: object) -> int:
    if isinstance(value, int):
        return int(value)
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


# ---------------------------------------------------------------- whole sequences


def gather_sequence(x: torch.Tensor, axis: Layout, group: Any, dim: int) -> torch.Tensor:
    """See `AttentionPlan.unshard`."""
    peer = Peer.of(group)
    if peer.world != axis.world:
        raise error("M707", f"the plan is for {axis.world} ranks, the group has {peer.world}")
    held = axis.local_length(peer.rank)
    expect(x, dim, held, f"rank {peer.rank} holds {held} positions of the plan")
    out: torch.Tensor = _GatherSequence.apply(x, axis, peer, dim % x.dim())  # type: ignore[no-untyped-call]
    return out


class _GatherSequence(torch.autograd.Function):
    """All-gather of uneven parts into sequence order; backward sums the gradients of all ranks in fp32, by rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Layout, peer: Peer, dim: int) -> torch.Tensor:
        ctx.plain = axis, peer, dim
        mine = x.detach().movedim(dim, 0).contiguous()
        counts = [axis.local_length(r) for r in range(peer.world)]
        gathered = _all_to_all(peer, [mine] * peer.world, counts, "unshard")
        inverse = torch.empty(axis.length, dtype=torch.int64)
        inverse[_order(axis)] = torch.arange(axis.length)
        return torch.cat(gathered).index_select(0, inverse.to(x.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        axis, peer, dim = ctx.plain
        rows = grad.movedim(dim, 0)
        parts = [take(rows, axis.ranges(axis.chunks_of(r)), 0).contiguous() for r in range(peer.world)]
        received = _all_to_all(peer, parts, [axis.local_length(peer.rank)] * peer.world, "the backward of unshard")
        total = received[0].to(torch.promote_types(grad.dtype, torch.float32))
        for part in received[1:]:
            total = total + part
        return total.to(grad.dtype).movedim(0, dim), None, None, None


def _order(axis: Layout) -> torch.Tensor:
    """Positions in the order in which the ranks hold them, rank after rank."""
    index = torch.arange(axis.length)
    return torch.cat([take(index, axis.ranges(axis.chunks_of(r)), 0) for r in range(axis.world)])


def _all_to_all(peer: Peer, parts: Sequence[torch.Tensor], counts: Sequence[int], what: str) -> list[torch.Tensor]:
    """parts[r] to rank r; returns the part of each rank, counts[r] rows of the same trailing shape."""
    tail = parts[0].shape[1:]
    unit = tail.numel() * parts[0].element_size()
    flat = torch.cat([p.reshape(-1) for p in parts])
    buffer = torch.empty(sum(counts) * tail.numel(), dtype=flat.dtype, device=flat.device)
    with named_failure(what, peer):
        work = dist.all_to_all_single(
            buffer.view(torch.uint8),
            flat.view(torch.uint8),
            [c * unit for c in counts],
            [len(p) * unit for p in parts],
            group=peer.group,
            async_op=True,
        )
        work.wait()
    return [part.view(-1, *tail) for part in torch.split(buffer, [c * tail.numel() for c in counts])]
