"""Which way gradients of others' keys leave a rank, whatever its calls would choose: small ones never push all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args
from unittest import mock

from maskc.runtime.overlap_again import Again
from maskc.runtime.overlap_kernels import KeyBuffer
from maskc.runtime.overlap_pieces import Leaving

WAYS: tuple[Leaving, ...] = get_args(Leaving)


@contextmanager
def leaving(way: Leaving) -> Iterator[None]:
    """In this process; "given" where a kernel has all of their sum, else they are pushed piece by piece. Calls that are made
    again leave as they did."""
    anew, key = property(KeyBuffer.departures.func), Again._key  # type: ignore[attr-defined]

    def keyed(self: Again, *how: Any, **tensors: Any) -> tuple[object, ...]:
        found = key(self, *how, **tensors)
        return (*found, way) if found else ()

    with (
        mock.patch.object(KeyBuffer, "_leaving", property(lambda self: way)),
        mock.patch.object(KeyBuffer, "departures", anew),
        mock.patch.object(Again, "_key", keyed),
    ):
        yield
