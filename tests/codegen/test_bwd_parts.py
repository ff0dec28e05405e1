"""Parts of the backward kernels on the CPU: mask bits of a lane, zeroing ahead, order of key tiles, dQ out of its tiles."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch

from maskc.codegen.spec import MaskForm
from maskc.codegen.spec_bwd import BackwardSpec, select_backward
from maskc.runtime.hopper_bwd import _Main, _Post, _Pre
from tests.codegen.host import CUDA, compile_on_host, in_one_text
from tests.codegen.test_bwd_tiles import _WARPS, FORMS, masks

_MORE = """
#define __align__(n) __attribute__((aligned(n)))
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static unsigned ones_from(unsigned n) { return n < 32 ? 0xffffffffu << n : 0; }
static void zero_global_v4(float* p) { for (int i = 0; i < 4; ++i) p[i] += 1; }  // counted
static void add_release(unsigned* p, unsigned x) { *p += x; }
// Of numbers that 16 bits hold.
static unsigned pack_bf16(float low, float high) { return bits<unsigned>(low) >> 16 | (bits<unsigned>(high) & 0xffff0000u); }
"""
_NO_PACK = "static unsigned pack_bf16(float, float) { return 0; }"


def host(spec: BackwardSpec, folder: Path, parts: list[tuple[str, str, str]], entry: str) -> ctypes.CDLL:
    """Host code of what the kernels share and of parts of headers: (header, where it begins, what follows it)."""
    headers = dict(spec.source().headers)
    assert _NO_PACK in _WARPS
    pieces = [CUDA, _WARPS.replace(_NO_PACK, ""), _MORE]
    pieces += [headers[name] for name in ("device/types.cuh", "bwd/key_tile.cuh", "bwd/shared.cuh")]
    for header, begin, after in parts:
        text = headers[header]
        start = text.index(begin)
        pieces.append(text[start : text.index(after, start) if after else None])
    folder.mkdir(exist_ok=True)
    return compile_on_host(in_one_text(*pieces).replace("blockIdx.y", "0") + entry, folder)


@pytest.mark.parametrize("name", ["causal", "two_sided", "upper", "five"])
def test_mask_bits_of_a_lane(name: str, tmp_path: Path) -> None:
    """Bit i of a key: row 8 (i / 2) + i % 2 after the lane's first row sees it."""
    form = FORMS[name]
    spec = select_backward(form, 128, "bf16")
    bounds = ("bwd/consumer.cuh", "// The row bounds of the two keys", "// Zeroes the scores that the mask hides.")
    entry = """
extern "C" void seen(const Params* p, int tile, int first_key, int row0, unsigned* out) {
  Work work{};
  work.tile = tile;
  const Bounds bounds = load_bounds(*p, work, first_key);
  for (int r = 0; r < 2; ++r) out[r] = seen_rows(bounds, r, row0);
}
"""
    library = host(spec, tmp_path / "host", [bounds], entry)
    rng = random.Random(name)
    nq, nk, rows = 900, 300, torch.arange(900)
    v = masks(form, nq, nk, rng)
    vectors = {n: t.flatten() for n in ("lts", "lte", "uts", "ute", "diag") if (t := getattr(v, n)) is not None}
    arguments = _Main(**{n: t.data_ptr() for n, t in vectors.items()}, nq=nq, nk=nk)
    out = (ctypes.c_uint32 * 2)()
    for _ in range(200):
        tile, first_key, row0 = rng.randrange(3), rng.randrange(120), 64 * rng.randrange(14) + 2 * rng.randrange(4)
        library.seen(ctypes.byref(arguments), tile, first_key, row0, out)
        for r in range(2):
            key = tile * 128 + first_key + 8 * r
            hidden = torch.full((nq,), key >= nk)
            if key < nk:
                at = {n: int(t[key]) for n, t in vectors.items()}
                hidden |= (rows < (key if form.causal else 0)) | (rows < at.get("diag", 0))
                if form.lts:
                    hidden |= (rows >= at["lts"]) & (rows < at.get("lte", nq))
                if form.ute:
                    hidden |= (rows >= at.get("uts", 0)) & (rows < at["ute"])
            for i in range(spec.score_cols // 4):
                row = row0 + 8 * (i // 2) + i % 2
                if row < nq:
                    assert (out[r] >> i & 1) == (not hidden[row]), (key, row)


@pytest.mark.parametrize("tiles", [3, 12])
def test_shares_zero_every_accumulator_once(tiles: int, tmp_path: Path) -> None:
    spec = select_backward(MaskForm(), 64, "bf16")
    part = ("bwd/dq.cuh", "// The share of a key tile in zeroing", "// Waits until dq")
    entry = """
struct Share { const Params* p; int unit, tile; };
extern "C" void share(const Params* p, int unit, int tile) {
  run_blocks([](const Share& s) { zero_share(*s.p, s.unit, s.tile, threadIdx.x); }, Share{p, unit, tile}, 1, 32);
}
"""
    library = host(spec, tmp_path / "host", [part], entry)
    units, heads, q_blocks = 3, 2, 4
    dq = torch.zeros(units, heads * q_blocks * spec.block_q * spec.head_dim)
    zeroed = torch.zeros(units, dtype=torch.int32)
    sizes = {"batch": 1, "hk": units, "splits": 1, "heads": heads, "q_blocks": q_blocks, "kv_blocks": tiles}
    arguments = _Main(dq=dq.data_ptr(), zeroed=zeroed.data_ptr(), **sizes)
    for unit in (1, 2, 3, 70):
        for tile in range(tiles):
            library.share(ctypes.byref(arguments), unit, tile)
    assert zeroed.tolist() == [0, tiles, tiles], "units past the last are nobody's"
    assert (dq[0] == 0).all()
    assert (dq[1:] == 1).all()


def test_order_of_key_tiles(tmp_path: Path) -> None:
    """By falling work; tiles of equal work as they lie. Only the CTA that comes last does it, for every mask."""
    spec = select_backward(MaskForm(lts=True), 128, "bf16")
    parts = [
        ("bwd/pre.cuh", "namespace pre {", "DEVICE void unpack("),
        ("bwd/pre.cuh", "// Key tiles of each mask by falling work", 'extern "C"'),
    ]
    entry = """
static void sort(const pre::Params& p) { pre::order_tiles(p, 3); }
extern "C" void sort_tiles(const pre::Params* p, int blocks) { run_blocks(sort, *p, blocks, 128); }
"""
    library = host(spec, tmp_path / "host", parts, entry)
    rng = random.Random(0)
    done = torch.zeros(1, dtype=torch.int32)
    for number, tiles in ((1, 1), (2, 256), (1, 700)):
        work = [[rng.randrange(20) for _ in range(tiles)] for _ in range(number)]
        records = torch.zeros(number, tiles, spec.tile_ints, dtype=torch.int32)
        records[:, :, 10] = torch.tensor(work)
        order = torch.full((number, tiles), -1, dtype=torch.int32)
        where = {"tiles": records.data_ptr(), "order": order.data_ptr(), "done": done.data_ptr()}
        arguments = _Pre(**where, kv_blocks=tiles, mask_tiles=number * tiles)
        library.sort_tiles(ctypes.byref(arguments), 2)
        assert done.tolist() == [2]
        assert (order == -1).all(), "records are missing"
        library.sort_tiles(ctypes.byref(arguments), 1)
        assert done.tolist() == [0], "for the next launch"
        assert order.tolist() == [sorted(range(tiles), key=lambda t: (-of[t], t)) for of in work]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dq_out_of_its_tiles(head_dim: int, tmp_path: Path) -> None:
    """The order in which the consumers write a tile, undone: accumulator 4 j + e of a thread is float e of its j-th four."""
    spec = select_backward(MaskForm(), head_dim, "bf16")
    entry = """
extern "C" void convert(const post::Params* p, int blocks) { run_blocks(attn_bwd_post, *p, blocks, 256); }
"""
    library = host(spec, tmp_path / "host", [("bwd/post.cuh", "namespace post {", "")], entry)
    heads, nq = 2, spec.block_q + 21
    q_blocks = -(-nq // spec.block_q)
    want = torch.randint(-128, 128, (heads, q_blocks * spec.block_q, head_dim)).float()
    # Index of a row and a column in a tile: part, four, thread, float.
    row, column = torch.meshgrid(torch.arange(spec.block_q), torch.arange(head_dim), indexing="ij")
    r, c = row % 64, column % spec.dq_cols
    part = row // 64 if spec.dq_split == "rows" else column // spec.dq_cols
    thread = r // 16 * 32 + r % 8 * 4 + c % 8 // 2
    at = part * 64 * spec.dq_cols + c // 8 * 512 + thread * 4 + r % 16 // 8 * 2 + c % 2
    assert at.unique().numel() == spec.block_q * head_dim
    acc = torch.empty(heads, q_blocks, spec.block_q * head_dim)
    acc[:, :, at.flatten()] = want.view(heads, q_blocks, -1)
    for dtype in (torch.float32, torch.bfloat16):
        got = torch.full((nq, heads, head_dim), 99, dtype=dtype)
        f32 = dtype == torch.float32
        arguments = _Post(acc=acc.data_ptr(), dq=got.data_ptr(), nq=nq, hq=heads, q_blocks=q_blocks, dq_is_f32=f32, scale=0.5)
        library.convert(ctypes.byref(arguments), heads * q_blocks)
        assert torch.equal(got.float(), 0.5 * want[:, :nq].transpose(0, 1))
