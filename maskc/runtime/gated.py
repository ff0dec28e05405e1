"""The executors "gated" and "copy-then-attend" of a context-parallel call: owners write their keys to the memory of readers.

Every rank of the group makes the same calls in the same order, forward and backward; nothing is said between them but the
words of `maskc.runtime.protocol`, and no host waits for a GPU. What goes wrong is therefore seen late: log-sum-exp and the
gradients of keys are NaN from then on, and the next call raises.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from maskc.binding.streams import current_handle
from maskc.boundary import BoundaryVectors
from maskc.runtime.call_order import tag_of
from maskc.runtime.link import BUFFERS, Link, Room, link_of
from maskc.runtime.localize import localized
from maskc.runtime.merge import Partial
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.overlap_plan import OverlapPlan, overlap_plan
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.remember import derived
from maskc.runtime.symmetric import Symmetric, most_rows, room_of
from maskc.runtime.transport import KeyShape

if TYPE_CHECKING:
    from maskc.runtime.comm import Peer
    from maskc.runtime.executor import Call


@dataclass(frozen=True, slots=True)
class Direct:
    """The way to the memory of the other ranks, and by which executor keys are taken from there."""

    link: Link
    executor: Executor


def direct(peer: Peer, plan: AttentionPlan, executor: str, k: Tensor, v: Tensor) -> Direct | str:
    """The way of a call, with room for it, or why there is none. All ranks enter the first time, with equal plans.

    Raises MaskcError M721 once where the last one broke.
    """
    link = link_of(peer, k.device)
    if isinstance(link, str):
        return link
    link.reserve(peer, _room(plan, key_shape(k, v)))
    return Direct(link, cast(Executor, executor))


@derived
def _room(plan: AttentionPlan, shape: KeyShape) -> Room:
    return room_of(plan.keys, most_rows(plan), shape)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """(out, lse) of this rank's rows."""
    way = _way(call)
    with way.link.call():
        key = _key(call, q, k, v)
        rank = rank_of(call, q, k, v, key)
        rank.holds = None
        tag = tag_of(*key, way.executor, "forward")
        out, lse = rank.forward(local_mask(call, q, k), q, k, v, call.scale, way.executor, tag)
        way.link.given |= dict.fromkeys(rank.plan.sources, rank.epoch)
        rank.holds = lse if call.plan.keep_keys else None
        return out, lse


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): keys are gathered again or kept, gradients go back in fp32 and are added up in a fixed order.

    Kept are those of the last call under this plan, if it was this one's forward. Ranks make the same calls and so find the
    same; where one does not (it alone saves tensors elsewhere), all raise M721 in time.
    """
    way, given = _way(call), (q, k, v, out, lse, dout, call.scale)
    with way.link.call():
        key = _key(call, q, k, v)
        rank = rank_of(call, q, k, v, key)
        kept, rank.holds = rank.holds is not None and _one_memory(rank.holds, lse), None
        local, how = local_mask(call, q, k), call.deterministic
        tag = tag_of(*key, way.executor, "backward", kept)
        made = rank.backward(local, *given, way.executor, dlse=dlse, deterministic=how, gather=not kept, tag=tag)
        way.link.given |= {} if kept else dict.fromkeys(rank.plan.sources, rank.epoch)
        rank.holds = lse if call.plan.keep_keys else None
        return made


def _one_memory(held: Tensor, other: Tensor) -> bool:
    """Whether both are in one piece of memory. `held` keeps its own from being given to others; it may be empty."""
    return bool(held.untyped_storage()._cdata == other.untyped_storage()._cdata)


@derived
def visit_order(plan: AttentionPlan, rank: int, part: int, heads: tuple[int, int], masks: int) -> OverlapPlan:
    """`overlap_plan`, which the layers of a batch share. heads: of queries and keys."""
    return overlap_plan(plan, rank, part, heads, masks)


def key_shape(k: Tensor, v: Tensor) -> KeyShape:
    return KeyShape(k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype)


def _way(call: Call) -> Direct:
    assert call.direct is not None
    call.direct.link.complain()
    return call.direct


def _order(call: Call, q: Tensor, k: Tensor, rank: int | None = None) -> OverlapPlan:
    """Of this rank, or of another."""
    masks, rank = call.vectors.batch * call.vectors.heads, call.peer.rank if rank is None else rank
    return visit_order(call.plan, rank, call.part, (q.shape[2], k.shape[2]), masks)


def local_mask(call: Call, q: Tensor, k: Tensor) -> BoundaryVectors:
    """The mask of this rank's rows over its key buffer."""
    # streams that have waited for what `localized` made need not ask it again
    stream = current_handle(call.device) if call.device.type == "cuda" else 0
    key = call.plan.digest, call.part, call.peer.rank, q.shape[2], k.shape[2], stream
    known = _local_masks.setdefault(call.vectors, {})
    found = known.get(key)
    if found is None:
        columns = _order(call, q, k).columns
        found = localized(call.vectors, call.plan.rows, call.row_chunks, call.plan.keys, columns, call.device)
        known[key] = found
    return found


_local_masks: WeakKeyDictionary[BoundaryVectors, dict[tuple[Hashable, ...], BoundaryVectors]] = WeakKeyDictionary()


def _key(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Hashable, ...]:
    """What calls have in common that share a key buffer, the same on all ranks."""
    return call.plan.digest, call.part, key_shape(k, v), q.shape[2]


def rank_of(call: Call, q: Tensor, k: Tensor, v: Tensor, key: tuple[Hashable, ...] | None = None) -> Overlapped:
    """This rank with its key buffer, which the calls of a batch share; those of a few plans are kept. key: `_key`, if known."""
    assert call.direct is not None
    link, key = call.direct.link, key or _key(call, q, k, v)
    rank, place = link.ranks.pop(key, (None, 0))
    if rank is None:
        shape, order = key_shape(k, v), _order(call, q, k)
        while len(link.ranks) >= BUFFERS:
            link.ranks.pop(next(iter(link.ranks)))
        place = min(set(range(BUFFERS)) - {at for _, at in link.ranks.values()})
        link.await_given()
        rank = Overlapped(
            order,
            call.plan.keys,
            shape,
            Symmetric(link, order, call.plan.keys, shape, place),
            link.queues,
            call.device,
            readers={r: _order(call, q, k, r) for r, _ in order.lends},
            timeout=link.timeout,
            lasting=link.lasting,
        )
    link.ranks[key] = rank, place  # the last one used comes last, on all ranks alike
    return rank
