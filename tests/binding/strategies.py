"""Hypothesis strategies: boundary vectors of every form, whatever their intervals look like."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from maskc.boundary import BlockTable, BoundaryVectors

FORMS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            (),
            ("lts",),
            ("ute",),
            ("lts", "lte"),
            ("uts", "ute"),
            ("lts", "ute"),
            ("lts", "lte", "ute"),
            ("lts", "lte", "uts", "ute"),
        ),
    )
)


def tensor(draw: st.DrawFn, nq: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """Bounds in [0, nq], in runs of equal values, so that whole blocks are masked or clear often enough."""
    batch, heads, nk = shape
    seed = draw(st.integers(0, 2**31))
    run = draw(st.sampled_from([1, 3, 8, 64]))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, nq + 1, (batch, heads, -(-nk // run)), generator=generator, dtype=torch.int32)
    return values.repeat_interleave(run, 2)[..., :nk].contiguous()


@st.composite
def boundary_vectors(
    draw: st.DrawFn, most: int = 40, sizes: tuple[int, int] | None = None, blocks: bool = True
) -> BoundaryVectors:
    """Any legal vectors: touching, overlapping, swapped and empty intervals, with and without triangle, diag and table."""
    nq, nk = sizes or (draw(st.integers(1, most)), draw(st.integers(1, most)))
    batch, heads = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 3), (2, 2)]))
    form = draw(st.sampled_from(FORMS)) | draw(st.sampled_from([frozenset(), frozenset({"diag"})]))
    tensors = {name: tensor(draw, nq, (batch, heads, nk)) for name in sorted(form)}
    table = None
    if blocks and draw(st.booleans()):
        block_q, block_kv = draw(st.sampled_from([(4, 4), (8, 2), (3, 5)]))
        shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), -(-nq // block_q), -(-nk // block_kv)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        table = BlockTable(torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.5, 0.9])), block_q, block_kv)
    return BoundaryVectors(nq, nk, batch, heads, draw(st.booleans()), blocks=table, **tensors)
