"""The protocol of overlapped calls under every interleaving, and broken variants of it that must be found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from maskc.runtime.protocol import (
    Attend,
    Begin,
    End,
    Epochs,
    Give,
    Pull,
    Put,
    Settle,
    Turn,
    Wait,
    Word,
    backward_steps,
    call_steps,
    regrouped,
)
from tests.overlap.explorer import Explorer, Fill, Program, Violation, readers_of
from tests.overlap.programs import (
    CALLS,
    CASES,
    PULLED,
    Mutation,
    given_of,
    is_put,
    programs,
    pulled,
    swapped,
    without,
)

QUEUES = pytest.mark.parametrize("one_queue", [False, True], ids=["many queues", "one queue"])
EXPLORED = [
    (case, calls, one_queue)
    for case in CASES
    for calls in CALLS
    for one_queue in (True, False)
    if len(CASES[case]) <= 2 or calls == "forward" or (one_queue and "once, " not in calls)  # else millions of states
]


@pytest.mark.parametrize(("case", "calls", "one_queue"), EXPLORED)
def test_no_interleaving_waits_for_ever_or_reads_what_is_not_there(case: str, calls: str, one_queue: bool) -> None:
    assert Explorer(programs(case, CALLS[calls]), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("groups", [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("calls", ["ff", "fb", "gg", "aa"])
def test_groups_of_heads(calls: str, groups: Sequence[int], one_queue: bool) -> None:
    assert Explorer(programs("two ranks, a chunk each", calls, groups), one_queue).explore() > 10
    assert Explorer(programs("causal pair: nobody copies from rank 1", calls, groups), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("calls", ["fff", "bbb", "fb"])
@pytest.mark.parametrize("case", PULLED)
def test_pulled_keys(case: str, calls: str, groups: int, one_queue: bool) -> None:
    assert Explorer(pulled(case, calls, groups), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("case", PULLED)
def test_copies_by_a_kernel(case: str, one_queue: bool) -> None:
    """It starts when all sources are ready, and tells them that it is done at its end."""
    assert Explorer(pulled(case, "rrr"), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("calls", ["ff", "fb", "gg", "gh", "gb", "ga"])
@pytest.mark.parametrize("case", ["two ranks, a chunk each", "causal pair: nobody copies from rank 1", "no own chunk is needed"])
@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_dies_at_any_moment_leaves_nobody_waiting(case: str, mortal: int, calls: str, one_queue: bool) -> None:
    assert Explorer(programs(case, calls), one_queue, mortal=mortal).explore() > 10


THREE = "causal: three ranks", "three ranks, a ring of needs"


@pytest.mark.parametrize(("case", "calls"), [*product(THREE, ("ff", "g")), (THREE[0], "a")])
@pytest.mark.parametrize("mortal", [0, 1, 2])
def test_nobody_takes_what_a_stopped_rank_goes_on_to_give(case: str, mortal: int, calls: str) -> None:
    assert Explorer(programs(case, calls), True, mortal).explore() > 10


@pytest.mark.parametrize("case", THREE)
def test_stopping_one_rank_alone_is_not_enough(case: str) -> None:
    """Its streams write keys of a call into the buffer of a rank whose kernel is still at the call before."""
    with pytest.raises(Violation, match="the kernel of rank"):
        Explorer(programs(case, "ff"), True, 0, stop_tells_all=False).explore()


@QUEUES
def test_stopping_the_kernel_alone_is_not_enough(one_queue: bool) -> None:
    """A copy stream that waits for a dead rank holds up whatever comes after it: its waits must end, too."""
    with pytest.raises(Violation, match="waits for ever"):
        Explorer(programs("two ranks, a chunk each"), one_queue, mortal=1, stop_frees_streams=False).explore()


# ---------------------------------------------------------------- what must be found out


def one_half(program: Program) -> Program:
    """Memory without a second half, readers still waited for two calls late."""
    return [(s, replace(op, half=0) if isinstance(op, Fill | Pull) else op) for s, op in program]


def no_epochs(program: Program) -> Program:
    """Flags that say 1 for ever instead of the epoch."""

    def flat(op: object) -> object:
        return replace(op, epoch=1) if isinstance(op, Wait | Put) and op.word.kind in ("open", "ready", "flag") else op  # type: ignore[type-var]

    return [(s, flat(op)) for s, op in program]  # type: ignore[misc]


def waits_first(program: Program) -> Program:
    """A rank says that its buffer may be written when it has given its own keys."""
    out, opened = [], []
    for step in program:
        if is_put("open")(step[1]):
            opened.append(step)
            continue
        if isinstance(step[1], Attend):
            out, opened = [*out, *opened], []
        out.append(step)
    return out


def opened_early(program: Program) -> Program:
    """The buffer is called free before the kernel that reads it is done."""
    out: list[Any] = []
    for step in program:
        begin = out and isinstance(out[-1][1], Begin) and is_put("open")(step[1])
        out[-1:] = [step, out[-1]] if begin else [*out[-1:], step]
    return out


def done_early(program: Program) -> Program:
    """A source is told that it may overwrite before the last copy from it is made."""
    out: list[Any] = []
    for stream, op in program:
        if isinstance(op, Put) and op.word.kind == "done":
            last = max(i for i, (_, x) in enumerate(out) if isinstance(x, Pull) and x.source == op.word.holder)
            out.insert(last, (stream, op))
        else:
            out.append((stream, op))
    return out


def gave_early(program: Program) -> Program:
    """A reader is told that all its keys are there before the last is."""
    out: list[Any] = []
    for stream, op in program:
        if isinstance(op, Put) and op.word.kind == "gave":
            out.insert(max(i for i, (_, x) in enumerate(out) if isinstance(x, Give) and x.reader == op.word.holder), (stream, op))
        else:
            out.append((stream, op))
    return out


def flags_of_nothing(program: Program) -> Program:
    """Flags that are written, but not with the epoch."""
    return [(s, replace(op, epoch=0) if isinstance(op, Put) and op.word.kind == "flag" else op) for s, op in program]


BOTH, MANY, ONE = (False, True), (False,), (True,)
BROKEN: dict[str, tuple[Mutation, str, tuple[bool, ...]]] = {
    "nobody waits until buffers may be written": (without("open", Wait), "the kernel of rank", BOTH),
    "buffers may be written before the kernel is done": (opened_early, "the kernel of rank", MANY),
    "copies do not wait for what is before the call": (without(None, Begin), "gives keys", MANY),
    "own keys change before they are given": (without(None, End), "gives keys", MANY),
    "the flag comes before the copy": (swapped(lambda op: isinstance(op, Give), is_put("flag")), "the kernel of rank", BOTH),
    "no epochs": (no_epochs, "epoch", BOTH),
    "no flag is ever written": (without("flag", Put), "waits for ever", BOTH),
    "nobody says open": (without("open", Put), "waits for ever", BOTH),
    "flags that never reach the epoch": (flags_of_nothing, "waits for ever", BOTH),
    "waits before signals": (waits_first, "waits for ever", BOTH),
}
BROKEN_FIRST: dict[str, tuple[Mutation, str, tuple[bool, ...]]] = {
    "the kernel does not wait for keys": (without("gave", Wait), "the kernel of rank", BOTH),
    "the word comes before the last keys": (gave_early, "the kernel of rank", BOTH),
    "nobody says gave": (without("gave", Put), "waits for ever", BOTH),
}
"""Where a kernel starts when all keys are there."""
BROKEN_PULLED: dict[str, tuple[Mutation, str, tuple[bool, ...]]] = {
    "readers are not waited for": (without("done", Wait), "copies epoch", BOTH),
    "sources are not waited for": (without("ready", Wait), "copies epoch", BOTH),
    "copies do not wait for the kernel before": (without(None, Begin), "the kernel of rank", MANY),
    "the flag comes before the copy": (swapped(lambda op: isinstance(op, Pull), is_put("flag")), "the kernel of rank", MANY),
    "keys are called ready before they are": (swapped(lambda op: isinstance(op, Fill), is_put("ready")), "copies epoch", BOTH),
    "sources may overwrite before the copy": (done_early, "copies epoch", BOTH),
    "one half": (one_half, "copies epoch", BOTH),
    "no epochs": (no_epochs, "epoch", BOTH),
    "no flag is ever written": (without("flag", Put), "waits for ever", BOTH),
    "nobody says ready": (without("ready", Put), "waits for ever", BOTH),
    "nobody says done": (without("done", Put), "waits for ever", BOTH),
}
"""Mutation, what is found, with how many queues. With one queue a kernel starts after the copies before it, so that two
faults between copies and kernel cannot show."""


VARIANTS = {
    "forward": (BROKEN, [programs(case) for case in CASES]),
    "copying first": (BROKEN_FIRST, [programs(case, "ccc") for case in CASES]),
    "pulled": (BROKEN_PULLED, [pulled(case, "fff") for case in PULLED]),
}


@pytest.mark.parametrize(
    ("way", "name", "one_queue"),
    [(way, n, q) for way, (variants, _) in VARIANTS.items() for n, (_, _, modes) in variants.items() for q in modes],
)
def test_broken_variants_are_found_out(way: str, name: str, one_queue: bool) -> None:
    """In some case at least: where everybody copies from everybody, much is ordered by chance."""
    variants, cases = VARIANTS[way]
    mutate, message, _ = variants[name]
    found = []
    for right in cases:
        try:
            Explorer([mutate(p) for p in right], one_queue).explore()
        except Violation as violation:
            found.append(str(violation))
    assert found
    assert any(message in text for text in found), found


def verdict(broken: list[Program], one_queue: bool, reduced: bool) -> bool:
    return lasts(Explorer(broken, one_queue, reduced=reduced))


@QUEUES
@pytest.mark.parametrize("case", ["two ranks, a chunk each", "causal pair: nobody copies from rank 1"])
def test_taking_moves_without_data_first_leaves_out_nothing(case: str, one_queue: bool) -> None:
    """The set of all interleavings comes to the same verdict, for the protocol and for everything that is wrong with it."""
    for mutate in (lambda program: program, *(m for m, _, _ in BROKEN.values())):
        tried = [mutate(p) for p in programs(case)]
        assert verdict(tried, one_queue, reduced=True) == verdict(tried, one_queue, reduced=False)


@QUEUES
@pytest.mark.parametrize("frees", [True, False])
def test_the_same_where_a_rank_dies(frees: bool, one_queue: bool) -> None:
    for case, calls in (("causal pair: nobody copies from rank 1", "ff"), ("two ranks, a chunk each", "f")):
        tried = [Explorer(programs(case, calls), one_queue, 1, frees, reduced=reduced) for reduced in (True, False)]
        assert len({lasts(e) for e in tried}) == 1


def lasts(explorer: Explorer) -> bool:
    try:
        explorer.explore()
    except Violation:
        return False
    return True


# ---------------------------------------------------------------- the steps themselves


def test_copies_and_their_words_come_before_the_kernel() -> None:
    """Others wait for them, and with one hardware queue they would stand behind a kernel that waits for those."""
    for made in CASES.values():
        for p in made:
            given = given_of(made, p.rank, (1,) * len(made))
            steps = call_steps(p, Turn(5), 1, given)
            kernel = next(i for i, (_, op) in enumerate(steps) if isinstance(op, Attend))
            assert [(op.reader, op.piece) for _, op in steps[:kernel] if isinstance(op, Give)] == list(given)
            flags = [op.word for _, op in steps[:kernel] if isinstance(op, Put) and op.word.kind == "flag"]
            assert flags == [Word("flag", reader, piece) for reader, piece in given]
            assert not any(isinstance(op, Give | Put | Wait) for _, op in steps[kernel:])


def test_everything_the_kernel_waits_for_is_pulled_before_it() -> None:
    for made in CASES.values():
        for p in made:
            steps = call_steps(p, Turn(5))
            assert isinstance(steps[-1][1], Attend)
            flags = [op.word.by for _, op in steps if isinstance(op, Put) and op.word.kind == "flag"]
            assert flags == list(steps[-1][1].pieces)


def test_a_kernel_that_copies_starts_when_all_sources_are_ready() -> None:
    """It is enqueued with the first of its pulls, so all that it needs comes before that, and what it is done with after all."""
    made = [(p, call_steps(p, Turn(5), 2)) for case in CASES.values() for p in case if p.pulls]
    for p, steps in made:
        kernel = [step for step in regrouped(steps) if step[0] == "copy"]
        assert sorted(map(str, kernel)) == sorted(str(step) for step in steps if step[0] == "copy")
        kinds = [op.word.kind if isinstance(op, Wait | Put) else type(op) for _, op in kernel]
        sources, pieces = len(p.sources), len(p.pieces(2))
        assert kinds == [Begin, *["ready"] * sources, *[Pull, "flag"] * pieces, *["done"] * sources]


@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 1, 3)])
def test_every_piece_of_every_rank_is_given_once_by_its_owner(groups: Sequence[int]) -> None:
    for made in CASES.values():
        given = [(rank, *gift) for rank in range(len(made)) for gift in given_of(made, rank, groups)]
        wanted = [(p.slot_of(n).source, p.rank, n) for p in made for n in p.pieces(groups[p.rank])]
        assert sorted(given) == sorted(wanted)


def test_readers_are_served_at_a_time_the_one_behind_first() -> None:
    """Of a reader in the order in which it counts on its pieces; one with twice the pieces gets two for one of another."""
    made = CASES["three ranks, everybody needs all"]
    assert [g.reader for g in given_of(made, 1, (1, 1, 1))] == [2, 0]
    pieces = [(g.reader, g.piece // len(made[g.reader].slots)) for g in given_of(made, 1, (4, 1, 2))]
    assert pieces == [(2, 0), (0, 0), (0, 1), (2, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("gather", [False, True])
def test_own_keys_are_settled_before_every_kernel(gather: bool) -> None:
    """Also before a backward over kept keys: the kernel of the forward may have read own keys in place."""
    for made in CASES.values():
        for p in made:
            steps = backward_steps(p, Turn(5), 1, given_of(made, p.rank, (1,) * len(made)), gather=gather)
            kinds = [type(op) for stream, op in steps if stream == "compute"]
            assert kinds.index(Settle) < kinds.index(Attend)


def test_pairs_that_need_nothing_exchange_nothing() -> None:
    made = CASES["causal pair: nobody copies from rank 1"]
    assert readers_of(made, 1) == ()
    assert [type(op) for _, op in call_steps(made[0], Turn(4))] == [Settle, Attend]
    assert not any(isinstance(op, Give) for _, op in call_steps(made[1], Turn(4), 1, ()))


def test_epochs_remember_who_used_what() -> None:
    """Owners change from call to call; a wait is for the one that used the memory last."""
    epochs = Epochs()
    assert epochs.begin([3]) == Turn(1)
    assert epochs.begin() == Turn(2)
    assert epochs.begin([3, 1]) == Turn(3, ((3, 1),))
    assert epochs.begin([1]) == Turn(4, ((1, 3),))
    assert epochs.begin([1, 3]) == Turn(5, ((1, 4), (3, 3)))
