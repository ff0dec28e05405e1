"""Random masks for the converters: every vector form, empty and swapped intervals, rectangles, batch and heads."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from maskc.boundary import BoundaryVectors


@st.composite
def vectors(draw: st.DrawFn, *, square: bool = False, single: bool = False, largest: int = 14) -> BoundaryVectors:
    nk = draw(st.integers(1, largest))
    nq = nk if square else draw(st.integers(1, largest))
    batch, heads = (1, 1) if single else (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    causal = draw(st.booleans())
    form = draw(st.sampled_from(("", "lts", "lts lte", "ute", "uts ute", "lts ute", "lts lte ute", "lts lte uts ute"))).split()

    def vector(name: str) -> torch.Tensor | None:
        return torch.randint(0, nq + 1, (batch, heads, nk), generator=generator, dtype=torch.int32) if name in form else None

    given = [vector(name) for name in ("lts", "lte", "uts", "ute")]
    return BoundaryVectors(nq, nk, batch if form else 1, heads if form else 1, causal, *given)


def seen(v: BoundaryVectors) -> torch.Tensor:
    return ~v.masked()


def equal(a: BoundaryVectors, b: BoundaryVectors) -> bool:
    """Whether two masks show the same cells, over whatever batch and heads they have."""
    return bool((seen(a) == seen(b)).all())
