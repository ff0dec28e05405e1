"""What is kept with a mask serves every later call, so it is made of ordinary tensors in every mode of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def lasting(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, outside of `torch.inference_mode`, whose tensors training can neither save nor write to."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
