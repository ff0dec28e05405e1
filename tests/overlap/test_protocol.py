"""The protocol of overlapped calls under every interleaving, and broken variants of it that must be found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest

from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import OverlapPlan, visit_order
from maskc.runtime.protocol import (
    Attend,
    Begin,
    Epochs,
    Fill,
    Pull,
    Push,
    Put,
    Settle,
    Step,
    Sum,
    Turn,
    Wait,
    backward_steps,
    call_steps,
    regrouped,
)
from tests.overlap.explorer import Explorer, Violation, readers_of

Program = list[Step]
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


CALLS = {"forward": "fff", "backward": "bbb", "training": "fb", "with kept keys": "fkfk", "one engine": "oo", "adds": "aa"}
"""f: forward, b: backward, o: with one copy engine, k: backward over the keys of the call before, a: its kernel adds."""


def program(made: list[OverlapPlan], p: OverlapPlan, calls: str, groups: int, parts: int = 1) -> Program:
    """r: forward, copies by a kernel. parts: in which keys are offered and gradients sent."""
    epochs, readers = Epochs(), readers_of(made, p.rank)
    owners = dict.fromkeys(s.source for s in p.pulls)
    steps: Program = []
    for call in calls:
        match call:
            case "f":
                steps += call_steps(p, readers, epochs.begin(readers), groups, parts)
            case "r":
                steps += regrouped(call_steps(p, readers, epochs.begin(readers), groups, parts))
            case _:
                gather = call in "boa"
                turn = epochs.begin(readers if gather else None, owners)
                steps += backward_steps(p, readers, turn, groups, gather, 1, call == "o", call == "a", parts)
    return steps


def programs(case: str, calls: str = "fff", groups: Sequence[int] = (1, 1, 1), parts: int = 1) -> list[Program]:
    """groups: of heads, by rank; they need not agree."""
    return [program(CASES[case], p, calls, g, parts) for p, g in zip(CASES[case], groups, strict=False)]


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
@pytest.mark.parametrize("calls", ["ff", "a"])
def test_keys_offered_and_gradients_sent_in_parts(calls: str, groups: Sequence[int], one_queue: bool) -> None:
    """Pieces need not end where parts do."""
    assert Explorer(programs("causal pair: nobody copies from rank 1", calls, groups, parts=2), one_queue).explore() > 10
    if one_queue or calls == "a":
        assert Explorer(programs("two ranks, a chunk each", calls, groups, parts=2), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("case", ["two ranks, two chunks each", "three ranks, a ring of needs"])
def test_copies_by_a_kernel(case: str, one_queue: bool) -> None:
    """It starts when all sources are ready, and tells them that it is done at its end."""
    assert Explorer(programs(case, "rrr"), one_queue).explore() > 10


@QUEUES
@pytest.mark.parametrize("calls", ["ff", "fb"])
@pytest.mark.parametrize("case", ["two ranks, a chunk each", "causal pair: nobody copies from rank 1", "no own chunk is needed"])
@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_dies_at_any_moment_leaves_nobody_waiting(case: str, mortal: int, calls: str, one_queue: bool) -> None:
    assert Explorer(programs(case, calls), one_queue, mortal=mortal).explore() > 10


@QUEUES
def test_stopping_the_kernel_alone_is_not_enough(one_queue: bool) -> None:
    """A copy stream that waits for a dead rank holds up whatever comes after it: its waits must end, too."""
    with pytest.raises(Violation, match="waits for ever"):
        Explorer(programs("two ranks, a chunk each"), one_queue, mortal=1, stop_frees_streams=False).explore()


# ---------------------------------------------------------------- what must be found out


def without(kind: str | None, what: type) -> Mutation:
    def drop(op: object) -> bool:
        return isinstance(op, what) and (kind is None or op.word.kind == kind)  # type: ignore[attr-defined]

    return lambda program: [s for s in program if not drop(s[1])]


def one_half(program: Program) -> Program:
    """A source buffer without a second half, readers still waited for two calls late."""
    return [(s, replace(op, half=0) if isinstance(op, Fill | Pull) else op) for s, op in program]


def no_epochs(program: Program) -> Program:
    """Flags that say 1 for ever instead of the epoch."""

    def flat(op: object) -> object:
        return replace(op, epoch=1) if isinstance(op, Wait | Put) and op.word.kind in ("ready", "flag") else op  # type: ignore[type-var]

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
    """Each call enqueues its copies, and so its waits for others, before it tells them that its own keys are ready."""
    out: Program = []
    call: Program = []
    for step in program:
        call.append(step)
        if isinstance(step[1], Attend):  # the last of a call
            out += sorted(call, key=lambda s: s[0] != "copy")
            call = []
    return out


def done_early(program: Program) -> Program:
    """A source is told that it may overwrite before the last copy from it is made."""
    out: Program = []
    for stream, op in program:
        if isinstance(op, Put) and op.word.kind == "done":
            last = max(i for i, (_, x) in enumerate(out) if isinstance(x, Pull) and x.source == op.word.holder)
            out.insert(last, (stream, op))
        else:
            out.append((stream, op))
    return out


def flags_of_nothing(program: Program) -> Program:
    """Flags that are written, but not with the epoch."""
    return [(s, replace(op, epoch=0) if isinstance(op, Put) and op.word.kind == "flag" else op) for s, op in program]


BOTH, MANY, ONE = (False, True), (False,), (True,)
BROKEN: dict[str, tuple[Mutation, str, tuple[bool, ...]]] = {
    "readers are not waited for": (without("done", Wait), "copies epoch", BOTH),
    "attention does not wait for the offer's place": (without("offered", Wait), "waits for ever", MANY),
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
    "flags that never reach the epoch": (flags_of_nothing, "waits for ever", BOTH),
    "waits before signals": (waits_first, "waits for ever", ONE),
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


@pytest.mark.parametrize(("name", "one_queue"), [(n, q) for n, (_, _, modes) in BROKEN.items() for q in modes])
def test_broken_variants_are_found_out(name: str, one_queue: bool) -> None:
    """In some case at least: where everybody copies from everybody, much is ordered by chance."""
    mutate, message, _ = BROKEN[name]
    found = []
    for case in CASES:
        broken = [mutate(p) for p in programs(case)]
        try:
            Explorer(broken, one_queue).explore()
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
        tried = [Explorer(programs(case, calls), one_queue, 1, frees, reduced) for reduced in (True, False)]
        assert len({lasts(e) for e in tried}) == 1


def lasts(explorer: Explorer) -> bool:
    try:
        explorer.explore()
    except Violation:
        return False
    return True


def test_waits_before_signals_do_no_harm_with_many_queues() -> None:
    """Why it must be tested with one: the same program is right where every stream has a queue of its own."""
    assert Explorer([waits_first(p) for p in programs("two ranks, a chunk each")]).explore() > 10


# ---------------------------------------------------------------- the steps themselves


def test_everything_the_kernel_waits_for_is_enqueued_before_it() -> None:
    for made in CASES.values():
        for p in made:
            steps = call_steps(p, readers_of(made, p.rank), Turn(5))
            assert isinstance(steps[-1][1], Attend)
            flags = [op.word.by for _, op in steps if isinstance(op, Put) and op.word.kind == "flag"]
            assert flags == list(steps[-1][1].pieces)


@pytest.mark.parametrize("gather", [False, True])
def test_own_keys_are_settled_before_every_kernel(gather: bool) -> None:
    """Also before a backward over kept keys: the kernel of the forward may have read own keys in place."""
    for made in CASES.values():
        for p in made:
            steps = backward_steps(p, readers_of(made, p.rank), Turn(5), gather=gather)
            kinds = [type(op) for stream, op in steps if stream == "compute"]
            assert kinds.index(Settle) < kinds.index(Attend)


def test_pairs_that_need_nothing_exchange_nothing() -> None:
    made = CASES["causal pair: nobody copies from rank 1"]
    assert readers_of(made, 1) == ()
    assert not any(isinstance(op, Wait | Put) for _, op in call_steps(made[0], (), Turn(4)))


def test_epochs_remember_who_used_what() -> None:
    """Readers and owners change from call to call; a wait is for those that used the memory last."""
    epochs = Epochs()
    assert epochs.begin([1, 2], [3]) == Turn(1)
    assert epochs.begin([3]) == Turn(2)
    assert epochs.begin(None, [3, 1]) == Turn(3, (), ((3, 1),)), "no keys offered: the half stays as it is"
    assert epochs.begin([], [1]) == Turn(4, ((3, 2),), ((1, 3),))
    assert epochs.begin([1], []) == Turn(5, ((1, 1), (2, 1)))
    assert epochs.begin([1], []) == Turn(6), "nobody read epoch 4"
