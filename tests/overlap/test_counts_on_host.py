"""What a gated backward counts, stores and adds, by its own text compiled for the host, over what a rank hands it.

The backward kernel and the copy kernel run beside each other, so whatever the order of their counts, each piece gets its
flag, its gradients are reported when the last tile is stored and not before, and all counts are zero again at the end.
Gradients go where the rank's tables say, and owners are told of each piece and of the last.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.octets import from_octets, to_octets
from maskc.codegen.exchange import exchange_source
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import exchange, hopper_bwd
from maskc.runtime.layout import Layout
from maskc.runtime.localize import localize
from maskc.runtime.overlap import COPY_CTAS, Overlapped
from maskc.runtime.overlap_grads import Owners, Told, first_places, places, reports, result_rows
from maskc.runtime.overlap_plan import Cut, joined, overlap_plan
from maskc.runtime.overlap_sum import GradientSum
from maskc.runtime.overlap_tables import Units, backward_tables, expected_arrivals
from maskc.runtime.protocol import Word
from maskc.runtime.transport import HostQueues, KeyShape, padded
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text
from tests.dist.cases import Case
from tests.overlap.looped import CPU, looped

SPEC = replace(select_backward(MaskForm(lts=True), 128, "bf16"), gated=True)
_AROUND = """
constexpr int THREADS = 1, LOADS = 1;
inline void __syncthreads() {{}}
inline u32 count_up(u32* p) {{ return ++*p; }}
inline void store_release_system(u32* p, u32 v) {{ *p = v; }}
inline void store_relaxed_system(u32* p, u32 v) {{ *p = v; }}
inline u32 load_relaxed_system(const u32* p) {{ return *p; }}
inline uint4 load_uncached(const u8* p) {{ return *reinterpret_cast<const uint4*>(p); }}
struct float4 {{ float x, y, z, w; }};
inline float4 load_once_f4(const float* p) {{ return {{p[0], p[1], p[2], p[3]}}; }}
inline void store_f4(float* p, float x, float y, float z, float w) {{ p[0] = x, p[1] = y, p[2] = z, p[3] = w; }}
inline void fence_system() {{}}
static float near;
inline void bulk_prefetch(const float* p, u32 bytes) {{
  for (u32 i = 0; i < bytes / 4; ++i) near = p[i];  // a sanitizer or a fault would tell of what is not there
}}
inline bool arrived(const u32*, u32, u32, u32, u32*) {{ return true; }}
inline bool reached(const u32* word, u32 epoch) {{ return static_cast<int>(*word - epoch) >= 0; }}
constexpr int BLOCK_KV = {block_kv}, HEAD_DIM = {head_dim};
{tables}
struct Params {{ int batch, splits, hk, nk, kv_blocks; GateTables gate; float *dk, *dv; }};
struct Work {{ int tile, kv_head, batch, unit, split, lost; }};
{gate}
{copies}
// What one CTA does for one piece.
extern "C" void copy_piece(CopyParams p, int cta, int ctas, int piece) {{
  blockIdx.x = cta, gridDim.x = ctas;
  p.copies += piece * p.parts, p.pieces += piece, p.count = 1;
  copy_chunks(p);
}}
extern "C" void finish(const GateTables* gate, int batch, int splits, int tile, int kv_head, int lost) {{
  tile_finished(Params{{batch, splits, 0, 0, 0, *gate, nullptr, nullptr}}, Work{{tile, kv_head, 0, 0, 0, lost}});
}}
// What one lane stores.
extern "C" void store(const GateTables* gate, const int* sizes, const int* work, int key_row, int at, const float* grads,
                      float* dk, float* dv) {{
  const Params p{{sizes[0], sizes[1], sizes[2], sizes[3], 0, *gate, dk, dv}};
  constexpr int N = HEAD_DIM / 2;
  const auto grad = [=](int which, int i) {{ return grads[which * N + i]; }};
  store_octets<N>(p, Work{{work[0], work[1], work[2], 0, work[3], 0}}, key_row, at, grad);
}}
// dK and dV of a lane's two keys, [columns / 8][key][2] each, in the way of the registers; 0: they are left to the sum.
extern "C" int complete(const GateTables* gate, int hk, int nk, int tile, int batch, int kv_head, int key_row, int column,
                        float* dk, float* dv) {{
  const Params p{{1, 1, hk, nk, (nk + BLOCK_KV - 1) / BLOCK_KV, *gate, nullptr, nullptr}};
  const Work work{{tile, kv_head, batch, batch * hk + kv_head, 0, 0}};
  if (!leaves_whole(p, work)) return 0;
  constexpr int N = HEAD_DIM / 2;
  add_others<N>(p, work, key_row, column, *reinterpret_cast<float(*)[N]>(dk), *reinterpret_cast<float(*)[N]>(dv));
  return 1;
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers, exchange_text = dict(SPEC.source().headers), exchange_source().text
    shared = headers["bwd/shared.cuh"]
    tables = shared[shared.index("DEVICE i64 octet(") : shared.index("struct Params {")]
    gate, copies = map(in_one_text, (headers["bwd/gate.cuh"], exchange_text[exchange_text.index("struct Part {") :]))
    sizes = {"block_kv": SPEC.block_kv, "head_dim": SPEC.head_dim}
    text = ONE_THREAD + _AROUND.format(tables=tables, gate=gate, copies=copies, **sizes)
    made = compile_on_host(text, tmp_path_factory.mktemp("counts"))
    made.finish.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 5]
    made.store.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 3]
    made.complete.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 7, *[ctypes.c_void_p] * 2]
    made.copy_piece.argtypes = [exchange._CopyParams, *[ctypes.c_int] * 3]
    return made


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[exchange._CopyParams]:
    """Parameters of the copy kernels that were to be launched."""
    out: list[exchange._CopyParams] = []
    monkeypatch.setattr(exchange, "_kernel", lambda name: name)
    monkeypatch.setattr(exchange, "launch", lambda kernel, grid, threads, given, device: out.append(given.body))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_two_kernels_that_count_side_by_side(library: ctypes.CDLL, launched: list[exchange._CopyParams], seed: int) -> None:
    """Every few tiles are seen by no row: those are counted without a look at the flags of their keys."""
    rng, epoch, splits = random.Random(seed), 1, 1 + seed % 2
    shape = KeyShape(1, 2, 16, 16, torch.float32)
    v, p, order, link, _ = looped(Case(3, 1500, seed, "lts", heads=(4, 2, 1)), 100, shape)
    rank = Overlapped(order, p.keys, shape, link, HostQueues(), CPU, groups=1 + seed // 2 % 2)
    rank.epoch = epoch
    for peer in order.sources:
        link.post(peer, epoch, lambda pair: [t.normal_() for t in pair])
    cut = rank.backward_cut
    rank._copy_by_kernel(cut, epoch % 2)
    local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, order.columns)
    arrivals = expected_arrivals(cut.plan, 1024, cut.groups, 1e9, 1e-6)
    units = Units(1, 4, 2, splits, 2 // splits, cut.groups)
    tables = backward_tables(local, cut.plan, SPEC, units, arrivals, 132, CPU, cut.first)
    gate = rank._backward_gate(tables, SPEC.block_kv, there=False)
    ranges, slots = cut.plan.block_slots(SPEC.block_kv), len(cut.plan.slots)

    def pieces(item: int) -> list[int]:
        first, last = ranges[item & 0xFFFF]
        group = (item >> 16) // splits // cut.group_heads
        return [cut.first + group * slots + slot for slot in range(max(first, cut.plan.own), last + 1)]

    words, foreign = rank.words, [cut.first + piece for piece in cut.pieces]
    left = [int(i) for i in tables.items]
    unseen = {i for i in left if rng.random() < 0.3}
    copies = dict.fromkeys(range(COPY_CTAS), 0)
    while left or copies:
        ready = [i for i in left if i in unseen or all(words.flags[p] == epoch for p in pieces(i))]
        assert ready or copies, f"tiles wait for ever; flags {words.flags.tolist()}"
        if copies and (not ready or rng.random() < 0.5):
            cta = rng.choice(list(copies))
            library.copy_piece(launched[0], cta, COPY_CTAS, copies[cta])
            copies[cta] += 1
            if copies[cta] == len(foreign):
                del copies[cta]
        else:
            item = rng.choice(ready)
            left.remove(item)
            library.finish(ctypes.byref(gate), 1, splits, item & 0xFFFF, (item >> 16) // splits, 0)
            open_ = {p for i in left for p in pieces(i)}
            assert [p for p in foreign if words.finished[p] == epoch] == [p for p in foreign if p not in open_]
    assert len(foreign) > 1
    assert all(words.flags[p] == epoch for p in foreign)
    assert not words.counts.any()
    assert not words.copied.any()
    assert not words.flags[: cut.first].any(), "words of the forward"
    for piece in cut.pieces:
        at = cut.plan.slot_of(piece)
        there = link.readable(at.source, epoch % 2, at.chunk, cut.heads_of(piece), at.rows)
        assert all(torch.equal(a, b) for a, b in zip(rank._place(cut, piece), there, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_gradients_that_leave_as_a_whole(library: ctypes.CDLL, seed: int) -> None:
    """Random masks, sizes of chunks, and times of arrival, lane by lane, against the sum on the host; the rest is left to it."""
    rng, epoch, heads, batch, dim = random.Random(seed), 3, (1, 2, 3, 8, 16)[seed % 5], 1 + seed % 2, SPEC.head_dim
    torch.manual_seed(seed)
    shape = KeyShape(batch, heads, dim, dim, torch.float32)
    _, p, order, link, sums = looped(Case(3, 1500, seed, "lts", heads=(4, 2, 1)), (128, 256, 100)[seed % 3], shape)
    block = order.slots[order.own - 1].start // SPEC.block_kv + 1 if order.own else 0
    groups = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    cuts = {r: Cut(joined(overlap_plan(p, r), p.keys, rng.choice((1, 300))), groups, heads) for r, _ in order.lends}
    words = {r: torch.tensor([epoch - rng.randrange(2) for _ in range(c.words)], dtype=torch.int32) for r, c in cuts.items()}

    def told(reader: int, chunk: int) -> Told:
        return Told.of(cuts[reader], chunk, words[reader])

    def is_told(reader: int, chunk: int, head: int) -> bool:
        pieces = (i for i in cuts[reader].pieces if chunk in cuts[reader].plan.slot_of(i).chunks)
        return all(words[reader][i] == epoch for i in pieces if head in range(heads)[cuts[reader].heads_of(i)])

    tiles = sums.lent(block, SPEC.block_kv, told)
    assert len(tiles) == len(range(block * SPEC.block_kv, order.rows, SPEC.block_kv)), "one entry a tile"
    first, others = exchange.lent_table(tiles, CPU)
    added = torch.zeros(batch * heads, len(tiles), dtype=torch.int32)
    given = [t.data_ptr() for t in (first, others, added)]
    gate = hopper_bwd.GateTables(*([0] * 16), block, 1, 1, *given)
    gate.epoch = epoch
    result = result_rows(order)
    own = [torch.randn(1, batch, heads, result.rows, dim) for _ in range(2)]
    rows = p.keys.local_length(1)
    want = [torch.zeros(batch, rows, heads, dim) for _ in range(2)]
    sums.add_on_host((own[0], own[1]), (want[0], want[1]))
    for reader, chunks in order.lends:
        for t in (t for c in chunks for t in link.staged(reader, c)):
            t.copy_(to_octets(t))
    chunk_of = {c.slot.start + i: (c, i) for c in sums.chunks if c.slot for i in range(c.slot.rows)}
    for (tile, lent), b, h in product(enumerate(tiles, block), range(batch), range(heads)):
        expected = lent is not None and all(is_told(reader, chunk, h) for chunk, reader in readers_of_tile(sums, tile))
        lanes = [(16 * warp + lane // 4, lane % 4) for warp in range(8) for lane in range(32)]
        for row, quad in rng.sample(lanes, 6):
            keys = [tile * SPEC.block_kv + row + 8 * r for r in range(2)]
            grads = [torch.zeros(dim // 8, 2, 2) for _ in range(2)]
            for which, (r, key) in product(range(2), enumerate(keys)):
                if key < order.rows:
                    chunk, i = chunk_of[key]
                    mine = own[which][0, b, h, result.starts[chunk.chunk] + i]
                    grads[which][:, r] = mine.view(-1, 8)[:, 2 * quad : 2 * quad + 2]
            sizes = heads, order.rows, tile, b, h, row, 4 * quad
            whole = library.complete(ctypes.byref(gate), *sizes, *(t.data_ptr() for t in grads))
            assert whole == expected
            assert (added[b * heads + h, tile - block] == epoch) == expected
            for which, (r, key) in product(range(2), enumerate(keys)):
                if whole and key < order.rows:
                    chunk, i = chunk_of[key]
                    right = want[which][b, chunk.rows.start + i, h].view(-1, 8)[:, 2 * quad : 2 * quad + 2]
                    assert torch.equal(grads[which][:, r], right)


def readers_of_tile(sums: GradientSum, tile: int) -> set[tuple[int, int]]:
    """(chunk, reader)."""
    start, stop = tile * SPEC.block_kv, (tile + 1) * SPEC.block_kv
    over = (c for c in sums.chunks if c.slot and c.slot.start < stop and start < c.slot.start + c.slot.rows)
    return {(c.chunk, r) for c in over for r in c.readers}


class Given:
    """Staging and words of all owners, as `Giving` names them."""

    def __init__(self, keys: Layout, shape: KeyShape) -> None:
        self.staging = {c: shape.gradients(keys.size_of(c), "cpu") for c in range(keys.chunk_count)}
        self.words: dict[int, torch.Tensor] = {}
        self.sent = torch.zeros(keys.world, dtype=torch.int32)

    def place(self, owner: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.staging[chunk]

    def told(self, owner: int, reader: int) -> torch.Tensor:
        return self.words.setdefault(owner, torch.zeros(512, dtype=torch.int32))

    def address(self, word: Word) -> int:
        assert word.kind == "sent"
        return self.sent.data_ptr() + 4 * word.holder


@pytest.mark.parametrize("seed", range(12))
def test_gradients_go_to_owners(library: ctypes.CDLL, seed: int) -> None:
    """Every lane of every tile, in any order; what is told is there, and nobody is told of what was lost."""
    rng, epoch = random.Random(seed), 7
    torch.manual_seed(seed)
    heads, batch, splits, dim, give = (1, 2, 4)[seed % 3], 1 + seed % 2, 1 + (seed % 4 == 3), SPEC.head_dim, seed % 4 != 3
    shape = KeyShape(batch, heads, dim, dim, torch.float32)
    _, p, base, _, _ = looped(Case(3, 700, seed, "lts", heads=(4, 2, 1)), (128, 60, 100, 36)[seed % 4], shape)
    order = joined(base, p.keys, 128) if seed % 2 else base
    cut = Cut(order, rng.choice([n for n in (1, 2, 4) if heads % n == 0]), heads, first=5)
    there = Given(p.keys, shape)
    finished, counts, counted = (torch.zeros(600, dtype=torch.int32) for _ in range(3))
    owners = Owners(there, there.address, counted) if give else None  # type: ignore[arg-type]
    where, first, told = exchange.way_tables(
        places(base, shape, owners), first_places(base, SPEC.block_kv), reports(cut, finished, owners), CPU
    )
    slots, ranges = len(order.slots), order.block_slots(SPEC.block_kv)
    tiles = torch.tensor([0] * cut.first + [sum(a <= s <= b for a, b in ranges) for s in range(slots)], dtype=torch.int32)
    blocks = torch.tensor([(a + cut.first) | (b + cut.first) << 16 for a, b in ranges.tolist()], dtype=torch.int32)
    addresses = [t.data_ptr() for t in (blocks, tiles, finished, counts, told, where, first)]
    gate = hopper_bwd.GateTables(
        0, *addresses, 0, 0, 0, epoch, 0, cut.first + order.own, slots, cut.group_heads, 1 << 30, give, 0, 0, 0, 0
    )
    result = result_rows(base, give)
    made = [torch.full((splits, batch, heads, result.rows, dim), 9.0) for _ in range(2)]
    grads = [torch.randn(splits, batch, heads, order.rows, dim) for _ in range(2)]
    lost = (rng.randrange(len(ranges)), rng.randrange(heads)) if seed % 3 == 2 and give else None
    items = list(product(range(len(ranges)), range(batch), range(heads), range(splits)))
    rng.shuffle(items)
    lanes = [(16 * warp + lane // 4, lane % 4) for warp in range(SPEC.block_kv // 16) for lane in range(32)]
    sizes = (ctypes.c_int * 4)(batch, splits, heads, order.rows)
    done: set[tuple[int, int, int, int]] = set()
    for tile, b, h, split in items:
        if (tile, h) == lost:
            library.finish(ctypes.byref(gate), batch, splits, tile, h, 1)
            continue
        for row, quad in lanes:
            own = torch.zeros(2, dim // 8, 2, 2)
            for which, r in product(range(2), range(2)):
                key = tile * SPEC.block_kv + row + 8 * r
                if key < order.rows:
                    own[which, :, r] = grads[which][split, b, h, key].view(-1, 8)[:, 2 * quad : 2 * quad + 2]
            work = (ctypes.c_int * 4)(tile, h, b, split)
            library.store(ctypes.byref(gate), sizes, work, row, 4 * quad, own.data_ptr(), *(t.data_ptr() for t in made))
        library.finish(ctypes.byref(gate), batch, splits, tile, h, 0)
        done.add((tile, b, h, split))
        for piece in cut.pieces:
            number, heads_of = piece % slots, range(*cut.heads_of(piece).indices(heads))
            of_slot = [t for t, (a, z) in enumerate(ranges) if a <= number <= z]
            complete = done.issuperset(product(of_slot, range(batch), heads_of, range(splits)))
            word = there.words[order.slots[number].source][piece] if give else finished[cut.first + piece]
            assert (word == epoch) == complete
    for owner in order.sources if give else ():
        words = [there.words[owner][piece] for piece in cut.pieces if order.slot_of(piece).source == owner]
        assert (there.sent[owner] == epoch) == all(w == epoch for w in words)
    assert lost or not (counts.any() or counted.any())
    for slot, which in product(base.slots, range(2)):
        away = give and slot.source != order.rank
        stored = there.staging[slot.chunk][which][None] if away else made[which][:, :, :, result.starts[slot.chunk] :]
        got = from_octets(stored[:, :, :, : padded(slot.rows)])[:, :, :, : slot.rows]
        right = grads[which][:, :, :, slot.start : slot.start + slot.rows]
        tiles_of = range(slot.start // SPEC.block_kv, -(-(slot.start + slot.rows) // SPEC.block_kv))
        if lost is None or lost[0] not in tiles_of:
            assert torch.equal(got, right)
