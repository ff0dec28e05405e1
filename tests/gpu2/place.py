"""Where the ranks are, two or more: a GPU each, two or more to a GPU, or on the host.

On one GPU their processes run in turn, some milliseconds each. torch then lets all take memory on it that the others read;
to NCCL, which wants a GPU a rank, each claims a host of its own: what they send goes through a socket.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from maskc.runtime import overlap

RANKS = "MASKC_RANKS"
"""In the environment: how many; 2 where it says nothing."""
SHARED = "MASKC_SHARED_GPU"
"""In the environment of ranks that share GPUs: the backend of their group."""
LEAVE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
LEFT = "MASKC_SHARED_LEFT"
"""In the environment of such ranks: multiprocessors that gated kernels leave to copies."""


@cache
def world() -> int:
    return int(os.environ.get(RANKS, "2"))


@cache
def gpus() -> int:
    """That the ranks use: one each, fewer, or none."""
    found = torch.cuda.device_count()
    return min(found, max(1, world() // 2)) if SHARED in os.environ else world() * (found >= world())


def shared() -> bool:
    """Whether ranks share GPUs."""
    return 0 < gpus() < world()


@cache
def device() -> str:
    return "cuda" if gpus() else "cpu"


@cache
def backend() -> str:
    return os.environ.get(SHARED, "nccl" if gpus() else "gloo")


def enter(rank: int) -> None:
    """Before this process uses its GPU or its group."""
    if gpus():
        torch.cuda.set_device(rank % gpus())
    if shared():
        os.environ.update({LEAVE: "1", "NCCL_HOSTID": f"rank {rank}"})
        asked = overlap._left_free
        overlap._left_free = lambda executor: max(asked(executor), int(os.environ.get(LEFT, "0")))
