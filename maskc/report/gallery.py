"""The standard set with data to look at: small enough to see every cell, and the same shape at a training length.

Every example is a function of a unit: with unit 1 a sequence has 128 tokens, with unit u documents, windows and prefixes
are u times as long. Constants inside a mask (block sizes) stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from maskc.binding.constructors import segments, spans

TOKENS = 128
DOCS = (49, 35, 44)
PREFIXES = (14, 9, 20)
IMAGES = ((8, 22), (58, 70), (96, 116))


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of `bind`."""

    nq: int
    nk: int
    inputs: dict[str, object]


def example(mask: str, unit: int = 1) -> Example:
    """The example of a standard mask, named as in `std:NAME` or `std:FILE:MASK`."""
    return EXAMPLES[mask](unit)


def _square(**inputs: object) -> Callable[[int], Example]:
    """A square example; an input that is a function is called with the unit."""

    def make(u: int) -> Example:
        return Example(TOKENS * u, TOKENS * u, {name: value(u) if callable(value) else value for name, value in inputs.items()})

    return make


def _docs(u: int) -> object:
    return segments(lengths=[n * u for n in DOCS])


def _images(u: int) -> object:
    return spans(ranges=[(a * u, b * u) for a, b in IMAGES])


def _times(n: int) -> Callable[[int], int]:
    return lambda u: n * u


def _parts(u: int) -> object:
    """Per document a question and three answers."""
    lengths = [n for doc in DOCS for n in (doc - 3 * (doc // 4), *[doc // 4] * 3)]
    return segments(lengths=[n * u for n in lengths])


def _eviction(u: int) -> torch.Tensor:
    """From the middle on one key is evicted per row, in a fixed order that looks random."""
    n = TOKENS * u
    row = torch.arange(n // 2, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: n // 2]
    evict = torch.full((n,), n)
    evict[order] = torch.maximum(row, order + 1)
    return evict


def _tree_ends(u: int) -> torch.Tensor:
    """In every document a trunk, then branches of unequal length: a key is seen until the end of its branch."""
    ends: list[int] = []
    start = 0
    for doc in DOCS:
        trunk, stop = doc // 4, start + doc
        ends += [stop * u] * (trunk * u)
        edge = start + trunk
        for share in (2, 3, 1):
            size = (doc - trunk) // share // 2 if edge < stop else 0
            size = stop - edge if share == 1 else size
            ends += [(edge + size) * u] * (size * u)
            edge += size
        start = stop
    return torch.tensor(ends)


def _bottom_right(u: int) -> Example:
    return Example(96 * u, TOKENS * u, {})


def _cross_pairs(u: int) -> Example:
    rows, keys = (10, 22, 8, 30, 26), (28, 12, 40, 20, 28)
    ids = torch.arange(5)
    return Example(
        96 * u,
        TOKENS * u,
        {
            "row_pair": ids.repeat_interleave(torch.tensor(rows) * u),
            "key_pair": ids.repeat_interleave(torch.tensor(keys) * u),
        },
    )


def _dflash(u: int) -> Example:
    stored, drafts = 96 * u, 32 * u
    anchor = torch.arange(drafts) // 4 * 4 * (stored // drafts) + 1
    return Example(drafts, stored + drafts, {"S": stored, "anchor": anchor})


def _fixed_sparse(u: int) -> Example:
    return Example(512 * u, 512 * u, {})


def _teacher_forcing(u: int) -> Example:
    """Documents of a clean half followed by its noisy copy in blocks."""
    noisy, clean, start = [], [], 0
    for doc in DOCS:
        half = doc // 2
        clean.append((start * u, (start + half) * u))
        edges = range(start + half, start + doc, 8)
        noisy += [(a * u, min(a + 8, start + doc) * u) for a in edges]
        start += doc
    return Example(TOKENS * u, TOKENS * u, {"doc": _docs(u), "noisy": spans(ranges=noisy), "clean": spans(ranges=clean)})


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "full": _square(),
    "causal": _square(),
    "sliding_window": _square(window=_times(24)),
    "doc_causal": _square(doc=_docs),
    "doc_full": _square(doc=_docs),
    "doc_prefix": _square(doc=_docs, prefix=lambda u: [n * u for n in PREFIXES]),
    "doc_window": _square(doc=_docs, window=_times(12)),
    "share_question": _square(sample=_docs, part=_parts),
    "global_window": _square(globals=_times(6), window=_times(12)),
    "causal_blockwise": _square(part=lambda u: segments(lengths=[n * u for n in (26, 38, 30, 34)])),
    "prefix_lm": _square(prefix=_times(48)),
    "qk_sparse": _square(drop=lambda u: spans(ranges=[(20 * u, 44 * u), (70 * u, 96 * u)])),
    "random_eviction": _square(evict=_eviction),
    "sinks_window": _square(doc=_docs, window=_times(10), sinks=_times(4)),
    "chunked": _square(doc=_docs, chunk=_times(12)),
    "gemma3:local": _square(doc=_docs, image=_images, window=_times(16)),
    "gemma3:global": _square(doc=_docs, image=_images, window=_times(16)),
    "transfusion": _square(doc=_docs, image=_images, noised=[False, True, False]),
    "block_causal": _square(doc=_docs, block_size=_times(7)),
    "block_diffusion": _square(L=_times(64)),
    "teacher_forcing": _teacher_forcing,
    "prefix_tree": _square(doc=_docs, end=_tree_ends),
    "fid": _square(part=lambda u: segments(lengths=[n * u for n in (30, 34, 28, 36)])),
    "fixed_sparse": _fixed_sparse,
    "longformer_causal": _square(doc=_docs, window=_times(12), globals=_times(4)),
    "symmetric_window": _square(doc=_docs, left=_times(6), right=_times(12)),
    "duo_heads": _square(doc=_docs, streaming=[False, True], window=_times(12), sinks=_times(3)),
    "key_padding": _square(length=_times(100)),
    "left_padding": _square(pad=_times(28)),
    "bottom_right": _bottom_right,
    "cross_pairs": _cross_pairs,
    "dflash": _dflash,
}
"""In the order in which a page lists them."""
