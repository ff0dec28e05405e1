"""Compiles what the cover runs, side by side: one after another inside the workers it takes most of the suite's time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import maskc
from benchmarks.masks import mask_case
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
from maskc.codegen.spec_bwd import select_backward
from maskc.runtime.hopper import DTYPES, mask_form
from tests.gpu import check
from tests.gpu.cases import Case
from tests.gpu.inputs import random_vectors, suite_mask


def compile_all(cases: Sequence[Case]) -> str:
    """Fills the cache; says how much there was. A source that does not compile is left to the cases that need it."""
    started = time.monotonic()
    found = {source.text: source for case in cases for source in sources(case)}
    with ThreadPoolExecutor() as pool:
        bad = sum(pool.map(_fails, found.values()))
    return f"{len(found)} sources compiled in {time.monotonic() - started:.0f} s" + (f", {bad} did not compile" if bad else "")


def _fails(source: CudaSource) -> bool:
    try:
        compile_cubin(source)
    except maskc.MaskcError:
        return True
    return False


def sources(case: Case) -> Iterator[CudaSource]:
    """Kernels of a case, as the backend chooses them; none where the mask cannot have the shape."""
    vectors = _vectors(case)
    if vectors is None:
        return
    form = mask_form(vectors)
    dtype = DTYPES[check.DTYPES[case.dtype]]
    spec = forward_spec(form, case.head_dim, dtype)
    yield forward_source(spec)
    if spec.packed:
        yield schedule_source(schedule_spec(form, case.head_dim))
    if case.direction == "bwd":
        yield select_backward(form, case.head_dim, dtype, deterministic=case.deterministic).source()


def _vectors(case: Case) -> BoundaryVectors | None:
    """Vectors with the bounds that the case's have, of the same or a smaller size."""
    rng = random.Random(case.seed)
    kind, name = case.mask.split(":")
    if kind == "form":
        return random_vectors(name, min(case.nq, 300), min(case.nk, 300), 1, case.mask_heads, case.seed, "cpu")
    if kind == "suite":
        made = suite_mask(name, case.nq, case.nk, rng)
        return None if made is None else _bound(str(made[0]), made[1], case)
    if case.nq < 8:
        return None
    bench = mask_case(name, case.nq, heads=case.mask_heads)
    return _bound(bench.mask, dict(bench.inputs), case)


def _bound(mask: str, inputs: dict[str, object], case: Case) -> BoundaryVectors:
    return maskc.compile(mask).bind(nq=case.nq, nk=case.nk, **inputs).vectors()
