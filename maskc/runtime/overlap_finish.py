"""Waiting for the end of a rank's calls, and what makes it come."""

from __future__ import annotations

import time

import torch

from maskc.diagnostics import error
from maskc.runtime.overlap_kernels import KeyBuffer
from maskc.runtime.transport import read_word, write_word

STOPPED = 0xFFFFFFFF
"""What the host writes to make kernels stop waiting."""


class Finish(KeyBuffer):
    """See `maskc.runtime.overlap.Overlapped`."""

    def finish(self, timeout: float | None = None) -> None:
        """Wait for everything enqueued; afterwards the rank can be used again.

        timeout: seconds after which the host stops all waits (default: twice that of a wait of the kernel).

        Raises:
            MaskcError: M721 when a chunk did not arrive; the results of calls since the last `finish` are useless.
        """
        failed = self.words.failed.data_ptr()
        deadline = time.monotonic() + (2 * self.timeout if timeout is None else timeout)
        while not self.queues.idle() and time.monotonic() < deadline and not read_word(failed):
            time.sleep(1e-4)
        if not self.queues.idle():
            self.stop()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = read_word(failed)
        if found:
            if self.words.everybody.numel() == 1:  # else others go by it, too, and the link is not used again
                write_word(failed, 0)
                for t in (self.words.counts, self.words.sent, self.words.lost):  # as they stand
                    t.zero_()
            raise error("M721", self._missing(found))

    def stop(self) -> None:
        """End every wait of this rank, from any thread: of its kernel and of its streams."""
        failed = self.words.failed.data_ptr()
        if not read_word(failed):
            write_word(failed, STOPPED)
        self.transport.release(self.epoch)

    def _missing(self, found: int) -> str:
        if found == STOPPED:
            return f"rank {self.plan.rank}: waiting was stopped in call {self.epoch}"
        cut = self.forward_cut if found <= self.forward_cut.words else self.backward_cut
        slot = cut.plan.slot_of(found - 1 - cut.first)
        return f"rank {self.plan.rank}: key chunk {slot.chunk} of rank {slot.source} did not arrive within {self.timeout} s"
