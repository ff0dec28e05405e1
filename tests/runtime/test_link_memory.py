"""How ranks come to share memory, and what they do where one of them cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime import link as link_module
from maskc.runtime.comm import Peer
from maskc.runtime.link import LONGEST, Link, Room, SharedFile

CPU, META = torch.device("cpu"), torch.device("meta")


def told_by(monkeypatch: pytest.MonkeyPatch, *others: int) -> Peer:
    """Rank 0, to whom the others tell these numbers."""
    monkeypatch.setattr(link_module.comm, "gather_numbers", lambda peer, mine, *_: [mine, *([n] for n in others)])
    monkeypatch.setattr(link_module.comm, "group_timeout", lambda peer: 9000.0)
    monkeypatch.setattr(Peer, "home", lambda peer, x: CPU)
    return Peer(None, 0, 1 + len(others))


def test_the_first_rank_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_module._first(told_by(monkeypatch, 0, 0), CPU, "") == ""
    assert link_module._first(told_by(monkeypatch, 0, 1), CPU, "") == "rank 2 cannot share memory; its own log says why"
    assert link_module._first(told_by(monkeypatch, 0, 1), CPU, "why") == "why"


@pytest.mark.parametrize("device", [CPU, META, torch.device("cuda", 0)])
def test_a_rank_goes_without_where_another_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says first whether it could, whatever its own answer: the others wait to hear it."""
    monkeypatch.delattr("torch.distributed._symmetric_memory.empty")
    peer, said = told_by(monkeypatch, 1), []

    def gather(peer: Peer, mine: list[int], *_: object) -> list[list[int]]:
        said.append(mine)
        return [mine, [1]]

    monkeypatch.setattr(link_module.comm, "gather_numbers", gather)
    why, first = {
        "cpu": ("rank 1 cannot share memory; its own log says why", [0]),
        "meta": ("`meta` devices share no memory", [1]),
        "cuda": ("this torch has another symmetric memory", [1]),
    }[device.type]
    assert (link_module._make(peer, device), said) == (why, [first])


def test_memory_is_made_anew_where_it_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room there is no link; a link that cannot grow has none until it can."""
    peer, memory = told_by(monkeypatch), link_module._memory
    monkeypatch.setattr(link_module, "_memory", lambda *_: "no room")
    assert link_module._make(peer, CPU) == "no room"
    monkeypatch.setattr(link_module, "_memory", memory)
    link = link_module._make(peer, CPU)
    assert isinstance(link, Link)
    assert link.timeout == LONGEST
    held, least = link.memory, link.room
    link.ranks = {"a": (None, 0)}  # type: ignore[dict-item]
    link.reserve(peer, least)
    assert (link.memory is held, link.ranks) == (True, {"a": (None, 0)})
    more = Room(least.buffer + 1, least.region)
    monkeypatch.setattr(link_module, "_memory", lambda *_: "no room")
    for asked in (more, least):
        with pytest.raises(MaskcError, match="no room"):
            link.reserve(peer, asked)
        assert (link.memory, link.room, link.ranks) == ((), Room(0, 0), {})
    monkeypatch.setattr(link_module, "_memory", memory)
    link.reserve(peer, more)
    assert (link.room, len(link.memory[0])) == (Room(0, 0).grown(more), link.room.total(1))


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_memory_is_proven_to_be_that_of_the_others(wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told_by(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = torch.zeros(2, 64, dtype=torch.uint8)
    memory[0, -8:] = 2 if wrong == 0 else 1
    found = link_module._proven(Peer(None, 1, 2), CPU, (memory[0], memory[0] if wrong == 1 else memory[1]))
    assert found == ("" if wrong is None else "symmetric memory: rank 1 does not read what rank 0 wrote")


@pytest.mark.parametrize("refused", [0, 1])
def test_nothing_of_shared_memory_is_left_behind(refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = told_by(monkeypatch, *[refused] * refused)
    monkeypatch.setattr(link_module, "_shared_path", lambda token: tmp_path / "words")
    assert isinstance(link_module.shared_file(peer, CPU, 64), str if refused else SharedFile)
    assert not list(tmp_path.iterdir())
