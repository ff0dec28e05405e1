"""Calls over a link: which keys are kept, which buffer a plan has, what is said of a call before it waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskc
from maskc.diagnostics import MaskcError
from maskc.runtime import gated
from maskc.runtime.comm import Peer
from maskc.runtime.link import BUFFERS, Link
from maskc.runtime.plan import plan
from maskc.runtime.symmetric import most_rows, room_of
from maskc.runtime.transport import KeyShape
from tests.runtime.test_link import CPU, links


class Running:
    """In place of an `Overlapped`: counts calls, tells how it was asked, fails when told to."""

    def __init__(self, link: Link, *sources: int) -> None:
        self.link, self.plan, self.epoch, self.holds, self.fails = link, SimpleNamespace(sources=sources), 0, None, False
        self.tags: list[int] = []
        self.gathered: list[bool] = []
        self.more: dict[str, Any] = {}

    def _called(self, tag: int) -> None:
        assert self.holds is None, "a call that breaks off leaves nothing to be taken for kept"
        if self.fails:
            raise KeyError
        self.epoch += 1
        self.tags.append(tag)

    def forward(self, local: Any, q: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._called(more[-1])
        return q, torch.zeros(3)

    def backward(self, *_: Any, gather: bool, tag: int, **more: Any) -> str:
        self._called(tag)
        self.gathered.append(gather)
        self.more = more
        return "gradients"


def called(link: Link, digest: str = "a", executor: Any = "gated", keep: bool = True, part: int = 0) -> Any:
    plan = SimpleNamespace(digest=digest, keep_keys=keep, keys="keys")
    way = gated.Direct(link, executor)
    return SimpleNamespace(direct=way, plan=plan, part=part, scale=0.5, deterministic="how", device=CPU)


X = torch.zeros(1, 4, 2, 8)


def back(call: Any, lse: torch.Tensor) -> None:
    assert gated.backward(call, X, X, X, X, lse, X, X) == "gradients"


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    made = Running(links(3, tmp_path / "words")[1], 0, 2)
    monkeypatch.setattr(gated, "rank_of", lambda *_: made)
    monkeypatch.setattr(gated, "local_mask", lambda *_: None)
    return made


def test_keys_are_kept_from_the_last_call_alone(running: Running) -> None:
    call = called(running.link)
    first = gated.forward(call, X, X, X)[1]
    for lse in (first, first[1:]):
        back(call, lse)
    second = gated.forward(call, X, X, X)[1]
    for lse in (first, first, second, second):
        back(call, lse)
    assert running.gathered == [False, False, True, False, True, False]
    assert running.more == {"dlse": X, "deterministic": "how"}
    running.fails = True
    for broken in (lambda: back(call, second), lambda: gated.forward(call, X, X, X)):
        running.holds = second  # type: ignore[assignment]
        with pytest.raises(KeyError):
            broken()
        assert running.holds is None
    running.fails = False
    back(call, second)
    assert running.gathered[-1]


def test_keys_are_gathered_again_where_a_plan_says_so(running: Running) -> None:
    call = called(running.link, keep=False)
    lse = gated.forward(call, X, X, X)[1]
    for _ in range(2):
        back(call, lse)
    assert running.gathered == [True, True]


def test_what_was_given_last_is_known_of_every_rank(running: Running) -> None:
    call, link = called(running.link), running.link
    link.given = {5: 1}
    first = gated.forward(call, X, X, X)[1]
    assert link.given == {5: 1, 0: 1, 2: 1}
    back(call, first)
    assert link.given == {5: 1, 0: 1, 2: 1}, "a call that gathers nothing is given nothing"
    running.plan.sources = (2,)
    back(call, torch.zeros(3))
    assert link.given == {5: 1, 0: 1, 2: 3}


def test_calls_that_enqueue_other_things_are_told_apart(running: Running) -> None:
    for more in ({}, {"digest": "b"}, {"executor": "copy-then-attend"}, {"part": 1}):
        call = called(running.link, **more)
        lse = gated.forward(call, X, X, X)[1]
        for other in (lse, torch.zeros(3)):
            back(call, other)
    tags = list(running.tags)
    assert len(set(tags)) == len(tags) == 12
    gated.forward(called(running.link), X, X, X)
    assert running.tags[-1] == tags[0]


def test_no_call_begins_on_a_link_that_broke(running: Running) -> None:
    running.link.give_up()
    with pytest.raises(MaskcError, match="rank 1 gave up"):
        gated.forward(called(running.link), X, X, X)
    with pytest.raises(MaskcError, match="rank 1 gave up"):
        back(called(running.link), X)
    assert running.epoch == 0


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A link over whose buffers nothing runs: `made` are (place, what an Overlapped is given by name)."""
    link = SimpleNamespace(ranks={}, made=[], waits=0, queues="queues", timeout=7.0, lasting="lasting")

    def wait() -> None:
        assert len(link.made) == link.waits, "before a buffer serves another plan"
        link.waits += 1

    def overlapped(order: Any, keys: Any, shape: Any, place: Any, *_: Any, **more: Any) -> int:
        link.made.append((place, more))
        return len(link.made)

    link.await_given = wait
    monkeypatch.setattr(gated, "Overlapped", overlapped)
    monkeypatch.setattr(gated, "Symmetric", lambda link, order, keys, shape, place: place)
    monkeypatch.setattr(gated, "_order", lambda call, q, k, rank=None: SimpleNamespace(rank=rank, lends=((1, ()), (2, ()))))
    return link


def test_the_plan_that_was_not_used_for_longest_loses_its_buffer(buffers: Any) -> None:
    assert [gated.rank_of(called(buffers, d), X, X, X) for d in "AABACABB"] == [1, 1, 2, 1, 3, 1, 4, 4]
    assert [place for place, _ in buffers.made] == [0, 1, 1, 1]
    gated.rank_of(called(buffers, "D"), X, X, X)
    assert (buffers.made[-1][0], buffers.waits, len(buffers.ranks)) == (0, 5, BUFFERS)


def test_a_rank_is_made_of_what_its_link_has(buffers: Any) -> None:
    gated.rank_of(called(buffers), X, X, X)
    more = buffers.made[0][1]
    assert {r: order.rank for r, order in more.pop("readers").items()} == {1: 1, 2: 2}
    assert more == {"timeout": 7.0, "lasting": "lasting"}


def test_calls_share_a_buffer_where_nothing_differs_but_values(buffers: Any) -> None:
    longer, twice, wide, half = torch.zeros(1, 9, 2, 8), torch.zeros(2, 4, 2, 8), torch.zeros(1, 4, 2, 16), X.half()
    same = [gated.rank_of(called(buffers), *qkv) for qkv in ((X, X, X), (X + 1, X, X), (longer, X, X), (wide, wide[..., :8], X))]
    assert same == [1] * 4
    heads = torch.zeros(1, 4, 4, 8)
    others = [(heads, X, X), (heads, heads, heads), (X, twice, twice), (X, wide, X), (X, X, wide), (X, half, half)]
    found = [gated.rank_of(called(buffers, part=part), *qkv) for part, qkv in ((1, (X, X, X)), *((0, other) for other in others))]
    assert found == [2, 3, 4, 5, 6, 7, 8]


def test_the_way_of_a_call_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[Any] = []
    link = SimpleNamespace(reserve=lambda peer, room: reserved.append(room))
    monkeypatch.setattr(gated, "link_of", lambda peer, device: link)
    p = plan(maskc.compile("std:causal").bind(nq=64, nk=64), world_size=2, chunk=8)
    for executor in ("gated", "copy-then-attend"):
        way = gated.direct(Peer(None, 0, 2), p, executor, X, X)
        assert isinstance(way, gated.Direct)
        assert (way.executor, way.link) == (executor, link)
    assert reserved == [room_of(p.keys, most_rows(p), KeyShape(1, 2, 8, 8, torch.float32))] * 2
    monkeypatch.setattr(gated, "link_of", lambda peer, device: "why not")
    assert gated.direct(Peer(None, 0, 2), p, "gated", X, X) == "why not"
