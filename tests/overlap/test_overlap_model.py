"""The model of step times: its arithmetic by hand, its bounds, and what it prints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors
from maskc.runtime.machine import BACKWARD_FACTOR, DEFAULT_MACHINE
from maskc.runtime.overlap_model import Flow, backward_times, forward_times, predict, section
from maskc.runtime.plan import plan


def test_by_hand() -> None:
    """Own work 2; a chunk that takes 3 to come and 1 to work on; another that comes at 4 and takes 5."""
    flow = Flow((0.0, 3.0, 4.0), (0.0, 3.0, 1.0), (2.0, 1.0, 5.0))
    t = forward_times(flow)
    assert (t.attention, t.transfer, t.apart, t.beside) == (8.0, 4.0, 12.0, 9.0)
    b = backward_times(flow)
    assert b.attention == BACKWARD_FACTOR * 8
    assert b.apart == 4 + 20 + 8
    # slots end at 5, 7.5, 20; gradients: 6 seconds from 7.5, 2 seconds from 20
    assert b.beside == 22.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8))
def test_nothing_is_faster_than_work_or_link_nor_slower_than_one_after_the_other(items: list[tuple[float, float]]) -> None:
    transfers = (0.0, *(t for t, _ in items))
    arrivals = tuple(sum(transfers[: i + 1]) for i in range(len(transfers)))
    flow = Flow(arrivals, transfers, (1.0, *(w for _, w in items)))
    for t in (forward_times(flow), backward_times(flow)):
        assert max(t.attention, arrivals[-1]) <= t.beside + 1e-9
        assert t.beside <= t.apart + 1e-9


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 16)])
def test_predictions_for_many_ranks(world: int, nodes: int) -> None:
    v = BoundaryVectors(256 * world, 256 * world, 1, 1, True)
    p = plan(v, world_size=world, nodes=nodes, chunk=128, order="zigzag", heads=32, heads_kv=8, head_dim=128)
    times = predict(p)
    assert len(times) == world
    compute = sum(f.attention for f, _ in times)
    heads = DEFAULT_MACHINE.compute_seconds(sum(p.workloads), p.costs, p.tile, 32, 128)
    assert compute == pytest.approx(heads)
    for forward, backward in times:
        assert forward.beside <= forward.apart + 1e-12
        assert backward.beside <= backward.apart + 1e-12
        assert (forward.transfer > 0) == (world > 1)
    text = section(p)
    assert "a model, not a measurement" in text
    assert text.count("\n") == 4 + (world if world <= 16 else 0) + 2
    assert ("into a node" in text) == (nodes > 1)


def test_what_comes_from_other_nodes_comes_later() -> None:
    """The same ranks in two nodes instead of one: nothing gets faster."""
    v = BoundaryVectors(4096, 4096, 1, 1, False)
    near, far = (plan(v, world_size=4, nodes=n, chunk=256, order="contiguous", heads_kv=8, head_dim=128) for n in (1, 2))
    for (a, _), (b, _) in zip(predict(near), predict(far), strict=True):
        assert a.attention == b.attention
        assert a.apart < b.apart
        assert a.beside <= b.beside


def test_work_is_that_of_one_batch_item_however_many_heads_the_mask_has() -> None:
    """The plan adds up the tiles of every mask head and item; query heads run each of them once."""
    ends = torch.full((2, 4, 1024), 1024, dtype=torch.int32)
    one, many = (
        BoundaryVectors(1024, 1024, *shape, True, lts=ends[: shape[0], : shape[1]].contiguous()) for shape in ((1, 1), (2, 4))
    )
    a, b = (predict(plan(v, world_size=2, chunk=128, order="zigzag"), masks=v.batch * v.heads) for v in (one, many))
    for (x, _), (y, _) in zip(a, b, strict=True):
        assert x.attention == pytest.approx(y.attention)
