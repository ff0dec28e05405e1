"""Where things lie in the memory of a link: nothing on top of anything else, the same place seen from both sides."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import maskc
from maskc.diagnostics import MaskcError, error
from maskc.runtime import link as link_module
from maskc.runtime.call_order import ENTRIES
from maskc.runtime.comm import Peer
from maskc.runtime.copies import Copy
from maskc.runtime.layout import Layout
from maskc.runtime.link import ALIGNMENT, BUFFERS, KINDS, Link, Room, SharedFile, link_of, words_size
from maskc.runtime.overlap import STOPPED
from maskc.runtime.overlap_grads import Owners, Told, places, reports
from maskc.runtime.overlap_plan import Cut, OverlapPlan, joined, overlap_plan, plan_visits
from maskc.runtime.plan import plan
from maskc.runtime.protocol import Word
from maskc.runtime.symmetric import Symmetric, most_rows, room_of
from maskc.runtime.transport import OCTET, HostQueues, KeyShape, padded, read_word, write_word

Extent = tuple[int, int]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Layout, list[OverlapPlan], KeyShape]:
    world, sizes = draw(st.integers(2, 4)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    owner = tuple(draw(st.integers(0, world - 1)) for _ in sizes)
    keys = Layout(world, tuple(sum(sizes[:i]) for i in range(len(sizes) + 1)), owner)
    needed = [frozenset(draw(st.sets(st.integers(0, len(sizes) - 1)))) for _ in range(world)]
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    shape = KeyShape(draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 5)), dtype)
    return keys, [plan_visits(keys, needed, r, world) for r in range(world)], shape


def transports(keys: Layout, made: list[OverlapPlan], shape: KeyShape) -> list[Symmetric]:
    """All ranks over the same memory."""
    room = room_of(keys, max(p.rows for p in made), shape)
    memory = tuple(torch.zeros(room.total(keys.world), dtype=torch.uint8) for _ in range(keys.world))
    link: Any = SimpleNamespace(room=room, memory=memory)
    link.flags, link.told = partial(Link.flags, link), partial(Link.told, link)
    return [Symmetric(link, p, keys, shape) for p in made]


def extent(x: torch.Tensor) -> Extent:
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def extents(keys: Layout, made: list[OverlapPlan], ranks: list[Symmetric]) -> Iterator[Extent]:
    for p, mine in zip(made, ranks, strict=True):
        for which in range(BUFFERS):
            mine.which = which
            yield extent(mine.flags(p.rank))
            k, v = mine.buffer(p.rank, p.rows)
            yield from (extent(t.permute(2, 1, 0, 3)) for t in (k, v) if t.numel())
        for reader, chunks in p.lends:
            yield extent(mine.told(p.rank, reader))
            for chunk in chunks:
                yield from (extent(rows) for t in mine.staged(reader, chunk) for rows in t.flatten(0, 1))


@given(plans())
def test_nothing_overlaps(given_plans: tuple[Layout, list[OverlapPlan], KeyShape]) -> None:
    keys, made, shape = given_plans
    found = [e for e in extents(keys, made, transports(keys, made, shape)) if e[0] < e[1]]
    for (a, b), (c, d) in combinations(found, 2):
        assert b <= c or d <= a


def cut(plan: OverlapPlan, heads: int) -> Cut:
    """Every head of a chunk comes by itself."""
    return Cut(plan, heads, heads)


@given(plans())
def test_a_reader_finds_what_the_owner_wrote_and_the_other_way_round(
    given_plans: tuple[Layout, list[OverlapPlan], KeyShape],
) -> None:
    keys, made, shape = given_plans
    ranks = transports(keys, made, shape)
    for p, mine in zip(made, ranks, strict=True):
        held = shape.batch, keys.local_length(p.rank), shape.heads
        own = [torch.zeros(*held, d, dtype=shape.dtype) for d in (shape.dim_k, shape.dim_v)]
        row = 0
        for chunk in keys.chunks_of(p.rank):
            for i, t in enumerate(own):
                t[:, row : row + keys.size_of(chunk)] = chunk + 16 * i + 1
            row += keys.size_of(chunk)
        for reader, _ in p.lends:
            theirs = cut(made[reader], shape.heads)
            for piece in theirs.pieces:
                if theirs.plan.slot_of(piece).source == p.rank:
                    mine.give(reader, theirs, piece, (own[0], own[1]))
    for p, mine in zip(made, ranks, strict=True):
        for slot in p.pulls:
            got = [t[:, slot.start : slot.start + slot.rows] for t in mine.buffer(p.rank, p.rows)]
            assert [set(t.flatten().tolist()) for t in got] == [{slot.chunk + 1}, {slot.chunk + 17}]
            grads = shape.gradients(slot.rows, "cpu")
            for i, t in enumerate(grads):
                t.fill_(slot.chunk + 100 * p.rank + i)
            for head in range(shape.heads):
                heads = slice(head, head + 1)
                mine.push(slot.source, slot.chunk, heads, (grads[0][:, heads], grads[1][:, heads]))
    for p, mine in zip(made, ranks, strict=True):
        for reader, chunks in p.lends:
            for chunk in chunks:
                got = list(mine.staged(reader, chunk))
                assert [set(t.flatten().tolist()) for t in got] == [{chunk + 100 * reader}, {chunk + 100 * reader + 1}]


@given(plans())
def test_a_kernel_stores_where_the_owner_looks(given_plans: tuple[Layout, list[OverlapPlan], KeyShape]) -> None:
    """Gradients, whole octets of each chunk, and the words that tell of them."""
    keys, made, shape = given_plans
    ranks = transports(keys, made, shape)
    for p, mine in zip(made, ranks, strict=True):
        for slot in p.pulls:
            owner = ranks[slot.source]
            for there, seen in zip(mine.place(slot.source, slot.chunk), owner.staged(p.rank, slot.chunk), strict=True):
                assert (there.data_ptr(), there.shape, there.stride()) == (seen.data_ptr(), seen.shape, seen.stride())
                assert there.shape[2] == padded(slot.rows)
                assert (there.data_ptr() - mine.link.memory[slot.source].data_ptr()) % (OCTET * 4) == 0
                assert there.stride(1) % (OCTET * there.shape[3]) == 0
            assert mine.told(slot.source, p.rank).data_ptr() == owner.told(slot.source, p.rank).data_ptr()


@given(plans())
def test_words_lie_apart_from_what_proves_that_memory_is_shared(given_plans: tuple[Layout, list[OverlapPlan], KeyShape]) -> None:
    """The last bytes of it: a word that is not zero at first would tell of gradients that are not there."""
    keys, made, shape = given_plans
    mine = transports(keys, made, shape)[0]
    _, end = extent(mine.link.memory[0])
    assert all(
        extent(words)[1] <= end - 8
        for words in (*(mine.link.flags(0, i) for i in range(BUFFERS)), *(mine.told(0, r) for r in range(keys.world)))
    )


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
            taken = sum(padded(keys.size_of(c)) for c in slot.chunks)
            part = slice(2, 2 + taken)
            whole = [torch.rand_like(t) for t in shape.gradients(taken + 5, "cpu")]
            other = [torch.rand_like(t) for t in whole]
            for less in ((heads, slice(2, taken)), (slice(heads.start, heads.start + 1), part)):  # asked for before
                by_engine.pushed(slot.source, slot.chunk, *less, (other[0], other[1]))
            by_host.push_rows(slot.source, slot.chunk, heads, part, (whole[0], whole[1]))
            for which, one in by_engine.pushed(slot.source, slot.chunk, heads, part, (other[0], other[1])).copies:
                run(one, whole[which].data_ptr())
            assert torch.equal(by_host.link.memory[slot.source], by_engine.link.memory[slot.source])


@given(plans(), st.booleans())
def test_copy_engines_give_what_the_host_gives(given_plans: tuple[Layout, list[OverlapPlan], KeyShape], every_head: bool) -> None:
    """Keys as they lie: heads of a row behind each other, rows of a head, or with a gap; in other places from call to call."""
    keys, made, shape = given_plans
    cuts = [Cut(p, 1 if every_head else shape.heads, shape.heads) for p in made]
    for p, by_host, by_engine in zip(made, transports(keys, made, shape), transports(keys, made, shape), strict=True):
        sizes = [(shape.batch, keys.local_length(p.rank), shape.heads, d) for d in (shape.dim_k, shape.dim_v)]
        dense, apart = ([torch.rand(size).to(shape.dtype) for size in sizes] for _ in range(2))
        heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in apart]
        gap = [torch.nn.functional.pad(t, (0, 3))[..., : t.shape[3]] for t in apart]
        for own in (dense, heads_first, gap, [t.clone() for t in dense]):
            for reader, _ in p.lends:
                for piece in (n for n in cuts[reader].pieces if made[reader].slot_of(n).source == p.rank):
                    by_host.give(reader, cuts[reader], piece, (own[0], own[1]))
                    for which, one in by_engine.given(reader, cuts[reader], piece, (own[0], own[1])).copies:
                        run(one, own[which].data_ptr())
            for one, other in zip(by_host.link.memory, by_engine.link.memory, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("prune", [True, False])
def test_there_is_room_for_the_keys_of_every_rank_under_every_mask_of_a_plan(prune: bool) -> None:
    """Under the first, a rank sees its own keys; under the second, rank 0 sees all."""
    first, second = (maskc.compile_text(f"mask m = {body}").bind(nq=64, nk=64).vectors() for body in ("k == q", "q < 8"))
    p = plan((first, second), world_size=2, chunk=8, order="contiguous", prune=prune)
    needed = [[overlap_plan(p, rank, part).rows for rank in range(2)] for part in range(2)]
    assert most_rows(p) == max(max(rows) for rows in needed) == 64
    assert max(needed[0]) == (32 if prune else 64)


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_room_grows_and_never_shrinks(a: int, b: int, c: int, d: int) -> None:
    held, asked = Room(a * ALIGNMENT, b * ALIGNMENT), Room(c, d)
    grown = held.grown(asked)
    assert grown.holds(held)
    assert grown.holds(asked)
    assert held.holds(asked) == (grown == held)
    assert grown.buffer % ALIGNMENT == grown.region % ALIGNMENT == 0


def links(world: int, path: Path) -> list[Link]:
    """Of all ranks, over one file of words."""
    path.write_bytes(bytes(words_size(world)))
    words = [SharedFile.at(path, words_size(world)) for _ in range(world)]
    return [Link(Peer(None, rank, world), torch.device("cpu"), words[rank], 1.0) for rank in range(world)]


def test_a_buffer_serves_another_plan_when_all_that_was_given_is_there(tmp_path: Path) -> None:
    """Also pieces that no row saw, for which no kernel has waited."""
    mine = links(3, tmp_path / "words")[1]
    mine.queues = HostQueues(seconds=0.0)
    mine.await_given()
    mine.given = {0: 4, 2: 7}
    write_word(mine.address(Word("gave", 1, 0)), 4)
    write_word(mine.address(Word("gave", 1, 2)), 6)
    with pytest.raises(MaskcError, match="epoch 7"):
        mine.await_given()
    write_word(mine.address(Word("gave", 1, 2)), 7)
    mine.await_given()


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_word_has_a_place_of_its_own(world: int, tmp_path: Path) -> None:
    for link in links(world, tmp_path / "words"):
        at = [link.address(Word(k, h, b)) for k in KINDS for h in range(world) for b in range(world)]
        at += [place(r) for r in range(world) for place in (link._broken, link._failed)]
        calls = ctypes.addressof(link.calls._words)
        at += range(calls, calls + ctypes.sizeof(link.calls._words), 4)
        assert link.lasting.failed.data_ptr() == link._failed(link.rank)
        start = link._words.address
        assert len(set(at)) == len(at)
        assert all(a % 4 == 0 and start <= a <= start + words_size(world) - 4 for a in at)


def test_a_rank_that_gives_up_says_that_results_of_all_are_useless(tmp_path: Path) -> None:
    """Its streams go on to write into buffers that others may be reading."""
    made = links(3, tmp_path / "words")
    assert [link.lasting.failed.item() for link in made] == [0, 0, 0]
    with suppress(KeyError), made[1].call():
        made[1].epochs.begin()
        raise KeyError
    assert [link.lasting.failed.item() & 0xFFFFFFFF for link in made] == [STOPPED] * 3
    assert [link.broken for link in made] == [(1,)] * 3
    with pytest.raises(MaskcError, match="rank 1 gave up"):
        made[2].complain()


@given(plans(), st.booleans(), st.integers(0, 3))
def test_kernels_of_owner_and_reader_name_the_same_places(
    given_plans: tuple[Layout, list[OverlapPlan], KeyShape], every_head: bool, first: int
) -> None:
    """Where a reader's kernel stores gradients of a chunk the owner adds them up, and looks at the word that it writes."""
    keys, made, shape = given_plans
    ranks, groups = transports(keys, made, shape), shape.heads if every_head else 1
    cuts = [Cut(joined(p, keys, 3), groups, shape.heads, first=first) for p in made]
    sent = torch.zeros(keys.world, dtype=torch.int32)
    for p, mine, cut_ in zip(made, ranks, cuts, strict=True):
        owners = Owners(mine, lambda word: 4 * (word.holder * keys.world + word.by), sent)
        told = reports(cut_, torch.zeros(100, dtype=torch.int32), owners)[first:]
        for slot, place in zip(reversed(p.slots), places(p, shape, owners), strict=True):
            assert (place.first, place.rows, place.away) == (slot.start, slot.rows, slot.source != p.rank)
            if place.away:
                dk, dv = ranks[slot.source].staged(p.rank, slot.chunk)
                assert (place.dk, place.dv, place.head) == (dk.data_ptr(), dv.data_ptr(), dk.stride(1))
        counters: dict[int, int] = {}
        for i, slot in enumerate(cut_.plan.slots[cut_.plan.own :], cut_.plan.own):
            report, owner = told[i], slot.source
            for chunk in slot.chunks:
                seen = Told.of(cut_, chunk, ranks[owner].told(owner, p.rank))
                assert (seen.word, seen.slots, seen.group_heads) == (report.word, len(cut_.plan.slots), cut_.group_heads)
            assert report.sent == 4 * (owner * keys.world + p.rank)
            assert report.pieces == sum(cut_.plan.slot_of(piece).source == owner for piece in cut_.pieces)
            assert counters.setdefault(report.counted, owner) == owner


def test_release_ends_the_waits_of_one_rank(tmp_path: Path) -> None:
    """Every word that it waits for, whose count may pass 2**31 and 2**32; none is turned back, and no other rank's is touched."""
    first, mine, last = links(3, tmp_path / "words")
    held = [Word(kind, 1, by) for kind in KINDS for by in range(3)]
    others = [Word(kind, holder, by) for kind in KINDS for holder in (0, 2) for by in range(3)]
    for epoch in (5, 2**31, 2**32 + 3):
        for ahead, want in ((-1, 0), (-7, 0), (0, 0), (2, 2)):
            for word in held:
                write_word(mine.address(word), epoch + ahead)
            mine.release(epoch)
            assert {read_word(mine.address(word)) for word in held} == {(epoch + want) & 0xFFFFFFFF}
    assert {read_word(link.address(word)) for link in (first, last) for word in others} == {0}


def test_kernels_learn_that_waits_end_before_streams_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a slot for which a kernel gave up stays named."""
    _, mine, other = links(3, tmp_path / "words")
    mine.epochs.begin()
    write_word(other._failed(2), 7)
    told: list[list[int]] = []
    release = Link.release

    def seen(link: Link, epoch: int) -> None:
        told.append([read_word(link._broken(1)), *(read_word(link._failed(r)) for r in range(3))])
        release(link, epoch)

    monkeypatch.setattr(Link, "release", seen)
    mine._stop()
    assert told == [[1, STOPPED, STOPPED, 7]]
    assert read_word(mine.address(Word("gave", 1, 0))) == 1


def test_what_a_watch_is_told(tmp_path: Path) -> None:
    one, two = links(2, tmp_path / "words")
    assert (one._trouble(), two._trouble()) == ("", "")
    write_word(one._failed(0), 9)
    assert (one._trouble(), two._trouble()) == ("a kernel ended its wait for slot 9", "")
    two.give_up()
    assert one._trouble() == two._trouble() == "rank 1 gave up"


def test_an_error_breaks_the_link_where_others_wait_for_the_rest(tmp_path: Path) -> None:
    """What is refused before the first word breaks nothing; a wait that ended does, whenever it began."""
    mine, other = links(2, tmp_path / "words")
    with suppress(MaskcError), mine.call():
        raise error("M723", "no memory")
    assert (mine.broken, mine.complained) == ((), False)
    with suppress(MaskcError), mine.call():
        raise error("M721", "a wait ended")
    assert (other.broken, mine.complained, other.complained) == ((0,), True, False)
    with pytest.raises(MaskcError, match="rank 0 gave up"):
        other.complain()
    assert other.complained


def wait_that_ends(link: Link) -> None:
    with link.call():
        raise error("M721", "a wait ended")


@pytest.mark.parametrize("look", [Link.complain, wait_that_ends])
def test_another_call_than_that_of_the_others_is_named_at_every_look(look: Callable[[Link], None], tmp_path: Path) -> None:
    mine, other = links(2, tmp_path / "words")
    mine.begin((), 3)
    other.begin((), 4)
    for _ in range(2):
        with pytest.raises(MaskcError, match="call 1 of rank 0 is another than that of rank 1"):
            look(other)
    assert mine.broken == (1,)
    for calls in (0, ENTRIES):
        for link in calls * (mine, other):
            link.begin((), 4)
        assert mine.watch._differs() == "call 1 of rank 1 is another than that of rank 0"


# ---------------------------------------------------------------- one link per group


class Group:
    """What a process group is to `link_of`."""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """`link_of` takes the group of a Peer for what it is. The devices for which links are made."""
    made: list[torch.device] = []

    def make(peer: Peer, device: torch.device) -> Link:
        made.append(device)
        return links(peer.world, tmp_path / f"words{len(made)}")[peer.rank]

    monkeypatch.setattr(link_module, "_make", make)
    monkeypatch.setattr(link_module.comm, "process_group", lambda peer: peer.group)
    return made


CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_group_has_a_link_per_device(alone: list[torch.device]) -> None:
    peer, other = Peer(Group(), 0, 2), Peer(Group(), 0, 2)
    found = [link_of(peer, CPU), link_of(peer, META), link_of(other, CPU)]
    assert len(set(map(id, found))) == 3
    assert [link_of(peer, CPU), link_of(peer, META), link_of(other, CPU)] == found
    assert alone == [CPU, META, CPU]


@pytest.mark.parametrize("complained", [True, False])
def test_a_link_that_broke_is_told_of_once(complained: bool, alone: list[torch.device]) -> None:
    peer = Peer(Group(), 0, 2)
    first = link_of(peer, CPU)
    assert isinstance(first, Link)
    first.give_up()
    with pytest.raises(MaskcError, match="rank 0 gave up") if complained else nullcontext():
        if complained:
            first.complain()
    with nullcontext() if complained else pytest.raises(MaskcError, match="rank 0 gave up"):
        link_of(peer, CPU)
    second = link_of(peer, CPU)
    assert isinstance(second, Link)
    assert (second is first, second.broken, len(alone)) == (False, (), 2)


def test_the_watch_of_a_group_that_is_gone_ends(alone: list[torch.device]) -> None:
    peer = Peer(Group(), 0, 2)
    link = link_of(peer, CPU)
    assert isinstance(link, Link)
    assert not link.watch._leaving
    del peer
    gc.collect()
    assert link.watch._leaving
