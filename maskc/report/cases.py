"""One mask with the data of one batch, as plain data for a page: words, vectors, documents, counts. All of it the library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from maskc.binding.bind import bind
from maskc.binding.bound import BoundInputs, BoundMask
from maskc.boundary import VECTOR_NAMES, BoundaryVectors
from maskc.compiled import CompiledMask
from maskc.explain import explain
from maskc.pictures import tile_counts, visible_pairs
from maskc.report.encode import runs
from maskc.report.gallery import EXAMPLES, Example, example
from maskc.report.plans import communication, localization, plans
from maskc.report.predicate import Json, predicate
from maskc.targets import load
from maskc.tiles import block_minmax, classify

SLICES = 4
"""Batch items and mask heads that a page shows."""
RUNS = 60_000
"""Longest text of one vector, in runs; beyond, a page holds evenly spaced keys only."""
SPACED_KEYS = 4096
TILE_LIMIT = 1 << 26
"""Tile counts over tables beyond this are left out."""
TOKENS_WITHOUT_DATA = 128


@dataclass(frozen=True, slots=True)
class Subject:
    """What a page is to show: a bound mask with its name and the group it is listed in.

    scaled: the same mask at a training length, for balance and transfers. planned: whether to show those at all.
    """

    name: str
    group: str
    bound: BoundMask
    scaled: BoundMask | None = None
    planned: bool = True


def case(subject: Subject, tick: Callable[[str], None] = lambda _: None) -> dict[str, Json]:
    """The data of one mask. `tick` is told what is being worked at."""
    bound = subject.bound
    v = bound.vectors()
    fn = bound.compiled.fn
    words = explain(bound.compiled)
    tick(f"{subject.name}: tiles")
    sizes = tile_sizes(max(v.nq, v.nk))
    counts: dict[str, Json] = {}
    for block in sizes:
        if -(-v.nq // block[0]) * -(-v.nk // block[1]) * v.batch * v.heads <= TILE_LIMIT:
            counts[f"{block[0]}x{block[1]}"] = [n for _, n in sorted(tile_counts(classify(v, *block)).items())]
    shown = [slice_data(bound, v, b, h, tuple(parse_size(s) for s in counts)) for b, h in _slices(v)]
    tick(f"{subject.name}: plans")
    scaled = v if subject.scaled is None else subject.scaled.vectors()
    return {
        "name": subject.name,
        "group": subject.group,
        "source": fn.source.text if fn.source is not None else fn.name,
        "verdict": words.verdict,
        "rows": list(words.rows),
        "needs": list(words.needs),
        "words": dict(words.vectors),
        "properties": [list(p) for p in words.properties],
        "predicate": predicate(fn),
        "nq": v.nq,
        "nk": v.nk,
        "batch": v.batch,
        "heads": v.heads,
        "square": v.nq == v.nk,
        "visible": visible_pairs(v),
        "tiles": counts,
        "tile": f"{sizes[default_size(sizes)][0]}x{sizes[default_size(sizes)][1]}",
        "slices": list(shown),
        "local": localization(v),
        "plan": plans(scaled) if subject.planned else None,
        "comm": communication(scaled) if subject.planned else None,
    }


def parse_size(text: str) -> tuple[int, int]:
    rows, _, keys = text.partition("x")
    return int(rows), int(keys)


def tile_sizes(n: int) -> tuple[tuple[int, int], ...]:
    """Tile sizes (rows, keys) worth a look at a length: the kernels' own where there are enough tiles of them."""
    if n <= 48:
        return (2, 2), (4, 4), (8, 8)
    if n <= 1024:
        return (8, 8), (16, 16), (16, 32), (32, 32), (64, 64)
    if n <= 1 << 18:
        return (64, 128), (192, 64), (128, 128), (192, 128), (256, 256)
    return (128, 128), (256, 256), (512, 512)


def default_size(sizes: tuple[tuple[int, int], ...]) -> int:
    """Number of the size that a page opens with."""
    return sizes.index((128, 128)) if (128, 128) in sizes else 1


def _slices(v: BoundaryVectors) -> list[tuple[int, int]]:
    return [(b, h) for b in range(v.batch) for h in range(v.heads)][:SLICES]


def slice_data(bound: BoundMask, v: BoundaryVectors, item: int, head: int, sizes: tuple[tuple[int, int], ...]) -> dict[str, Json]:
    """Vectors and inputs of one batch item and mask head.

    Where a vector has too many runs, `stride` keys lie between those that are given, and the minima and maxima of the KV
    blocks come along so that tile classes stay exact.
    """
    one = head_of(v, item, head)
    texts = {name: runs(t[0, 0], RUNS) for name, t in zip(VECTOR_NAMES, one.tensors, strict=True) if t is not None}
    out: dict[str, Json] = {"item": item, "head": head, "causal": one.causal, "stride": 1, "inputs": _inputs(bound, item, head)}
    if one.blocks is not None:
        rows = ["".join("01"[int(x)] for x in row) for row in one.blocks.keep[0, 0].tolist()]
        out["blocks"] = {"q": one.blocks.block_q, "kv": one.blocks.block_kv, "keep": list(rows)}
    if any(text is None for text in texts.values()):
        stride = -(-one.nk // SPACED_KEYS)
        out["stride"] = stride
        out["extremes"] = {str(kv): _extremes(one, kv) for kv in sorted({kv for _, kv in sizes})}
        texts = {n: runs(t[0, 0, ::stride]) for n, t in zip(VECTOR_NAMES, one.tensors, strict=True) if t is not None}
    out["vectors"] = dict(texts)
    return out


def head_of(v: BoundaryVectors, item: int, head: int) -> BoundaryVectors:
    """The vectors of one batch item and mask head alone, on the CPU."""

    def pick(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[item : item + 1, head : head + 1].cpu()

    blocks = v.blocks
    if blocks is not None:
        keep = blocks.keep.cpu()
        rows, columns = min(item, keep.shape[0] - 1), min(head, keep.shape[1] - 1)
        blocks = replace(blocks, keep=keep[rows : rows + 1, columns : columns + 1])
    lts, lte, uts, ute, diag = map(pick, v.tensors)
    return replace(v, batch=1, heads=1, lts=lts, lte=lte, uts=uts, ute=ute, diag=diag, blocks=blocks)


def _extremes(v: BoundaryVectors, block_kv: int) -> dict[str, Json]:
    """[minima, maxima] per KV block of each vector that exists."""
    bounds = block_minmax(v, block_kv)
    named = zip(VECTOR_NAMES, (bounds.lts, bounds.lte, bounds.uts, bounds.ute, bounds.diag), strict=True)
    return {name: [runs(e.low[0, 0]), runs(e.high[0, 0])] for name, e in named if e is not None}


def _inputs(bound: BoundMask, item: int, head: int) -> Json:
    """The raw inputs of the predicate, or None where they are too long for a page."""
    given: BoundInputs = bound.inputs
    out: dict[str, Json] = {"sets": {}, "vectors": {}, "scalars": {}}
    sets: dict[str, Json] = {}
    for name, table in given.sets.items():
        row = min(item, table.batch - 1)
        count = int(table.counts[row])
        decl = bound.compiled.fn.input(name)
        edges = runs(table.starts[row, :count], RUNS), runs(table.ends[row, :count], RUNS)
        if None in edges:
            return None
        sets[name] = {"start": edges[0], "end": edges[1], "kind": decl.kind.value, "within": decl.within}
    vectors: dict[str, Json] = {}
    for name, t in given.vectors.items():
        values = t[min(item, t.shape[0] - 1), min(head, t.shape[1] - 1)]
        text = runs(values, RUNS)
        if text is None:
            return None
        vectors[name] = text
    scalars: dict[str, Json] = {
        name: x if isinstance(x, int) else int(x[min(item, len(x) - 1)]) for name, x in given.scalars.items()
    }
    out.update(sets=sets, vectors=vectors, scalars=scalars)
    return out


def standard(unit: int = 1, names: tuple[str, ...] | None = None) -> Iterator[Subject]:
    """The standard masks with their examples; with `unit` > 1 planned at unit times that length, else not planned."""
    for name in names or tuple(EXAMPLES):
        compiled = load(f"std:{name}")
        small, large = (_bind(compiled, example(name, u)) for u in (1, unit))
        yield Subject(name, "standard", small, large, planned=unit > 1)


def _bind(compiled: CompiledMask, e: Example) -> BoundMask:
    return bind(compiled, nq=e.nq, nk=e.nk, batch=None, validate=True, inputs=e.inputs)
