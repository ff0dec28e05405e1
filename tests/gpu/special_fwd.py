"""Forward kernel: recorded queues, hygiene, graphs, streams, threads, offsets beyond 2^31, and shapes that once broke peers."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

import maskc
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.codegen.forward import forward_spec
from maskc.codegen.mirror import KvIndex
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import HEAD_DIMS, KernelSpec, MaskForm, QueueSource, Scheduler
from maskc.runtime import hopper, trace
from tests.gpu.check import masked_rows
from tests.gpu.inputs import FORMS, SUITE, random_vectors, suite_mask
from tests.gpu.warm import variant

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SCALE = 128**-0.5


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    suite = sorted(p.stem for p in SUITE.glob("*.mask") if not p.stem.startswith("9"))
    return [
        *((f"queue/{name}/{source}", partial(_suite_queue, name, source)) for name in suite for source in SOURCES),
        *((f"queue/{form}/{source}", partial(_form_queue, form, source)) for form in FORMS for source in SOURCES),
        *((f"queue/order/{s}", partial(_scheduler, s)) for s in SCHEDULERS),
        *((f"shape/{nq}x{nk}x{hq}:{hk}x{b}", partial(_shape, b, nq, nk, hq, hk)) for b, nq, nk, hq, hk in SHAPES),
        *((f"edge/{name}", partial(_edge, name)) for name in EDGES),
        *((f"softmax/{name}", partial(_softmax, name)) for name in SCORES),
        ("memory/guards", _guards),
        ("memory/compute-sanitizer", _sanitizer),
        ("nan/unseen keys", _unseen_nan),
        ("nan/seen keys", _seen_nan),
        ("repeat/20 runs", _repeatable),
        ("run/graph", _graph),
        ("run/two streams", _streams),
        ("run/threads", _threads),
        ("run/new batch, no compilation", _no_compilation),
        ("trace", _trace),
        ("size/offsets beyond 2^31", _far_offsets),
        ("size/131072", _long),
    ]


SOURCES = get_args(QueueSource)
SCHEDULERS = get_args(Scheduler)
SHAPES = (
    *((2840, 32, 32, 16, 4), (1, 300, 300, 16, 16), (1, 128, 127, 1, 1), (1, 127, 128, 1, 1), (9, 1, 203, 6, 2)),
    *((9, 799, 217, 6, 1), (2, 4224, 4096, 6, 2), (1, 1, 1, 14, 1), (1, 130, 4097, 14, 1), (1, 16383, 16385, 2, 1)),
    (1, 20000, 20000, 2, 1),
)


def _operands(b: int, nq: int, nk: int, hq: int, hk: int, d: int = 128, seed: int = 0) -> Tensors:
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def make(n: int, h: int) -> torch.Tensor:
        return torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16, generator=gen)

    return make(nq, hq), make(nk, hk), make(nk, hk)


def verify(
    v: BoundaryVectors,
    qkv: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    samples: int = 3,
    rows: int = 512,
    scale: float | None = None,
) -> str:
    """ "" or what is wrong, on a few (batch item, head, row range) of the answer, by the rule of `tests.gpu.check`."""
    q, k, val = qkv
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rng = random.Random(7)
    for i in range(samples):
        b, h = (
            (0, 0)
            if i == 0
            else (q.shape[0] - 1, q.shape[2] - 1)
            if i == 1
            else (rng.randrange(q.shape[0]), rng.randrange(q.shape[2]))
        )
        r0 = 0 if i == 0 else max(0, v.nq - rows) if i == 1 else rng.randrange(max(1, v.nq - rows))
        r1 = min(v.nq, r0 + rows)
        g, m = h // (q.shape[2] // k.shape[2]), h // (q.shape[2] // v.heads)
        hidden = masked_rows(v, b, m, r0, r1)
        clean = hidden.all(0)[:, None]
        answers = []
        for dtype in (torch.float64, q.dtype):
            kk, vv = k[b, :, g].to(dtype).masked_fill(clean, 0), val[b, :, g].to(dtype).masked_fill(clean, 0)
            s = (q[b, r0:r1, h].to(dtype) @ (kk * scale).T).masked_fill(hidden, -math.inf)
            p = torch.softmax(s, 1).masked_fill(hidden.all(1)[:, None], 0)
            answers.append(((p @ vv).double(), torch.logsumexp(s.double(), 1)))
        (exact, exact_lse), (naive, _) = answers
        got, got_lse = out[b, r0:r1, h].double(), lse[b, h, r0:r1].double()
        where = f"item {b} head {h} rows {r0}-{r1}"
        if not torch.equal(torch.isfinite(got_lse), ~hidden.all(1)) or not torch.isfinite(got).all():
            return f"{where}: wrong infinities or NaN"
        low = exact.to(q.dtype)
        limit = 2 * (naive - exact).abs().max() + 2 * ((low + 0.3 - 0.3) - low).double().abs().max()
        if (got - exact).abs().max() > limit:
            return f"{where}: error {(got - exact).abs().max().item():.2e}, limit {limit.item():.2e}"
        finite = torch.isfinite(exact_lse)
        if finite.any() and (got_lse - exact_lse)[finite].abs().max() > 1e-3:
            return f"{where}: lse is off by {(got_lse - exact_lse)[finite].abs().max().item():.2e}"
    return ""


def sources() -> Iterator[CudaSource]:
    for spec in _specs():
        yield from variant(spec)


def _specs() -> set[KernelSpec]:
    """Of every case: default variants of all forms at all head dims, and those that record, deal work or trace."""
    masks = [suite_mask(path.stem, 64, 64, random.Random(3)) for path in SUITE.glob("*.mask") if path.stem[0] != "9"]
    bound = [maskc.compile(str(made[0])).bind(nq=64, nk=64, **made[1]) for made in masks if made is not None]
    queued = {hopper.mask_form(b.vectors()) for b in bound}
    queued |= {hopper.mask_form(random_vectors(form, 64, 64, 1, 1, 5, "cpu")) for form in FORMS}
    forms = queued | {hopper.mask_form(make("cpu")) for make in EDGES.values()}
    specs = {forward_spec(form, d, "bf16") for form in forms for d in HEAD_DIMS}
    for form in queued:
        recording = replace(forward_spec(form, 128, "bf16"), record_queue=True)
        specs |= {recording} if form.closed else {replace(recording, queue=source) for source in SOURCES}
    specs |= {forward_spec(form, 128, "f16") for form in (MaskForm(), MaskForm(causal=True), MaskForm(ute=True))}
    dealt = forward_spec(MaskForm(lts=True, lte=True, uts=True, ute=True), 128, "bf16")
    specs |= {replace(dealt, scheduler=scheduler) for scheduler in SCHEDULERS}
    return specs | {trace.trace_spec(MaskForm(causal=True, lts=True), 128, "bf16")}


# ---------------------------------------------------------------- the queue as the loader consumed it


def _recorded(v: BoundaryVectors, spec: KernelSpec, qkv: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, val = qkv
    blocks = (-(-v.nq // spec.block_q), -(-v.nk // spec.block_kv))
    record = torch.zeros(q.shape[0], q.shape[2], blocks[0], 1 + blocks[1], dtype=torch.int32, device="cuda")
    out, lse = hopper.forward_with(spec, v, q, k, val, SCALE, None, record)
    return record.cpu(), out, lse


def _queue(v: BoundaryVectors, source: str, heads: int) -> str:
    form = hopper.mask_form(v)
    if form.closed and source == "schedule":
        return ""
    qkv = _operands(v.batch, v.nq, v.nk, heads, heads)
    spec = replace(forward_spec(form, 128, "bf16"), record_queue=True, queue=source)  # type: ignore[arg-type]
    record, out, lse = _recorded(v, spec, qkv)
    for b in range(v.batch):
        for h in range(heads):
            m = h // (heads // v.heads)
            index = kv_index(spec, v, b, m)
            for i in range(record.shape[2]):
                line = record[b, h, i].tolist()
                got = [(x >> 8, x & 255) for x in line[1 : 1 + line[0]]]
                wanted = index.queue(i)
                if got != wanted:
                    return f"item {b} head {h} Q block {i}: {got[:8]} instead of {wanted[:8]}"
    return verify(v, qkv, out, lse)


def kv_index(spec: KernelSpec, v: BoundaryVectors, item: int, head: int) -> KvIndex:
    def row(t: torch.Tensor) -> Any:
        return t[item % t.shape[0], head % t.shape[1]].tolist()

    named = {n: row(t) for n, t in zip(("lts", "lte", "uts", "ute", "diag"), v.tensors, strict=True) if t is not None}
    return KvIndex(spec, v.nq, v.nk, named, None if v.blocks is None else row(v.blocks.keep))


def _suite_queue(name: str, source: str) -> str:
    n = 1500
    made = suite_mask(name, n, n, random.Random(3))
    if made is None:
        return "the mask has no such shape"
    bound = maskc.compile(str(made[0])).bind(nq=n, nk=n, **made[1])
    v = bound.vectors(device=torch.device("cuda"))
    return _queue(v, source, max(2, v.heads))


def _form_queue(form: str, source: str) -> str:
    return _queue(random_vectors(form, 1100, 1300, 2, 2, 5, "cuda"), source, 4)


def _global_window(n: int, window: int) -> BoundaryVectors:
    key = torch.arange(n, device="cuda")
    made = {
        "lts": torch.where(key < 16, n, key + window + 1), "lte": torch.full_like(key, n),
        "uts": torch.where(key <= 16 + window, 0, 16), "ute": torch.where(key <= 16 + window, 0, key - window),
    }  # fmt: skip
    shaped = {name: t.clamp(0, n).to(torch.int32).view(1, 1, n).contiguous() for name, t in made.items()}
    return BoundaryVectors(n, n, 1, 1, False, **shaped)


def _scheduler(scheduler: str) -> str:
    """The first rows of a global window visit everything: giants beside short rows."""
    v = _global_window(6000, 200)
    qkv = _operands(1, v.nq, v.nk, 14, 2)
    spec = replace(forward_spec(hopper.mask_form(v), 128, "bf16"), scheduler=scheduler)  # type: ignore[arg-type]
    out, lse = hopper.forward_with(spec, v, *qkv, SCALE)
    out.fill_(math.nan)
    out, lse = hopper.forward_with(spec, v, *qkv, SCALE)
    return verify(v, qkv, out, lse)


# ---------------------------------------------------------------- shapes and edges


def _shape(b: int, nq: int, nk: int, hq: int, hk: int) -> str:
    v = random_vectors("causal+lts" if nq == nk else "lts+ute", nq, nk, 1 if nq > 4000 else b, 1, 3, "cuda")
    qkv = _operands(b, nq, nk, hq, hk)
    return verify(v, qkv, *hopper.forward(v, *qkv, SCALE))


def _columns(n: int, nk: int | None = None, on: str = "cuda", **parts: torch.Tensor | int) -> BoundaryVectors:
    nk = nk or n
    causal = bool(parts.pop("causal", 0))
    shaped = {name: torch.as_tensor(t, device=on).to(torch.int32).expand(1, 1, nk).contiguous() for name, t in parts.items()}
    return BoundaryVectors(n, nk, 1, 1, causal, **shaped)


def _table(n: int, on: str) -> BoundaryVectors:
    keep = torch.rand(1, 1, -(-n // 128), -(-n // 128), generator=torch.Generator().manual_seed(1)) < 0.3
    return BoundaryVectors(n, n, 1, 1, False, blocks=BlockTable(keep.to(on), 128, 128))


KEY = torch.arange(1 << 18)
EDGES: dict[str, Callable[[str], BoundaryVectors]] = {  # of a device
    "block table of 20000 keys": lambda on: _table(20000, on),
    "one key past a block": lambda on: _columns(4097, causal=1, lts=(KEY[:4097] + 300).clamp(max=4097), on=on),
    "130 rows, bounds at the last": lambda on: _columns(130, 513, lts=60, lte=130, on=on),
    "LTS 0 over a whole tile": lambda on: _columns(1000, lts=torch.where(KEY[:1000] < 256, 0, 900), on=on),
    "key hidden from its own row": lambda on: _columns(700, causal=1, lts=torch.where(KEY[:700] < 300, KEY[:700], 700), on=on),
    "more rows than keys, first rows empty": lambda on: _columns(900, 300, ute=(KEY[:300] + 600), on=on),
    "touching intervals": lambda on: _columns(800, lts=400, lte=600, uts=200, ute=400, on=on),
    "swapped intervals": lambda on: _columns(800, lts=100, lte=200, uts=500, ute=600, on=on),
    "empty intervals": lambda on: _columns(800, lts=800, lte=800, uts=0, ute=0, on=on),
    "nothing visible": lambda on: _columns(500, lts=0, on=on),
    "one visible tile in a row": lambda on: _columns(3000, lts=(KEY[:3000] // 128 + 1) * 128, ute=KEY[:3000] // 128 * 128, on=on),
    "every second block": lambda on: _columns(4000, lts=torch.where(KEY[:4000] // 128 % 2 == 0, 0, 4000), on=on),
    "window in 16383 keys": lambda on: _columns(16383, causal=1, lts=(KEY[:16383] + 100).clamp(max=16383), on=on),
    "window in 16384 keys": lambda on: _columns(16384, causal=1, lts=(KEY[:16384] + 100).clamp(max=16384), on=on),
    "window in 32769 keys": lambda on: _columns(32769, causal=1, lts=(KEY[:32769] + 100).clamp(max=32769), on=on),
    "128 full blocks": lambda on: _columns(300, 16384, lts=300, on=on),
    "window in 16385 keys": lambda on: _columns(16385, causal=1, lts=(KEY[:16385] + 100).clamp(max=16385), on=on),
}


def _edge(name: str) -> str:
    v = EDGES[name]("cuda")
    problems = []
    for head_dim in (64, 128, 256):
        qkv = _operands(1, v.nq, v.nk, 2, 1, head_dim)
        problem = verify(v, qkv, *hopper.forward(v, *qkv, head_dim**-0.5))
        problems += [f"head dim {head_dim}: {problem}"] if problem else []
    return "; ".join(problems)


# ---------------------------------------------------------------- memory


class _Guarded:
    """torch, except that `empty` carves tensors out of larger ones with a known border."""

    border = 4096

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((2 * self.border + -(-size // 256) * 256,), 0x5A, dtype=torch.uint8, device=device)
        self.made.append(whole)
        whole[self.border : self.border + size] = 0xFF  # NaN in every floating type
        return whole[self.border : self.border + size].view(dtype).view(shape)

    def touched(self) -> bool:
        return any((w[: self.border] != 0x5A).any() or (w[-self.border :] != 0x5A).any() for w in self.made)


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


def _softmax(name: str) -> str:
    """Scores that a running maximum must follow, or start from, tile by tile; first tiles that hide rows from all keys."""
    scale = 2.0**-4
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)):
        q = torch.randn(1, 1000, 2, head_dim, device="cuda") * 2**-7
        k = torch.randn(1, 1000, 2, head_dim, device="cuda") * 2**-7
        q[..., 0], k[..., 0] = 8.0, (SCORES[name].to("cuda") / (8 * scale))[None, :, None]
        val = torch.randn(1, 1000, 2, head_dim, device="cuda")
        qkv = q.to(dtype), k.to(dtype), val.to(dtype)
        for v in (
            BoundaryVectors(1000, 1000, 1, 1, False),
            BoundaryVectors(1000, 1000, 1, 1, True),
            _columns(1000, ute=KEY[:1000] // 2),
        ):
            if problem := verify(v, qkv, *hopper.forward(v, *qkv, scale), scale=scale):
                return f"head dim {head_dim} {dtype} {hopper.mask_form(v)}: {problem}"
    return ""


def _inside_nan(shape: tuple[int, ...]) -> torch.Tensor:
    """A strided tensor whose surroundings, between its rows too, are NaN."""
    b, s, h, d = shape
    whole = torch.full((b + 2, s + 2, h + 2, 2 * d), math.nan, device="cuda", dtype=torch.bfloat16)
    whole[1:-1, 1:-1, 1:-1, :d] = torch.randn(shape, device="cuda")
    return whole[1:-1, 1:-1, 1:-1, :d]


def _guards() -> str:
    """Nothing is read outside the tensors and nothing written outside the results."""
    for form in ("causal+lts", "lts+lte+uts+ute", "blocks", "empty_rows"):
        for nq, nk, dim in ((1, 1, 64), (130, 257, 128), (193, 65, 256), (1000, 1111, 64)):
            v = random_vectors(form, nq, nk, 2, 1, nq, "cuda")
            qkv = _inside_nan((2, nq, 6, dim)), _inside_nan((2, nk, 2, dim)), _inside_nan((2, nk, 2, dim))
            guarded = _Guarded()
            hopper.torch = guarded  # type: ignore[assignment]
            try:
                out, lse = hopper.forward(v, *qkv, dim**-0.5)
            finally:
                hopper.torch = torch
            if guarded.touched():
                return f"{form} {nq}x{nk} head dim {dim}: wrote outside its tensors"
            if problem := verify(v, qkv, out, lse):
                return f"{form} {nq}x{nk} head dim {dim}: {problem}"
    return ""


def _sanitizer() -> str:
    """memcheck over `main` below; importing torch under the tool takes most of the time.

    API errors are not memory errors: the driver bindings ask for entry points that an older driver does not have.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return "skip: compute-sanitizer is not installed"
    command = [
        tool,
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "tests.gpu.special_fwd",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=85, check=False)
    except subprocess.TimeoutExpired:
        return "skip: not finished within 85 s"
    return "" if done.returncode == 0 else done.stdout[-600:] + done.stderr[-300:]


def main() -> None:
    """A few small calls that touch every role and every ragged edge."""
    for form, nq, nk, dim in (("causal+lts", 130, 257, 128), ("lts+lte+uts+ute", 200, 65, 64), ("empty_rows", 70, 300, 256)):
        v = random_vectors(form, nq, nk, 1, 1, 1, "cuda")
        hopper.forward(v, *_operands(1, nq, nk, 2, 1, dim), dim**-0.5)
    torch.cuda.synchronize()


# ---------------------------------------------------------------- NaN


def _unseen_nan() -> str:
    v = random_vectors("unseen_keys", 900, 1100, 1, 1, 2, "cuda")
    q, k, val = _operands(1, 900, 1100, 4, 2)
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
    v = _columns(1024, causal=1, lts=(KEY[:1024] // 256 + 1) * 256)
    q, k, val = _operands(1, 1024, 1024, 1, 1)
    val[0, 300] = math.nan
    out, _ = hopper.forward(v, q, k, val, SCALE)
    bad = out[0, :, 0].isnan().all(1)
    if not bad[300:512].all():
        return "a row that attends the NaN does not show it"
    return "NaN reached rows of other tiles" if out[0, :256].isnan().any() or out[0, 512:].isnan().any() else ""


# ---------------------------------------------------------------- launches


def _repeatable() -> str:
    v = random_vectors("causal+lts+lte", 3000, 3000, 1, 1, 4, "cuda")
    qkv = _operands(2, 3000, 3000, 6, 2)
    first = hopper.forward(v, *qkv, SCALE)
    for i in range(20):
        again = hopper.forward(v, *qkv, SCALE)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return f"run {i} differs"
    return verify(v, qkv, *first)


def _graph() -> str:
    """Captured once with a schedule made outside and once with one made inside, replayed with other data and vectors."""
    v = _columns(2000, causal=1, lts=(KEY[:2000] // 500 + 1) * 500)
    q, k, val = _operands(1, 2000, 2000, 4, 2)
    tables = hopper.schedule(v, 128)
    hopper.forward(v, q, k, val, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outside = hopper.forward(v, q, k, val, SCALE, schedule=tables)
        inside = hopper.forward(v, q, k, val, SCALE)
    for seed in (1, 2):
        for old, new in zip((q, k, val), _operands(1, 2000, 2000, 4, 2, seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        problem = verify(v, (q, k, val), *outside) or verify(v, (q, k, val), *inside)
        if problem:
            return f"replay {seed}: {problem}"
    assert v.lts is not None
    v.lts.copy_(((KEY[:2000] // 250 + 1) * 250).to("cuda", torch.int32).view(1, 1, -1))
    graph.replay()
    return verify(v, (q, k, val), *inside)


def _together(pool: Callable[[list[Callable[[], Tensors]]], list[Any]]) -> str:
    """Several masks at once give what they give alone."""
    masks = [
        random_vectors(f, 2000, 2000, 1, 1, i, "cuda")
        for i, f in enumerate(("causal+lts", "lts+ute", "causal+lts+lte", "blocks"))
    ]
    calls = [_operands(1, 2000, 2000, 8, 2, seed=i) for i in range(len(masks))]
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


def _streams() -> str:
    streams = [torch.cuda.Stream() for _ in range(4)]

    def run(jobs: list[Callable[[], Any]]) -> list[Any]:
        out = []
        for stream, job in zip(streams, jobs, strict=True):
            with torch.cuda.stream(stream):
                out.append(job())
        return out

    return _together(run)


def _threads() -> str:
    def run(jobs: list[Callable[[], Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [f.result() for f in [pool.submit(job) for job in jobs]]

    return _together(run)


def _no_compilation() -> str:
    qkv = _operands(1, 1024, 1024, 2, 2)
    hopper.forward(random_vectors("lts+ute", 1024, 1024, 1, 1, 1, "cuda"), *qkv, SCALE)
    compile_cubin = hopper.compile_cubin
    hopper.compile_cubin = None  # type: ignore[assignment]
    try:
        for n, seed in ((1024, 2), (700, 3), (4097, 4)):
            v = random_vectors("lts+ute", n, n, 1, 1, seed, "cuda")
            qkv = _operands(1, n, n, 2, 2)
            if problem := verify(v, qkv, *hopper.forward(v, *qkv, SCALE)):
                return problem
    finally:
        hopper.compile_cubin = compile_cubin
    return ""


def _trace() -> str:
    """Every role of every CTA comes to its end, in order, and the index generator walks each work item once."""
    v = _columns(3000, causal=1, lts=(KEY[:3000] // 700 + 1).clamp(max=4) * 700 + 200)
    found = list(trace.intervals(trace.record(v, *_operands(1, 3000, 3000, 8, 2), SCALE)))
    if any(one.length < 0 for one in found):
        return "time runs backwards"
    walked = sorted(one.at for one in found if one.role == 0 and one.state == "index")
    if walked != list(range(24 * 8)):
        return f"work items {walked[:10]}..., {len(walked)} in all"
    roles = {(one.cta, one.role) for one in found}
    return "" if len(roles) == 4 * len({cta for cta, _ in roles}) else "a role is missing"


# ---------------------------------------------------------------- sizes


def _far_offsets() -> str:
    """More than 2^31 elements in q and out, and in k and val; a narrow window keeps the work small."""
    n, heads = 131072, 132
    v = _columns(n, causal=1, lts=(KEY[:n] + 256).clamp(max=n))
    q = torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16)
    k, val = torch.randn_like(q), torch.randn_like(q)
    return verify(v, (q, k, val), *hopper.forward(v, q, k, val, SCALE), rows=64)


def _long() -> str:
    problems = []
    for name, v in (
        ("causal", _columns(131072, causal=1)),
        ("full", _columns(131072)),
        ("global window", _global_window(131072, 4096)),
    ):
        qkv = _operands(1, v.nq, v.nk, 2, 1)
        problem = verify(v, qkv, *hopper.forward(v, *qkv, SCALE), samples=4, rows=64)
        problems += [f"{name}: {problem}"] if problem else []
    return "; ".join(problems)


if __name__ == "__main__":
    main()
