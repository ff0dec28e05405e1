"""Arguments of the converters, each refused by its name (M451) before anything is made of it."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from maskc.diagnostics import error, shortened


def tensor_of(name: str, value: object) -> Tensor:
    """A list, an array or a tensor as a dense tensor."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise error("M451", f"{name} is no tensor: {shortened(repr(value))}") from None
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise error("M451", f"{name} is a {'nested' if tensor.is_nested else 'sparse'} tensor", None, "give a dense one")
    return tensor


def check_integers(least: int, **values: object) -> None:
    """Sizes and the like: integers from `least` on; None is left to whoever asks."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least):
            raise error("M451", f"{name} = {value!r} is no integer from {least} on")
