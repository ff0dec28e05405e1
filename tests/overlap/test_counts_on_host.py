"""The words that kernels count in, by their own text compiled for the host, over the words that a rank hands them.

The backward kernel and the copy kernel run beside each other, so whatever the order of their counts, each piece gets its
flag, its gradients are reported when the last tile is stored and not before, and all counts are zero again at the end.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from maskc.codegen.exchange import exchange_source
from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime import exchange, hopper_bwd
from maskc.runtime.localize import localize
from maskc.runtime.overlap import COPY_CTAS, Overlapped
from maskc.runtime.overlap_sum import GradientSum
from maskc.runtime.overlap_tables import Units, backward_tables, expected_arrivals
from maskc.runtime.protocol import PARTS, told
from maskc.runtime.transport import HostQueues, KeyShape
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text
from tests.dist.cases import Case
from tests.overlap.looped import CPU, looped

SPEC = replace(select_backward(MaskForm(lts=True), 128, "bf16"), gated=True)
_AROUND = """
constexpr int THREADS = 1, LOADS = 1;
inline void __syncthreads() {{}}
inline u32 count_up(u32* p) {{ return ++*p; }}
inline void store_release_system(u32* p, u32 v) {{ *p = v; }}
inline uint4 load_uncached(const u8* p) {{ return *reinterpret_cast<const uint4*>(p); }}
inline float2 load_once_f2(const float* p) {{ return {{p[0], p[1]}}; }}
static float near;
inline void bulk_prefetch(const float* p, u32 bytes) {{
  for (u32 i = 0; i < bytes / 4; ++i) near = p[i];  // a sanitizer or a fault would tell of what is not there
}}
inline bool arrived(const u32*, u32, u32, u32, u32*) {{ return true; }}
inline bool reached(const u32* word, u32 epoch) {{ return static_cast<int>(*word - epoch) >= 0; }}
constexpr int BLOCK_KV = {block_kv}, HEAD_DIM = {head_dim};
{tables}
struct Params {{ int batch, splits, hk, nk, kv_blocks; GateTables gate; }};
struct Work {{ int tile, kv_head, batch, unit; }};
{gate}
{copies}
// What one CTA does for one piece.
extern "C" void copy_piece(CopyParams p, int cta, int ctas, int piece) {{
  blockIdx.x = cta, gridDim.x = ctas;
  p.copies += piece * p.parts, p.pieces += piece, p.count = 1;
  copy_chunks(p);
}}
extern "C" void finish(const GateTables* gate, int batch, int splits, int tile, int kv_head) {{
  tile_finished(Params{{batch, splits, 0, 0, 0, *gate}}, Work{{tile, kv_head, 0, 0}});
}}
// dK and dV of a lane's two keys, [columns / 8][key][2] each, in the way of the registers; 0: they are left to the sum.
extern "C" int complete(const GateTables* gate, int hk, int nk, int tile, int batch, int kv_head, int key_row, int column,
                        float* dk, float* dv) {{
  const Params p{{1, 1, hk, nk, (nk + BLOCK_KV - 1) / BLOCK_KV, *gate}};
  const Work work{{tile, kv_head, batch, batch * hk + kv_head}};
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
    tables = shared[shared.index("struct Lent {") : shared.index("struct Params {")]
    gate, copies = map(in_one_text, (headers["bwd/gate.cuh"], exchange_text[exchange_text.index("struct Part {") :]))
    sizes = {"block_kv": SPEC.block_kv, "head_dim": SPEC.head_dim}
    text = ONE_THREAD + _AROUND.format(tables=tables, gate=gate, copies=copies, **sizes)
    made = compile_on_host(text, tmp_path_factory.mktemp("counts"))
    made.finish.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4]
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
    gate = rank._backward_gate(tables, there=False)
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
            library.finish(ctypes.byref(gate), 1, splits, item & 0xFFFF, (item >> 16) // splits)
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
    shape = KeyShape(batch, heads, dim, dim, torch.float32)
    _, p, order, _, sums = looped(Case(3, 1500, seed, "lts", heads=(4, 2, 1)), (128, 256, 100)[seed % 3], shape)
    block = order.slots[order.own - 1].start // SPEC.block_kv + 1 if order.own else 0
    came = torch.tensor([told(epoch, rng.choice((0, 3, PARTS))) for _ in order.lends], dtype=torch.int32)
    tiles = sums.lent(block, SPEC.block_kv, [came.data_ptr() + 4 * i for i in range(len(came))])
    assert len(tiles) == len(range(block * SPEC.block_kv, order.rows, SPEC.block_kv)), "one entry a tile"
    first, others = exchange.lent_table(tiles, CPU)
    added = torch.zeros(batch * heads, len(tiles), dtype=torch.int32)
    given = [t.data_ptr() for t in (first, others, added)]
    gate = hopper_bwd.GateTables(*([0] * 13), block, 1, told(epoch, 0), *given)
    gate.epoch = epoch
    own = [torch.randn(1, batch, heads, order.rows, dim) for _ in range(2)]
    rows = p.keys.local_length(1)
    want = [torch.zeros(batch, rows, heads, dim) for _ in range(2)]
    sums.add_on_host((own[0], own[1]), (want[0], want[1]))
    in_result = {c.slot.start + i: c.rows.start + i for c in sums.chunks if c.slot for i in range(c.slot.rows)}
    for (tile, lent), b, h in product(enumerate(tiles, block), range(batch), range(heads)):
        expected = lent is not None and all(
            came[[r for r, _ in order.lends].index(reader)] >= told(epoch, -(-(h + 1) * PARTS // heads))
            for reader in readers_of_tile(sums, tile)
        )
        lanes = [(16 * warp + lane // 4, lane % 4 * 2) for warp in range(8) for lane in range(32)]
        for row, column in rng.sample(lanes, 6):
            keys = [tile * SPEC.block_kv + row + 8 * r for r in range(2)]
            grads = [torch.zeros(dim // 8, 2, 2) for _ in range(2)]
            for which, (r, key) in product(range(2), enumerate(keys)):
                if key < order.rows:
                    grads[which][:, r] = own[which][0, b, h, key].view(-1, 8)[:, column : column + 2]
            sizes = heads, order.rows, tile, b, h, row, column
            whole = library.complete(ctypes.byref(gate), *sizes, *(t.data_ptr() for t in grads))
            assert whole == expected
            assert (added[b * heads + h, tile - block] == epoch) == expected
            for which, (r, key) in product(range(2), enumerate(keys)):
                if whole and key < order.rows:
                    right = want[which][b, in_result[key], h].view(-1, 8)[:, column : column + 2]
                    assert torch.equal(grads[which][:, r], right)


def readers_of_tile(sums: GradientSum, tile: int) -> set[int]:
    start, stop = tile * SPEC.block_kv, (tile + 1) * SPEC.block_kv
    over = (c for c in sums.chunks if c.slot and c.slot.start < stop and start < c.slot.start + c.slot.rows)
    return {r for c in over for r in c.readers}
