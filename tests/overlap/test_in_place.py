"""Own keys that kernels read where they are, the gradients of them that they complete, and copies of what leaves together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskc.runtime import overlap_kernels
from maskc.runtime.overlap import Overlapped
from maskc.runtime.overlap_grads import Gradients
from maskc.runtime.overlap_kernels import InPlace
from maskc.runtime.overlap_plan import plan_visits
from maskc.runtime.protocol import at_once
from maskc.runtime.transport import HostQueues
from tests.overlap.stand_in import on_gpu
from tests.overlap.test_departures import CPU, KEYS, SHAPE, rank_0
from tests.runtime.test_link import transports


def running(rank: int, needed: set[int]) -> Overlapped:
    """A rank that sees these chunks; the others see all."""
    every = [frozenset(needed) if r == rank else frozenset(range(7)) for r in range(3)]
    made = [plan_visits(KEYS, every, r, 3) for r in range(3)]
    transport, readers = transports(KEYS, made, SHAPE)[rank], {r: made[r] for r, _ in made[rank].lends}
    return Overlapped(made[rank], KEYS, SHAPE, transport, HostQueues(), CPU, readers=readers)


def keys(rank: int) -> torch.Tensor:
    return torch.randn(SHAPE.batch, KEYS.local_length(rank), SHAPE.heads, SHAPE.dim_k)


@pytest.mark.parametrize(("block_kv", "block"), [(8, 4), (16, 2)])
def test_own_keys_of_whole_blocks_are_read_in_place(block_kv: int, block: int) -> None:
    """Own ones lie behind 25 rows of others: what shares a block with those is read in the buffer."""
    made, k, v = running(0, set(range(7))), on_gpu(keys(0)), on_gpu(keys(0))
    own = made.in_place(k, v, block_kv)
    assert own is not None
    assert (own.block, own.rows, own.lead) == (block, slice(7, 12), ((25, slice(0, 7)),))
    assert all(torch.equal(there, t[:, 7:]) for there, t in zip(own.pair, (k, v), strict=True))
    assert made.in_place(k, v, 64) is None, "no whole block"
    assert made.in_place(torch.Tensor(k), torch.Tensor(v), block_kv) is None, "no kernel"


def test_own_keys_in_two_places_are_not_read_in_place() -> None:
    """Of chunks 1, 2 and 4 the rank does not see the second: in the buffer the others lie side by side, in its tensors not."""
    k = on_gpu(keys(1))
    assert running(1, {1, 4}).in_place(k, k, 1) is None
    assert running(1, {1, 2}).in_place(k, k, 1) is not None, "but for some at an end"
    assert running(1, {0}).in_place(k, k, 1) is None, "none at all"


def test_a_kernel_completes_gradients_whose_sum_one_cta_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made, k = running(0, set(range(7))), keys(0)
    own = InPlace(4, 8, (k[:, 7:], k[:, 7:]), slice(7, 12), ((25, slice(0, 7)),))
    q: Any = SimpleNamespace(shape=(SHAPE.batch, 12, SHAPE.heads, SHAPE.dim_k), dtype=k.dtype)
    local: Any = None
    grads = keys(0), keys(0)
    monkeypatch.setattr(Overlapped, "splits", lambda *_: 1)
    whole = made.whole(local, q, own, grads, False)
    assert whole is not None
    assert all(t.data_ptr() == g[:, 7:].data_ptr() for t, g in zip(whole.results, grads, strict=True))
    assert whole.added.shape == (SHAPE.batch * SHAPE.heads, 1), "one tile of own keys"
    assert made.whole(local, q, None, grads, False) is None
    assert made.whole(local, q, own, (grads[0].double(), grads[1].double()), False) is None, "of another dtype than it stores"
    monkeypatch.setattr(Overlapped, "splits", lambda *_: 2)
    assert made.whole(local, q, own, grads, False) is None, "several CTAs have parts of them"


@pytest.mark.parametrize(("joins", "count"), [(True, 2), (False, 5)])
def test_neighbours_leave_in_one_copy_where_the_transport_joins(monkeypatch: pytest.MonkeyPatch, joins: bool, count: int) -> None:
    """Chunks 1, 2 and 4 lie behind each other at their owner, 3 and 5 at theirs; each comes by itself."""
    monkeypatch.setattr(overlap_kernels, "choose_given", lambda *_: ((1, 1), (1, 1)))
    made, transport = rank_0()
    cut, seen = made.backward_cut, list[tuple[int, ...]]()
    monkeypatch.setattr(transport, "joins", joins)
    monkeypatch.setattr(transport, "push_rows", lambda *args: seen.append(args[:2]))
    dk, dv = (torch.zeros(1, SHAPE.batch, SHAPE.heads, made._results[0].rows, SHAPE.dim_k) for _ in range(2))
    for departure in at_once(cut.plan, cut.groups):
        made.push(departure.pieces, Gradients(torch.empty(0), dk, dv))
    assert len(seen) == count
    assert {owner for owner, _ in seen} == {1, 2}
