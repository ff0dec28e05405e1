"""The kernel that copies own keys, its own text compiled for the host, against torch."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from maskc.codegen.exchange import FILL_RUNS, exchange_source
from maskc.runtime import exchange
from maskc.runtime.transport import head_major
from tests.codegen.host import ONE_THREAD, compile_on_host, in_one_text

_AROUND = """
constexpr int LOADS = 3;
inline void __syncthreads() {{}}
inline u32 count_up(u32* p) {{ return ++*p; }}
{text}
extern "C" void run(FillParams p, int cta, int ctas) {{
  blockIdx.x = cta, gridDim.x = ctas;
  for (threadIdx.x = 0; threadIdx.x < FILL_THREADS; ++threadIdx.x) fill(p);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    whole = exchange_source().text
    text = in_one_text(whole[whole.index("constexpr int FILL_THREADS") : whole.index("// ---- copy_chunks")])
    made = compile_on_host(ONE_THREAD + _AROUND.format(text=text), tmp_path_factory.mktemp("fill"))
    made.run.argtypes = [exchange._FillParams, ctypes.c_int, ctypes.c_int]
    return made


@pytest.mark.parametrize("seed", range(24))
def test_rows_go_where_they_should_and_nowhere_else(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random heads, batches, strides, runs (more than one launch takes, too), and numbers of CTAs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, batch, ctas = rng.choice((1, 3, 8, 40)), rng.choice((1, 2)), rng.choice((1, 5))
    many = 2 * FILL_RUNS if seed % 4 == 0 else 3
    dims = rng.choice((64, 128)), rng.choice((64, 128))
    sizes = [rng.choice((1, 2, 17, 40)) for _ in range(many)]
    gaps = [rng.randrange(3) for _ in sizes]
    rows = sum(sizes) + sum(gaps)
    own = [torch.randn(batch, rows, heads + 1, d).bfloat16()[:, :, 1:] for d in dims]
    into = [torch.randn(heads, rows + 2, batch, d).bfloat16() for d in dims]
    wanted = [t.clone() for t in into]
    runs, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        runs.append((at + gap // 2, slice(at, at + size)))
        at += size + gap
    for t, to in zip(own, wanted, strict=True):
        for place, taken in runs:
            to[:, place : place + taken.stop - taken.start] = head_major(t[:, taken])

    def launch(kernel: str, grid: tuple[int, ...], threads: int, given: object, device: torch.device) -> None:
        for cta in range(grid[0]):
            library.run(given.body, cta, grid[0])  # type: ignore[attr-defined]

    monkeypatch.setattr(exchange, "_kernel", lambda name: name)
    monkeypatch.setattr(exchange, "launch", launch)
    exchange.fill((own[0], own[1]), (into[0], into[1]), runs, ctas)
    assert all(torch.equal(a, b) for a, b in zip(into, wanted, strict=True))
