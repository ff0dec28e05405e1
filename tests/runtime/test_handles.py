"""Handles: they live as long as what they stand for, keep it alive where they outlive it, and say when it is gone."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest

import maskc
from maskc.handles import held


def test_a_handle_keeps_what_it_stands_for() -> None:
    spec = maskc.compile("std:causal").bind(nq=8, nk=8)
    vectors, handle, gone = spec.vectors(), spec.handle, weakref.ref(spec)
    assert held(handle).vectors() is vectors
    del spec
    assert gone() is None  # at once: it does not keep itself
    assert held(handle.detach()).vectors() is vectors
    number = handle.clone()
    del handle
    with pytest.raises(maskc.MaskcError, match="M517"):
        held(number)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_handles_of_their_own(again) -> None:  # type: ignore[no-untyped-def]
    p = maskc.plan(maskc.compile("std:causal").bind(nq=8, nk=8), world_size=2)
    twin = again(p)
    assert twin == p
    assert held(twin.handle) == held(p.handle) == p
    assert int(twin.handle) != int(p.handle)
