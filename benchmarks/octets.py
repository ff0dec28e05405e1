"""The order in which gated kernels store gradients, and back: `octet` of templates/bwd/shared.cuh.j2."""

from __future__ import annotations

from torch import Tensor


def to_octets(t: Tensor) -> Tensor:
    """[..., rows, D], rows a multiple of 8, in a new tensor of that shape."""
    *lead, rows, dim = t.shape
    split = t.reshape(-1, rows // 8, 8, dim // 16, 2, 4, 2)  # octet, row; of 16 columns the half, the lane and its two
    return split.permute(0, 1, 3, 2, 5, 4, 6).reshape(*lead, rows, dim)


def from_octets(t: Tensor) -> Tensor:
    *lead, rows, dim = t.shape
    split = t.reshape(-1, rows // 8, dim // 16, 8, 4, 2, 2)
    return split.permute(0, 1, 3, 2, 5, 4, 6).reshape(*lead, rows, dim)
