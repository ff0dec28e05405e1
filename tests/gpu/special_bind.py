"""Binding data that are on a GPU: the same vectors as on the CPU, one synchronisation, none without validation.

And what is kept with a mask: right on every stream, and in graphs, whichever stream made it and however late.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

import maskc
from maskc import CompiledMask, segments, spans
from maskc.codegen.render import CudaSource
from maskc.runtime import hopper
from maskc.runtime.layout import contiguous
from maskc.runtime.localize import localize, localized
from tests.gpu import warm
from tests.gpu.special_prep import differences

N = 4096
LENGTHS = torch.tensor([1000, 0, 2000, 1, 900])
IDS = torch.repeat_interleave(torch.arange(5), LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in (*LENGTHS.tolist(), N - 3901)])


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [
        *((f"bind/{name}", partial(_same, name)) for name in CASES),
        ("bind/messages", _messages),
        ("bind/run", _run),
        ("bind/50 lists compile nothing", _lists),
        ("bind/in a compiled function", _compiled),
        ("streams/vectors made late", partial(_late, "vectors")),
        ("streams/data bound late", partial(_late, "bind")),
        ("streams/localized late", _localized_late),
        ("streams/read on the host", _read_on_the_host),
        ("streams/graph behind a late stream", _late_graph),
        ("streams/made in a graph", _made_in_a_graph),
        *((f"streams/lists in a graph/{name}", partial(_lists_in_a_graph, name)) for name in LISTED),
        ("streams/memory of a mask that is gone", _freed),
    ]


def sources() -> Iterator[CudaSource]:
    for name, _ in CASES.values():
        yield from warm.preparation(maskc.compile(f"std:{name}"))
    for name in ("doc_causal", *(CASES[case][0] for case in LISTED)):
        yield from warm.built(maskc.compile(f"std:{name}"))


def _padded(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat((ids, torch.full((N - len(ids),), -1)))


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "lengths": ("doc_causal", lambda: {"doc": ("segments", "lengths", LENGTHS)}),
    "cu_seqlens": (
        "doc_causal",
        lambda: {"doc": ("segments", "cu_seqlens", torch.cat((LENGTHS[:0].new_zeros(1), LENGTHS.cumsum(0))))},
    ),
    "ids": ("doc_full", lambda: {"doc": ("segments", "ids", _padded(IDS))}),
    "positions": ("doc_full", lambda: {"doc": ("segments", "positions", POSITIONS)}),
    "eos": ("doc_full", lambda: {"doc": ("segments", "eos", torch.arange(N) % 700 == 0)}),
    "batch of ids": ("doc_full", lambda: {"doc": ("segments", "ids", torch.stack((_padded(IDS), torch.arange(N) // 9)))}),
    "prefix": ("doc_prefix", lambda: {"doc": ("segments", "lengths", LENGTHS), "prefix": LENGTHS // 2}),
    "prefix by ids": (
        "doc_prefix",
        lambda: {"doc": ("segments", "ids", _padded(IDS)), "prefix": LENGTHS[LENGTHS > 0] // 2},
    ),
    "ranges": ("qk_sparse", lambda: {"drop": ("spans", "ranges", torch.tensor([[5, 90], [90, 100], [1000, 3000]]))}),
    "nested": (
        "share_question",
        lambda: {"sample": ("segments", "ids", torch.arange(N) // 1024), "part": ("segments", "ids", torch.arange(N) // 256)},
    ),
    "heads": ("random_eviction", lambda: {"evict": torch.arange(N) + torch.randint(1, N, (2, 3, N))}),
    "scalar": ("sliding_window", lambda: {"window": torch.tensor(100)}),
    "scalars": ("sliding_window", lambda: {"window": torch.tensor([100, 200])}),
    "sorted": ("cross_pairs", lambda: {"row_pair": torch.arange(N) // 100, "key_pair": torch.arange(N) // 90}),
    "tail that needs folding": ("fid", lambda: {"part": ("segments", "lengths", torch.tensor([1000, 2000]))}),
}
LISTED = ("lengths", "prefix", "ranges", "heads", "scalars")
"""Cases whose numbers also come as lists: sets, a number of each segment, a vector of each head, one of each item."""


def _inputs(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Constructors and tensors of a case on one device."""
    return _made(given, lambda data: data.to(device))


def _made(given: dict[str, Any], form_of: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """form_of: what becomes of the tensors."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, tuple):
            kind, form, data = value
            made[name] = (segments if kind == "segments" else spans)(**{form: form_of(data)})
        else:
            made[name] = form_of(value)
    return made


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """The synchronising operations that torch notices."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            # torch also warns, once in a process, that the mode is a prototype
            found += [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]


def _same(name: str) -> str:
    mask_name, make = CASES[name]
    mask = maskc.compile(f"std:{mask_name}")
    given = make()
    want = mask.bind(**_inputs(given, "cpu")).vectors(N, N)
    on_gpu = _inputs(given, "cuda")
    mask.bind(**on_gpu).vectors(N, N)  # the first use of a torch kernel in a process loads it, which may synchronise
    torch.cuda.synchronize()
    folds = mask_name == "fid"
    for validate, allowed in ((True, 2 if folds else 1), (False, 1 if folds else 0)):
        with synchronisations() as found:
            got = mask.bind(validate=validate, **on_gpu).vectors(N, N)
        if problem := differences(got, want):
            return f"validate={validate}: {problem}"
        if len(found) > allowed:
            return f"validate={validate}: {len(found)} synchronisations, {allowed} allowed: {found}"
    return ""


def _messages() -> str:
    """The first fault is named as on the CPU, whatever else goes wrong on the device."""
    mask: CompiledMask = maskc.compile("std:doc_prefix")
    faults: list[tuple[str, dict[str, Any]]] = [
        (
            "cu_seqlens[2] = 3 after 5",
            {"doc": segments(cu_seqlens=torch.tensor([0, 5, 3, 9], device="cuda")), "prefix": [0, 0, 0]},
        ),
        ("ids[3] = 7 comes back", {"doc": segments(ids=torch.tensor([7, 7, 1, 7], device="cuda")), "prefix": [0, 0, 0]}),
        ("prefix[1] = 9, doc.len[1] = 2", {"doc": segments(lengths=torch.tensor([3, 2], device="cuda")), "prefix": [0, 9]}),
        ("lengths[0] = -5", {"doc": segments(lengths=torch.tensor([-5, 2], device="cuda")), "prefix": [0, 0]}),
        ("reaches token", {"doc": segments(lengths=torch.tensor([2**40], device="cuda")), "prefix": [0]}),
    ]
    for wanted, inputs in faults:
        try:
            mask.bind(**inputs)
        except maskc.MaskcError as e:
            if wanted not in str(e):
                return f"{wanted!r} is not in {e}"
        else:
            return f"{wanted!r}: not refused"
    torch.cuda.synchronize()
    return ""


def _run() -> str:
    """`run` itself never synchronises, with vectors made on the way."""
    mask = maskc.compile("std:doc_causal")
    q, k, v = (torch.randn(1, N, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    maskc.run(mask.bind(doc=segments(lengths=[N])), q, k, v).sum().backward()  # kernels are compiled and loaded
    for where in ("cuda", "cpu"):
        spec = mask.bind(doc=segments(lengths=LENGTHS.to(where)))
        with synchronisations() as found:
            maskc.run(spec, q, k, v).sum().backward()
        if found:
            return f"data on {where}: {len(found)} synchronisations"
    return ""


def _lists() -> str:
    """Fifty lists of documents, of other lengths and counts each: every kernel is there after the first."""
    from maskc.codegen import kernels
    from maskc.runtime import hopper_bwd

    def run(lengths: list[int]) -> None:
        q, k, v = (
            torch.randn(1, sum(lengths), 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        maskc.run(_documents().bind(doc=segments(lengths=torch.tensor(lengths).cuda())), q, k, v).sum().backward()

    run([100, 28])
    modules = (kernels, hopper, hopper_bwd)
    before = [module.compile_cubin for module in modules]
    compiled = []
    try:
        for module in modules:
            module.compile_cubin = lambda *a, **k: compiled.append(a)
        for i in range(50):
            run([1 + i % 7, *[37 + i] * (i % 5), 300 - 3 * i])
    finally:
        for module, function in zip(modules, before, strict=True):
            module.compile_cubin = function
    return f"{len(compiled)} compilations" if compiled else ""


def _compiled() -> str:
    """A mask whose vectors nobody has made, inside torch.compile: the graph breaks there, and the answer is right."""
    qkv = _operands()
    want = _warm(qkv)
    fast = torch.compile(lambda spec, *x: maskc.run(spec, *x) + 0, backend="eager")
    for _ in range(3):
        if not torch.equal(fast(_bound(), *qkv), want):
            return "another result"
    return ""


# ---------------------------------------------------------------- streams

LATE = 200_000_000
"""Cycles for which the stream that makes something is kept busy first, about a tenth of a second."""


def _operands(batch: int = 1, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = batch, N, heads, 128
    return tuple(torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def _bound(lengths: torch.Tensor = LENGTHS) -> maskc.BoundMask:
    return _documents().bind(validate=False, doc=segments(lengths=lengths.cuda()))


@cache
def _documents() -> CompiledMask:
    return maskc.compile("std:doc_causal")


def _warm(qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What is right; and every kernel is loaded, and the pool full of memory that holds something else."""
    want = maskc.run(_bound(), *qkv)
    for _ in range(3):
        maskc.run(_bound(torch.tensor([N // 2, N // 2])), *qkv)
    torch.cuda.synchronize()
    assert isinstance(want, torch.Tensor)
    return want


def _late(what: str) -> str:
    """Nobody waits for the stream that binds, or makes the vectors; a second stream runs at once."""
    qkv, lengths = _operands(), LENGTHS.cuda()
    want = _warm(qkv)
    for _ in range(3):
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        spec = None if what == "bind" else _bound()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(LATE)
            if spec is None:
                spec = _bound(lengths)
            else:
                maskc.run(spec, *qkv)
        with torch.cuda.stream(second):
            got = maskc.run(spec, *qkv)
        if first.query():
            return "the first stream was not late: nothing was tested"
        torch.cuda.synchronize()
        if not torch.equal(got, want):
            return "another stream did not wait"
    return ""


def _read_on_the_host() -> str:
    """Vectors that are asked for on the CPU are there when the call returns, however late the GPU is."""
    mask, lengths = _documents(), LENGTHS.cuda()
    want = mask.bind(doc=segments(lengths=LENGTHS)).vectors(N, N)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(LATE)
        got = mask.bind(validate=False, doc=segments(lengths=lengths)).vectors(N, N, "cpu")
        if problem := differences(got, want):
            return problem
    return ""


def _localized_late() -> str:
    """The vectors of a rank, and the kernel tables made of them, by a stream that is late."""
    layout = contiguous(N, 2)
    want = localize(_bound().vectors(N, N), layout, (1,), layout, (0, 1))
    wanted = [t for t in want.tensors if t is not None]
    first, second, late = torch.cuda.Stream(), torch.cuda.Stream(), 0
    for _ in range(4):  # the first round loads kernels and fills the pools, which may wait for the GPU
        v = _bound().vectors(N, N)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(LATE)
            localized(v, layout, (1,), layout, (0, 1), v.device)
        with torch.cuda.stream(second):
            got = localized(v, layout, (1,), layout, (0, 1), v.device)
            copies = [t.clone() for t in got.tensors if t is not None]
        late += not first.query()
        torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(copies, wanted, strict=True)):
            return "another stream did not wait"
    return "" if late else "the first stream was not late: nothing was tested"


def _late_graph() -> str:
    """A graph captured while the vectors are still being made waits for them when it is replayed."""
    qkv, lengths = _operands(), LENGTHS.cuda()
    want = _warm(qkv)
    first, capturing, pool = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]  # the first fills the pool, which may wait for the GPU
    for graph in graphs:
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(LATE)
            spec = _bound(lengths)
            maskc.run(spec, *qkv)
        with torch.cuda.stream(capturing):
            graph.capture_begin(pool)
            got = maskc.run(spec, *qkv)
            graph.capture_end()
            graph.replay()
    late = not first.query()
    torch.cuda.synchronize()
    if not late:
        return "the first stream was not late: nothing was tested"
    return "" if torch.equal(got, want) else "the graph did not wait"


def _made_in_a_graph() -> str:
    """What a graph makes is its own: a call in the open makes it anew, and a second graph does not read the first one's."""
    qkv = _operands()
    want = _warm(qkv)
    spec = _bound()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = [maskc.run(spec, *qkv) for _ in range(2)]
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        second = maskc.run(spec, *qkv)
    other.replay()
    torch.cuda.synchronize()
    if not torch.equal(second, want):
        return "a second graph read what the first had not made yet"
    if not torch.equal(maskc.run(spec, *qkv), want):
        return "a call in the open used the vectors of a graph"
    graph.replay()
    return "" if all(torch.equal(out, want) for out in inside) else "the graph is wrong"


def _lists_in_a_graph(name: str) -> str:
    """Bound on the host and first used in a graph: every replay has its numbers, whatever memory was used in between."""
    mask_name, make = CASES[name]
    mask, given = maskc.compile(f"std:{mask_name}"), make()
    on_gpu = mask.bind(**_inputs(given, "cuda"))
    qkv = _operands(on_gpu.batch, 2 * on_gpu.heads)
    want = maskc.run(on_gpu, *qkv)  # which loads the kernels
    spec = mask.bind(**_made(given, torch.Tensor.tolist))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maskc.run(spec, *qkv)
    for turn in range(3):
        used = [torch.full((size,), 7, dtype=torch.int32, device=d) for size in (8, 64, 1 << 12, 1 << 16) for d in DEVICES * 16]
        del used
        got.fill_(torch.nan)
        graph.replay()
        if not torch.equal(got, want):
            return f"replay {turn} is wrong"
    return "" if torch.equal(maskc.run(spec, *qkv), want) else "a call in the open used what the graph had made"


DEVICES = ("cuda", "cpu")


def _freed() -> str:
    """The memory of a mask is not used again while another stream still reads it."""
    qkv, lengths, other = _operands(), LENGTHS.cuda(), torch.tensor([N // 2, N // 2]).cuda()
    want = _warm(qkv)
    second, late = torch.cuda.Stream(), 0
    for _ in range(4):  # the first round fills the pools, which may wait for the GPU
        spec = _bound(lengths)
        maskc.run(spec, *qkv)
        torch.cuda.synchronize()
        with torch.cuda.stream(second):
            torch.cuda._sleep(LATE)
            got = maskc.run(spec, *qkv)
        del spec
        for size in (1 << 14, 1 << 16, 1 << 18):  # on this stream, which does not wait
            [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
        maskc.run(_bound(other), *qkv)
        late += not second.query()
        torch.cuda.synchronize()
        if not torch.equal(got, want):
            return "the mask was overwritten while it was read"
    return "" if late else "the second stream was not late: nothing was tested"
