"""Calls that are made again tell kernels what calls made anew tell them, and ask the driver for no more than they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stub_libcuda import built, told_by

STUB = Path(__file__).with_name("stub_streams.cpp")
FORWARD = {"attn_fwd": 1, "spoil": 1}
BACKWARD = {"attn_bwd_pre": 1, "attn_bwd": 1, "attn_bwd_post": 1, "sum_gradients": 1, "spoil": 1}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of all cases, from one process in which the stub is the driver."""
    found: dict[str, list[dict[str, Any]]] = told_by(
        "tests.overlap.launches_again", built(STUB, tmp_path_factory.mktemp("driver"))
    )
    return found


def test_kernels_are_told_the_same(calls: dict[str, list[dict[str, Any]]]) -> None:
    """Byte by byte, but for where results lie, and of a backward its workspace and two gradients of keys."""
    assert len(calls) > 10
    for name, made in calls.items():
        for call in made:
            assert not call["wrong"], (name, call["call"])
            assert call["launched"] == (FORWARD if call["call"] == "f" else BACKWARD), name
            assert call["others"] <= (0 if call["call"] == "f" else 3), (name, call["call"])


def test_nothing_that_is_kept_holds_a_rank_or_its_keys(calls: dict[str, list[dict[str, Any]]]) -> None:
    """A link that needs more room gives the old memory back first, without waiting for garbage to be collected."""
    assert [name for name, made in calls.items() if made[-1]["held"]] == []


def test_what_the_driver_is_asked(calls: dict[str, list[dict[str, Any]]]) -> None:
    """Besides launches, of the two ranks of a short call.

    K and V to the other, backward heads of V apart, as they lie; the words around them; streams that follow each other; and
    the context, once.
    """
    always = {"push": 1, "pop": 1, "record": 2, "follow": 2, "2": 1}
    for rank in (0, 1):
        forward, backward = calls[f"fb, 2 ranks, zigzag, 2 on 2, chunks of 128, chosen groups, given, rank {rank}"]
        assert forward["asked"] == {**always, "write": 1, "wait": 1, "copy": 2}
        assert backward["asked"] == {**always, "write": 2, "wait": 2, "copy": 3}
