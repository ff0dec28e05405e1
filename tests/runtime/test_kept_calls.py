"""What is kept from one call over a link to the next: local masks, what was asked, and that calls are entered one by one."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskc
from maskc.boundary import BoundaryVectors
from maskc.runtime import context_parallel, gated, watch
from maskc.runtime.comm import Peer
from maskc.runtime.link import Entered, Link
from maskc.runtime.transport import CudaQueues
from tests.overlap.stand_in import GPU, OnGpu, on_gpu

# ---------------------------------------------------------------- local masks


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current one, by its handle."""
    state = SimpleNamespace(handle=7)
    for module in (gated, context_parallel):
        monkeypatch.setattr(module, "current_handle", lambda device: state.handle)
    return state


@pytest.fixture
def local_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made of nothing but the columns that its order has, which depend on the heads."""
    monkeypatch.setattr(gated, "_order", lambda call, q, k: SimpleNamespace(columns=(q.shape[2], k.shape[2])))
    monkeypatch.setattr(gated, "localized", lambda *given: SimpleNamespace(columns=given[4]))


def vectors() -> BoundaryVectors:
    return BoundaryVectors(64, 64, 1, 1, True)


def masked(v: BoundaryVectors, heads: tuple[int, int] = (4, 2), **other: Any) -> Any:
    given = {"digest": "a", "part": 0, "rank": 0, "device": GPU, **other}
    plan = SimpleNamespace(digest=given["digest"], rows=None, keys=None)
    peer = SimpleNamespace(rank=given["rank"])
    call: Any = SimpleNamespace(plan=plan, part=given["part"], peer=peer, device=given["device"], vectors=v, row_chunks=())
    q, k = (torch.zeros(1, 1, h, 1) for h in heads)
    return gated.local_mask(call, q, k)


@pytest.mark.usefixtures("local_masks")
def test_a_local_mask_is_that_of_its_plan_rank_heads_and_stream(stream: SimpleNamespace) -> None:
    """On another stream it is asked for again, for that one may have to wait for it."""
    v = vectors()
    first = masked(v)
    assert masked(v) is first
    others = [masked(v, **how) for how in ({"digest": "b"}, {"part": 1}, {"rank": 1}, {"heads": (8, 2)}, {"heads": (4, 4)})]
    stream.handle = 8
    others += [masked(v), masked(vectors())]
    assert len({id(m) for m in (first, *others)}) == 1 + len(others)


@pytest.mark.usefixtures("local_masks", "stream")
def test_local_masks_go_with_the_mask() -> None:
    v = vectors()
    masked(v)
    before = len(gated._local_masks)
    del v
    gc.collect()
    assert len(gated._local_masks) < before


# ---------------------------------------------------------------- what was asked


def asked(*tensors: torch.Tensor) -> Any:
    spec = maskc.compile("std:causal").bind(nq=64, nk=64)
    plan = maskc.plan(spec, world_size=2)
    return context_parallel._asked(spec, tensors, Peer(None, 0, 2), plan, "gated")  # type: ignore[arg-type]


def test_a_call_that_may_be_anything_is_looked_at() -> None:
    x = torch.zeros(1, 32, 2, 16)
    assert asked(x, x, x) is not None
    for odd in (x.as_subclass(OnGpu), torch.nn.Parameter(x), None, "q"):
        assert asked(odd, x, x) is asked(x, odd, x) is asked(x, x, odd) is None  # type: ignore[arg-type]
    meta = torch.zeros(1, 32, 2, 16, device="meta")
    assert len({asked(x, x, x), asked(meta, x, x), asked(x, meta, x), asked(x, x, meta)}) == 4


def test_a_call_on_another_stream_or_in_a_graph_is_looked_at(monkeypatch: pytest.MonkeyPatch, stream: SimpleNamespace) -> None:
    """On another stream the vectors of the mask have to be waited for, and in a graph that is a part of it."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(context_parallel, "Tensor", OnGpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    x = on_gpu(torch.zeros(1, 32, 2, 16))
    first = asked(x, x, x)
    assert asked(x, x, x) == first
    stream.handle = 8
    assert asked(x, x, x) not in (None, first)
    state.capturing = True
    assert asked(x, x, x) is None


# ---------------------------------------------------------------- one by one


class Entering:
    """In place of a link."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.entering, self.epochs, self.error = threading.RLock(), SimpleNamespace(epoch=5), error
        self.seen: list[object] = []

    def broke_off(self, e: BaseException, before: int) -> None:
        self.seen.append((e, before))
        if self.error is not None:
            raise self.error

    def look_after(self) -> None:
        self.seen.append("looked after")

    def is_free(self) -> bool:
        """For another thread."""
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(self.entering.acquire(blocking=False)))
        thread.start()
        thread.join()
        return found == [True]


def test_one_call_is_in_a_link_at_a_time() -> None:
    link: Any = Entering()
    with Entered(link):
        assert not link.is_free()
    assert link.seen == ["looked after"]
    assert link.is_free()


@pytest.mark.parametrize("error", [None, RuntimeError("the link broke")], ids=["as it was", "another"])
def test_a_call_that_raises_leaves_the_link(error: BaseException | None) -> None:
    """What it has enqueued is looked after, whatever else is raised then."""
    link, raised = Entering(error), ValueError("in the middle")
    link.epochs.epoch = 9
    with pytest.raises(ValueError if error is None else RuntimeError, match="middle" if error is None else "broke"):
        _raise_inside(link, raised)
    assert link.seen == [(raised, 9), "looked after"]
    assert link.is_free()


def _raise_inside(link: Any, raised: BaseException) -> None:
    with Entered(link):
        link.epochs.epoch += 1
        raise raised


@pytest.mark.parametrize("used_again", [False, True])
def test_the_watch_knows_of_all_that_compute_was_given(monkeypatch: pytest.MonkeyPatch, used_again: bool) -> None:
    """An event behind everything, on the stream that waits for the others at the end of a call."""
    made: list[Any] = []

    def event() -> Any:
        made.append(SimpleNamespace(on=[], record=lambda stream: made[0].on.append(stream)))
        return made[-1]

    old = event() if used_again else None
    monkeypatch.setattr(torch.cuda, "Event", event)
    queues, seen = object.__new__(CudaQueues), []
    queues.compute, queues.copies, queues.sends, queues.sums = "compute", "copies", "sends", "sums"  # type: ignore[assignment]
    link: Any = SimpleNamespace(queues=queues, watch=SimpleNamespace(spare=lambda: old, entered=seen.append))
    Link.look_after(link)
    assert seen == made
    assert made[0].on == ["compute"]


def test_threads_that_look_after_links_end_with_the_process() -> None:
    over = SimpleNamespace(query=lambda: False)
    looking = watch.Watch(lambda: "", lambda: None, 100.0)
    looking.entered(over)
    assert looking in watch._watches
    watch._close()
    assert looking._thread is not None
    looking._thread.join(5.0)
    assert not looking._thread.is_alive()
