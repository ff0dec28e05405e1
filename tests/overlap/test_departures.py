"""What leaves a rank together, and what its key buffer is like before anything comes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime import overlap_kernels
from maskc.runtime.layout import Layout
from maskc.runtime.overlap import Overlapped
from maskc.runtime.overlap_grads import Gradients, departing, reports
from maskc.runtime.overlap_kernels import TICK
from maskc.runtime.overlap_plan import Cut, OverlapPlan, joined, plan_visits
from maskc.runtime.protocol import Departure, Tell, Word, at_once, by_pieces
from maskc.runtime.symmetric import Symmetric
from maskc.runtime.transport import HostQueues, KeyShape
from tests.runtime.test_link import transports

CPU = torch.device("cpu")
KEYS = Layout(3, (0, 5, 9, 16, 20, 26, 30, 37), (0, 1, 1, 2, 1, 2, 0))
"""Seven chunks; rank 1 has 1, 2, 4 and rank 2 has 3, 5."""
SHAPE = KeyShape(2, 4, 8, 8, torch.float32)


def plans(needed: Sequence[int]) -> list[OverlapPlan]:
    """needed: the chunks that rank 0 sees; the others see their own."""
    own = [frozenset(KEYS.chunks_of(r)) for r in range(3)]
    return [plan_visits(KEYS, [frozenset(needed), *own[1:]], rank, 3) for rank in range(3)]


def rank_0(which: int = 0) -> tuple[Overlapped, Symmetric]:
    """In memory that was full of NaN. which: of its key buffers."""
    made = plans(range(7))
    transport = transports(KEYS, made, SHAPE)[0]
    transport.which = which
    for memory in transport.link.memory:
        memory.fill_(255)
    return Overlapped(made[0], KEYS, SHAPE, transport, HostQueues(), CPU), transport


@pytest.mark.parametrize("way", [by_pieces, at_once], ids=["pieces", "at once"])
@pytest.mark.parametrize("needed", [range(7), (0, 1, 4, 5, 6), (0, 1, 2, 3)])
@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (2, 1), (4, 100)])
def test_copies_take_the_rows_and_heads_of_their_pieces_and_no_others(
    needed: Sequence[int], groups: int, rows: int, way: Callable[[OverlapPlan, int], Sequence[Departure]]
) -> None:
    plan = plans(needed)[0]
    cut = Cut(joined(plan, KEYS, rows), groups, 4)
    for departure in way(cut.plan, groups):
        wanted = {
            (c, h)
            for piece in departure.pieces
            for c in cut.plan.slot_of(piece).chunks
            for h in range(cut.heads_of(piece).start, cut.heads_of(piece).stop)
        }
        for keys in (KEYS, None):
            copies = departing(plan, cut, departure.pieces, keys)
            taken = [(c, h) for slot, heads in copies for c in slot.chunks for h in range(heads.start, heads.stop)]
            assert sorted(taken) == sorted(wanted)
            assert {slot.source for slot, _ in copies} == {departure.owner}


def test_what_leaves_at_once_is_a_copy_for_each_run_of_neighbours() -> None:
    """Of what an owner has: its chunks 1, 2 and 4 lie behind each other in its keys, and in the staging of whoever sees all."""
    for needed, runs in ((range(7), {1: [(1, 2, 4)], 2: [(3, 5)]}), ((0, 1, 4, 5, 6), {1: [(1,), (4,)], 2: [(5,)]})):
        plan = plans(needed)[0]
        cut = Cut(plan, 2, 4)
        found = {d.owner: departing(plan, cut, d.pieces, KEYS) for d in at_once(plan, 2)}
        assert {owner: sorted(slot.chunks for slot, _ in copies) for owner, copies in found.items()} == runs
        assert all(heads == slice(0, 4) for copies in found.values() for _, heads in copies)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("way", [by_pieces, at_once], ids=["pieces", "at once"])
def test_every_row_arrives_where_its_owner_adds_it_up(way: Callable[[OverlapPlan, int], Sequence[Departure]], seed: int) -> None:
    """In whatever order chunks of several owners lie in the buffer: a copy of neighbours takes no rows of others along."""
    drawn = random.Random(seed)
    made = plans(range(7))
    made[0] = shuffled(made[0], drawn)
    first, *owners = transports(KEYS, made, SHAPE)
    running = Overlapped(made[0], KEYS, SHAPE, first, HostQueues(), CPU)
    rows = running._results[0].rows
    grads = [torch.randn(1, SHAPE.batch, SHAPE.heads, rows, SHAPE.dim_k) for _ in range(2)]
    for departure in way(running.backward_cut.plan, running.backward_cut.groups):
        running.push(departure.pieces, Gradients(torch.empty(0), *grads))
    for slot in made[0].pulls:
        at = running.result_rows(slot).start
        for there, mine in zip(owners[slot.source - 1].staged(0, slot.chunk), grads, strict=True):
            assert torch.equal(there[:, :, : slot.rows], mine[0][:, :, at : at + slot.rows])


def shuffled(plan: OverlapPlan, drawn: random.Random) -> OverlapPlan:
    """The same keys, those of others in another order."""
    foreign, slots, at = list(plan.pulls), list(plan.slots[: plan.own]), plan.slots[plan.own - 1].start
    drawn.shuffle(foreign)
    for slot in foreign:
        at -= slot.rows
        slots.append(replace(slot, start=at))
    return replace(plan, slots=tuple(slots))


@pytest.mark.parametrize("way", ["by pieces", "at once"])
def test_a_rank_leaves_as_the_rule_says(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(overlap_kernels, "way_of_gradients", lambda *_: way)
    monkeypatch.setattr(overlap_kernels, "sent_together", lambda plan, groups, batch: groups)
    monkeypatch.setattr(overlap_kernels, "choose_given", lambda *_: ((4, 1), (2, 1)))
    running, _ = rank_0()
    cut = running.backward_cut
    assert cut.groups == 2
    made = at_once(cut.plan, 2) if way == "at once" else by_pieces(cut.plan, 2, 2)
    assert running.departures == made
    assert len(made) == (2 if way == "at once" else len(cut.plan.pulls))


def test_words_of_both_directions_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one number are others in the other direction, and of another owner."""
    monkeypatch.setattr(overlap_kernels, "choose_given", lambda *_: ((4, 1), (2, 1)))
    running, _ = rank_0()
    assert running.backward_cut.first == running.forward_cut.words == 4 * 7


@pytest.mark.parametrize("which", [0, 1])
def test_keys_that_never_come_are_finite(which: int) -> None:
    running, transport = rank_0(which)
    assert not running.keys.count_nonzero()
    assert not running.values.count_nonzero()
    assert running.words.flags.data_ptr() == transport.link.flags(0, which).data_ptr()
    other = transport.link.memory[0][transport.link.room.buffer_at(1 - which) :]
    assert other[0] == 255


def test_places_and_words_of_pieces_are_those_of_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel tells of a piece where the stream that pushes it waits."""
    monkeypatch.setattr(overlap_kernels, "choose_given", lambda *_: ((4, 1), (2, 1)))
    running, _ = rank_0()
    for cut in (running.forward_cut, running.backward_cut):
        for piece in cut.pieces:
            assert [t.shape[:2] for t in running._place(cut, piece)] == [(cut.group_heads, cut.plan.slot_of(piece).rows)] * 2
    cut = running.backward_cut
    told = reports(cut, running.words.finished, None)
    for piece in cut.pieces:
        group, slot = divmod(piece, len(cut.plan.slots))
        word = told[cut.first + slot].word + 4 * group * len(cut.plan.slots)
        assert running.address(cut, Word("finished", 0, piece)) == word


def test_an_owner_is_told_of_every_piece_in_words_of_this_rank() -> None:
    running, transport = rank_0()
    for memory in transport.link.memory:
        memory.zero_()
    call: Any = SimpleNamespace(executor="gated", tape=None)
    running._say("send", [Tell(1, (3, 5), 7), Tell(2, (4,), 8)], call, None)
    for owner, words in ((1, {3: 7, 5: 7}), (2, {4: 8})):
        told = transport.told(owner, 0).tolist()
        assert {i: word for i, word in enumerate(told) if word} == words
    assert sum(int(memory.count_nonzero()) for memory in transport.link.memory) == 3, "and no other words"


@pytest.mark.parametrize("seconds", [0.0, -1.0, TICK * (1 << 32)])
def test_a_wait_ends_in_a_time_that_a_kernel_can_count(seconds: float) -> None:
    made = plans(range(7))
    with pytest.raises(MaskcError, match="M722"):
        Overlapped(made[0], KEYS, SHAPE, transports(KEYS, made, SHAPE)[0], HostQueues(), CPU, timeout=seconds)
