"""The ways of gradients under every interleaving: given by kernels or pushed, under any plans, where somebody gives up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest

from maskc.runtime.overlap_plan import OverlapPlan
from maskc.runtime.protocol import (
    Attend,
    Departure,
    End,
    Operation,
    Push,
    Put,
    Sum,
    Tell,
    Turn,
    Wait,
    at_once,
    backward_steps,
    by_pieces,
)
from tests.overlap.explorer import Explorer, Program, Violation, Work
from tests.overlap.programs import (
    BETWEEN_THREE,
    BETWEEN_TWO,
    CASES,
    PULLED,
    Mutation,
    is_put,
    is_wait,
    plans,
    program,
    programs,
    pulled,
    swapped,
    without,
)

QUEUES = pytest.mark.parametrize("one_queue", [False, True], ids=["many queues", "one queue"])
WAYS_IN_TURN = [("aaa", "ggg"), ("agb", "bag"), ("gab", "gab"), ("fdfh", "fkfd"), ("fhgd", "fdak")]
"""Each rank chooses for each call."""


@QUEUES
@pytest.mark.parametrize("calls", [("ggg", "bbb"), ("gbg", "ggb"), ("fhfh", "fkfk"), ("fhg", "fkb"), *WAYS_IN_TURN])
@pytest.mark.parametrize("case", BETWEEN_TWO)
def test_one_rank_gives_gradients_that_another_pushes(case: str, calls: Sequence[str], one_queue: bool) -> None:
    assert Explorer(programs(case, calls), one_queue).explore() > 10


@pytest.mark.parametrize("calls", [("gg", "bb", "gg"), ("bb", "gg", "gg"), ("ga", "ag", "ab")])
@pytest.mark.parametrize("case", BETWEEN_THREE)
def test_one_of_three_ranks_pushes_its_gradients(case: str, calls: Sequence[str]) -> None:
    assert Explorer(programs(case, calls), True).explore() > 10


@QUEUES
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("calls", ["ggg", "gbg"])
@pytest.mark.parametrize("case", PULLED)
def test_gradients_of_pulled_keys_are_given(case: str, calls: str, groups: int, one_queue: bool) -> None:
    assert Explorer(pulled(case, calls, groups), one_queue).explore() > 10


@pytest.mark.parametrize("case", PULLED)
def test_nothing_but_a_word_says_that_gradients_of_pulled_keys_were_added_up(case: str) -> None:
    with pytest.raises(Violation, match="adds up"):
        Explorer([without("free", Wait)(p) for p in pulled(case, "ggg")]).explore()


EVERYTHING, LESS, ONE_WAY, BACK = (
    plans([0, 1, 0, 1], [{0, 1, 2, 3}, {0, 1, 2, 3}]),
    plans([0, 1, 0, 1], [{0, 2, 3}, {0, 1}]),
    plans([0, 1, 0, 1], [{0, 2}, {0, 1, 2, 3}]),
    plans([0, 1, 0, 1], [{0, 1, 2}, {1, 3}]),
)
SWITCHES: dict[str, tuple[list[list[OverlapPlan]], str, str]] = {
    "more, less, more": ([EVERYTHING, LESS, EVERYTHING], "ggg", "010"),
    "less, more, less": ([LESS, EVERYTHING, LESS], "ggg", "010"),
    "one way, then the other": ([ONE_WAY, BACK, ONE_WAY], "ggg", "010"),
    "one way, both, back": ([ONE_WAY, EVERYTHING, BACK], "ggg", "012"),
    "pushed between": ([EVERYTHING, LESS, EVERYTHING], "gbg", "010"),
    "kept beside": ([EVERYTHING, LESS, EVERYTHING], "fgh", "010"),
    "kept twice beside": ([EVERYTHING, LESS, LESS, EVERYTHING], "fghh", "0110"),
    "kept behind one that pushes": ([EVERYTHING, ONE_WAY, EVERYTHING], "fbh", "010"),
    "pushed at once between": ([EVERYTHING, LESS, EVERYTHING], "gag", "010"),
    "all at once, one way, then the other": ([ONE_WAY, BACK, ONE_WAY], "aaa", "010"),
    "kept, pushed at once, beside": ([EVERYTHING, LESS, EVERYTHING], "fad", "010"),
    "all three, a ring, all three": ([CASES[BETWEEN_THREE[i]] for i in (0, 1, 0)], "ggg", "010"),
    "three, a ring, causal": ([CASES[BETWEEN_THREE[i]] for i in (0, 1, 2)], "ggg", "012"),
}
"""Plans that come after each other, what is called, and which key buffer each has: staging is that of the pair of ranks."""


@pytest.mark.parametrize("name", SWITCHES)
def test_whoever_is_given_keys_may_write_gradients_under_any_plan(name: str) -> None:
    """Given keys say that the last gradients were added up; over kept ones "free" does."""
    by_call, calls, buffers = SWITCHES[name]
    ranks = range(len(by_call[0]))
    for one_queue in (True, False) if len(ranks) == 2 else (True,):
        switching = [program(by_call, rank, calls, (1, 1, 1)) for rank in ranks]
        assert Explorer(switching, one_queue, buffers=buffers).explore() > 10


@pytest.mark.parametrize("calls", ["gg", "gh", "fh", "bb", "aa", "ga", ("gg", "bb"), ("ga", "ag")])
@pytest.mark.parametrize("impatient", [0, 1])
def test_nobody_adds_up_what_comes_of_a_kernel_that_gave_up(impatient: int, calls: str | Sequence[str]) -> None:
    """By its own clock, while all others go on: before hosts stop them it leaves out what it gives, and sums look for it."""
    assert Explorer(programs("two ranks, a chunk each", calls), True, impatient=impatient).explore() > 10


@pytest.mark.parametrize(("calls", "counts_all"), [("bb", False), ("gg", True)])
def test_either_a_kernel_leaves_out_what_it_gave_up_or_sums_look_at_all_ranks(calls: str, counts_all: bool) -> None:
    made = programs("two ranks, a chunk each", calls)
    assert Explorer(made, True, impatient=0, counts_all=counts_all).explore() > 10
    with pytest.raises(Violation, match="adds up"):
        Explorer(made, True, impatient=0, counts_all=counts_all, sees_all=False).explore()
    assert Explorer(programs("two ranks, a chunk each", "gg"), True, impatient=0, sees_all=False).explore() > 10


def looks_first(work: Work) -> Work:
    """A kernel that looks for gradients of own keys before it waits for anything, as its first tiles may be own ones."""
    return sorted(work, key=lambda item: ("start", "add").index(item[0]) if item[0] in ("start", "add") else 2)


@QUEUES
@pytest.mark.parametrize("calls", ["aa", "gg", ("ga", "ag"), ("bd", "ah")])
@pytest.mark.parametrize("case", BETWEEN_TWO)
def test_a_kernel_may_look_for_gradients_of_own_keys_at_any_time(case: str, calls: str | Sequence[str], one_queue: bool) -> None:
    """What it is told of lies there, of this call, and complete; what it is not told of it leaves to the sum."""
    assert Explorer(programs(case, calls), one_queue, rework=looks_first).explore() > 10


def unseen(work: Work) -> Work:
    """No row sees keys of the last piece: a kernel waits for them only where it gives gradients of them."""
    last = max((piece for what, piece in work if what == "read"), default=-1)
    left_out = ("read",) if ("store", last) in work else ("read", "gate")
    return [(what, piece) for what, piece in work if piece != last or what not in left_out]


@QUEUES
@pytest.mark.parametrize("calls", ["fff", "bb", "aa", "fbf", "gb", "fkf", ("ga", "ag"), ("fdb", "fhb")])
@pytest.mark.parametrize("case", BETWEEN_TWO)
def test_keys_that_nobody_sees_may_come_when_the_kernel_has_ended(case: str, calls: str | Sequence[str], one_queue: bool) -> None:
    assert Explorer(programs(case, calls), one_queue, rework=unseen).explore() > 10


SOME, ALL = plans([0, 1, 2], [{0, 1}, {1}, {2}]), CASES["three ranks, everybody needs all"]


@QUEUES
def test_a_late_flag_of_what_nobody_saw_is_not_one_of_the_next_call(one_queue: bool) -> None:
    """Rank 0 sees nothing of rank 1, which may still write the piece, and its flag, when rank 2 gives that of the next call."""

    def switching(**how: bool) -> Explorer:
        made = [program([SOME, ALL], rank, "ff", (1, 1, 1)) for rank in range(3)]
        return Explorer(made, one_queue, buffers="01", rework=unseen, **how)  # type: ignore[arg-type]

    assert switching().explore() > 10
    assert found_out([switching(flags_apart=False)], "goes back")


RING, CAUSAL = CASES["three ranks, a ring of needs"], CASES["causal: three ranks"]
TWO_MASKS = {
    "all, some": (ALL, SOME, ["fff"] * 3),
    "a ring, some": (RING, SOME, ["fff"] * 3),
    "causal, a ring": (CAUSAL, RING, ["ggg"] * 3),
    "some, a ring": (SOME, RING, ["gag"] * 3),
    "causal, some": (CAUSAL, SOME, ["fag"] * 3),
    "a ring, causal": (RING, CAUSAL, ["bgb"] * 3),
    "causal, some, each its way": (CAUSAL, SOME, ["gag", "aga", "bga"]),
    "a ring, some, each its way": (RING, SOME, ["gab", "aag", "bgg"]),
}
"""Of three ranks: two plans in turn, each with a key buffer of its own, and what each rank calls."""
FEW_STATES = "all, some", "a ring, some", "causal, a ring", "some, a ring", "causal, some"


@pytest.mark.parametrize(("name", "one_queue"), [*product(TWO_MASKS, (True,)), *product(FEW_STATES, (False,))])
def test_two_masks_in_turn_of_three_ranks(name: str, one_queue: bool) -> None:
    """Whatever no row sees, no word goes back and nobody waits for ever."""
    first, second, calls = TWO_MASKS[name]
    made = [program([first, second, first], rank, calls[rank], (1, 1, 1)) for rank in range(3)]
    assert Explorer(made, one_queue, buffers="010", rework=unseen).explore() > 10


@pytest.mark.parametrize("calls", ["ff", "bb", "aa"])
def test_own_keys_may_then_change_when_all_are_given(calls: str) -> None:
    """That all gradients came says less: those of keys that nobody sees are zeros before these come."""

    def never(program: Program) -> Program:
        return [(stream, op) for stream, op in program if op != End("copy") or stream == "send"]

    tried = [Explorer([never(p) for p in programs(case, calls)], rework=unseen) for case in BETWEEN_TWO]
    assert found_out(tried, "gives keys")


# ---------------------------------------------------------------- the steps themselves


def on_send(p: OverlapPlan, departures: Sequence[Departure], **how: bool) -> list[Operation]:
    return [op for stream, op in backward_steps(p, Turn(5), 2, (), departures=departures, **how) if stream == "send"]


@pytest.mark.parametrize("in_line", [True, False])
@pytest.mark.parametrize("way", [by_pieces, partial(by_pieces, together=2), at_once], ids=["pieces", "heads", "at once"])
def test_every_piece_leaves_once_and_its_owner_is_told_of_it_where_it_looks(
    way: Callable[[OverlapPlan, int], Sequence[Departure]], in_line: bool
) -> None:
    for p in (p for made in CASES.values() for p in made):
        sent = on_send(p, way(p, 2), in_line=in_line)
        pushed = [(op.owner, op.pieces) for op in sent if isinstance(op, Push)]
        assert sorted(piece for _, pieces in pushed for piece in pieces) == sorted(p.pieces(2))
        assert all(p.slot_of(piece).source == owner for owner, pieces in pushed for piece in pieces)
        assert [(op.owner, op.pieces) for op in sent if isinstance(op, Tell)] == (pushed if in_line else [])
        assert sorted(op.word.holder for op in sent if isinstance(op, Put)) == sorted(p.sources)
        (kernel,) = (op for _, op in backward_steps(p, Turn(5), 2, (), in_line=in_line) if isinstance(op, Attend))
        assert kernel.adds == (tuple(reader for reader, _ in p.lends) if in_line else ())


def test_what_leaves_at_once_waits_for_everything_and_then_for_no_kernel() -> None:
    """Copies follow each other, so that a link is awake for one short time."""
    for p in (p for made in CASES.values() for p in made if p.pulls):
        first, *others = (i for i, op in enumerate(on_send(p, at_once(p, 2))) if isinstance(op, Push))
        sent = on_send(p, at_once(p, 2))
        waited = [op.word.by for op in sent[:first] if is_wait("finished")(op)]  # type: ignore[union-attr]
        assert sorted(waited) == sorted(p.pieces(2))
        assert not any(is_wait("finished")(op) for op in sent[first:])
        assert len(others) == len(p.sources) - 1


@pytest.mark.parametrize(("keys_first", "gather"), [(True, True), (False, True), (True, False)])
def test_where_there_is_one_engine_keys_go_before_gradients(keys_first: bool, gather: bool) -> None:
    for p in (p for made in CASES.values() for p in made if p.pulls):
        sent = on_send(p, by_pieces(p, 2), keys_first=keys_first, gather=gather)
        assert (sent[0] == End("copy")) == (keys_first and gather)
        assert End("copy") not in sent[1:]


# ---------------------------------------------------------------- what must be found out


def sent_early(program: Program) -> Program:
    """The owner is told that it has everything before the last copy, whatever words follow that."""
    for last in (Tell, Push):
        program = swapped(lambda op, last=last: isinstance(op, last), is_put("sent"))(program)  # type: ignore[misc]
    return program


def awaits_all_but_the_last(program: Program) -> Program:
    """What leaves at once does so when all pieces but one are complete."""
    is_last = [
        is_wait("finished")(op) and not is_wait("finished")(after)
        for (_, op), (_, after) in zip(program, [*program[1:], ("send", None)], strict=True)
    ]
    return [step for step, last in zip(program, is_last, strict=True) if not last]


BROKEN_BACKWARD: dict[str, tuple[Mutation, str]] = {
    "gradients leave before they are complete": (without("finished", Wait), "pushes gradients"),
    "gradients are added up before they are there": (without("sent", Wait), "adds up"),
    "staging is written before it was added up": (without("free", Wait), "adds up"),
    "the owner is told before the last push": (sent_early, "adds up"),
    "staging is called free before the sum": (swapped(lambda op: isinstance(op, Sum), is_put("free")), "adds up"),
    "the owner is told of a piece before it is pushed": (
        swapped(lambda op: isinstance(op, Push), lambda op: isinstance(op, Tell)),
        "adds up",
    ),
    "gradients leave before the last is complete": (awaits_all_but_the_last, "pushes gradients"),
    "nobody says sent": (without("sent", Put), "waits for ever"),
    "nobody says free": (without("free", Put), "waits for ever"),
}
BROKEN_GIVEN: dict[str, tuple[Mutation, str]] = {
    name: BROKEN_BACKWARD[name]
    for name in (
        "gradients are added up before they are there",
        "staging is written before it was added up",
        "staging is called free before the sum",
        "nobody says free",
    )
}
"""The steps around a kernel that gives."""


@pytest.mark.parametrize(
    ("way", "name"), [*product(("pushed", "pushed at once"), BROKEN_BACKWARD), *(("given", name) for name in BROKEN_GIVEN)]
)
def test_broken_ways_of_gradients_are_found_out(way: str, name: str) -> None:
    mutate, message = BROKEN_BACKWARD[name]
    calls_of = {"pushed": ("bbb", "bkk"), "pushed at once": ("aa", "add"), "given": ("gg", "ghh")}
    tried = product(BETWEEN_TWO[:3], calls_of[way], ((1, 1), (2, 2)) if way == "pushed at once" else ((1, 1),))
    assert found_out([Explorer([mutate(p) for p in programs(*what)]) for what in tried], message)


def found_out(tried: Sequence[Explorer], message: str) -> bool:
    """In some case at least: where everybody copies from everybody, much is ordered by chance."""
    found = []
    for explorer in tried:
        try:
            explorer.explore()
        except Violation as violation:
            found.append(str(violation))
    return any(message in text for text in found)


def sooner(what: str, than: str) -> Callable[[Work], Work]:
    """A kernel that does one thing for a piece before another."""

    def rework(work: Work) -> Work:
        out: Work = []
        for item in work:
            before = (than, item[1])
            out.insert(out.index(before) if item[0] == what and before in out else len(out), item)
        return out

    return rework


BROKEN_KERNELS: dict[str, tuple[Callable[[Work], Work], str]] = {
    "tells of a piece before it is stored": (sooner("tell", "stored"), "adds up"),
    "says sent before the last piece is stored": (sooner("send", "stored"), "adds up"),
    "says sent before the last piece is begun": (sooner("send", "gate"), "adds up"),
    "stores before the keys of the piece came": (lambda work: sooner("stored", "gate")(sooner("store", "gate")(work)), "adds up"),
    "never says sent": (lambda work: [item for item in work if item[0] != "send"], "waits for ever"),
}


@QUEUES
@pytest.mark.parametrize("name", BROKEN_KERNELS)
def test_broken_kernels_are_found_out(name: str, one_queue: bool) -> None:
    rework, message = BROKEN_KERNELS[name]
    assert found_out([Explorer(programs(case, "gg"), one_queue, rework=rework) for case in BETWEEN_TWO], message)
