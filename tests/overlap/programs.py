"""What ranks enqueue call after call, as the explorer takes it, and ways to break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from maskc.runtime.layout import Layout
from maskc.runtime.overlap_plan import OverlapPlan, plan_visits
from maskc.runtime.protocol import (
    HALVES,
    Attend,
    Epochs,
    Gift,
    Put,
    Sum,
    Wait,
    Word,
    at_once,
    backward_steps,
    by_pieces,
    call_steps,
    gifts,
    regrouped,
)
from tests.overlap.explorer import AttendAfter, Change, Fill, Program, readers_of

Mutation = Callable[[Program], Program]


def plans(owner: Sequence[int], needed: Sequence[set[int]]) -> list[OverlapPlan]:
    world = len(needed)
    keys = Layout(world, tuple(range(len(owner) + 1)), tuple(owner))
    return [plan_visits(keys, [frozenset(n) for n in needed], rank, world) for rank in range(world)]


CASES = {
    "two ranks, a chunk each": plans([0, 1], [{0, 1}, {0, 1}]),
    "two ranks, two chunks each": plans([0, 1, 0, 1], [{0, 1, 2, 3}, {0, 1, 2, 3}]),
    "causal pair: nobody copies from rank 1": plans([0, 1], [{0}, {0, 1}]),
    "no own chunk is needed": plans([0, 1], [{1}, {0}]),
    "three ranks, everybody needs all": plans([0, 1, 2], [{0, 1, 2}] * 3),
    "three ranks, a ring of needs": plans([0, 1, 2], [{0, 2}, {0, 1}, {1, 2}]),
    "causal: three ranks": plans([0, 1, 2], [{0}, {0, 1}, {0, 1, 2}]),
}


CALLS = {
    "forward": "fff",
    "copying first": "ccc",
    "backward": "bbb",
    "training": "fb",
    "with kept keys": "fkfk",
    "one engine": "oo",
    "given gradients": "ggg",
    "given gradients, training": "fg",
    "given gradients, with kept keys": "fhfh",
    "given and pushed in turn": "gbgkh",
    "pushed at once": "aaa",
    "pushed at once, with kept keys": "fdad",
    "pushed at once, given in turn": "gagdh",
}
"""f: forward, c: keys first, b: backward whose gradients are pushed, o: with one copy engine, k: over the keys of the call
before; a: all of them pushed at once, with one copy engine, d: over the keys of the call before; g: backward whose kernel gives
gradients, h: over the keys of the call before. Owners are told of pieces, but by o, k."""
GATHERING, KEEPING, GIVING, AT_ONCE = "boga", "khd", "gh", "ad"
"""Backward calls whose keys are copied, and are not; whose gradients are given, and pushed at once."""


def given_of(made: list[OverlapPlan], rank: int, groups: Sequence[int]) -> tuple[Gift, ...]:
    return gifts({r: (made[r], groups[r]) for r in readers_of(made, rank)}, rank, len(made))


def after_keys(p: OverlapPlan, steps: Program, epoch: int) -> Program:
    """The same call with a kernel that starts when all keys are there."""
    out: list[Any] = []
    for stream, op in steps:
        if isinstance(op, Attend):
            out += [("compute", Wait(Word("gave", p.rank, source), epoch)) for source in p.sources]
            op = AttendAfter(op.pieces, op.epoch, op.finishes, op.tells, op.adds)
        out.append((stream, op))
    return out


def program(by_call: Sequence[list[OverlapPlan]], rank: int, calls: str, groups: Sequence[int]) -> Program:
    """What a rank enqueues where keys are given. Between calls its own keys change. by_call: the plans of all ranks in each.
    groups: of heads, by rank."""
    epochs = Epochs()
    steps: list[Any] = []
    for call, made in zip(calls, by_call, strict=True):
        p, given = made[rank], given_of(made, rank, groups)
        turn = epochs.begin(p.sources if call in GATHERING + KEEPING else ())
        steps += [("compute", Change(turn.epoch))] if call not in KEEPING else []
        match call:
            case "f":
                steps += call_steps(p, turn, groups[rank], given)
            case "c":
                steps += after_keys(p, call_steps(p, turn, groups[rank], given), turn.epoch)
            case _:
                leaving = (at_once if call in AT_ONCE else by_pieces)(p, groups[rank])
                how = call in GATHERING, leaving, call in "oa", call in GIVING, call not in "ok"
                steps += backward_steps(p, turn, groups[rank], given, *how)
    return steps


def programs(case: str, calls: str | Sequence[str] = "fff", groups: Sequence[int] = (1, 1, 1)) -> list[Program]:
    """calls: of all ranks, or of each. groups: of heads, by rank; they need not agree."""
    made = CASES[case]
    each = [calls] * len(made) if isinstance(calls, str) else calls
    return [program([made] * len(each[rank]), rank, each[rank], groups) for rank in range(len(made))]


PULLED = "causal pair: nobody copies from rank 1", "causal: three ranks"
"""Cases whose last rank can pull: nobody needs its keys."""


def pulled(case: str, calls: str, groups: int = 1) -> list[Program]:
    """The last rank pulls, f: forward, r: by a kernel, b: backward, g: with given gradients. Of the others, in whose place
    hosts post keys and take gradients, no kernel runs."""
    *others, p = CASES[case]
    epochs, owners = Epochs(), dict.fromkeys(s.source for s in p.pulls)
    steps: list[Any] = []
    sources: list[list[Any]] = [[] for _ in others]
    for call in calls:
        turn = epochs.begin(owners if call in "bg" else ())
        made = (
            backward_steps(p, turn, groups, given_grads=call == "g", in_line=call == "g")
            if call in "bg"
            else call_steps(p, turn, groups)
        )
        steps += regrouped(made) if call == "r" else made
        for source, out in enumerate(sources):
            late, ready = turn.epoch - HALVES, Word("ready", p.rank, source)
            out += [("copy", Wait(Word("done", source, p.rank), late))] if late > 0 else []
            out += [("copy", Fill(turn.half, turn.epoch)), ("copy", Put(ready, turn.epoch))]
            if call in "bg":
                out += [("send", Wait(Word("sent", source, p.rank), turn.epoch))]
                out += [("send", Sum((p.rank,), turn.epoch)), ("send", Put(Word("free", p.rank, source), turn.epoch))]
    return [*sources, steps]


BETWEEN_TWO = [case for case, made in CASES.items() if len(made) == 2]
BETWEEN_THREE = [case for case, made in CASES.items() if len(made) == 3]


# ---------------------------------------------------------------- broken ones


def without(kind: str | None, what: type, stream: str | None = None) -> Mutation:
    def drop(step: Any) -> bool:
        on, op = step
        return isinstance(op, what) and (kind is None or op.word.kind == kind) and stream in (None, on)  # type: ignore[attr-defined]

    return lambda program: [s for s in program if not drop(s)]


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
