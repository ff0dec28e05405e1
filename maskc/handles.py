"""Handles: a tensor that stands for a Python object, so that a compiled graph can refer to it without being compiled anew.

`torch.compile` guards on the values of Python objects but not on those of tensors. A plan or a bound mask that changes
with every batch therefore enters a graph as its handle, a number in an int64 tensor, and the operator looks it up.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from maskc.diagnostics import error

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


class Handled:
    """Base of frozen dataclasses that have a handle, which is not part of their value."""

    handle: torch.Tensor
    """int64 [1], on the CPU. Its memory keeps what it stands for alive: graphs save it for a backward that comes when nobody
    else may hold the object."""

    def __post_init__(self) -> None:
        number = next(_numbers)
        # not the object itself, which would keep itself alive by its handle
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        _objects[number] = twin
        object.__setattr__(self, "handle", torch.frombuffer(_Number(number, twin), dtype=torch.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Handled.__post_init__(self)


class _Number(bytearray):
    """The memory of a handle."""

    def __new__(cls, number: int, owner: object) -> _Number:
        return super().__new__(cls)

    def __init__(self, number: int, owner: object) -> None:
        super().__init__(number.to_bytes(8, "little"))
        self.owner = owner


def held(handle: torch.Tensor) -> Any:
    """What equals the object of a handle. Raises M517 when it is gone, after a copy of its handle outlived it."""
    try:
        return _objects[int(handle)]
    except KeyError:
        hint = "keep the bound mask and the plan until the backward is done"
        raise error("M517", "a compiled graph refers to a mask or a plan that is gone", None, hint) from None
