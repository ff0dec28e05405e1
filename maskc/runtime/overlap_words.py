"""Words by which kernels, copies and hosts of one rank tell each other how far they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.codegen.spec import GATE_SLOTS

OWNERS = 64
"""Ranks that a kernel gives gradients to; where there are more, it gives none."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """Words of a rank that outlive a call, of any plan: epochs in them only grow, so old ones are harmless.

    flags, finished, counts, copied: int32 on the rank's device, a word per piece of either direction. flags: of one key
    buffer; the transport's where keys are given. counts, of the backward kernel, and copied, of a copy kernel, are zero
    between kernels; the two run beside each other, and tiles that no row sees are counted before their keys are there. sent:
    of each owner, how many of its pieces have been given in this launch; zero between kernels. lost: not zero once a kernel
    that gives gradients gave up. failed: in host memory, not zero once this rank, or somebody else for it, gave up waiting;
    everybody: those words of all ranks that go by it.
    """

    flags: Tensor
    finished: Tensor
    counts: Tensor
    copied: Tensor
    sent: Tensor
    lost: Tensor
    failed: Tensor
    everybody: Tensor

    @classmethod
    def of(cls, device: torch.device, words: int = 2 * GATE_SLOTS) -> Lasting:
        """Zeros; the device's are there for every stream once the current stream of the device is."""
        flags, finished, counts, copied = torch.zeros(4, max(1, words), dtype=torch.int32, device=device)
        failed = torch.zeros(1, dtype=torch.int32)
        sent = torch.zeros(OWNERS + 1, dtype=torch.int32, device=device)
        failed = failed.pin_memory() if device.type == "cuda" else failed
        return cls(flags, finished, counts, copied, sent[:OWNERS], sent[OWNERS:], failed, failed)
