"""Boundary vectors of a bound mask: its interval program evaluated on n columns, or its visible intervals folded.

Columns are worked on in slices on a CPU, so temporaries stay small whatever n is; nothing is ever nq x nk.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import assert_never

import torch
from torch import Tensor

from maskc.binding.bound import BoundInputs
from maskc.binding.evaluate import Frame, Number, concatenate, maximum, minimum
from maskc.binding.fold import fold
from maskc.boundary import BlockTable, BoundaryVectors
from maskc.diagnostics import error
from maskc.ir.intervals import VECTORS, Branch, Interval, IntervalProgram, Leaf, Tree, Vector
from maskc.ir.nodes import MaskFn

_SLICE = 1 << 17  # columns, over batch and heads, that are evaluated at once on a CPU

Slots = tuple[Number, Number, Number, Number]  # lts, lte, uts, ute


def boundary_vectors(fn: MaskFn, program: IntervalProgram | None, inputs: BoundInputs, nq: int, nk: int) -> BoundaryVectors:
    """The vectors of a mask for these sizes, on the device of its inputs; without a program by folding.

    Reads nothing back from a GPU where the mask is proved. Raises M413 for a block table of another size, M416 where a
    column needs more than two masked runs.
    """
    frames = _frames(fn, inputs, nq, nk)
    if program is None:
        vectors, causal = fold(fn, list(frames))
    else:
        parts = [_program_vectors(program, frame) for frame in frames]
        vectors, causal = {name: concatenate([part[name] for part in parts]) for name in program.vectors}, program.causal
    blocks = block_table(fn, inputs, nq, nk)
    shapes = [t.shape for t in vectors.values()] + ([] if blocks is None else [blocks.keep.shape])
    batch, heads = (max([1, *(shape[axis] for shape in shapes)]) for axis in (0, 1))
    lts, lte, uts, ute = (vectors[name].expand(batch, heads, nk).contiguous() if name in vectors else None for name in VECTORS)
    return BoundaryVectors(nq, nk, batch, heads, causal, lts, lte, uts, ute, None, blocks)


def _frames(fn: MaskFn, inputs: BoundInputs, nq: int, nk: int) -> Iterator[Frame]:
    """The columns in slices; one empty slice where there is no key."""
    sets = [t.starts.shape[0] for t in inputs.sets.values()]
    lead = max([1, *sets, *(t.shape[0] * t.shape[1] for t in inputs.vectors.values())])
    step = max(1, _SLICE // lead) if inputs.device.type == "cpu" else max(1, nk)
    heads = max([1, *(t.shape[1] for t in inputs.vectors.values())])
    head = torch.arange(heads, device=inputs.device)[None, :, None]
    for first in range(0, max(nk, 1), step):
        col = torch.arange(first, min(first + step, nk), device=inputs.device)[None, None]
        yield Frame(fn, inputs, nq, nk, col=col, head=head, first=first)


# ---------------------------------------------------------------- a proved mask


def _program_vectors(program: IntervalProgram, frame: Frame) -> dict[Vector, Tensor]:
    """The vectors at the columns of the frame, int32 [batch or 1, heads or 1, columns]."""
    assert frame.nq is not None
    lts, lte, uts, ute = _tree(program.tree, frame, frame.nq)
    lts, lte = _canonical(lts, lte, frame.nq)
    uts, ute = _canonical(uts, ute, 0)
    numbers: dict[Vector, Number] = {"lts": lts, "lte": lte, "uts": uts, "ute": ute}
    return {name: frame.spread(numbers[name]) for name in program.vectors}


def _tree(tree: Tree, frame: Frame, nq: int) -> Slots:
    match tree:
        case Leaf(_, lower, upper):
            return *_slot(lower, nq, frame, nq), *_slot(upper, 0, frame, nq)
        case Branch(guard, then, orelse):
            where = frame.truth(guard)
            if isinstance(where, bool):
                return _tree(then if where else orelse, frame, nq)
            a, b = _tree(then, frame, nq), _tree(orelse, frame, nq)
            return _pick(where, a[0], b[0]), _pick(where, a[1], b[1]), _pick(where, a[2], b[2]), _pick(where, a[3], b[3])
        case _:
            assert_never(tree)


def _slot(interval: Interval | None, empty: int, frame: Frame, nq: int) -> tuple[Number, Number]:
    if interval is None:
        return empty, empty
    lo, hi = frame.value(interval.lo).number, frame.value(interval.hi).number
    return minimum(maximum(lo, 0), nq), minimum(maximum(hi, 0), nq)


def _pick(where: Tensor, a: Number, b: Number) -> Number:
    if a is b or (isinstance(a, int) and isinstance(b, int) and a == b):
        return a
    return torch.where(where, a, b)


def _canonical(lo: Number, hi: Number, empty: int) -> tuple[Number, Number]:
    """An empty interval is stored as (empty, empty)."""
    if isinstance(lo, int) and isinstance(hi, int):
        return (lo, hi) if lo < hi else (empty, empty)
    gone = torch.as_tensor(lo >= hi)
    return _pick(gone, empty, lo), _pick(gone, empty, hi)


# ---------------------------------------------------------------- block tables


def block_table(fn: MaskFn, inputs: BoundInputs, nq: int, nk: int) -> BlockTable | None:
    """The tables of a mask as one: on the common grid, a block is kept where all keep it."""
    tables = []
    for name in fn.tables:
        table = inputs.blocks[name]
        wanted = -(-nq // table.block_q), -(-nk // table.block_kv)
        if tuple(table.keep.shape[2:]) != wanted:
            found = " x ".join(map(str, table.keep.shape[2:]))
            raise error(
                "M413",
                f"block table `{name}` is {found}, {nq} rows and {nk} keys in blocks of {table.block_q} x {table.block_kv} "
                f"make {wanted[0]} x {wanted[1]}",
                fn.input(name).span,
            )
        tables.append(table)
    if len(tables) <= 1:
        return tables[0] if tables else None
    block_q, block_kv = gcd(*(t.block_q for t in tables)), gcd(*(t.block_kv for t in tables))
    rows, cols = -(-nq // block_q), -(-nk // block_kv)
    keep = torch.ones(1, 1, rows, cols, dtype=torch.bool, device=inputs.device)
    for t in tables:
        fine = t.keep.repeat_interleave(t.block_q // block_q, 2).repeat_interleave(t.block_kv // block_kv, 3)
        keep = keep & fine[:, :, :rows, :cols]
    return BlockTable(keep, block_q, block_kv)
