"""Long integer vectors as short texts for a page, and lists of ranks as one character each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""One character per rank: pages show up to 62 ranks."""


def runs(values: torch.Tensor | Sequence[int], limit: int = 1 << 30) -> str | None:
    """`7x3` for 7 7 7, `4..9` for 4 5 6 7 8 9, else the number, with blanks between; None beyond `limit` runs.

    Runs are taken greedily from the left: a number starts the longest run of equal, or of consecutive, numbers.
    """
    v = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int64)
    if len(v) == 0:
        return ""
    steps = np.diff(v)
    edges = np.flatnonzero(np.diff(steps)) + 1  # steps[i] opens a stretch of equal steps
    stretches = np.append(edges, len(steps))
    out: list[str] = []
    at = stretch = 0
    while at < len(v):
        if len(out) > limit:
            return None
        while stretch < len(stretches) and stretches[stretch] <= at:
            stretch += 1
        last = int(stretches[stretch]) if stretch < len(stretches) else at
        step = int(steps[at]) if at < len(steps) else 2
        first = int(v[at])
        if step == 0:
            out.append(f"{first}x{last - at + 1}")
        elif step == 1 and last - at > 1:
            out.append(f"{first}..{int(v[last])}")
        else:
            out.append(str(first))
            last = at
        at = last + 1
    return " ".join(out)


def ranks(owner: Sequence[int]) -> str:
    """The rank of every chunk, a character each (see `DIGITS`)."""
    return "".join(DIGITS[r] for r in owner)
