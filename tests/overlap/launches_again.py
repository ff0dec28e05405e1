"""`python -m tests.overlap.launches_again`: what kernels are told by calls that are made again, beside calls made anew, as JSON.

Both are of one epoch and of the same tensors, so that nothing differs but where results and workspaces lie: every address in one
of them lies as far from that of the other call as all others do.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import struct
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maskc.runtime import driver_api, hopper, ready
from maskc.runtime.overlap_replay import Replays
from tests.gpu2.ways import leaving
from tests.overlap.driver_rank import BACK, CASES, FIRST, RANKS, Case, Rank
from tests.overlap.stand_in import install

Told = list[tuple[str, int, bytes]]
"""Of each launch: its kernel, how it is launched, and its arguments."""


def tensor_map(pointer: int, *shape: object) -> bytes:
    return struct.pack("<QQ", pointer, hash(shape) & 0xFFFFFFFFFFFFFFFF) + bytes(112)


def replace_address(slot: int, address: int) -> None:
    room = next(r for r in driver_api._rooms.known.values() if slot in r.slots[:-1])
    struct.pack_into("<Q", room.contents, slot - room.start, address)


def noting(told: Told) -> Callable[..., None]:
    def launch(kernel: driver_api.Kernel, configured: Any, pointers: int) -> None:
        room = next(r for r in driver_api._rooms.known.values() if r.pointers == pointers)
        told.append((kernel.name, id(configured), bytes(room.contents)))

    return launch


def call(running: Rank, kind: str, told: Told) -> list[torch.Tensor]:
    """A call of some epoch, and its results."""
    told.clear()
    if kind not in BACK:
        return list(running.made.forward(running.local, running.q, running.k, running.v, 0.1))
    given = running.local, running.q, running.k, running.v, running.out, running.lse, running.dout, 0.1
    return list(running.made.backward(*given, gather=kind != "k"))


def compared(running: Rank, kind: str, told: Told) -> dict[str, Any]:
    """Of a call made anew and made again: what differs but should not, and how far apart what lies elsewhere does."""
    running.made._replays = Replays()
    epochs = copy.deepcopy(running.epochs)
    results = call(running, kind, told)
    anew = list(told)
    running.epochs, log = epochs, Path(os.environ["STUB_DRIVER_LOG"])
    log.write_text("")
    moved = [(old.data_ptr(), new.data_ptr()) for old, new in zip(results, call(running, kind, told), strict=True)]
    asked = Counter(line.split()[0] for line in log.read_text().splitlines() if not line.startswith("operation"))
    wrong: list[str] = []
    apart: set[int] = set()
    if [t[:2] for t in anew] != [t[:2] for t in told]:
        wrong.append(f"other launches: {[t[0] for t in anew]}, {[t[0] for t in told]}")
    for (kernel, _, old), (_, _, new) in zip(anew, told, strict=True):
        for at in range(0, len(old) - 7, 4):
            (a,), (b,) = (struct.unpack_from("<Q", contents, at) for contents in (old, new))
            if a == b or at % 8:
                continue
            if a in dict(moved) and dict(moved)[a] != b:
                wrong.append(f"{kernel}, byte {at}: {a:#x}, {b:#x}")
            apart.add(b - a)
    apart -= {b - a for a, b in moved}
    launched = Counter(kernel for kernel, *_ in told)
    return {"call": kind, "wrong": wrong, "others": len(apart), "launched": launched, "asked": asked}


def traced(case: Case, rank: int, told: Told) -> list[dict[str, Any]]:
    running, found = Rank(case, rank), []
    with leaving(case.way):
        for kind in case.calls:  # owners are known to have been written to, and kernels are loaded
            running.call(kind)
        for kind in (k for k in case.calls if k in "fbk"):
            running.renew(heads_first=len(found) == 1)
            found.append(compared(running, kind, told))
    held = [weakref.ref(t) for t in (running.k, running.v)]
    del running.k, running.v
    running._alive.clear()
    alive = weakref.ref(running.made)
    gc.disable()
    running.made = None  # type: ignore[assignment]
    found[-1]["held"] = alive() is not None or any(t() is not None for t in held)
    gc.enable()
    return found


def main() -> None:
    told: Told = []
    driver_api.launch_configured = ready.launch_configured = noting(told)  # type: ignore[assignment]
    hopper.tensor_map = tensor_map  # type: ignore[assignment]
    ready.replace_address = replace_address
    cases = [case for case in CASES if not set(case.calls) & set(FIRST) and case.rows is None]
    with install():
        json.dump({f"{case.name}, rank {rank}": traced(case, rank, told) for case in cases for rank in RANKS}, sys.stdout)


if __name__ == "__main__":
    main()
