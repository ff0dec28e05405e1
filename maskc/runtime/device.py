"""What a GPU is, asked for once: torch looks it up anew each time, and every call of a mask wants to know."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) for a Hopper GPU."""
    return _answer(torch.cuda.get_device_capability, device)


@cache
def _answer(ask: Callable[[torch.device], tuple[int, int]], device: torch.device) -> tuple[int, int]:
    return ask(device)
