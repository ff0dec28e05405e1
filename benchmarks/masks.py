"""The twelve masks of the FlashMask family at any length, as mask files and the inputs that bind them.

Documents come from `tests/data/layouts.json`; a length without layouts takes those of 8192, scaled, the last document
taking the rest. Shared questions are cut at uniform random points (`random.Random(0)`), evictions drawn with torch's
generator seeded 0, so every run sees the same masks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import maskc

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.boundary import BoundaryVectors

LAYOUTS = Path(__file__).parents[1] / "tests" / "data" / "layouts.json"
GLOBALS = 16


@dataclass(frozen=True)
class MaskCase:
    """One mask at one length. `mask` and `inputs` are what `maskc.compile` and `bind` take; the rest describes it plainly.

    lengths: documents. parts: per document its question and answers. window: keys before (and, for the global window,
    after) a row, as the mask means it. drop: half-open spans. evict: int32 [heads, seqlen].
    """

    name: str
    seqlen: int
    heads: int
    mask: str
    inputs: dict[str, Any]
    lengths: list[int] | None = None
    prefixes: list[int] | None = None
    parts: list[list[int]] | None = None
    window: int = 0
    globals: int = 0
    prefix: int = 0
    drop: list[tuple[int, int]] | None = None
    evict: Any = None

    def spec(self) -> BoundMask:
        return maskc.compile(self.mask).bind(nq=self.seqlen, nk=self.seqlen, **self.inputs)


@dataclass(frozen=True)
class Layout:
    """Documents of one sequence: lengths, prefix lengths, and which are dropped by QK-sparse."""

    lengths: list[int]
    prefixes: list[int]
    dropped: list[bool]


def mask_case(name: str, seqlen: int, layout: int = 0, heads: int = 32) -> MaskCase:
    """The mask `name` (one of NAMES) at `seqlen` with document layout number `layout`."""
    return replace(_CASES[name](seqlen, documents(seqlen, layout), heads), name=name)


def density(case: MaskCase) -> float:
    """Visible cells over all cells, exact."""
    from maskc.pictures import visible_pairs

    v = vectors_of(case)
    return visible_pairs(v) / (v.batch * v.heads * v.nq * v.nk)


def tile_density(case: MaskCase) -> float:
    """Tiles of 128 x 128 with a visible cell over all tiles: what some papers take for the density."""
    from maskc.tiles import TileClass, classify

    classes = classify(vectors_of(case), 128, 128)
    return float((classes != TileClass.SKIP).double().mean())


def vectors_of(case: MaskCase) -> BoundaryVectors:
    """On the CPU."""
    return case.spec().vectors()


def documents(seqlen: int, layout: int = 0) -> Layout:
    """A document layout, scaled from 8192 where the length has none of its own."""
    table = _layouts()
    own = str(seqlen) in table
    chosen = table[str(seqlen) if own else "8192"][layout]
    scale = (lambda n: n) if own else (lambda n: n * seqlen // 8192)
    lengths = [scale(d["length"]) for d in chosen["documents"]]
    lengths[-1] = seqlen - sum(lengths[:-1])
    prefixes = [min(scale(d["prefix"]), n) for d, n in zip(chosen["documents"], lengths, strict=True)]
    return Layout(lengths, prefixes, [bool(d) for d in chosen["dropped"]])


@cache
def _layouts() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(LAYOUTS.read_text())
    return table


def _plain(mask: str) -> Callable[[int, Layout, int], MaskCase]:
    return lambda seqlen, docs, heads: MaskCase("", seqlen, heads, mask, {})


def _documents(mask: str) -> Callable[[int, Layout, int], MaskCase]:
    def make(seqlen: int, docs: Layout, heads: int) -> MaskCase:
        return MaskCase("", seqlen, heads, mask, {"doc": maskc.segments(lengths=docs.lengths)}, lengths=docs.lengths)

    return make


def _sliding_window(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    window = max(1, seqlen // 16)
    return MaskCase("", seqlen, heads, "std:sliding_window", {"window": window}, window=window)


def _share_question(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    rng = random.Random(0)
    parts = []
    for length in docs.lengths:
        answers = min(rng.randint(2, 6), max(0, length - 1))
        cuts = sorted(rng.sample(range(1, length), answers)) if answers else []
        parts.append([b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)])
    inputs = {"sample": maskc.segments(lengths=docs.lengths), "part": maskc.segments(lengths=[n for doc in parts for n in doc])}
    return MaskCase("", seqlen, heads, "std:share_question", inputs, lengths=docs.lengths, parts=parts)


def _global_window(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    inputs = {"globals": GLOBALS, "window": seqlen // 16}
    return MaskCase("", seqlen, heads, "std:global_window", inputs, window=seqlen // 16, globals=GLOBALS)


def _causal_blockwise(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    inputs = {"part": maskc.segments(lengths=docs.lengths)}
    return MaskCase("", seqlen, heads, "std:causal_blockwise", inputs, lengths=docs.lengths)


def _prefix_document(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    inputs = {"doc": maskc.segments(lengths=docs.lengths), "prefix": docs.prefixes}
    return MaskCase("", seqlen, heads, "std:doc_prefix", inputs, lengths=docs.lengths, prefixes=docs.prefixes)


def _prefix_causal(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    return MaskCase("", seqlen, heads, "std:prefix_lm", {"prefix": seqlen // 2}, prefix=seqlen // 2)


def _qk_sparse(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    ends = list(accumulate(docs.lengths))
    spans = zip(ends, docs.lengths, docs.dropped, strict=True)
    drop = [(end - length, end) for end, length, dropped in spans if dropped]
    return MaskCase("", seqlen, heads, "std:qk_sparse", {"drop": maskc.spans(ranges=drop)}, drop=drop)


def _random_eviction(seqlen: int, docs: Layout, heads: int) -> MaskCase:
    """From row S/2 on one key is evicted per row; every head draws its own."""
    import torch

    generator = torch.Generator().manual_seed(0)
    first = seqlen // 2
    evict = torch.full((heads, seqlen), seqlen, dtype=torch.int32)
    rows = torch.arange(first, seqlen, dtype=torch.int32)
    for head in evict:
        keys = torch.randperm(max(1, seqlen - 1), generator=generator)[: seqlen - first].sort().values
        head[keys] = torch.maximum(rows[: len(keys)], keys.to(torch.int32) + 1)
    return MaskCase("", seqlen, heads, "std:random_eviction", {"evict": evict[None]}, evict=evict)


_CASES: dict[str, Callable[[int, Layout, int], MaskCase]] = {
    "full": _plain("std:full"),
    "causal": _plain("std:causal"),
    "sliding_window": _sliding_window,
    "causal_document": _documents("std:doc_causal"),
    "document": _documents("std:doc_full"),
    "share_question": _share_question,
    "global_sliding_window": _global_window,
    "causal_blockwise": _causal_blockwise,
    "prefix_lm_document": _prefix_document,
    "prefix_lm_causal": _prefix_causal,
    "qk_sparse": _qk_sparse,
    "random_eviction": _random_eviction,
}
NAMES: tuple[str, ...] = tuple(_CASES)
