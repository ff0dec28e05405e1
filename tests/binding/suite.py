"""Masks of the suite with data large enough for tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from maskc import segments, spans

SUITE = Path(__file__).parents[1] / "data" / "suite"
DOCS = [700, 1, 0, 1900, 300, 1000]  # and a padded tail of 195
EVEN = [512, 1024, 512, 2048]


def _images(lengths: list[int]) -> Any:
    """A span of 150 tokens in every document that has room, from its token 37 on."""
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    return spans(ranges=[(s + 37, s + 187) for s, n in zip(starts.tolist(), lengths, strict=True) if n > 200])


def _clean_noisy(n: int, block: int) -> dict[str, Any]:
    """[noisy][clean] pairs of blocks, in one document of n tokens."""
    edges = range(0, n, 2 * block)
    return {
        "doc": segments(lengths=[n]),
        "noisy": spans(ranges=[(e, e + block) for e in edges]),
        "clean": spans(ranges=[(e + block, e + 2 * block) for e in edges]),
    }


def large_inputs(n: int = 4096) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, inputs) of every wanted suite mask at n = 4096 rows and keys."""
    assert n == sum(DOCS) + 195 == sum(EVEN)
    doc = {"doc": segments(lengths=DOCS)}
    generator = torch.Generator().manual_seed(0)
    parts = {"sample": segments(lengths=[2048, 2048]), "part": segments(lengths=[500, 748, 800, 300, 700, 1048])}
    yield from {
        "01_full": {},
        "02_causal": {},
        "03_sliding_window": {"window": 300},
        "04_doc_causal": doc,
        "05_doc_full": doc,
        "06_share_question": parts,
        "07_global_window": {"globals": 64, "window": 256},
        "08_causal_blockwise": {"part": segments(lengths=EVEN)},
        "09_doc_prefix": {**doc, "prefix": [300, 0, 0, 700, 10, 1000]},
        "10_prefix_lm": {"prefix": 1500},
        "11_qk_sparse": {"drop": spans(ranges=[(1024, 1562), (2358, 4058)])},
        "12_random_eviction": {"evict": torch.arange(n) + torch.randint(1, n, (n,), generator=generator)},
        "13_doc_window": {**doc, "window": 256},
        "14_sinks_window": {**doc, "window": 256, "sinks": 4},
        "15_chunked": doc,
        "16_gemma3_global": {**doc, "image": _images(DOCS)},
        "17_gemma3_local": {**doc, "image": _images(DOCS), "window": 512},
        "18_block_causal": doc,
        "20_block_diffusion": {"L": n // 2},
        "21_prefix_tree": {"doc": segments(lengths=EVEN), "end": _tree_ends(EVEN)},
        "22_transfusion": {**doc, "image": _images(DOCS), "noised": [1, 0, 1, 0]},
        "23_fixed_sparse": {},
        "24_longformer_causal": {**doc, "window": 256, "globals": 16},
        "25_key_padding": {"length": 3000},
        "26_left_padding": {"pad": 1000},
        "27_bottom_right": {},
        "28_duo_heads": {**doc, "streaming": [0, 1], "window": 256, "sinks": 4},
        "29_fid": {"part": segments(lengths=EVEN)},
        "31_symmetric_window_doc": {**doc, "left": 100, "right": 50},
        "32_row_style": {"doc": segments(lengths=EVEN)},
        "34_teacher_forcing_interleaved": _clean_noisy(n, 256),
        "35_parallel_drafts_dflash": {"S": n - 1024, "anchor": torch.arange(1024) * 3},
        "37_cross_pairs": {"row_pair": torch.arange(n) // 700, "key_pair": torch.arange(n) // 900},
        "94_packed_blockwise_causal": {**parts},
    }.items()


def _tree_ends(lengths: list[int]) -> torch.Tensor:
    """Subtree ends of a depth-first order: in every document a trunk of a quarter, then branches of 100 tokens."""
    ends, first = [], 0
    for n in lengths:
        trunk = n // 4
        ends += [first + n] * trunk
        ends += [min(first + trunk + (i // 100 + 1) * 100, first + n) for i in range(n - trunk)]
        first += n
    return torch.tensor(ends)
