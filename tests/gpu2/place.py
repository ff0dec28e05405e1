"""Where the two ranks are: a GPU each, both on one GPU, or on the host.

On one GPU their processes run in turn, some milliseconds each. torch then lets both take memory on it that the other reads;
to NCCL, which wants a GPU a rank, each claims a host of its own: what they send goes through a socket.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from maskc.runtime import overlap

WORLD = 2
SHARED = "MASKC_SHARED_GPU"
"""In the environment of ranks that share one GPU: the backend of their group."""
LEAVE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
LEFT = "MASKC_SHARED_LEFT"
"""In the environment of such ranks: multiprocessors that gated kernels leave to copies."""


@cache
def gpus() -> int:
    """That the ranks use: 2, 1 or 0."""
    found = torch.cuda.device_count()
    return min(found, 1) if SHARED in os.environ else WORLD * (found >= WORLD)


@cache
def device() -> str:
    return "cuda" if gpus() else "cpu"


@cache
def backend() -> str:
    return os.environ.get(SHARED, "nccl" if gpus() else "gloo")


def enter(rank: int) -> None:
    """Before this process uses its GPU or its group."""
    if gpus() == WORLD:
        torch.cuda.set_device(rank)
    elif gpus():
        os.environ.update({LEAVE: "1", "NCCL_HOSTID": f"rank {rank}"})
        asked = overlap._left_free
        overlap._left_free = lambda executor: max(asked(executor), int(os.environ.get(LEFT, "0")))
