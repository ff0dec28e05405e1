"""Random but legal inputs for every mask of the suite, at any length, and random boundary vectors of every form."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import maskc
from maskc.boundary import BlockTable, BoundaryVectors

SUITE = Path(__file__).parent.parent / "data" / "suite"
Inputs = dict[str, Any]


def cut(n: int, rng: random.Random, pieces: int | None = None) -> list[int]:
    """Lengths that sum to n: uneven, with one-token and empty pieces among them."""
    pieces = pieces if pieces is not None else rng.randint(1, max(1, min(12, n)))
    marks = sorted(rng.randint(0, n) for _ in range(pieces - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, n], strict=True)]


def docs(n: int, rng: random.Random) -> list[int]:
    """Document lengths; half of the time a tail of padding stays outside."""
    return cut(n - (rng.randint(0, n // 4) if rng.random() < 0.5 else 0), rng)


def nested(lengths: list[int], rng: random.Random, most: int = 4) -> list[int]:
    """Each length cut further into 1..most parts, flat."""
    return [part for length in lengths for part in cut(length, rng, rng.randint(1, most))]


def spans_in(lengths: list[int], rng: random.Random) -> list[tuple[int, int]]:
    """About one span (start, end) in every second segment, sometimes two that touch; none is empty."""
    out, at = [], 0
    for length in lengths:
        if length >= 2 and rng.random() < 0.7:
            a = rng.randrange(length)
            b = rng.randint(a + 1, length)
            out.append((at + a, at + b))
            if b < length and rng.random() < 0.4:
                out.append((at + b, at + rng.randint(b + 1, length)))
        at += length
    return out


def spans(n: int, ranges: list[tuple[int, int]]) -> Any:
    """maskc.spans from (start, end) pairs, by ids."""
    ids = [-1] * n
    for i, (start, end) in enumerate(ranges):
        ids[start:end] = [i] * (end - start)
    return maskc.spans(ids=ids)


def _tree_ends(lengths: list[int], n: int, rng: random.Random) -> list[int]:
    """Ends of random depth-first subtrees, one tree a document."""
    ends, at = [k + 1 for k in range(n)], 0
    for length in lengths:
        stack = [at + length]
        for k in range(at, at + length):
            while stack[-1] <= k:
                stack.pop()
            ends[k] = rng.randint(k + 1, stack[-1])
            stack.append(ends[k])
        at += length
    return ends


def _interleaved(n: int, rng: random.Random) -> Inputs:
    """[noisy b0][clean b0][noisy b1][clean b1]... in every document."""
    lengths = docs(n, rng)
    noisy: list[tuple[int, int]] = []
    clean: list[tuple[int, int]] = []
    at = 0
    for length in lengths:
        here = at
        for i, size in enumerate(cut(length, rng, 2 * rng.randint(1, 3))):
            if size:
                (noisy if i % 2 == 0 else clean).append((here, here + size))
            here += size
        at += length
    return {"doc": maskc.segments(lengths=lengths), "noisy": spans(n, noisy), "clean": spans(n, clean)}


def _share(n: int, rng: random.Random) -> Inputs:
    samples = docs(n, rng)
    return {"sample": maskc.segments(lengths=samples), "part": maskc.segments(lengths=nested(samples, rng))}


def _docs(n: int, rng: random.Random, **more: Any) -> Inputs:
    return {"doc": maskc.segments(lengths=docs(n, rng)), **more}


def _images(n: int, rng: random.Random, **more: Any) -> Inputs:
    lengths = docs(n, rng)
    return {"doc": maskc.segments(lengths=lengths), "image": spans(n, spans_in(lengths, rng)), **more}


def _transfusion(n: int, rng: random.Random) -> Inputs:
    lengths = docs(n, rng)
    found = spans_in(lengths, rng)
    noised = [rng.random() < 0.5 for _ in found]
    return {"doc": maskc.segments(lengths=lengths), "image": spans(n, found), "noised": noised}


def _prefix(n: int, rng: random.Random) -> Inputs:
    lengths = docs(n, rng)
    return {"doc": maskc.segments(lengths=lengths), "prefix": [rng.randint(0, length) for length in lengths]}


def _tree(n: int, rng: random.Random) -> Inputs:
    lengths = cut(n, rng)
    return {"doc": maskc.segments(lengths=lengths), "end": _tree_ends(lengths, n, rng)}


def _window(n: int, rng: random.Random) -> int:
    return rng.randint(1, max(1, n // 3))


def _dflash(nq: int, nk: int, rng: random.Random) -> Inputs:
    context = nk - nq
    return {"S": context, "anchor": sorted(rng.randint(0, context) for _ in range(nq))}


def _pairs(nq: int, nk: int, rng: random.Random) -> Inputs:
    pairs = max(1, nq // 3)
    return {"row_pair": sorted(rng.choices(range(pairs), k=nq)), "key_pair": sorted(rng.choices(range(pairs), k=nk))}


def _evict(n: int, rng: random.Random) -> list[int]:
    return [k + rng.randint(1, n) for k in range(n)]


# Masks that need nq == nk: name of the suite file -> inputs for n tokens.
SQUARE: dict[str, Callable[[int, random.Random], Inputs]] = {
    "04_doc_causal": _docs,
    "05_doc_full": _docs,
    "06_share_question": _share,
    "08_causal_blockwise": lambda n, r: {"part": maskc.segments(lengths=docs(n, r))},
    "09_doc_prefix": _prefix,
    "11_qk_sparse": lambda n, r: {"drop": spans(n, spans_in(cut(n, r), r))},
    "13_doc_window": lambda n, r: _docs(n, r, window=_window(n, r)),
    "14_sinks_window": lambda n, r: _docs(n, r, window=_window(n, r), sinks=r.randint(0, 5)),
    "15_chunked": _docs,
    "16_gemma3_global": _images,
    "17_gemma3_local": lambda n, r: _images(n, r, window=_window(n, r)),
    "18_block_causal": _docs,
    "21_prefix_tree": _tree,
    "22_transfusion": _transfusion,
    "24_longformer_causal": lambda n, r: _docs(n, r, window=_window(n, r), globals=r.randint(0, 5)),
    "28_duo_heads": lambda n, r: _docs(n, r, window=_window(n, r), sinks=r.randint(0, 5), streaming=[True, False]),
    "29_fid": lambda n, r: {"part": maskc.segments(lengths=cut(n, r))},  # a padded tail would make a third run
    "31_symmetric_window_doc": lambda n, r: _docs(n, r, left=r.randint(0, n), right=r.randint(0, n // 4)),
    "32_row_style": _docs,
    "34_teacher_forcing_interleaved": _interleaved,
    "94_packed_blockwise_causal": _share,
}

# Masks that mean what they say for any nq and nk.
RECTANGULAR: dict[str, Callable[[int, int, random.Random], Inputs]] = {
    "01_full": lambda nq, nk, r: {},
    "02_causal": lambda nq, nk, r: {},
    "03_sliding_window": lambda nq, nk, r: {"window": _window(nk, r)},
    "07_global_window": lambda nq, nk, r: {"globals": r.randint(0, 5), "window": _window(nk, r)},
    "10_prefix_lm": lambda nq, nk, r: {"prefix": r.randint(0, nk)},
    "12_random_eviction": lambda nq, nk, r: {"evict": _evict(nk, r)},
    "23_fixed_sparse": lambda nq, nk, r: {},
    "25_key_padding": lambda nq, nk, r: {"length": r.randint(0, nk)},
    "26_left_padding": lambda nq, nk, r: {"pad": r.randint(0, nk)},
    "37_cross_pairs": _pairs,
}

NAMES: tuple[str, ...] = tuple(
    sorted([*SQUARE, *RECTANGULAR, "20_block_diffusion", "27_bottom_right", "35_parallel_drafts_dflash"])
)


def suite_mask(name: str, nq: int, nk: int, rng: random.Random) -> tuple[Path, Inputs] | None:
    """(file, bind keywords) of a suite mask at this shape; None where the mask cannot have that shape."""
    path = SUITE / f"{name}.mask"
    if name in SQUARE:
        return (path, SQUARE[name](nq, rng)) if nq == nk else None
    if name in RECTANGULAR:
        return path, RECTANGULAR[name](nq, nk, rng)
    if name == "20_block_diffusion":
        return (path, {"L": nk // 2}) if nq == nk and nk % 2 == 0 else None
    if name == "27_bottom_right":
        return (path, {}) if nq <= nk else None
    if name == "35_parallel_drafts_dflash":
        return (path, _dflash(nq, nk, rng)) if nq <= nk else None
    raise KeyError(name)


# ---------------------------------------------------------------- random boundary vectors

FORMS: tuple[str, ...] = (
    "causal+lts",
    "causal+lts+lte",
    "causal+lts+lte+uts+ute",
    "lts+ute",
    "lts+lte+uts+ute",
    "swapped",
    "touching",
    "diag+lts+lte+uts+ute",
    "diag+ute",
    "out_of_range_tiles",
    "alternating_blocks",
    "blocks",
    "blocks+causal+lts",
    "all_masked",
    "unseen_keys",
    "empty_rows",
    "bands",
)


def random_vectors(form: str, nq: int, nk: int, batch: int, heads: int, seed: int, device: str) -> BoundaryVectors:
    """Vectors of a form by name: ordered or swapped intervals, touching ones, empty rows, keys that no row sees."""
    gen = torch.Generator().manual_seed(seed)
    names = form.split("+")

    def draw(high: int = nq + 1) -> torch.Tensor:
        return torch.randint(0, max(1, high), (batch, heads, nk), generator=gen, dtype=torch.int32)

    a, b, c, d = (draw() for _ in range(4))
    lo, hi = torch.minimum(a, b), torch.maximum(a, b)
    lo2, hi2 = torch.minimum(c, d), torch.maximum(c, d)
    key = torch.arange(nk, dtype=torch.int32).expand(batch, heads, nk)
    parts: dict[str, torch.Tensor] = {}
    match form:
        case "swapped":  # the lower slot holds the upper run
            four = torch.stack([a, b, c, d]).sort(0).values
            parts = {"lts": four[2], "lte": four[3], "uts": four[0], "ute": four[1]}
        case "touching":
            three = torch.stack([a, b, c]).sort(0).values
            parts = {"lts": three[1], "lte": three[2], "uts": three[0], "ute": three[1]}
        case "out_of_range_tiles":  # whole KV blocks whose bound is 0 or nq
            block = key // 128 % 3
            parts = {"lts": torch.where(block == 0, 0, torch.where(block == 1, nq, a))}
        case "alternating_blocks":  # every second Q block survives
            start = key // 128 % 2 * 128
            parts = {"lts": start + 128, "lte": start + 256, "uts": torch.zeros_like(start), "ute": start}
        case "bands":  # of runs of 200 keys, whole warp groups of a tile see all or nothing
            bounds = [t[..., (key[0, 0] // 200)] // 64 * 64 for t in torch.stack([a, b, c, d]).sort(0).values]
            parts = dict(zip(("uts", "ute", "lts", "lte"), bounds, strict=True))
        case "all_masked":
            parts = {"lts": torch.zeros_like(a)}
        case "unseen_keys":
            parts = {"lts": torch.where(draw(4) == 0, 0, hi)}
        case "empty_rows":
            parts = {"lts": hi.clamp(max=nq * 2 // 3), "ute": torch.full_like(a, nq // 5)}
        case _:
            drawn = {"lts": lo, "lte": hi, "uts": lo2, "ute": hi2 if "uts" in names else torch.minimum(lo, c), "diag": key // 2}
            parts = {name: value for name, value in drawn.items() if name in names}
    blocks = None
    if "blocks" in names:
        keep = torch.rand(batch, heads, -(-nq // 128), -(-nk // 128), generator=gen) < 0.6
        blocks = BlockTable(keep.to(device), 128, 128)
    moved = {name: value.to(torch.int32).clamp(0, nq).contiguous().to(device) for name, value in parts.items()}
    return BoundaryVectors(nq, nk, batch, heads, "causal" in names, blocks=blocks, **moved)
