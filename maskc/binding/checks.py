"""Collects what is wrong with bound data. Checks run where the data are; one read tells whether any failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.diagnostics import Diagnostic, MaskcError

Bad = Tensor | bool
Values = Sequence[Tensor | int]
Explain = Callable[[tuple[int, ...], list[int]], Diagnostic]


@dataclass(frozen=True, eq=False, slots=True)
class _Check:
    bad: Tensor
    values: Values | Callable[[], Values]
    explain: Explain

    def diagnostic(self) -> Diagnostic:
        """What `explain` says of the first bad element. Reads from the device once more."""
        index = tuple(self.bad.nonzero()[0].tolist())
        shown = [v if isinstance(v, int) else int(v.expand(self.bad.shape)[index]) for v in _made(self.values)]
        return self.explain(index, shown)


class Checks:
    """With `enabled=False` nothing is read back: only shapes and types are checked."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._failed: list[Diagnostic] = []
        self._checks: list[_Check] = []
        self._wanted: list[tuple[Tensor, Callable[[int], None]]] = []

    def fail(self, *diagnostics: Diagnostic) -> None:
        """What is wrong whatever the data say."""
        self._failed += diagnostics

    def forbid(self, bad: Bad | Callable[[], Bad], values: Values | Callable[[], Values], explain: Explain) -> None:
        """No element of `bad` may be true. `explain` gets the first index where one is, and each of `values` there.

        bad: or what makes it, for a comparison that takes a GPU a launch and is made only where something is checked.
        values: or what makes them, where something is wrong.
        """
        if not self.enabled:
            return
        found = bad() if callable(bad) else bad
        if isinstance(found, Tensor):
            if found.numel():
                self._checks.append(_Check(found, values, explain))
        elif found:
            self._failed.append(explain((), [int(v) for v in _made(values)]))

    def read(self, number: Tensor, then: Callable[[int], None]) -> None:
        """Read one integer in the same transfer and hand it to `then`."""
        if self.enabled:
            self._wanted.append((number, then))

    def finish(self) -> None:
        """The one read. Raises MaskcError with everything that is wrong."""
        checks, wanted = self._checks, self._wanted
        self._checks, self._wanted = [], []
        if checks or wanted:
            bad = [check.bad for check in checks]
            failed = [(bad[0] if len(bad) == 1 else torch.cat([b.reshape(-1) for b in bad])).any()] if bad else []
            read = _together([*failed, *(number for number, _ in wanted)])
            if failed and read[0]:
                self._failed += [check.diagnostic() for check in checks if check.bad.any()]
            for (_, then), number in zip(wanted, read[len(failed) :], strict=True):
                then(number)
        self.stop()

    def stop(self) -> None:
        """Raise what is known without a read."""
        if self._failed:
            raise MaskcError(self._failed)


def _made(values: Values | Callable[[], Values]) -> Values:
    return values() if callable(values) else values


def _together(scalars: Sequence[Tensor]) -> list[int]:
    """Tensors of one element each, of one device, as integers in one read."""
    if scalars[0].device.type == "cpu":  # where reading waits for nothing, and stacking takes longer
        return [int(x) for x in scalars]
    together: list[int] = torch.stack([x.reshape(()).to(torch.int64) for x in scalars]).tolist()
    return together
