"""Launches of the kernels around attention whose keys are on several ranks (templates/exchange.cu.j2)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskc.codegen.exchange import FILL_RUNS, FILL_THREADS, THREADS, exchange_source
from maskc.codegen.nvrtc import compile_cubin
from maskc.runtime.driver_api import Arguments, Kernel, launch, load_kernel
from maskc.runtime.ready import Launch

Pair = tuple[Tensor, Tensor]
Run = tuple[int, slice]
"""Where rows go, and which they are."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIZES = ("rows", "dim", "step", "first", "count", "which", "unit", "place")
_PIECE = np.dtype([*((n, np.int64) for n in ("out", "own")), *((n, np.int32) for n in _SIZES)])
_PART = np.dtype([("into", np.uint64), ("source", np.uint64), ("bytes", np.int64)])
ALIGNMENT = 128
"""Bytes that a table begins at a multiple of."""
LONE = 0xFFFF
"""In place of a number of others: `LONE` of bwd/shared.cuh.j2."""
TILE_ROWS = 128
"""Rows that a CTA adds up at a time, where no key tile of an attention kernel says."""


@dataclass(frozen=True, slots=True)
class Addend:
    """Rows of one head and batch item of dK (which = 0) or dV (1).

    out: first element in the result, whose rows lie `step` elements apart. own: first element in what this rank's kernel
    computed, None if it has none. parts: addresses of what others computed, fp32, in the order of addition. unit: batch item *
    heads + head. place: first row in the key buffer, if there is an own part.
    """

    which: int
    out: int
    step: int
    own: int | None
    rows: int
    dim: int
    parts: tuple[int, ...]
    unit: int = 0
    place: int = 0


@dataclass(frozen=True, slots=True)
class SumTable:
    """Addends on the GPU."""

    pieces: Tensor
    parts: Tensor
    count: int
    longest: int

    @classmethod
    def of(cls, addends: Sequence[Addend], device: torch.device) -> SumTable:
        rows = np.zeros(len(addends), _PIECE)
        parts: list[int] = []
        for row, a in zip(rows, addends, strict=True):
            row["out"], row["own"], row["first"] = a.out, -1 if a.own is None else a.own, len(parts)
            row["rows"], row["dim"], row["step"] = a.rows, a.dim, a.step
            row["count"], row["which"], row["unit"], row["place"] = len(a.parts), a.which, a.unit, a.place
            parts += a.parts
        pieces, addresses = on_device(device, rows.view(np.uint8), np.array(parts or [0], np.uint64).view(np.uint8))
        return cls(pieces, addresses, len(addends), max((a.rows for a in addends), default=0))


@dataclass(frozen=True, slots=True)
class Added:
    """Which sums an attention kernel has stored itself.

    words: int32 [batch * heads, own key tiles], the epoch in which it has. own_tile: key tile of the first; tile_rows: keys
    of one.
    """

    words: Tensor
    epoch: int
    own_tile: int
    tile_rows: int


def sum_gradients(
    table: SumTable, own: Pair, out: Pair, added: Added | None = None, octets: bool = False, by: Launch | None = None
) -> None:
    """Write own + parts to `out` on torch's current stream, but where that is `added` already.

    own: (dK, dV), fp32 [splits, ...]. out: (dK, dV), dense, in fp32, bf16 or fp16. octets: own and parts lie in octets, else
    row by row. by: what launches the kernel, here and below.
    """
    if not table.longest:
        return
    strides = [t.stride(0) if t.shape[0] > 1 else 0 for t in own]
    params = _SumParams(table.pieces.data_ptr(), table.parts.data_ptr())
    for i in range(2):
        params.own[i], params.split_stride[i], params.out[i] = own[i].data_ptr(), strides[i], out[i].data_ptr()
    params.splits, params.kind, params.octets, params.tile_rows = own[0].shape[0], _KINDS[out[0].dtype], octets, TILE_ROWS
    if added is not None:
        params.added, params.tiles, params.epoch = added.words.data_ptr(), added.words.shape[1], added.epoch & 0xFFFFFFFF
        params.own_tile, params.tile_rows = added.own_tile, added.tile_rows
    blocks = max(1, min(-(-table.longest // params.tile_rows), 1024 // max(1, table.count)))
    (by or launch)(_kernel("sum_gradients"), (blocks, table.count, 1), THREADS, Arguments((), params), device=out[0].device)


class Lent(NamedTuple):
    """What another rank has of the gradients of a key tile: `Lent` of bwd/shared.cuh.j2."""

    dk: int
    dv: int
    head: int
    told: int
    row: int
    slots: int
    group_heads: int


class Place(NamedTuple):
    """Where the gradients of a chunk go: `Place` of bwd/shared.cuh.j2."""

    dk: int
    dv: int
    head: int
    first: int
    rows: int
    away: bool


class Report(NamedTuple):
    """Who is told of the gradients of a slot: `Report` of bwd/shared.cuh.j2; addresses, 0 for none."""

    word: int
    sent: int
    counted: int
    pieces: int


_LENT, _PLACE, _REPORT = (
    np.dtype([*((n, np.int64) for n in wide), *((n, np.int32) for n in narrow)], align=True)
    for wide, narrow in (
        (Lent._fields[:4], Lent._fields[4:]),
        (Place._fields[:3], Place._fields[3:]),
        (Report._fields[:3], Report._fields[3:]),
    )
)


def lent_table(tiles: Sequence[Sequence[Lent] | None], device: torch.device) -> tuple[Tensor, Tensor]:
    """(per tile the number of its first and how many << 16, all of them) for a gated backward; None: LONE."""
    first: list[int] = []
    rows: list[Lent] = []
    for others in tiles:
        first.append(LONE << 16 if others is None else len(rows) | len(others) << 16)
        rows += others or ()
    if len(rows) > 0xFFFF:
        raise ValueError(f"{len(rows)} places of gradients from other ranks, at most {0xFFFF}")
    table = np.array(rows or [Lent(*([0] * 7))], _LENT)
    counts, places = on_device(device, np.array(first, np.uint32).view(np.uint8), table.view(np.uint8))
    return counts, places


def way_tables(
    places: Sequence[Place], first: Sequence[int], reports: Sequence[Report], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`GateTables.places`, `first_place` and `reports` of a gated backward."""
    tables = np.array(places, _PLACE), np.array(first, np.uint32), np.array(reports, _REPORT)
    there = on_device(device, *(t.view(np.uint8) for t in tables))
    return there[0], there[1], there[2]


def spoil(results: Sequence[Tensor], failed: Tensor, by: Launch | None = None) -> None:
    """NaN in all of one or two dense results where one of the words `failed` is set, on torch's current stream.

    failed: int32 that the GPU can read, whose memory outlives the launch.
    """
    params = _SpoilParams()
    for i, t in enumerate(results):
        params.words[i], params.count[i] = t.data_ptr(), t.numel() * t.element_size() // 4
    params.failed, params.ranks = failed.data_ptr(), failed.numel()
    (by or launch)(_kernel("spoil"), (1, 1, 1), THREADS, Arguments((), params), device=results[0].device)


def fill(own: Pair, into: Pair, runs: Sequence[Run], ctas: int) -> None:
    """Rows of own keys and values [B, rows, Hk, D] to rows of [Hk, rows, B, D], by so many CTAs on torch's current stream.

    runs: (row of `into`, rows of `own`).
    """
    params, width = _FillParams(), own[0].element_size()
    for i, (source, to) in enumerate(zip(own, into, strict=True)):
        params.source[i], params.into[i] = source.data_ptr(), to.data_ptr()
        params.batch_stride[i], params.row_stride[i], params.head_stride[i] = (source.stride(d) * width for d in range(3))
        params.into_head[i], params.units[i] = to.stride(0) * width, to.shape[3] * width // 16
    params.batch, params.heads = own[0].shape[0], own[0].shape[2]
    for at in range(0, len(runs), FILL_RUNS):
        some = runs[at : at + FILL_RUNS]
        params.runs = len(some)
        for i, (place, rows) in enumerate(some):
            params.place[i], params.first[i], params.rows[i] = place, rows.start, rows.stop - rows.start
        launch(_kernel("fill"), (ctas, 1, 1), FILL_THREADS, Arguments((), params), device=into[0].device)


def copy_table(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Copies (into, source) for `copy_chunks`, each one piece of memory."""
    rows = np.zeros(len(pairs), _PART)
    for row, (into, source) in zip(rows, pairs, strict=True):
        if not (into.is_contiguous() and source.is_contiguous() and into.shape == source.shape and into.dtype == source.dtype):
            raise ValueError(f"no plain copy: {tuple(source.shape)} {source.dtype} into {tuple(into.shape)} {into.dtype}")
        row["into"], row["source"], row["bytes"] = into.data_ptr(), source.data_ptr(), into.numel() * into.element_size()
    (there,) = on_device(device, rows.view(np.uint8))
    return there


def on_device(device: torch.device, *tables: NDArray[np.uint8]) -> tuple[Tensor, ...]:
    """Tables on the device in stream order, by one copy; the host does not wait."""
    starts = list(accumulate((-(-len(t) // ALIGNMENT) * ALIGNMENT for t in tables), initial=0))
    places = [slice(at, at + len(t)) for at, t in zip(starts, tables, strict=False)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, t in zip(places, tables, strict=True):
        host.numpy()[place] = t
    there = host.to(device, non_blocking=True)
    return tuple(there[place] for place in places)


def warm(device: torch.device) -> None:
    """Launch every kernel once with nothing to do."""
    word = torch.zeros(2, device=device)
    table = SumTable.of([Addend(0, 0, 4, None, 0, 4, ())], device)
    sum_gradients(replace(table, longest=1), (word[None], word[None]), (word, word))
    spoil((word,), word[:1])
    copy_chunks(word, torch.zeros(0, dtype=torch.int32, device=device), 0, (0, 0), 0, 1)
    pair = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=device)
    fill((pair, pair), (pair, pair), [(0, slice(0, 0))], 1)


def copy_chunks(
    table: Tensor, pieces: Tensor, parts: int, words: tuple[int, int], epoch: int, ctas: int, repeats: int = 1
) -> None:
    """Make the copies of a table one after another by `ctas` CTAs on torch's current stream.

    pieces: int32; piece i is made by `parts` copies in a row, after which word pieces[i] is written. words: addresses of
    flags and of counts, which are zero and left zero.
    """
    places = table.data_ptr(), pieces.data_ptr(), *words
    params = _CopyParams(*places, pieces.numel(), parts, repeats, epoch & 0xFFFFFFFF)
    launch(_kernel("copy_chunks"), (ctas, 1, 1), THREADS, Arguments((), params), device=table.device)


@cache
def _kernel(name: str) -> Kernel:
    return load_kernel(compile_cubin(exchange_source()).image, name)


_POINTER = ctypes.c_void_p


class _SumParams(ctypes.Structure):
    """`SumParams` of exchange.cu.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("pieces", "parts")),
        ("own", _POINTER * 2),
        ("split_stride", ctypes.c_int64 * 2),
        ("out", _POINTER * 2),
        ("added", _POINTER),
        *((name, ctypes.c_int32) for name in ("splits", "kind", "octets", "own_tile", "tiles", "tile_rows")),
        ("epoch", ctypes.c_uint32),
    ]


class _SpoilParams(ctypes.Structure):
    """`SpoilParams` of exchange.cu.j2."""

    _fields_ = [("words", _POINTER * 2), ("count", ctypes.c_int64 * 2), ("failed", _POINTER), ("ranks", ctypes.c_int32)]


class _CopyParams(ctypes.Structure):
    """`CopyParams` of exchange.cu.j2."""

    _fields_ = [
        *((name, _POINTER) for name in ("copies", "pieces", "flags", "counts")),
        *((name, ctypes.c_int32) for name in ("count", "parts", "repeats")),
        ("epoch", ctypes.c_uint32),
    ]


class _FillParams(ctypes.Structure):
    """`FillParams` of exchange.cu.j2."""

    _fields_ = [
        *((name, _POINTER * 2) for name in ("source", "into")),
        *((name, ctypes.c_int64 * 2) for name in ("batch_stride", "row_stride", "head_stride", "into_head")),
        ("units", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32 * FILL_RUNS) for name in ("first", "place", "rows")),
        *((name, ctypes.c_int32) for name in ("runs", "batch", "heads")),
    ]
