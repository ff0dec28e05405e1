"""The protocol of overlapped calls under every interleaving, and broken variants of it that must be found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import OverlapPlan, visit_order
from maskc.runtime.protocol import (
    HALVES,
    Attend,
    Begin,
    End,
    Epochs,
    Gift,
    Give,
    Pull,
    Push,
    Put,
    Settle,
    Sum,
    Turn,
    Wait,
    Word,
    backward_steps,
    call_steps,
    gifts,
    regrouped,
    told,
)
from tests.overlap.explorer import AttendAfter, Change, Explorer, Fill, Program, Violation, readers_of

Mutation = Callable[[Program], Program]


def plans(owner: Sequence[int], needed: Sequence[set[int]]) -> list[OverlapPlan]:
    world = len(needed)
    keys = Layout(world, tuple(range(len(owner) + 1)), tuple(owner))
    return [visit_order(keys, [frozenset(n) for n in needed], rank, world) for rank in range(world)]


CASES = {
    "two ranks, a chunk each": plans([0, 1], [{0, 1}, {0, 1}]),
    "two ranks, two chunks each": plans([0, 1, 0, 1], [{0, 1, 2, 3}, {0, 1, 2, 3}]),
    "causal pair: nobody copies from rank 1": plans([0, 1], [{0}, {0, 1}]),
    "no own chunk is needed": plans([0, 1], [{1}, {0}]),
    "three ranks, everybody needs all": plans([0, 1, 2], [{0, 1, 2}] * 3),
    "three ranks, a ring of needs": plans([0, 1, 2], [{0, 2}, {0, 1}, {1, 2}]),
    "causal: three ranks": plans([0, 1, 2], [{0}, {0, 1}, {0, 1, 2}]),
}
QUEUES = pytest.mark.parametrize("one_queue", [False, True], ids=["many queues", "one queue"])


CALLS = {
    "forward": "fff",
    "copying first": "ccc",
    "backward": "bbb",
    "training": "fb",
    "with kept keys": "fkfk",
    "one engine": "oo",
    "adds": "aa",
}
"""f: forward, c: keys first, b: backward, o: with one copy engine, k: backward over the keys of the call before, a: its kernel
adds."""


def given_of(made: list[OverlapPlan], rank: int, groups: Sequence[int]) -> tuple[Gift, ...]:
    return gifts({r: (made[r], groups[r]) for r in readers_of(made, rank)}, rank, len(made))


def after_keys(p: OverlapPlan, steps: Program, epoch: int) -> Program:
    """The same call with a kernel that starts when all keys are there."""
    out: list[Any] = []
    for stream, op in steps:
        if isinstance(op, Attend):
            out += [("compute", Wait(Word("gave", p.rank, source), epoch)) for source in p.sources]
            op = AttendAfter(op.pieces, op.epoch, op.finishes, op.adds)
        out.append((stream, op))
    return out


def program(made: list[OverlapPlan], rank: int, calls: str, groups: Sequence[int], parts: int = 1) -> Program:
    """What a rank enqueues where keys are given. Between calls its own keys change. groups: of heads, by rank. parts: in
    which gradients are sent."""
    p, epochs, given = made[rank], Epochs(), given_of(made, rank, groups)
    owners = dict.fromkeys(s.source for s in p.pulls)
    steps: list[Any] = []
    for call in calls:
        turn = epochs.begin(owners if call in "boka" else ())
        steps += [("compute", Change(turn.epoch))] if call != "k" else []
        match call:
            case "f":
                steps += call_steps(p, turn, groups[rank], given)
            case "c":
                steps += after_keys(p, call_steps(p, turn, groups[rank], given), turn.epoch)
            case _:
                steps += backward_steps(p, turn, groups[rank], given, call in "boa", 1, call == "o", call == "a", parts)
    return steps


def programs(case: str, calls: str = "fff", groups: Sequence[int] = (1, 1, 1), parts: int = 1) -> list[Program]:
    """groups: of heads, by rank; they need not agree."""
    return [program(CASES[case], rank, calls, groups, parts) for rank in range(len(CASES[case]))]


PULLED = "causal pair: nobody copies from rank 1", "causal: three ranks"
"""Cases whose last rank can pull: nobody needs its keys."""


def pulled(case: str, calls: str, groups: int = 1) -> list[Program]:
    """The last rank pulls, f: forward, r: by a kernel, b: backward. Of the others, in whose place hosts post keys and take
    gradients, no kernel runs."""
    *others, p = CASES[case]
    epochs, owners = Epochs(), dict.fromkeys(s.source for s in p.pulls)
    steps: list[Any] = []
    sources: list[list[Any]] = [[] for _ in others]
    for call in calls:
        turn = epochs.begin(owners if call == "b" else ())
        made = backward_steps(p, turn, groups, parts=1) if call == "b" else call_steps(p, turn, groups)
        steps += regrouped(made) if call == "r" else made
        for source, out in enumerate(sources):
            late, ready = turn.epoch - HALVES, Word("ready", p.rank, source)
            out += [("copy", Wait(Word("done", source, p.rank), late))] if late > 0 else []
            out += [("copy", Fill(turn.half, turn.epoch)), ("copy", Put(ready, turn.epoch))]
            if call == "b":
                out += [("send", Wait(Word("sent", source, p.rank), told(turn.epoch, 1, 1)))]
                out += [("send", Sum((p.rank,), turn.epoch)), ("send", Put(Word("free", p.rank, source), turn.epoch))]
    return [*sources, steps]


EXPLORED = [
    (case, calls, one_queue)
    for case in CASES
    for calls in CALLS
    for one_queue in (True, False)
    if calls == "forward" or len(CASES[case]) <= 2 or one_queue  # else millions of states
]


@pytest.mark.parametrize(("case", "calls", "one_queue"), EXPLORED)
def test_no_interleaving_waits_for_ever_or_reads_what_is_not_there(case: str, calls: str, one_queue: bool) -> None:
    assert Explorer(programs(case, CALLS[calls]), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("groups", [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("calls", ["ff", "fb"])
def test_groups_of_heads(calls: str, groups: Sequence[int], one_queue: bool) -> None:
    assert Explorer(programs("two ranks, a chunk each", calls, groups), one_queue).explore() > 10
    assert Explorer(programs("causal pair: nobody copies from rank 1", calls, groups), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("groups", [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("calls", ["b", "a"])
def test_gradients_sent_in_parts(calls: str, groups: Sequence[int], one_queue: bool) -> None:
    """Pieces need not end where parts do."""
    for case in ("causal pair: nobody copies from rank 1", "two ranks, a chunk each"):
        assert Explorer(programs(case, calls, groups, parts=2), one_queue, parts=2).explore() > 10


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
@pytest.mark.parametrize("calls", ["ff", "fb"])
@pytest.mark.parametrize("case", ["two ranks, a chunk each", "causal pair: nobody copies from rank 1", "no own chunk is needed"])
@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_dies_at_any_moment_leaves_nobody_waiting(case: str, mortal: int, calls: str, one_queue: bool) -> None:
    assert Explorer(programs(case, calls), one_queue, mortal=mortal).explore() > 10


THREE = pytest.mark.parametrize("case", ["causal: three ranks", "three ranks, a ring of needs"])


@THREE
@pytest.mark.parametrize("mortal", [0, 1, 2])
def test_nobody_takes_what_a_stopped_rank_goes_on_to_give(case: str, mortal: int) -> None:
    assert Explorer(programs(case, "ff"), True, mortal).explore() > 10


@THREE
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


def without(kind: str | None, what: type, stream: str | None = None) -> Mutation:
    def drop(step: Any) -> bool:
        on, op = step
        return isinstance(op, what) and (kind is None or op.word.kind == kind) and stream in (None, on)  # type: ignore[attr-defined]

    return lambda program: [s for s in program if not drop(s)]


def one_half(program: Program) -> Program:
    """Memory without a second half, readers still waited for two calls late."""
    return [(s, replace(op, half=0) if isinstance(op, Fill | Pull) else op) for s, op in program]


def no_epochs(program: Program) -> Program:
    """Flags that say 1 for ever instead of the epoch."""

    def flat(op: object) -> object:
        return replace(op, epoch=1) if isinstance(op, Wait | Put) and op.word.kind in ("open", "ready", "flag") else op  # type: ignore[type-var]

    return [(s, flat(op)) for s, op in program]  # type: ignore[misc]


def swapped(first: Callable[[object], bool], second: Callable[[object], bool]) -> Mutation:
    """Every neighbouring pair (first, second) on a stream the other way round."""

    def swap(program: Program) -> Program:
        out = list(program)
        for i in range(len(out) - 1):
            (a, x), (b, y) = out[i], out[i + 1]
            if a == b and first(x) and second(y):
                out[i], out[i + 1] = (b, y), (a, x)
        return out

    return swap


def is_put(kind: str) -> Callable[[object], bool]:
    return lambda op: isinstance(op, Put) and op.word.kind == kind


def is_wait(kind: str) -> Callable[[object], bool]:
    return lambda op: isinstance(op, Wait) and op.word.kind == kind


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
BROKEN_BACKWARD: dict[str, tuple[Mutation, str]] = {
    "gradients leave before they are complete": (without("finished", Wait), "pushes gradients"),
    "gradients are added up before they are there": (without("sent", Wait), "adds up"),
    "staging is written before it was added up": (without("free", Wait), "adds up"),
    "the owner is told before the last push": (swapped(lambda op: isinstance(op, Push), is_put("sent")), "adds up"),
    "staging is called free before the sum": (swapped(lambda op: isinstance(op, Sum), is_put("free")), "adds up"),
    "the kernel adds what has not come": (swapped(is_wait("sent"), is_put("came")), "adds up"),
    "nobody says sent": (without("sent", Put), "waits for ever"),
    "nobody says free": (without("free", Put), "waits for ever"),
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


@pytest.mark.parametrize("name", BROKEN_BACKWARD)
def test_broken_ways_of_gradients_are_found_out(name: str) -> None:
    mutate, message = BROKEN_BACKWARD[name]
    found = []
    cases = ("two ranks, a chunk each", "two ranks, two chunks each", "causal pair: nobody copies from rank 1")
    for case, calls in product(cases, ("bbb", "bkk", "aa")):
        try:
            Explorer([mutate(p) for p in programs(case, calls)]).explore()
        except Violation as violation:
            found.append(str(violation))
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
