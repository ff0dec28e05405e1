"""What is made once and kept: outside of `torch.inference_mode`, and outside of the graphs of `torch.compile`."""

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


def outside(what: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """The function, eagerly where a graph may break around it; else torch says M513 with `what` is to be done outside."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=f"M513: {what} once per batch, outside the compiled function")
                made: Result = torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
                return made
            return function(*args, **kwargs)

        return call

    return decorate
