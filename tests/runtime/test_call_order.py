"""Calls of ranks beside each other: whoever differs is named by the later one, and equal calls never are."""

from __future__ import annotations

import ctypes

from hypothesis import example, given
from hypothesis import strategies as st

from maskc.runtime.call_order import ENTRIES, EPOCHS, Calls, calls_size, tag_of


def ranks(world: int) -> list[Calls]:
    """All over the same words."""
    memory = ctypes.create_string_buffer(calls_size(world))
    made = [Calls(ctypes.addressof(memory), r, world) for r in range(world)]
    made[0].memory = memory  # type: ignore[attr-defined]  # lives as long
    return made


@given(st.integers(2, 4), st.data())
def test_equal_calls_never_differ(world: int, data: st.DataObject) -> None:
    """Ranks are ahead of each other by no more than what is kept; looks come whenever, also never for long."""
    every = ranks(world)
    tags = data.draw(st.lists(st.integers(1, EPOCHS - 1), min_size=1, max_size=40))
    said = [0] * world
    for _ in range(data.draw(st.integers(1, 60))):
        r, n = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, 300))
        for _ in range(min(n, min(said) + ENTRIES - said[r])):
            said[r] += 1
            every[r].say(said[r], tags[said[r] % len(tags)])
        if data.draw(st.booleans()):
            assert [c.differs() for c in every] == [""] * world
    assert [c.differs() for c in every] == [""] * world


@example(2, 0, 1, 0, 0)
@example(3, 2, 2, 1, 20)
@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 2 * EPOCHS), st.integers(0, 20), st.integers(0, 20))
def test_the_later_one_of_two_that_differ_names_the_other(world: int, rank: int, epoch: int, before: int, behind: int) -> None:
    every, rank = ranks(world), rank % world
    first = max(1, epoch - before)
    for r, c in enumerate(every):
        for e in range(first, epoch + 1):
            c.say(e, 7 + (r == rank and e == epoch))
        if r == rank:
            for e in range(epoch + 1, epoch + 1 + behind):
                c.say(e, 7)
    other = (rank + 1) % world
    assert every[other].differs() == f"call {epoch} of rank {rank} is another than that of rank {other}"
    assert every[rank].differs() == f"call {epoch} of rank {0 if rank else 1} is another than that of rank {rank}"


def test_a_rank_that_needs_nobody_may_be_far_ahead() -> None:
    """At an epoch of which words say 0, too, the other has not called at all."""
    ahead, behind = ranks(2)
    for epoch in range(1, 2 * EPOCHS + 1):
        ahead.say(epoch, 7)
        if epoch % ENTRIES == 0:
            assert ahead.differs() == ""
    assert behind.differs() == ""


def test_tags() -> None:
    """Small enough for a word, and what they are made of decides."""
    made = {tag_of("plan", part, way, kept) for part in range(8) for way in ("forward", "backward") for kept in (False, True)}
    assert len(made) == 32
    assert all(0 < tag < EPOCHS for tag in made)
    assert tag_of("plan", 0) == tag_of("plan", 0)
