"""Collects what is wrong with bound data. Checks run where the data are; one read brings all their results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskc.diagnostics import Diagnostic, MaskcError

Explain = Callable[[tuple[int, ...], list[int]], Diagnostic]


@dataclass(frozen=True, eq=False, slots=True)
class _Check:
    shape: torch.Size
    values: int
    explain: Explain


class Checks:
    """With `enabled=False` nothing is computed on the data and nothing is read: only shapes and types are checked."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._failed: list[Diagnostic] = []
        self._checks: list[_Check] = []
        self._results: list[Tensor] = []
        self._wanted: list[Callable[[int], None]] = []
        self._numbers: list[Tensor] = []

    def fail(self, *diagnostics: Diagnostic) -> None:
        """What is wrong whatever the data say."""
        self._failed += diagnostics

    def forbid(self, bad: Tensor | bool, values: Sequence[Tensor | int], explain: Explain) -> None:
        """No element of `bad` may be true. `explain` gets the first index where one is, and each of `values` there."""
        if not self.enabled:
            return
        if isinstance(bad, bool):
            if bad:
                self._failed.append(explain((), [int(v) for v in values]))
            return
        if bad.numel() == 0:
            return
        place = bad.flatten().to(torch.uint8).argmax().reshape(1)
        found = [_at(bad, bad.shape, place), place, *(_at(v, bad.shape, place) for v in values)]
        self._checks.append(_Check(bad.shape, len(values), explain))
        self._results += found

    def read(self, number: Tensor, then: Callable[[int], None]) -> None:
        """Read one integer in the same transfer and hand it to `then`."""
        if self.enabled:
            self._numbers.append(number.reshape(1).to(torch.int64))
            self._wanted.append(then)

    def finish(self) -> None:
        """The one read. Raises MaskcError with everything that is wrong."""
        if self._results or self._numbers:
            self._explain(torch.cat([*self._results, *self._numbers]).tolist())
        self._checks, self._results, self._wanted, self._numbers = [], [], [], []
        self.stop()

    def stop(self) -> None:
        """Raise what is known without a read."""
        if self._failed:
            raise MaskcError(self._failed)

    def _explain(self, numbers: list[int]) -> None:
        at = 0
        for check in self._checks:
            bad, place, *values = numbers[at : at + 2 + check.values]
            at += 2 + check.values
            if bad:
                self._failed.append(check.explain(_unravel(place, check.shape), values))
        for number, then in zip(numbers[at:], self._wanted, strict=True):
            then(number)


def _at(value: Tensor | int, shape: torch.Size, place: Tensor) -> Tensor:
    """The element of `value` (which broadcasts to `shape`) at a flat index: int64 [1], without a read."""
    if isinstance(value, int):
        return torch.full((1,), value, dtype=torch.int64, device=place.device)
    index, rest = [], place
    for size, own in zip(reversed(shape), reversed(value.shape), strict=True):
        index.append(rest % size if own > 1 else torch.zeros_like(rest))
        rest = rest // size
    return value[tuple(reversed(index))].to(torch.int64)


def _unravel(place: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    return tuple(reversed(index))
