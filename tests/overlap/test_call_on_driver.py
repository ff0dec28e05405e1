"""What a call enqueues is what the protocol says, stream by stream and in its order: nothing else keeps the two together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.overlap.driver_rank import CASES, RANKS
from tests.stub_libcuda import built, told_by

STUB = Path(__file__).with_name("stub_streams.cpp")
NAMES = [f"{case.name}, rank {rank}" for case in CASES for rank in RANKS]
Traces = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Of all cases, from one process in which the stub is the driver."""
    found: Traces = told_by("tests.overlap.on_driver", built(STUB, tmp_path_factory.mktemp("driver")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_call_enqueues_what_the_protocol_says(traces: Traces, name: str) -> None:
    for call in traces[name]:
        assert call["enqueued"] == call["wanted"], call["call"]


def test_all_kinds_of_operations_come(traces: Traces) -> None:
    """What never came could not be in the wrong place."""
    every = [what.split() for trace in traces.values() for call in trace for _, what in call["enqueued"]]
    seen = {" ".join(what[:2]) if what[0] in ("wait", "write") else what[0] for what in every}
    words = {f"{verb} {kind}" for verb in ("wait", "write") for kind in ("open", "free", "sent")}
    one_sided = {"write flag", "write gave", "wait gave", "wait finished", "write finished", "write told"}
    assert seen == {"torch", "attend", "follow", "give", "push", "settle", "spoil", "sum", *words, *one_sided}
