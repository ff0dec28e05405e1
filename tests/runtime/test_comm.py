"""Where ranks can talk, read off the description of a group's backends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from maskc.runtime.comm import Peer


@pytest.mark.parametrize(
    ("described", "host", "gpu"),
    [
        ("cpu:gloo,cuda:gloo", True, True),
        ("cuda:nccl", False, True),
        ("cpu:gloo,cuda:nccl", True, True),
        ("cpu:gloo", True, False),
    ],
)
def test_a_group_speaks_for_its_devices(monkeypatch: pytest.MonkeyPatch, described: str, host: bool, gpu: bool) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: described)
    peer = Peer(None, 0, 2)
    assert peer.speaks(torch.device("cpu")) is host
    assert peer.speaks(torch.device("cuda", 1)) is gpu


@pytest.mark.parametrize(
    ("described", "home"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_ranks_agree_on_one_device_type_whatever_they_were_given(
    monkeypatch: pytest.MonkeyPatch, described: str, home: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: described)
    peer = Peer(None, 0, 2)
    given = (None, "text", torch.zeros(1), torch.zeros(1, device="meta"))
    assert {peer.home(x).type for x in given} == {home}
