"""Binding data that are on a GPU: the same vectors as on the CPU, one synchronisation, none without validation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import maskc
from maskc import CompiledMask, segments, spans
from tests.gpu.special_prep import differences

N = 4096
LENGTHS = torch.tensor([1000, 0, 2000, 1, 900])
IDS = torch.repeat_interleave(torch.arange(5), LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in (*LENGTHS.tolist(), N - 3901)])


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [*((f"bind/{name}", partial(_same, name)) for name in CASES), ("bind/messages", _messages), ("bind/run", _run)]


def _padded(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat((ids, torch.full((N - len(ids),), -1)))


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "lengths": ("doc_causal", lambda: {"doc": ("segments", "lengths", LENGTHS)}),
    "cu_seqlens": (
        "doc_causal",
        lambda: {"doc": ("segments", "cu_seqlens", torch.cat((LENGTHS[:0].new_zeros(1), LENGTHS.cumsum(0))))},
    ),
    "ids": ("doc_full", lambda: {"doc": ("segments", "ids", _padded(IDS))}),
    "positions": ("doc_full", lambda: {"doc": ("segments", "positions", POSITIONS)}),
    "eos": ("doc_full", lambda: {"doc": ("segments", "eos", torch.arange(N) % 700 == 0)}),
    "batch of ids": ("doc_full", lambda: {"doc": ("segments", "ids", torch.stack((_padded(IDS), torch.arange(N) // 9)))}),
    "prefix": ("doc_prefix", lambda: {"doc": ("segments", "lengths", LENGTHS), "prefix": LENGTHS // 2}),
    "prefix by ids": (
        "doc_prefix",
        lambda: {"doc": ("segments", "ids", _padded(IDS)), "prefix": LENGTHS[LENGTHS > 0] // 2},
    ),
    "ranges": ("qk_sparse", lambda: {"drop": ("spans", "ranges", torch.tensor([[5, 90], [90, 100], [1000, 3000]]))}),
    "nested": (
        "share_question",
        lambda: {"sample": ("segments", "ids", torch.arange(N) // 1024), "part": ("segments", "ids", torch.arange(N) // 256)},
    ),
    "heads": ("random_eviction", lambda: {"evict": torch.arange(N) + torch.randint(1, N, (2, 3, N))}),
    "scalar": ("sliding_window", lambda: {"window": torch.tensor(100)}),
    "scalars": ("sliding_window", lambda: {"window": torch.tensor([100, 200])}),
    "sorted": ("cross_pairs", lambda: {"row_pair": torch.arange(N) // 100, "key_pair": torch.arange(N) // 90}),
    "tail that needs folding": ("fid", lambda: {"part": ("segments", "lengths", torch.tensor([1000, 2000]))}),
}


def _inputs(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Constructors and tensors of a case on one device."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, tuple):
            kind, form, data = value
            made[name] = (segments if kind == "segments" else spans)(**{form: data.to(device)})
        else:
            made[name] = value.to(device)
    return made


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """The synchronising operations that torch notices."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]


def _same(name: str) -> str:
    mask_name, make = CASES[name]
    mask = maskc.compile(f"std:{mask_name}")
    given = make()
    want = mask.bind(**_inputs(given, "cpu")).vectors(N, N)
    on_gpu = _inputs(given, "cuda")
    mask.bind(**on_gpu).vectors(N, N)  # the first use of a torch kernel in a process loads it, which may synchronise
    torch.cuda.synchronize()
    folds = mask_name == "fid"
    for validate, allowed in ((True, 2 if folds else 1), (False, 1 if folds else 0)):
        with synchronisations() as found:
            got = mask.bind(validate=validate, **on_gpu).vectors(N, N)
        if problem := differences(got, want):
            return f"validate={validate}: {problem}"
        if len(found) > allowed:
            return f"validate={validate}: {len(found)} synchronisations, {allowed} allowed: {found}"
    return ""


def _messages() -> str:
    """The first fault is named as on the CPU, whatever else goes wrong on the device."""
    mask: CompiledMask = maskc.compile("std:doc_prefix")
    faults: list[tuple[str, dict[str, Any]]] = [
        (
            "cu_seqlens[2] = 3 after 5",
            {"doc": segments(cu_seqlens=torch.tensor([0, 5, 3, 9], device="cuda")), "prefix": [0, 0, 0]},
        ),
        ("ids[3] = 7 comes back", {"doc": segments(ids=torch.tensor([7, 7, 1, 7], device="cuda")), "prefix": [0, 0, 0]}),
        ("prefix[1] = 9, doc.len[1] = 2", {"doc": segments(lengths=torch.tensor([3, 2], device="cuda")), "prefix": [0, 9]}),
        ("lengths[0] = -5", {"doc": segments(lengths=torch.tensor([-5, 2], device="cuda")), "prefix": [0, 0]}),
        ("reaches token", {"doc": segments(lengths=torch.tensor([2**40], device="cuda")), "prefix": [0]}),
    ]
    for wanted, inputs in faults:
        try:
            mask.bind(**inputs)
        except maskc.MaskcError as e:
            if wanted not in str(e):
                return f"{wanted!r} is not in {e}"
        else:
            return f"{wanted!r}: not refused"
    torch.cuda.synchronize()
    return ""


def _run() -> str:
    """`run` itself never synchronises, with vectors made on the way."""
    mask = maskc.compile("std:doc_causal")
    q, k, v = (torch.randn(1, N, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    maskc.run(mask.bind(doc=segments(lengths=[N])), q, k, v).sum().backward()  # kernels are compiled and loaded
    spec = mask.bind(doc=segments(lengths=LENGTHS.cuda()))
    with synchronisations() as found:
        maskc.run(spec, q, k, v).sum().backward()
    return f"{len(found)} synchronisations" if found else ""
