"""Which executor a call takes is said once per group and way."""

from __future__ import annotations

from typing import Any

import pytest

from maskc.runtime import context_parallel


class Group:
    """What a process group is to a weak dictionary."""


def test_the_way_of_keys_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one, other = Group(), Group()
    monkeypatch.setattr(context_parallel.comm, "process_group", lambda peer: peer)
    peers: list[Any] = [one, one, one, other]
    with caplog.at_level("INFO", "maskc"):
        for peer, way in zip(peers, ("gated", "gated", "staged, for no memory is shared", "gated"), strict=True):
            context_parallel._say_once(peer, way)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"ranks exchange keys by: {way}" for way in ("gated", "staged, for no memory is shared", "gated")]
