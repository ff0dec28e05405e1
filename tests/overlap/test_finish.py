"""How a host waits for the end of what it has enqueued, without a GPU."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from maskc.diagnostics import MaskcError
from maskc.runtime.overlap import STOPPED, Overlapped
from maskc.runtime.overlap_words import Lasting
from maskc.runtime.transport import HostQueues, read_word, write_word
from tests.overlap.test_departures import CPU, KEYS, SHAPE, plans
from tests.runtime.test_link import transports


class Busy(HostQueues):
    """Idle after so many looks, or once waits have ended."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.stopped = looks, False

    def idle(self) -> bool:
        self.looks -= 1
        return self.looks < 0 or self.stopped


def running(queues: Busy, timeout: float = 10.0, ranks: int = 1) -> Overlapped:
    """ranks: that go by each other's words of failure."""
    made = plans(range(7))
    transport = transports(KEYS, made, SHAPE)[0]
    transport.link.release = lambda epoch: setattr(queues, "stopped", True)
    everybody = torch.zeros(ranks, dtype=torch.int32)
    lasting = replace(Lasting.of(CPU), failed=everybody[:1], everybody=everybody)
    return Overlapped(made[0], KEYS, SHAPE, transport, queues, CPU, timeout=timeout, lasting=lasting)


def test_what_ends_in_time_is_waited_for() -> None:
    queues = Busy(20)
    running(queues).finish()
    assert queues.looks < 0
    assert not queues.stopped


def test_what_does_not_end_is_stopped_in_the_end() -> None:
    queues = Busy(10**9)
    with pytest.raises(MaskcError, match=r"M721.*stopped"):
        running(queues).finish(0.05)
    assert queues.stopped


def test_nobody_waits_on_once_a_kernel_gave_up() -> None:
    queues = Busy(10**9)
    rank = running(queues, timeout=20.0)
    write_word(rank.words.failed.data_ptr(), rank.forward_cut.plan.own + 1)
    begun = time.monotonic()
    with pytest.raises(MaskcError, match="did not arrive"):
        rank.finish()
    assert time.monotonic() - begun < 20, "of 40 s"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_word_that_others_go_by_stays(ranks: int) -> None:
    rank = running(Busy(0), ranks=ranks)
    write_word(rank.words.failed.data_ptr(), STOPPED)
    for t in (rank.words.counts, rank.words.sent, rank.words.lost):
        t.fill_(3)
    with pytest.raises(MaskcError, match="M721"):
        rank.finish()
    assert read_word(rank.words.failed.data_ptr()) == (0 if ranks == 1 else STOPPED)
    left = [set(t.tolist()) for t in (rank.words.counts, rank.words.sent, rank.words.lost)]
    assert left == [{0 if ranks == 1 else 3}] * 3
    if ranks == 1:
        rank.finish()


def test_a_stop_does_not_hide_what_did_not_come() -> None:
    """Whoever stops waits may do so while a kernel writes which slot it waited for."""
    rank = running(Busy(0))
    first = rank.forward_cut.plan.slots[rank.forward_cut.plan.own]
    write_word(rank.words.failed.data_ptr(), rank.forward_cut.plan.own + 1)
    rank.stop()
    with pytest.raises(MaskcError, match=f"key chunk {first.chunk} of rank {first.source} did not arrive"):
        rank.finish()


def test_the_last_piece_forward_and_the_first_backward_are_told_apart() -> None:
    rank = running(Busy(0))
    forward, backward = rank.forward_cut, rank.backward_cut
    for word, slot in ((forward.words, forward.plan.slots[-1]), (backward.first + 1, backward.plan.slots[0])):
        assert f"key chunk {slot.chunk} of rank {slot.source} " in rank._missing(word)
