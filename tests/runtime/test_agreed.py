"""Calls of a group that were checked and agreed on before are not looked at again, unless anything differs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import maskc
from maskc.diagnostics import MaskcError, error
from maskc.runtime import comm, context_parallel
from maskc.runtime.comm import Peer
from maskc.runtime.context_parallel import SETTLED_LIMIT, agreed_call
from maskc.runtime.executor import Call

ROWS = 64


class Group:
    """In place of a process group."""


class Looking:
    """A rank of two whose calls are counted where they are looked at, and where ranks compare them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks, self.compared, self.group = 0, 0, Group()
        look = context_parallel._call

        def counted(*given: Any) -> Call:
            self.looks += 1
            return look(*given)

        def agree(peer: Peer, fields: object, refused: bool, *_: Any) -> None:
            self.compared += 1
            if refused:
                raise error("M708", "refused")

        monkeypatch.setattr(context_parallel, "_call", counted)
        monkeypatch.setattr(comm, "agree", agree)
        monkeypatch.setattr(Peer, "speaks", lambda *_: True)
        monkeypatch.setattr(Peer, "home", lambda *_: torch.device("cpu"))
        self.spec = maskc.compile("std:causal").bind(nq=2 * ROWS, nk=2 * ROWS)
        self.plan = maskc.plan(self.spec, world_size=2, order="contiguous")

    def ask(self, *, group: Group | None = None, rank: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Call:
        q: Tensor = torch.zeros(1, ROWS, 4, 16, dtype=dtype)
        k: Tensor = torch.zeros(1, ROWS, more.pop("heads", 2), 16, dtype=dtype)
        given = {"plan": self.plan, "strategy": "all-gather", "scale": None, "deterministic": False, "backend": "auto"}
        given |= {"recording": False, **more}
        return agreed_call(self.spec, q, k, k, Peer(group or self.group, rank, 2), **given)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Looking:
    return Looking(monkeypatch)


def test_a_call_is_looked_at_once(looking: Looking) -> None:
    first = looking.ask()
    for _ in range(3):
        again = looking.ask()
        assert all(getattr(again, name) == getattr(first, name) for name in Call.__dataclass_fields__)
    assert (looking.looks, looking.compared) == (1, 1)


def test_whatever_differs_is_looked_at(looking: Looking) -> None:
    looking.ask()
    other = {
        "rank": {"rank": 1},
        "dtype": {"dtype": torch.float64},
        "heads": {"heads": 4},
        "strategy": {"strategy": "ring"},
        "scale": {"scale": 0.5},
        "deterministic": {"deterministic": True},
        "recording": {"recording": True},
        "plan": {"plan": maskc.plan(looking.spec, world_size=2, order="contiguous", prune=False)},
    }
    for i, (name, given) in enumerate(other.items()):
        looking.ask(**given)
        assert looking.looks == 2 + i, name


def test_what_is_refused_is_refused_every_time(looking: Looking) -> None:
    looking.ask(scale=1.0)
    for _ in range(2):
        for code, wrong in (
            ("M510", {"scale": True}),
            ("M511", {"plan": "plan"}),
            ("M707", {"plan": maskc.plan(looking.spec, world_size=4)}),
            ("M506", {"heads": 3}),
        ):
            with pytest.raises(MaskcError, match=code):
                looking.ask(**wrong)
        with pytest.raises(MaskcError):
            looking.ask(strategy=["ring"])


def test_another_group_compares_it_anew(looking: Looking) -> None:
    """So does a group that has forgotten: on all ranks alike, as none of them goes by what it has looked at before."""
    looking.ask()
    other = Group()
    assert looking.ask(group=other).peer.group is other
    assert (looking.looks, looking.compared) == (2, 2)
    context_parallel._agreed[looking.group].clear()
    looking.ask()
    assert (looking.looks, looking.compared) == (3, 3)


def test_calls_that_are_kept_keep_nothing_alive(looking: Looking) -> None:
    for i in range(SETTLED_LIMIT + 3):
        looking.ask(scale=1.0 + i)
    assert len(context_parallel._settled[looking.spec]) == SETTLED_LIMIT
    group = weakref.ref(looking.group)
    looking.group = Group()
    gc.collect()
    assert group() is None, "nor what it holds: a link, memory of all ranks"
    gone = weakref.ref(looking.spec)
    del looking.spec, looking.plan
    gc.collect()
    assert gone() is None
