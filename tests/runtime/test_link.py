"""Where things lie in the memory of a link: nothing on top of anything else, the same place seen from both sides."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskc.runtime.layout import Layout
from maskc.runtime.link import ALIGNMENT, KINDS, Link, Room, words_size
from maskc.runtime.overlap_plan import OverlapPlan, joined, visit_order
from maskc.runtime.protocol import HALVES, Word
from maskc.runtime.symmetric import Symmetric, room_of
from maskc.runtime.transport import Copy, KeyShape

Extent = tuple[int, int]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Layout, list[OverlapPlan], KeyShape]:
    world, sizes = draw(st.integers(2, 4)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    owner = tuple(draw(st.integers(0, world - 1)) for _ in sizes)
    keys = Layout(world, tuple(sum(sizes[:i]) for i in range(len(sizes) + 1)), owner)
    needed = [frozenset(draw(st.sets(st.integers(0, len(sizes) - 1)))) for _ in range(world)]
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    shape = KeyShape(draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 5)), dtype)
    return keys, [visit_order(keys, needed, r, world) for r in range(world)], shape


def transports(keys: Layout, made: list[OverlapPlan], shape: KeyShape) -> list[Symmetric]:
    """All ranks over the same memory."""
    room = room_of(keys, shape)
    memory = tuple(torch.zeros(room.total(keys.world), dtype=torch.uint8) for _ in range(keys.world))
    link: Any = SimpleNamespace(room=room, memory=memory)
    return [Symmetric(link, p, keys, shape) for p in made]


def extent(x: torch.Tensor) -> Extent:
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def extents(keys: Layout, made: list[OverlapPlan], ranks: list[Symmetric]) -> Iterator[Extent]:
    for p, mine in zip(made, ranks, strict=True):
        for half in range(HALVES):
            yield from map(extent, mine.own(half) or ())
        for reader, chunks in p.lends:
            for chunk in chunks:
                yield from (extent(rows) for t in mine.staged(reader, chunk) for rows in t.flatten(0, 1))


@given(plans())
def test_nothing_overlaps(given_plans: tuple[Layout, list[OverlapPlan], KeyShape]) -> None:
    keys, made, shape = given_plans
    found = [e for e in extents(keys, made, transports(keys, made, shape)) if e[0] < e[1]]
    for (a, b), (c, d) in combinations(found, 2):
        assert b <= c or d <= a


@given(plans())
def test_a_reader_finds_what_the_owner_wrote_and_the_other_way_round(
    given_plans: tuple[Layout, list[OverlapPlan], KeyShape],
) -> None:
    keys, made, shape = given_plans
    ranks = transports(keys, made, shape)
    for p, mine in zip(made, ranks, strict=True):
        for half in range(HALVES):
            for i, part in enumerate(mine.own(half) or ()):
                row = 0
                for chunk in keys.chunks_of(p.rank):
                    part[:, row : row + keys.size_of(chunk)] = chunk + 16 * half + 32 * i
                    row += keys.size_of(chunk)
    for p, mine in zip(made, ranks, strict=True):
        for slot in p.pulls:
            for half in range(HALVES):
                into = shape.empty(slot.rows, "cpu")
                for head in range(shape.heads):
                    heads = slice(head, head + 1)
                    mine.pull(slot.source, half, slot.chunk, heads, (into[0][heads], into[1][heads]))
                assert [set(t.flatten().tolist()) for t in into] == [{slot.chunk + 16 * half}, {slot.chunk + 16 * half + 32}]
            grads = shape.gradients(slot.rows, "cpu")
            for i, t in enumerate(grads):
                t.fill_(slot.chunk + 100 * p.rank + i)
            for head in range(shape.heads):
                heads = slice(head, head + 1)
                mine.push(slot.source, slot.chunk, heads, (grads[0][:, heads], grads[1][:, heads]))
    for p, mine in zip(made, ranks, strict=True):
        for reader, chunks in p.lends:
            for chunk in chunks:
                got = mine.staged(reader, chunk)
                assert [set(t.flatten().tolist()) for t in got] == [{chunk + 100 * reader}, {chunk + 100 * reader + 1}]


def run(one: Copy, ahead: int = 0) -> None:
    """What a copy engine would do, in host memory."""
    for i in range(one.pieces):
        to, source = (at + i * pitch for at, pitch in zip((one.into, one.source + ahead), one.pitches, strict=True))
        ctypes.memmove(to, source, one.width)


@given(plans(), st.integers(1, 9), st.booleans())
def test_copy_engines_are_given_what_the_host_copies(
    given_plans: tuple[Layout, list[OverlapPlan], KeyShape], rows: int, every_head: bool
) -> None:
    """Also of joined slots, of some heads or all, and of gradients that lie elsewhere than when the copies were prepared."""
    keys, made, shape = given_plans
    heads = slice(0, shape.heads) if every_head else slice(shape.heads - 1, shape.heads)
    for p, by_host, by_engine in zip(made, transports(keys, made, shape), transports(keys, made, shape), strict=True):
        for slot in joined(p, keys, rows).pulls:
            for memory in (by_host.link.memory, by_engine.link.memory):
                for r, t in enumerate(memory):
                    t.copy_(torch.arange(t.numel()).mul(7 + r).fmod(251))
            into = [[t[heads] for t in shape.empty(slot.rows, "cpu")] for _ in range(2)]
            by_host.pull(slot.source, 1, slot.chunk, heads, (into[0][0], into[0][1]))
            for to, source in zip(into[1], by_engine.readable(slot.source, 1, slot.chunk, heads, slot.rows), strict=True):
                run(Copy.of(to, source))
            assert all(torch.equal(a, b) for a, b in zip(*into, strict=True))
            part = slice(2, 2 + slot.rows)
            whole = [torch.rand_like(t) for t in shape.gradients(slot.rows + 5, "cpu")]
            other = [torch.rand_like(t) for t in whole]
            by_host.push_rows(slot.source, slot.chunk, heads, part, (whole[0], whole[1]))
            for which, one in by_engine._copies(slot.source, slot.chunk, heads, part, (other[0], other[1])):
                run(one, whole[which].data_ptr())
            assert torch.equal(by_host.link.memory[slot.source], by_engine.link.memory[slot.source])


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_room_grows_and_never_shrinks(a: int, b: int, c: int, d: int) -> None:
    held, asked = Room(a * ALIGNMENT, b * ALIGNMENT), Room(c, d)
    grown = held.grown(asked)
    assert grown.holds(held)
    assert grown.holds(asked)
    assert held.holds(asked) == (grown == held)
    assert grown.half % ALIGNMENT == grown.region % ALIGNMENT == 0


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_word_has_a_place_of_its_own(world: int) -> None:
    link: Any = SimpleNamespace(world=world, _words=SimpleNamespace(address=1000))
    at = [Link.address(link, Word(k, h, b)) for k in KINDS for h in range(world) for b in range(world)]
    at += [Link._broken(link, r) for r in range(world)]
    assert len(set(at)) == len(at)
    assert all(a % 4 == 0 and 1000 <= a <= 1000 + words_size(world) - 4 for a in at)
