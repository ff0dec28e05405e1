"""Keys in another order on the GPU: the copies, and attention of masks that are reordered, against the dense reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import maskc
from benchmarks.masks import mask_case
from maskc.codegen.render import CudaSource
from maskc.runtime import reorder
from tests.gpu import warm
from tests.gpu.cases import Case
from tests.gpu.check import DEVICE, run_case

_PLAIN = Case("bench:random_eviction", 4224, 4224, 1, 4, 4, 4, 128, "bf16", False, False, False)


def _with(**changes: object) -> Case:
    return Case(**{**_PLAIN.as_json(), **changes})


CASES = {
    f"{name}/{direction}": _with(**changes, direction=direction)
    for name, changes in {
        "mha": {},
        "one order for two items": {"batch": 2},
        "gqa": {"heads": 6, "kv_heads": 2, "mask_heads": 2},
        "one order for all heads": {"heads": 4, "kv_heads": 2, "mask_heads": 1},
        "head dim 64": {"head_dim": 64, "dtype": "fp16"},
        "head dim 256": {"head_dim": 256, "heads": 2, "kv_heads": 2, "mask_heads": 2},
        "strided": {"strided": True, "lse_grad": True, "nq": 4097, "nk": 4097},
        "deterministic": {"deterministic": True, "nq": 4300, "nk": 4300},
    }.items()
    for direction in ("fwd", "bwd")
}


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    attention = [(f"reorder/{name}", partial(_attention, case)) for name, case in CASES.items()]
    return [*attention, ("reorder/copies", _copies), ("reorder/graph", _graph)]


def sources() -> Iterator[CudaSource]:
    for case in CASES.values():
        yield from warm.sources(case)


def _attention(case: Case) -> str:
    """The conformance rule, and that keys were moved at all: K and V of every call."""
    take, moved = reorder.take_keys, 0

    def counted(x: torch.Tensor, order: maskc.binding.bound.Reordered) -> torch.Tensor:
        nonlocal moved
        moved += 1
        return take(x, order)

    reorder.take_keys = counted
    try:
        problem = run_case(case)
    finally:
        reorder.take_keys = take
    return problem or ("" if moved >= 4 else f"keys were moved {moved} times")


def _copies() -> str:
    """The kernel against torch's gather, forth and back: every head dim, strided, keys that no CTA fills."""
    for batch, items, keys, heads, mask_heads, dim in ((3, 1, 1001, 6, 3, 128), (2, 2, 4096, 4, 4, 64), (1, 1, 7, 2, 1, 256)):
        x = torch.randn(batch, keys, heads, 2 * dim, device=DEVICE, dtype=torch.bfloat16)[..., dim:]
        old = torch.rand(items, mask_heads, keys, device=DEVICE).argsort(-1).to(torch.int32)
        new = old.argsort(-1).to(torch.int32)
        got = torch.ops.maskc.take_keys(x, old, new)
        if not torch.equal(got.cpu(), torch.ops.maskc.take_keys(x.cpu(), old.cpu(), new.cpu())):
            return f"wrong keys, {keys} of head dim {dim}"
        if not torch.equal(torch.ops.maskc.take_keys(got, new, old), x):
            return f"there and back is not the same, {keys} of head dim {dim}"
    return ""


def _graph() -> str:
    """A captured call on a mask whose order is known replays to the same bits."""
    case = mask_case("random_eviction", 4096, heads=2)
    spec = maskc.compile(case.mask).bind(nq=4096, nk=4096, evict=case.inputs["evict"].to(DEVICE))
    q, k, v = (torch.randn(1, 4096, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    wanted = maskc.run(spec, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maskc.run(spec, q, k, v)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return "" if torch.equal(got, wanted) else "the replay differs"
