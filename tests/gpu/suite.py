"""What the suite runs: the cover and the special cases as jobs for `tests.gpu.pool`, and the kernels that they need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType

import torch

import maskc
from maskc.codegen import cache as store
from maskc.codegen.nvrtc import compile_cubin
from maskc.codegen.render import CudaSource
from maskc.options import Options
from tests.gpu import warm
from tests.gpu.cases import Case, all_cases
from tests.gpu.check import DEVICE, run_case
from tests.gpu.pool import Job, Outcome, run_jobs

SPECIAL = ("prep", "context", "bind", "queue", "fwd", "memory", "reorder", "bwd", "again")
SPECIAL += ("overlap", "flex", "transformers", "tools")
"""tests.gpu.special_NAME: special_cases() gives (name, check), a check "" or what is wrong; sources() the kernels, if any."""
MOST_KEPT = 8 << 30
"""Bytes that torch keeps of a worker's past cases; a machine with several workers needs them."""


def special_modules() -> dict[str, ModuleType]:
    return {name: importlib.import_module(f"tests.gpu.special_{name}") for name in SPECIAL}


class Suite:
    """The selected cases. match: parts of names; every: each n-th; special: beside the cover; seconds: of the last run."""

    def __init__(
        self, match: Sequence[str] = ("",), every: int = 1, special: bool = True, seconds: Mapping[str, float] | None = None
    ) -> None:
        modules = special_modules() if special else {}
        found: list[tuple[str, str, Callable[[], str], Case | None]] = []  # name, kind, run, case of the cover
        for kind, module in modules.items():
            found += [(f"special/{name}", kind, run, None) for name, run in module.special_cases()]
        found += [(case.name, "-".join(map(str, case.group)), partial(run_case, case), case) for case in all_cases()]
        chosen = [one for one in found if any(text in one[0] for text in match)][::every]
        self.cover = [case for *_, case in chosen if case is not None]
        self.modules = [modules[kind] for kind in dict.fromkeys(kind for _, kind, _, case in chosen if case is None)]
        known = seconds or {}
        expected = [known.get(name, 3.0 if case is None else 1.0) for name, *_, case in chosen]
        self.jobs = [Job(name, kind, partial(_tidy, run), s) for (name, kind, run, _), s in zip(chosen, expected, strict=True)]

    def sources(self) -> list[CudaSource]:
        """Each once."""
        found = [source for case in self.cover for source in warm.sources(case)]
        for module in self.modules:
            found += getattr(module, "sources", tuple)()
        return list(dict.fromkeys(found))


def _tidy(run: Callable[[], str]) -> str:
    try:
        return run()
    finally:
        if DEVICE == "cuda" and torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()


def begin() -> str:
    """In a worker: a context, and the libraries that the references call; what it runs on."""
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        return "a CPU"
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = torch.randn(64, 64, device="cuda", dtype=dtype)
        torch.softmax(x @ x, 1).sum().item()
    return torch.cuda.get_device_name()


# ---------------------------------------------------------------- kernels first


def compile_ahead(sources: Sequence[CudaSource], deadline: float) -> str:
    """Fills the cache, in processes side by side; says how it went. What does not compile is left to the cases."""
    before = len(kernels_kept())
    problems: list[Outcome] = []

    def told(outcome: Outcome) -> None:
        if outcome.problem:
            problems.append(outcome)

    jobs = [Job(source.name, "", partial(_compile, source)) for source in sources]
    run_jobs(jobs, [{}] * (os.cpu_count() or 1), told, limit=120.0, start_limit=60.0, deadline=deadline)
    new = len(kernels_kept()) - before
    return f"{len(jobs)} kernels, {new} of them compiled now" + "".join(f"\n{p.name}: {p.problem[:300]}" for p in problems[:3])


def kernels_kept() -> set[str]:
    """Names of the entries of the cache."""
    return {path.name for path in store.entries(Options.from_env().cache_dir)}


def _compile(source: CudaSource) -> str:
    try:
        compile_cubin(source)
    except maskc.MaskcError as error:
        return str(error)
    return ""
