"""Handles: a tensor that stands for a Python object, so that a compiled graph can refer to it without being compiled anew.

`torch.compile` guards on the values of Python objects but not on those of tensors. A plan or a bound mask that changes
with every batch therefore enters a graph as its handle, a number in an int64 tensor, and the operator looks it up.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


class Handled:
    """Base of frozen dataclasses that have a handle. It dies with the object and is not part of its value."""

    handle: torch.Tensor
    """int64 [1], on the CPU."""

    def __post_init__(self) -> None:
        number = next(_numbers)
        _objects[number] = self
        object.__setattr__(self, "handle", torch.tensor([number]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Handled.__post_init__(self)


def held(handle: torch.Tensor) -> Any:
    """The object of a handle. Raises KeyError when it is gone."""
    return _objects[int(handle)]
