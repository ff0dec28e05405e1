"""The kernels around attention whose keys are on several ranks."""

from __future__ import annotations

from maskc.codegen.render import CudaSource, render

THREADS, LOADS = 512, 8
"""Threads of a CTA, and 16-byte loads that one has under way: eight CTAs have half a MiB, what a link needs to be full."""
FILL_THREADS, FILL_RUNS = 768, 16
"""Of "fill": threads of a CTA, and runs of rows that one launch takes."""


def exchange_source() -> CudaSource:
    """exchange.cu.j2: one source for every head dim, dtype and number of heads."""
    return render("exchange.cu.j2", threads=THREADS, loads=LOADS, fill_threads=FILL_THREADS, fill_runs=FILL_RUNS)
