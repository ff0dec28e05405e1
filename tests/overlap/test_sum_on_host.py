"""The kernel that adds up gradients, its own text compiled for the host: all of them, or what the attention kernel left."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from benchmarks.octets import from_octets, to_octets
from maskc.codegen.exchange import THREADS, exchange_source
from maskc.runtime import exchange
from maskc.runtime.exchange import Added, SumTable
from maskc.runtime.overlap_grads import result_rows
from maskc.runtime.transport import KeyShape
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text
from tests.dist.cases import Case
from tests.overlap.looped import CPU, looped

DIM, TILE = 64, 32
_AROUND = """
constexpr int THREADS = {threads};
struct float4 {{ float x, y, z, w; }};
typedef unsigned short u16;
inline float4 make_float4(float x, float y, float z, float w) {{ return {{x, y, z, w}}; }}
inline float2 make_float2(float x, float y) {{ return {{x, y}}; }}
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


@pytest.mark.parametrize("octets", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_sums_are_those_of_the_host(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int, octets: bool) -> None:
    """Rows of tiles that are added already stay as they are, and their own parts may be anything."""
    epoch, batch, heads, splits = 5, 1 + seed % 2, 2, 1 if seed % 4 else 3
    torch.manual_seed(seed)
    shape = KeyShape(batch, heads, DIM, DIM, torch.float32)
    _, p, order, link, sums = looped(Case(3, 600, seed, "lts", heads=(2, 2, 1)), (32, 48, 40, 36)[seed % 4], shape)
    given = seed % 3 == 2
    result = result_rows(order, given)
    made = [torch.randn(splits, batch, heads, result.rows, DIM) for _ in range(2)]
    want = [torch.zeros(batch, p.keys.local_length(1), heads, DIM) for _ in range(2)]
    whole = result_rows(order)
    front = torch.zeros(splits, batch, heads, whole.rows - result.rows, DIM)  # chunks of others lie before own ones
    padded = [torch.cat((front, t), dim=3) for t in made]
    sums.add_on_host((padded[0], padded[1]), (want[0], want[1]))
    out = [torch.full_like(t, -7.0) for t in want]
    block = order.slots[order.own - 1].start // TILE + 1
    words = (torch.rand(batch * heads, -(-order.rows // TILE) - block) < 0.5).int() * epoch
    added = Added(words, epoch, block, TILE) if splits == 1 else None
    for chunk, unit in product((c for c in sums.chunks if added), range(batch * heads)):
        for row, at in enumerate(range(chunk.slot.start, chunk.slot.start + chunk.slot.rows) if chunk.slot else ()):
            if at // TILE >= block and words[unit, at // TILE - block]:
                b, h = divmod(unit, heads)
                for own, wanted in zip(made, want, strict=True):
                    own[:, b, h, result.starts[chunk.chunk] + row] = float("nan")
                    wanted[b, chunk.rows.start + row, h] = -7.0

    def launch(kernel: str, grid: tuple[int, int, int], threads: int, params: object, device: torch.device) -> None:
        for piece in range(grid[1]):
            for number in range(grid[0]):
                library.run(params.body, number, grid[0], piece)  # type: ignore[attr-defined]

    monkeypatch.setattr(exchange, "_kernel", lambda name: name)
    monkeypatch.setattr(exchange, "launch", launch)
    if octets:
        made = [to_octets(t) for t in made]
        for reader, chunks in order.lends:
            for t in (t for c in chunks for t in link.staged(reader, c)):
                t.copy_(to_octets(t))
    exchange.sum_gradients(SumTable.of(sums.addends(given), CPU), (made[0], made[1]), (out[0], out[1]), added, octets)
    for got, wanted in zip(out, want, strict=True):
        assert torch.equal(got, wanted) if splits == 1 else torch.allclose(got, wanted)


def test_octets_and_back() -> None:
    t = torch.arange(2 * 16 * 32, dtype=torch.float32).view(2, 16, 32)
    assert torch.equal(from_octets(to_octets(t)), t)
    for row, column in ((0, 0), (9, 17), (15, 31), (7, 8)):
        at = (row >> 3) * 8 * 32 + (column >> 4) * 128 + (row & 7) * 16
        at += 4 * (column >> 1 & 3) + 2 * (column >> 3 & 1) + (column & 1)
        assert to_octets(t)[1].flatten()[at] == t[1, row, column]
