"""What attn_bwd_pre writes, with its threads run on the CPU: key tile records and walks against the dense mask, row constants."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maskc.boundary import BoundaryVectors
from maskc.codegen.spec import VECTORS, MaskForm
from maskc.codegen.spec_bwd import BackwardSpec
from maskc.runtime.hopper_bwd import _Main, _Pre
from maskc.tiles import TileClass, classify
from tests.codegen.host import CUDA, compile_on_host, in_one_text

BLOCKS, DEAD_KEYS = 10, 11  # fields of a record
BITS = 0xFFFFFFFF
FORMS = {
    "full": MaskForm(),
    "causal": MaskForm(causal=True),
    "document": MaskForm(causal=True, lts=True),
    "two_sided": MaskForm(lts=True, ute=True),
    "interval": MaskForm(lts=True, lte=True),
    "upper": MaskForm(uts=True, ute=True, causal=True),
    "four": MaskForm(lts=True, lte=True, uts=True, ute=True),
    "five": MaskForm(lts=True, lte=True, uts=True, ute=True, diag=True),
}
_WARPS = """
#include <cstring>
#define __device__
#define __forceinline__ inline
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static unsigned pack_bf16(float, float) { return 0; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
[[maybe_unused]] static Index blockDim{128};
template <class To, class From> static To bits(From from) { To to; std::memcpy(&to, &from, 4); return to; }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static float __int_as_float(int x) { return bits<float>(x); }
static unsigned __cvta_generic_to_shared(const void*) { return 0; }
template <typename T> static T shuffle(T value, int from) {
  const int warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = bits<int>(value);
  warp_barriers[warp]->arrive_and_wait();
  const T out = bits<T>(lanes[warp][from]);
  warp_barriers[warp]->arrive_and_wait();
  return out;
}
static int __shfl_sync(unsigned, int value, int from) { return shuffle(value, from); }
static float __shfl_xor_sync(unsigned, float value, int x) { return shuffle(value, threadIdx.x % 32 ^ x); }
static unsigned __ballot_sync(unsigned, bool on) {
  const int bit = on ? static_cast<int>(1u << threadIdx.x % 32) : 0;
  return reduce(bit, [](int a, int b) { return a | b; });
}
static int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}
template <class T> static T load_acquire(const T* p) { return *p; }
static unsigned atomicAdd(unsigned* p, unsigned x) { return (*p += x) - x; }
static void __threadfence() {}
static void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
"""
_ENTRIES = """
static void walk_runs(const int* tile, int blocks, int* out) {
  for_each_run(tile, blocks, [&](Run run) {
    if (threadIdx.x == 0) *out++ = run.begin, *out++ = run.end, *out++ = run.partial, *out++ = HIDDEN_HALF;
  });
  if (threadIdx.x == 0) *out = -1;
}
extern "C" void deal(const Params* p, int items, int* out) {
  for (int i = 0; i < items; ++i) {
    const Work w = work_of(*p, i);
    for (int x : {w.batch, w.kv_head, w.split, w.tile, w.first_head, static_cast<int>(w.mask)}) *out++ = x;
  }
}
struct WalkArgs { const int* tile; int blocks; int* out; };
extern "C" void prepare(const pre::Params* args, int blocks) { run_blocks(attn_bwd_pre, *args, blocks, 128); }
extern "C" void walk_tile(const int* tile, int blocks, int* out) {
  run_blocks([](const WalkArgs& a) { walk_runs(a.tile, a.blocks, a.out); }, WalkArgs{tile, blocks, out}, 1, 32);
}
struct ItemArgs { Params p; const int* record; int* out; };
static void walk_twice(const ItemArgs& args) {
  Item item{work_of(args.p, 0), {}};
  std::memcpy(item.record, args.record, sizeof(item.record));
  Ring ring;
  int* out = args.out;
  for (int n = 0; n < 2; ++n)
    walk(args.p, item, ring, [&](int h, int m, int slot, u32 parity, auto kind) {
      if (threadIdx.x == 0)
        for (int x : {h, m, slot, static_cast<int>(parity), static_cast<int>(kind.partial)}) *out++ = x;
    });
  if (threadIdx.x == 0) *out = -1;
}
extern "C" void walk_item(const Params* p, const int* record, int* out) {
  run_blocks(walk_twice, ItemArgs{*p, record, out}, 1, 32);
}
"""


def host(spec: BackwardSpec, folder: Path) -> ctypes.CDLL:
    """The preparation kernel and the walk of a spec, as host code."""
    headers = dict(spec.source().headers)
    parts = [CUDA, f"#define HIDDEN_HALF {'run.hidden_half' if spec.halves else '0'}", _WARPS]
    parts += [headers[name] for name in ("device/types.cuh", "bwd/key_tile.cuh", "bwd/shared.cuh", "bwd/walk.cuh", "bwd/pre.cuh")]
    text = in_one_text(*parts)
    folder.mkdir(exist_ok=True)
    return compile_on_host(text + _ENTRIES, folder)


def masks(form: MaskForm, nq: int, nk: int, rng: random.Random) -> BoundaryVectors:
    """Bounds in long runs, so that tiles of every class come up, some intervals empty."""

    def steps() -> list[int]:
        out: list[int] = []
        while len(out) < nk:
            out += [rng.choice((0, nq, rng.randint(0, nq)))] * rng.randint(1, 150)
        return out[:nk]

    def pair() -> tuple[list[int], list[int]]:
        pairs = [(min(a, b), max(a, b)) for a, b in zip(steps(), steps(), strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]

    lower, upper = pair(), pair()
    lists = {"lts": lower[0], "lte": lower[1], "uts": upper[0], "ute": upper[1], "diag": [x // 3 for x in steps()]}
    made = {name: torch.tensor(x, dtype=torch.int32).view(1, 1, nk) for name, x in lists.items() if getattr(form, name)}
    return BoundaryVectors(nq, nk, 1, 1, form.causal, **made)


def prepared(
    library: ctypes.CDLL, spec: BackwardSpec, v: BoundaryVectors, ahead: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Key tile records [tiles, TILE_INTS], and what the kernel made of random rows (the first one sees nothing)."""
    q_blocks, kv_blocks = -(-v.nq // spec.block_q), -(-v.nk // spec.block_kv)
    out, dout = (torch.randn(1, v.nq, 1, spec.head_dim).bfloat16() for _ in range(2))
    lse, dlse = torch.randn(1, 1, v.nq), torch.randn(1, 1, v.nq)
    lse[..., 0] = -torch.inf
    made = {
        "lse2": torch.full((q_blocks * spec.block_q,), torch.nan),
        "dpsum": torch.full((q_blocks * spec.block_q,), torch.nan),
        "dead_rows": torch.full((q_blocks,), -1, dtype=torch.int32),
        "dq": torch.full((q_blocks * spec.block_q * spec.head_dim,), torch.nan),
        "turns": torch.full((q_blocks,), -1, dtype=torch.int32),
        "ticket": torch.full((1,), -1, dtype=torch.int32),
        "zeroed": torch.full((1,), -1, dtype=torch.int32),
        "tiles": torch.full((kv_blocks, spec.tile_ints), -1, dtype=torch.int32),
    }
    given = {"out": out, "dout": dout, "lse": lse, "dlse": dlse, **made}
    vectors = {n: t for n, t in zip(VECTORS, v.tensors, strict=True) if t is not None}
    pointers = {name: t.data_ptr() for name, t in (given | vectors).items()}
    strides = {f"{t}_{d}": s for t in ("out", "dout") for d, s in (("batch", 0), ("row", spec.head_dim), ("head", 0))}
    sizes = {"nq": v.nq, "nk": v.nk, "hq": 1, "batch": 1, "q_blocks": q_blocks, "kv_blocks": kv_blocks}
    arguments = _Pre(**pointers, **strides, **sizes, mask_tiles=kv_blocks, mask_heads=1, heads=1, ahead=ahead)
    library.prepare(ctypes.byref(arguments), q_blocks + -(-kv_blocks // 4))
    expected = torch.full_like(made["dpsum"], 0.0)
    expected[: v.nq] = dlse.view(-1) - (out.double() * dout.double()).sum(-1).view(-1).float()
    expected[0] = 0.0
    return made["tiles"], made | {"lse": lse, "expected": expected}


def runs_of(library: ctypes.CDLL, record: torch.Tensor, blocks: int) -> list[tuple[int, int, bool, int]]:
    room = (ctypes.c_int * (4 * blocks + 5))()
    library.walk_tile(ctypes.c_void_p(record.data_ptr()), blocks, room)
    values = list(room)[: list(room).index(-1)]
    return [(a, b, bool(c), idle) for a, b, c, idle in zip(*[iter(values)] * 4, strict=True)]


def only(v: BoundaryVectors, causal: bool, kept: tuple[str, ...]) -> BoundaryVectors:
    """`v` with one kind of interval alone."""
    vectors = {name: t if name in kept else None for name, t in zip(VECTORS, v.tensors, strict=True)}
    return replace(v, causal=causal, **vectors)


@pytest.mark.parametrize(("name", "deterministic"), [*((name, False) for name in FORMS), ("document", True), ("five", True)])
def test_records_and_walks(name: str, deterministic: bool, tmp_path: Path) -> None:
    """A block left out is hidden from all keys, an UNMASKED one from none; one that a single interval hides is left out."""
    spec = BackwardSpec(64, "bf16", FORMS[name], deterministic, block_q=64, block_kv=128)
    library = host(spec, tmp_path / "host")
    rng = random.Random(name)
    for nq, nk in ((300, 390), (64, 128), (129, 640), (1, 1)):
        v = masks(spec.form, nq, nk, rng)
        masked = v.masked()[0, 0]
        tiles, _ = prepared(library, spec, v)
        sharp = classify(v, spec.block_q, spec.block_kv)[0, 0]
        alone = [only(v, causal, kept) for causal, kept in ((v.causal, ("diag",)), (False, VECTORS[:2]), (False, VECTORS[2:4]))]
        hidden_by_one = [x.masked()[0, 0] for x in alone]
        blocks = -(-nq // spec.block_q)
        for tile, record in enumerate(tiles):
            runs = runs_of(library, record, blocks)
            kinds = {m: partial for begin, end, partial, _ in runs for m in range(begin, end)}
            rests = {m: idle for begin, end, _, idle in runs for m in range(begin, end)}
            step = -1 if deterministic else 1
            order = [m for begin, end, *_ in runs for m in range(begin, end)[::step]]
            assert order == sorted(kinds, reverse=deterministic)
            assert record[BLOCKS] == len(order)
            cols = slice(tile * spec.block_kv, (tile + 1) * spec.block_kv)
            ragged = cols.stop > nk
            for m in range(blocks):
                rows = slice(m * spec.block_q, (m + 1) * spec.block_q)
                cell = masked[rows, cols]
                if m not in kinds:
                    assert cell.all()
                    continue
                assert not any(x[rows, cols].all() for x in hidden_by_one)
                halves = [slice(cols.start + 64 * half, cols.start + 64 * (half + 1)) for half in range(2)]
                alone_hide = [any(x[rows, half].all() for x in hidden_by_one) for half in halves]
                if spec.halves and rests[m]:
                    assert masked[rows, halves[rests[m] - 1]].all()
                    assert kinds[m]
                else:
                    assert not spec.halves or not any(alone_hide)
                if not kinds[m]:
                    assert not cell.any()
                    assert not ragged, "keys past the end are masked"
                elif sharp[m, tile] == TileClass.UNMASKED:
                    assert ragged
            dead = masked[:, cols].all(0)
            words = [int(x) & BITS for x in record[DEAD_KEYS : DEAD_KEYS + spec.block_kv // 32]]
            assert [words[k // 32] >> k % 32 & 1 for k in range(spec.block_kv)] == [
                *dead.int().tolist(),
                *[0] * (spec.block_kv - len(dead)),
            ]


def test_row_constants(tmp_path: Path) -> None:
    spec = BackwardSpec(64, "bf16", MaskForm(), True, block_q=64, block_kv=128)
    library = host(spec, tmp_path / "host")
    v = BoundaryVectors(100, 10, 1, 1, False)
    _, made = prepared(library, spec, v)
    assert made["dead_rows"].tolist() == [1, 0]
    assert made["turns"].tolist() == [0, 0]
    assert made["ticket"].tolist() == made["zeroed"].tolist() == [0]
    assert not made["dq"].any()
    assert prepared(library, spec, v, ahead=0)[1]["dq"].isnan().all(), "the main kernel zeroes it"
    lse2 = made["lse"].view(-1) * torch.tensor(1.4426950408889634)
    assert made["lse2"][0] == torch.inf, "a row that sees nothing"
    assert torch.equal(made["lse2"][1:100], lse2[1:])
    assert (made["lse2"][100:] == torch.inf).all(), "rows past the end"
    assert torch.allclose(made["dpsum"], made["expected"], rtol=0, atol=2**-20 * 64)


def test_every_tile_is_dealt_once(tmp_path: Path) -> None:
    """Whatever the grouping; heads that share a mask head get its tiles in the order given."""
    library = host(BackwardSpec(64, "bf16", MaskForm(lts=True), block_q=64, block_kv=128), tmp_path / "host")
    batch, hk, splits, heads, tiles = 2, 3, 2, 2, 5
    order = torch.stack([torch.randperm(tiles) for _ in range(batch * hk)]).int()
    for group in (1, 2, 5, 100):
        sizes = {"nq": 64, "nk": 128 * tiles, "hq": hk * splits * heads, "hk": hk, "batch": batch, "kv_blocks": tiles}
        arguments = _Main(
            **sizes, splits=splits, heads=heads, mask_batch=batch, mask_heads=hk, group=group, order=order.data_ptr()
        )
        items = batch * hk * splits * tiles
        room = (ctypes.c_int * (6 * items))()
        library.deal(ctypes.byref(arguments), items, room)
        dealt = list(zip(*[iter(room)] * 6, strict=True))
        units = [(b, h, s) for b in range(batch) for h in range(hk) for s in range(splits)]
        assert sorted(d[:4] for d in dealt) == sorted((*u, t) for u in units for t in range(tiles))
        for b, h, s, _, first, mask in dealt:
            assert first == (h * splits + s) * heads
            assert mask == b * hk + h
        for unit in units:
            assert [d[3] for d in dealt if d[:3] == unit] == order[unit[0] * hk + unit[1]].tolist()
        together = [d[:3] for d in dealt[: min(group, len(units)) * tiles]]
        assert set(together) == set(units[:group])


@pytest.mark.parametrize("deterministic", [False, True])
def test_walk_of_a_block_table(deterministic: bool, tmp_path: Path) -> None:
    """The kept blocks of each run, in order, head after head; the ring goes on from item to item."""
    spec = BackwardSpec(64, "bf16", MaskForm(causal=True, blocks=True), deterministic, block_q=64, block_kv=128)
    library = host(spec, tmp_path / "host")
    rng = random.Random(0)
    heads = 2
    for blocks, per_row, share in ((1, 1, 1.0), (300, 2, 0.5), (200, 1, 0.95), (129, 4, 0.05), (70, 2, 0.0), (256, 2, 1.0)):
        keep = torch.tensor([rng.random() < share for _ in range(-(-blocks // per_row))]).view(-1, 1).contiguous()
        record = torch.zeros(spec.tile_ints, dtype=torch.int32)
        record[0], record[1] = blocks // 5, blocks // 3  # hidden below the first, PARTIAL below the second
        table = {"rows": len(keep), "cols": 1, "batch": 1, "heads": 1, "block_q": 64 * per_row, "block_kv": 128}
        sizes = {"nq": 64 * blocks, "nk": 128, "hq": heads, "hk": 1, "batch": 1, "q_blocks": blocks, "kv_blocks": 1}
        more = {"splits": 1, "heads": heads, "mask_batch": 1, "mask_heads": 1, "group": 1}
        named = {f"keep_{name}": size for name, size in table.items()}
        arguments = _Main(keep=keep.data_ptr(), **sizes, **more, **named)
        room = (ctypes.c_int * (2 * heads * blocks * 5 + 1))()
        library.walk_item(ctypes.byref(arguments), ctypes.c_void_p(record.data_ptr()), room)
        steps = list(zip(*[iter(list(room)[: list(room).index(-1)])] * 5, strict=True))
        kept = [m for m in range(blocks // 5, blocks) if keep[m // per_row]]
        order = [(h, m) for h in range(heads) for m in (reversed(kept) if deterministic else kept)]
        assert [s[:2] for s in steps] == 2 * order
        assert [s[2:4] for s in steps] == [(i % spec.slots, i // spec.slots % 2) for i in range(len(steps))]
        assert [s[4] for s in steps] == [m < blocks // 3 for _, m in 2 * order]
