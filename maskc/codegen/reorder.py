"""The kernel that copies keys into another order."""

from __future__ import annotations

from maskc.codegen.render import CudaSource, render

THREADS, KEYS = 256, 8
"""Threads of a CTA, and the keys that it copies."""


def take_keys_source() -> CudaSource:
    """take_keys.cu.j2: one kernel for every head dim, dtype and number of heads."""
    return render("take_keys.cu.j2", threads=THREADS, keys=KEYS)
