"""What a link between GPUs that is awake costs attention at the limit of power, whatever the link carries.

    python -m benchmarks.link_power [--out benchmarks/results/link_power.json]

The gated backward with every key there and gradients in its own memory runs on two GPUs, call behind call, while copy engines
write to the other GPU: nothing, a few bytes now and then, or as much as they can. Per GPU: ms and joules a call, clock, and
the share of links that slept. GPUs are hot when it begins; every kind of traffic comes ROUNDS times, there and back. The file
is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch import multiprocessing as mp

from benchmarks.digest import digests
from benchmarks.machine import machine
from benchmarks.masks import mask_case
from benchmarks.nvml import Gpu, Watch
from benchmarks.overlap_ways import ON_GPUS, Cell, Rank, alone
from maskc.runtime.comm import Peer, process_group

ROUNDS, SECONDS, WARM = 2, 0.7, 2.0
"""How often, and for how long each is measured, behind a quarter as long that is not; and before all of them, to be hot."""


class Traffic(NamedTuple):
    """size: bytes of a copy to the other GPU. gap: ms of rest behind it. senders: GPUs that copy."""

    name: str
    size: int = 0
    gap: float = 0.0
    senders: int = 0


ALONE, TRICKLE, FULL = Traffic("none"), Traffic("32 KB every 0.2 ms", 32 << 10, 0.2, 2), Traffic("full link", 256 << 20, 0.0, 2)
SELDOM = [Traffic(f"32 KB every {gap} ms, one way", 32 << 10, gap, 1) for gap in (5, 20, 100)]
"""From which gap on do links sleep between copies?"""
PLAN = (
    (Cell("causal", 32_768, 32, 8), [ALONE, TRICKLE, *SELDOM, FULL]),
    (Cell("causal", 65_536, 32, 8), [ALONE, TRICKLE, FULL]),
)


@contextmanager
def copies(traffic: Traffic, mine: Tensor, theirs: Tensor) -> Iterator[list[float]]:
    """Copies by a thread, and when each was enqueued."""
    over, times = Event(), list[float]()

    def go() -> None:
        side = torch.cuda.Stream(mine.device) if ON_GPUS else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            while traffic.size and not over.is_set():
                theirs[: traffic.size].copy_(mine[: traffic.size], non_blocking=True)
                times.append(time.perf_counter())
                if side is not None and not traffic.gap:
                    side.synchronize()
                time.sleep(traffic.gap / 1e3)

    thread = Thread(target=go)
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


def steady(peer: Peer, call: Callable[[], Any], gpu: Gpu | None, sent: list[float], seconds: float) -> dict[str, Any]:
    """Per call on this GPU, warm. All ranks enter and make equally many calls. sent: when copies were made."""
    device = torch.device("cuda", peer.rank) if ON_GPUS else torch.device("cpu")

    def timed(calls: int) -> float:
        """From when all ranks are here."""
        dist.all_reduce(torch.zeros(1, device=device), group=peer.group)
        settle()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        settle()
        return time.perf_counter() - started

    longest = torch.tensor([timed(1)], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=peer.group)
    calls = max(3, int(seconds / longest.item()))
    timed(-(-calls // 4))
    with Watch(gpu) as watch:
        copied, before = len(sent), gpu.joules() if gpu else 0.0
        took = timed(calls)
        copied, joules = len(sent) - copied, (gpu.joules() if gpu else 0.0) - before
    asleep = statistics.mean(watch.asleep) if watch.asleep else None
    mhz = statistics.mean(watch.mhz) if watch.mhz else None
    return {"ms": 1e3 * took / calls, "joules": joules / calls, "mhz": mhz, "asleep": asleep, "copies": copied, "seconds": took}


def settle() -> None:
    if ON_GPUS:
        torch.cuda.synchronize()


def measure(rank: Rank, kinds: Sequence[Traffic], buffers: tuple[Tensor, Tensor], seconds: float) -> Iterator[dict[str, Any]]:
    """A row per round and kind of traffic, on every rank. buffers: here and on the other GPU."""
    attention = alone(rank, rank.plan("balanced")).attention
    call = partial(attention.backward, *attention.forward())
    gpu, cell = Gpu(rank.device) if ON_GPUS else None, rank.cell
    steady(rank.peer, call, gpu, [], WARM)
    for at in range(ROUNDS):
        for kind in kinds if at % 2 == 0 else reversed(kinds):
            with copies(kind if rank.peer.rank < kind.senders else ALONE, *buffers) as sent:
                found: list[Any] = [None] * rank.peer.world
                dist.all_gather_object(found, steady(rank.peer, call, gpu, sent, seconds), group=rank.peer.group)
            threshold = gpu.sleeps_after_us() if gpu else None
            what = {"mask": cell.mask, "rows_per_device": cell.rows, "heads": cell.heads, "kv_heads": cell.heads_kv}
            yield {**what, **kind._asdict(), "round": at, "ranks": found, "sleeps_after_us": threshold}


def told(row: dict[str, Any]) -> str:
    each = (f"{r['ms']:.2f} ms {r['joules']:.1f} J {r['mhz'] or 0:.0f} MHz asleep {r['asleep']}" for r in row["ranks"])
    return f"{row['rows_per_device']} rows, {row['name']:28} " + " | ".join(each)


def serve(rank: int, path: str, out: Path) -> None:
    """A process of two, on its own GPU."""
    from torch.distributed import _symmetric_memory as symmetric

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    peer = Peer.of(dist.group.WORLD)
    head = {**machine(), "gpus": 2, **digests()}
    mine = symmetric.empty(FULL.size, dtype=torch.uint8, device=device)
    theirs = symmetric.rendezvous(mine, process_group(peer)).get_buffer(1 - rank, (FULL.size,), torch.uint8)
    source, rows = torch.randint(256, (FULL.size,), dtype=torch.uint8, device=device), []
    for cell, kinds in PLAN:
        case = mask_case(cell.mask, cell.rows * 2, heads=cell.heads)
        for row in measure(Rank(peer, device, cell, case, case.spec()), kinds, (source, theirs), SECONDS):
            rows.append(row)
            if rank == 0:
                out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
                print(told(row), flush=True)
    os._exit(0)  # the other's memory is mapped here: nothing is closed in any order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "link_power.json")
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print(f"{torch.cuda.device_count()} GPUs are here, not 2")
        return 2
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    mp.spawn(serve, (tempfile.mktemp(prefix="maskc-link-"), args.out), nprocs=2)  # type: ignore
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
