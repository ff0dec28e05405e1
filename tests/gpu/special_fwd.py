"""Forward kernel: shapes that once broke peers, edges, hard softmax, NaN, graphs, streams, threads, offsets beyond 2^31."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import variant
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import HEAD_DIMS, MaskForm
from maskc.runtime import hopper
from tests.gpu.check import masked_rows
from tests.gpu.forward import KEY, SCALE, Tensors, columns, global_window, operands, verify
from tests.gpu.inputs import FORMS, random_vectors


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((f"shape/{nq}x{nk}x{hq}:{hk}x{b}", partial(_shape, b, nq, nk, hq, hk)) for b, nq, nk, hq, hk in SHAPES),
        *((f"edge/{name}", partial(_edge, name)) for name in EDGES),
        *((f"softmax/{name}{'/long' * (nk > 1000)}", partial(_softmax, name, nk)) for name in SCORES for nk in (1000, 30_000)),
        ("nan/unseen keys", _unseen_nan),
        ("nan/seen keys", _seen_nan),
        ("repeat/20 runs", _repeatable),
        ("run/graph", partial(_graph, 2000, 2000)),
        ("run/graph/300 rows of 40000 keys", partial(_graph, 300, 40_000)),
        *((f"run/four streams/{heads} heads", partial(_streams, heads)) for heads in (8, 2)),
        *((f"run/threads/{heads} heads", partial(_threads, heads)) for heads in (8, 2)),
        ("run/new batch, no compilation", _no_compilation),
        ("size/offsets beyond 2^31", _far_offsets),
        ("size/131072", _long),
    ]


def sources() -> Iterator[CudaSource]:
    """Of all forms, at every head dim; some of these cases also run float16."""
    forms = {hopper.mask_form(random_vectors(form, 64, 64, 1, 1, 5, "cpu")) for form in FORMS}
    forms |= {hopper.mask_form(make("cpu")) for make in EDGES.values()}
    closed = {MaskForm(), MaskForm(causal=True), MaskForm(ute=True)}
    specs = {forward_spec(form, d, "bf16") for form in forms | closed for d in HEAD_DIMS}
    for spec in specs | {forward_spec(form, 128, "f16") for form in closed}:
        yield from variant(spec)


SHAPES = (
    *((2840, 32, 32, 16, 4), (1, 300, 300, 16, 16), (1, 128, 127, 1, 1), (1, 127, 128, 1, 1), (9, 1, 203, 6, 2)),
    *((9, 799, 217, 6, 1), (2, 4224, 4096, 6, 2), (1, 1, 1, 14, 1), (1, 130, 4097, 14, 1), (1, 16383, 16385, 2, 1)),
    (1, 20000, 20000, 2, 1),
)


def _shape(b: int, nq: int, nk: int, hq: int, hk: int) -> str:
    v = random_vectors("causal+lts" if nq == nk else "lts+ute", nq, nk, 1 if nq > 4000 else b, 1, 3, "cuda")
    qkv = operands(b, nq, nk, hq, hk)
    return verify(v, qkv, *hopper.forward(v, *qkv, SCALE))


def _table(n: int, on: str) -> BoundaryVectors:
    return _table_of(torch.rand(-(-n // 128), -(-n // 128), generator=torch.Generator().manual_seed(1)) < 0.3, n, n, on)


def _table_of(keep: torch.Tensor, nq: int, nk: int, on: str) -> BoundaryVectors:
    return BoundaryVectors(nq, nk, 1, 1, False, blocks=BlockTable(keep[None, None].contiguous().to(on), 128, 128))


EDGES: dict[str, Callable[[str], BoundaryVectors]] = {  # of a device
    "block table of 20000 keys": lambda on: _table(20000, on),
    "one key past a block": lambda on: columns(4097, causal=1, lts=(KEY[:4097] + 300).clamp(max=4097), on=on),
    "130 rows, bounds at the last": lambda on: columns(130, 513, lts=60, lte=130, on=on),
    "LTS 0 over a whole tile": lambda on: columns(1000, lts=torch.where(KEY[:1000] < 256, 0, 900), on=on),
    "key hidden from its own row": lambda on: columns(700, causal=1, lts=torch.where(KEY[:700] < 300, KEY[:700], 700), on=on),
    "more rows than keys, first rows empty": lambda on: columns(900, 300, ute=(KEY[:300] + 600), on=on),
    "touching intervals": lambda on: columns(800, lts=400, lte=600, uts=200, ute=400, on=on),
    "swapped intervals": lambda on: columns(800, lts=100, lte=200, uts=500, ute=600, on=on),
    "empty intervals": lambda on: columns(800, lts=800, lte=800, uts=0, ute=0, on=on),
    "512 runs in a row": lambda on: columns(300, 131_072, lts=torch.where(KEY[:131_072] // 128 % 2 == 0, 0, 300), on=on),
    "512 runs of a table": lambda on: _table_of((torch.arange(1024) % 2 == 0).expand(3, -1), 300, 131_072, on),
    "most rows see nothing": lambda on: columns(60_000, 256, lts=9_000, on=on),
    "a table hides most rows": lambda on: _table_of((torch.arange(469) < 71)[:, None].expand(-1, 2), 60_000, 256, on),
    "nothing visible": lambda on: columns(500, lts=0, on=on),
    "one visible tile in a row": lambda on: columns(3000, lts=(KEY[:3000] // 128 + 1) * 128, ute=KEY[:3000] // 128 * 128, on=on),
    "every second block": lambda on: columns(4000, lts=torch.where(KEY[:4000] // 128 % 2 == 0, 0, 4000), on=on),
    "window in 16383 keys": lambda on: columns(16383, causal=1, lts=(KEY[:16383] + 100).clamp(max=16383), on=on),
    "window in 16384 keys": lambda on: columns(16384, causal=1, lts=(KEY[:16384] + 100).clamp(max=16384), on=on),
    "window in 32769 keys": lambda on: columns(32769, causal=1, lts=(KEY[:32769] + 100).clamp(max=32769), on=on),
    "128 full blocks": lambda on: columns(300, 16384, lts=300, on=on),
    "window in 16385 keys": lambda on: columns(16385, causal=1, lts=(KEY[:16385] + 100).clamp(max=16385), on=on),
    # a warp group has 64 rows of a tile: what one of them alone sees, or sees nothing of
    "64 rows see 64 keys of their own": lambda on: _bands(1000, KEY[:1000] // 64 * 64, on),
    "64 rows from row 32 see keys of their own": lambda on: _bands(1000, KEY[:1000] // 64 * 64 + 32, on),
    "64 rows in turn see blocks in turn": lambda on: _bands(192, KEY[:9000] // 128 % 3 * 64, on),
    "the first 64 rows of a tile see nothing": lambda on: columns(400, uts=0, ute=64, lts=192, lte=256, on=on),
    "the middle 64 rows of a tile see nothing": lambda on: columns(500, uts=64, ute=128, lts=256, lte=320, on=on),
    "the last 64 rows of a tile see nothing": lambda on: columns(400, uts=128, ute=192, lts=320, lte=384, on=on),
    "the last keys for the first 64 rows": lambda on: columns(192, 900, lts=torch.where(KEY[:900] < 450, 192, 64), on=on),
    "the last keys for the middle 64 rows": lambda on: columns(192, 900, **_late(64, 128), on=on),
    "the last keys for the last 64 rows": lambda on: columns(192, 900, **_late(128, 192), on=on),
    "one key for the last 128 rows": lambda on: columns(192, 900, lts=torch.where(KEY[:900] == 700, 192, 64), on=on),
    **{
        f"{n} rows": lambda on, n=n: columns(n, 700, lts=(KEY[:700] + 20).clamp(max=n), ute=(KEY[:700] - 90).clamp(min=0), on=on)
        for n in (63, 64, 65, 129, 193, 257, 321)
    },
    # a row block with far more keys than the others, or alone: few heads leave most multiprocessors without work
    "300 rows of 60000 keys": lambda on: columns(300, 60_000, lts=300, on=on),
    "one row of 40001 keys": lambda on: columns(1, 40_001, lts=torch.where(KEY[:40_001] % 3 == 0, 1, 0), on=on),
    "16 rows of a global window": lambda on: global_window(12_000, 100, on),
    "a hundred keys at either end of 60000": lambda on: columns(
        200, 60_000, lts=torch.where((KEY[:60_000] - 30_000).abs() < 29_900, 0, 200), on=on
    ),
    "half of the keys for 64 rows, half for the others": lambda on: columns(192, 40_000, **_halves(40_000), on=on),
    "rows that see the last key alone": lambda on: columns(200, 40_000, lts=torch.where(KEY[:40_000] == 39_999, 200, 100), on=on),
    "rows that see the first key alone": lambda on: columns(200, 40_000, lts=torch.where(KEY[:40_000] == 0, 200, 100), on=on),
}


def _bands(nq: int, first: torch.Tensor, on: str) -> BoundaryVectors:
    """Each key is for 64 rows, from `first` on."""
    return columns(nq, len(first), ute=first.clamp(max=nq), lts=(first + 64).clamp(max=nq), on=on)


def _late(first: int, end: int) -> dict[str, torch.Tensor]:
    """Of 900 keys for 192 rows, the second half for some rows only: the blocks that are visited first."""
    return {"ute": torch.where(KEY[:900] < 450, 0, first), "lts": torch.where(KEY[:900] < 450, 192, end)}


def _halves(nk: int) -> dict[str, torch.Tensor]:
    """The first half of the keys for rows 64 to 127 of 192, the second for all others."""
    low = KEY[:nk] < nk // 2
    hidden = {"uts": 0, "ute": torch.where(low, 64, 0), "lts": torch.where(low, 128, 64), "lte": torch.where(low, 192, 128)}
    return {name: torch.as_tensor(t) for name, t in hidden.items()}


def _edge(name: str) -> str:
    v = EDGES[name]("cuda")
    problems = []
    for head_dim in (64, 128, 256):
        qkv = operands(1, v.nq, v.nk, 2, 1, head_dim)
        problem = verify(v, qkv, *hopper.forward(v, *qkv, head_dim**-0.5))
        problems += [f"head dim {head_dim}: {problem}"] if problem else []
    return "; ".join(problems)


RAMP = torch.linspace(-400, 400, 1000)
SCORES: dict[str, torch.Tensor] = {  # a score a key, about; KV blocks are visited from the last to the first
    "rising": RAMP.flip(0),
    "falling": RAMP,
    "far below zero": torch.full((1000,), -390.0),
    "far above zero": torch.full((1000,), 390.0),
    "all zero": torch.zeros(1000),
    "one great key": torch.zeros(1000).index_fill(0, torch.tensor([77]), 300.0),
    "small steps": torch.linspace(0, 30, 1000).flip(0),
}


def _softmax(name: str, nk: int) -> str:
    """Scores that a running maximum must follow, or start from, tile by tile; first tiles that hide rows from all keys.

    nk: 1000 rows and keys of two heads, or with more keys 200 rows of one, between whose parts the scores differ as much.
    """
    scale = 2.0**-4
    nq, heads = (1000, 2) if nk == 1000 else (200, 1)
    scores = SCORES[name].repeat_interleave(nk // 1000)
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)):
        q = torch.randn(1, nq, heads, head_dim, device="cuda") * 2**-7
        k = torch.randn(1, nk, heads, head_dim, device="cuda") * 2**-7
        q[..., 0], k[..., 0] = 8.0, (scores.to("cuda") / (8 * scale))[None, :, None]
        val = torch.randn(1, nk, heads, head_dim, device="cuda")
        qkv = q.to(dtype), k.to(dtype), val.to(dtype)
        for v in (columns(nq, nk), columns(nq, nk, causal=1), columns(nq, nk, ute=KEY[:nk] * nq // (2 * nk))):
            if problem := verify(v, qkv, *hopper.forward(v, *qkv, scale), scale=scale):
                return f"head dim {head_dim} {dtype} {hopper.mask_form(v)}: {problem}"
    return ""


# ---------------------------------------------------------------- NaN


def _unseen_nan() -> str:
    v = random_vectors("unseen_keys", 900, 1100, 1, 1, 2, "cuda")
    q, k, val = operands(1, 900, 1100, 4, 2)
    wanted = hopper.forward(v, q, k, val, SCALE)
    unseen = masked_rows(v, 0, 0, 0, 900).all(0)
    if not unseen.any():
        return "the case has no unseen key"
    for value in (math.nan, math.inf):
        k[:, unseen], val[:, unseen] = value, value
        got = hopper.forward(v, q, k, val, SCALE)
        if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
            return f"{value} in keys that no row sees changes the result"
    return ""


def _seen_nan() -> str:
    """NaN in a key reaches every row that attends it, and no row outside the tiles that hold it."""
    v = columns(1024, causal=1, lts=(KEY[:1024] // 256 + 1) * 256)
    q, k, val = operands(1, 1024, 1024, 1, 1)
    val[0, 300] = math.nan
    out, _ = hopper.forward(v, q, k, val, SCALE)
    bad = out[0, :, 0].isnan().all(1)
    if not bad[300:512].all():
        return "a row that attends the NaN does not show it"
    rows = forward_spec(hopper.mask_form(v), 128, "bf16").block_q  # rows 300 to 511 attend it; others of their tiles may show it
    others = out[0, : 300 // rows * rows], out[0, (511 // rows + 1) * rows :]
    return "NaN reached rows of other tiles" if any(part.isnan().any() for part in others) else ""


# ---------------------------------------------------------------- launches


def _repeatable() -> str:
    v = random_vectors("causal+lts+lte", 3000, 3000, 1, 1, 4, "cuda")
    qkv = operands(2, 3000, 3000, 6, 2)
    first = hopper.forward(v, *qkv, SCALE)
    for i in range(20):
        again = hopper.forward(v, *qkv, SCALE)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return f"run {i} differs"
    return verify(v, qkv, *first)


def _graph(nq: int, nk: int) -> str:
    """Captured once with a schedule made outside and once with one made inside, replayed with other data and vectors."""
    heads = (4, 2) if nq == nk else (2, 1)
    key = KEY[:nk] * nq // nk

    def documents(length: int) -> torch.Tensor:
        return ((key // length + 1) * length).clamp(max=nq)

    v = columns(nq, nk, causal=nq == nk, lts=documents(nq // 4))
    q, k, val = operands(1, nq, nk, *heads)
    tables = hopper.schedule(v, 128)
    hopper.forward(v, q, k, val, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outside = hopper.forward(v, q, k, val, SCALE, schedule=tables)
        inside = hopper.forward(v, q, k, val, SCALE)
    for seed in (1, 2):
        for old, new in zip((q, k, val), operands(1, nq, nk, *heads, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        problem = verify(v, (q, k, val), *outside) or verify(v, (q, k, val), *inside)
        if problem:
            return f"replay {seed}: {problem}"
    assert v.lts is not None
    for length in (nq // 8, nq, 1):  # rows of other lengths than at the capture
        v.lts.copy_(documents(length).to("cuda", torch.int32).view(1, 1, -1))
        graph.replay()
        if problem := verify(v, (q, k, val), *inside):
            return f"documents of {length} rows: {problem}"
    return ""


def _together(heads: int, pool: Callable[[list[Callable[[], Tensors]]], list[Any]]) -> str:
    """Several masks at once give what they give alone."""
    masks = [
        random_vectors(f, 2000, 2000, 1, 1, i, "cuda")
        for i, f in enumerate(("causal+lts", "lts+ute", "causal+lts+lte", "blocks"))
    ]
    masks += [columns(300, 40_000, lts=300), global_window(8000, 100)] if heads < 8 else []
    calls = [operands(1, v.nq, v.nk, heads, max(1, heads // 4), seed=i) for i, v in enumerate(masks)]
    alone = [hopper.forward(v, *qkv, SCALE) for v, qkv in zip(masks, calls, strict=True)]
    torch.cuda.synchronize()
    for _ in range(5):
        jobs = [partial(hopper.forward, v, *qkv, SCALE) for v, qkv in zip(masks, calls, strict=True)]
        got = pool(jobs)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(alone, got, strict=True)):
            if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
                return f"mask {i} differs from its run alone"
    return ""


def _streams(heads: int) -> str:
    streams = [torch.cuda.Stream() for _ in range(4)]

    def run(jobs: list[Callable[[], Any]]) -> list[Any]:
        out = []
        for i, job in enumerate(jobs):
            with torch.cuda.stream(streams[i % 4]):
                out.append(job())
        return out

    return _together(heads, run)


def _threads(heads: int) -> str:
    def run(jobs: list[Callable[[], Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [f.result() for f in [pool.submit(job) for job in jobs]]

    return _together(heads, run)


def _no_compilation() -> str:
    qkv = operands(1, 1024, 1024, 2, 2)
    hopper.forward(random_vectors("lts+ute", 1024, 1024, 1, 1, 1, "cuda"), *qkv, SCALE)
    compile_cubin = hopper.compile_cubin
    hopper.compile_cubin = None  # type: ignore[assignment]
    try:
        for n, seed in ((1024, 2), (700, 3), (4097, 4)):
            v = random_vectors("lts+ute", n, n, 1, 1, seed, "cuda")
            qkv = operands(1, n, n, 2, 2)
            if problem := verify(v, qkv, *hopper.forward(v, *qkv, SCALE)):
                return problem
    finally:
        hopper.compile_cubin = compile_cubin
    return ""


# ---------------------------------------------------------------- sizes


def _far_offsets() -> str:
    """More than 2^31 elements in q and out, and in k and val; a narrow window keeps the work small."""
    n, heads = 131072, 132
    v = columns(n, causal=1, lts=(KEY[:n] + 256).clamp(max=n))
    q = torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, val = torch.randn_like(q), torch.randn_like(q)
    return verify(v, (q, k, val), *hopper.forward(v, q, k, val, SCALE), rows=64)


def _long() -> str:
    problems = []
    for name, v in (
        ("causal", columns(131072, causal=1)),
        ("full", columns(131072)),
        ("global window", global_window(131072, 4096)),
    ):
        qkv = operands(1, v.nq, v.nk, 2, 1)
        problem = verify(v, qkv, *hopper.forward(v, *qkv, SCALE), samples=4, rows=64)
        problems += [f"{name}: {problem}"] if problem else []
    return "; ".join(problems)
