"""What is kept with a mask, without a GPU: streams, events and tensors are stand-ins that write down what is asked of them.

On a GPU: tests/gpu/special_bind.py, "streams/...".
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskc
from maskc.binding import bind, streams
from maskc.binding.data import move
from maskc.binding.streams import Kept, Making, tensors_of
from maskc.boundary import BlockTable, BoundaryVectors

A, B = (SimpleNamespace(device="cuda:0", cuda_stream=n, waited=[]) for n in (1, 2))


class Calls:
    """The current stream, whether it captures, and what was asked of streams and tensors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        self.patch = patch
        for stream in (A, B):
            stream.wait_event = lambda event, of=stream: self.log.append(("wait", of.cuda_stream))
        self.on(A)

    def on(self, stream: Any, capturing: bool = False) -> None:
        self.patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        self.patch.setattr(streams, "current_handle", lambda device: stream.cuda_stream)
        self.patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def taken(self) -> list[tuple[str, Any]]:
        out, self.log = self.log, []
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def kept(calls: Calls) -> Kept[str, str]:
    tensor: Any = SimpleNamespace(record_stream=lambda stream: calls.log.append(("memory", stream.cuda_stream)))
    return Kept({"key": ("value", Making((tensor,), A, object()))})  # type: ignore[arg-type]


def test_the_stream_that_made_it_waits_for_nothing(calls: Calls) -> None:
    assert kept(calls)["key"] == "value"
    assert calls.taken() == []


def test_another_stream_waits_every_time_and_tells_the_allocator_once(calls: Calls) -> None:
    mine = kept(calls)
    calls.on(B)
    assert mine["key"] == "value"
    assert calls.taken() == [("wait", 2), ("memory", 2)]
    assert mine["key"] == "value"
    assert calls.taken() == [("wait", 2)]


def test_a_graph_waits_at_its_replays_whatever_stream_captures_it(calls: Calls) -> None:
    mine = kept(calls)
    for stream in (A, B):
        calls.on(stream, capturing=True)
        assert mine["key"] == "value"
        assert calls.taken() == [("wait", stream.cuda_stream)]


def test_what_a_graph_makes_is_not_kept(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr("maskc.binding.streams.gpu_tensors", lambda value: (there,))
    monkeypatch.setattr(torch.cuda, "Event", lambda external: SimpleNamespace(record=lambda stream: None, external=external))
    mine: Kept[int, str] = Kept()
    calls.on(A, capturing=True)
    assert mine.keep(0, "made in a graph") == "made in a graph"
    assert 0 not in mine
    calls.on(A)
    mine.keep(0, "made in the open")
    assert mine[0] == "made in the open"
    assert mine.found[0][1].event.external  # type: ignore[union-attr]


def test_tensors_are_found_where_they_lie() -> None:
    x, keep = torch.zeros(1, 1, 4, dtype=torch.int32), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    v = BoundaryVectors(4, 4, 1, 1, False, lts=x, blocks=BlockTable(keep, 128, 128))
    assert [t.data_ptr() for t in tensors_of((v, (x,), 3, "text"))] == [x.data_ptr(), keep.data_ptr(), x.data_ptr()]


def test_a_bound_mask_that_was_used_pickles() -> None:
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[3, 5]))
    v = spec.vectors(8, 8)
    spec._vectors.found[8, 8, "cuda:0"] = v, Making((), A, A)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(spec))
    assert torch.equal(again.vectors(8, 8).lts, v.lts)
    assert again._vectors.found[8, 8, "cuda:0"][1] is None


def test_a_copy_to_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it there cannot tell when an asynchronous copy has come; a GPU's own streams can."""
    waits: dict[str, bool] = {}

    def to(self: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        waits[device.type] = not non_blocking
        return self

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "to", to)
    move(torch.zeros(1, device="meta"), torch.device("cpu"))
    move(torch.zeros(1), torch.device("cuda", 0))
    assert waits == {"cpu": True, "cuda": False}


def test_inputs_on_two_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {7: SimpleNamespace(device=torch.device("cuda", 0)), 8: SimpleNamespace(device=torch.device("cuda", 1))}
    monkeypatch.setattr(bind, "tensors_in", lambda value: [where[value]])
    mask = maskc.compile_text("input a : int\ninput b : int\nmask m = a <= k <= q + b")
    with pytest.raises(maskc.MaskcError, match="M418") as caught:
        mask.bind(a=7, b=8)
    assert "`a` on cuda:0 and `b` on cuda:1" in str(caught.value)


def test_the_object_of_a_stream_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, asked = [7], []
    monkeypatch.setattr(streams, "_raw_stream", lambda index: handle[0] + index)
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append((device.index, handle[0])) or [*asked][-1])
    first, second = (torch.device("cuda", index) for index in (0, 1))
    assert [streams.current_stream(d) for d in (first, second, first, second)] == [(0, 7), (1, 7), (0, 7), (1, 7)]
    handle[0] = 8
    assert streams.current_stream(first) == (0, 8), "another stream, as its number says"
    assert asked == [(0, 7), (1, 7), (0, 8)]
