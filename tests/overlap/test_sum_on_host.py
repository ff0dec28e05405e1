"""The kernel that adds up gradients, its own text compiled for the host: all of them, or what the attention kernel left."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from maskc.codegen.exchange import THREADS, exchange_source
from maskc.runtime import exchange
from maskc.runtime.exchange import Added, SumTable
from maskc.runtime.transport import KeyShape
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text
from tests.dist.cases import Case
from tests.overlap.looped import CPU, looped

DIM, TILE = 64, 32
_AROUND = """
constexpr int THREADS = {threads};
struct float4 {{ float x, y, z, w; }};
struct uint2 {{ u32 x, y; }};
typedef unsigned short u16;
inline float4 make_float4(float x, float y, float z, float w) {{ return {{x, y, z, w}}; }}
inline uint2 make_uint2(u32 x, u32 y) {{ return {{x, y}}; }}
inline u32 pack_bf16(float, float) {{ return 0; }}
inline u32 pack_f16(float, float) {{ return 0; }}
static int piece_of_block;
{text}
extern "C" void run(SumParams p, int block, int blocks, int piece) {{
  blockIdx.x = block, gridDim.x = blocks, piece_of_block = piece;
  for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) sum_gradients(p);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    whole = exchange_source().text
    text = in_one_text(whole[whole.index("enum Kind") : whole.index("// ---- spoil")]).replace("blockIdx.y", "piece_of_block")
    made = compile_on_host(ONE_THREAD + _AROUND.format(threads=THREADS, text=text), tmp_path_factory.mktemp("sum"))
    made.run.argtypes = [exchange._SumParams, *[ctypes.c_int] * 3]
    return made


@pytest.mark.parametrize("seed", range(8))
def test_sums_are_those_of_the_host(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Rows of tiles that are added already stay as they are, and their own parts may be anything."""
    epoch, batch, heads, splits = 5, 1 + seed % 2, 2, 1 if seed % 4 else 3
    torch.manual_seed(seed)
    shape = KeyShape(batch, heads, DIM, DIM, torch.float32)
    _, p, order, _, sums = looped(Case(3, 600, seed, "lts", heads=(2, 2, 1)), (32, 48, 40)[seed % 3], shape)
    made = [torch.randn(splits, batch, heads, order.rows, DIM) for _ in range(2)]
    want = [torch.zeros(batch, p.keys.local_length(1), heads, DIM) for _ in range(2)]
    sums.add_on_host((made[0], made[1]), (want[0], want[1]))
    out = [torch.full_like(t, -7.0) for t in want]
    block = order.slots[order.own - 1].start // TILE + 1
    words = (torch.rand(batch * heads, -(-order.rows // TILE) - block) < 0.5).int() * epoch
    added = Added(words, epoch, block, TILE, order.rows) if splits == 1 else None
    for chunk, unit in product((c for c in sums.chunks if added), range(batch * heads)):
        for row, at in enumerate(range(chunk.slot.start, chunk.slot.start + chunk.slot.rows) if chunk.slot else ()):
            if at // TILE >= block and words[unit, at // TILE - block]:
                b, h = divmod(unit, heads)
                for own, result in zip(made, want, strict=True):
                    own[:, b, h, at] = float("nan")
                    result[b, chunk.rows.start + row, h] = -7.0

    def launch(kernel: str, grid: tuple[int, int, int], threads: int, given: object, device: torch.device) -> None:
        for piece in range(grid[1]):
            for number in range(grid[0]):
                library.run(given.body, number, grid[0], piece)  # type: ignore[attr-defined]

    monkeypatch.setattr(exchange, "_kernel", lambda name: name)
    monkeypatch.setattr(exchange, "launch", launch)
    exchange.sum_gradients(SumTable.of(sums.addends(), CPU), (made[0], made[1]), (out[0], out[1]), added)
    for got, wanted in zip(out, want, strict=True):
        assert torch.equal(got, wanted) if splits == 1 else torch.allclose(got, wanted)
