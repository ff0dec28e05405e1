"""Results remembered as long as the object they were made from lives: no global cache keeps a batch's tensors alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from maskc.binding.streams import Kept

First = TypeVar("First")
Rest = TypeVarTuple("Rest")
Result = TypeVar("Result")


def derived(function: Callable[[First, *Rest], Result]) -> Callable[[First, *Rest], Result]:
    """A function whose results are kept per first argument, weakly, and per other arguments, which are hashable.

    For results without GPU tensors, which do not lead back to the first argument.
    """
    known: WeakKeyDictionary[First, dict[tuple[*Rest], Result]] = WeakKeyDictionary()

    def call(first: First, /, *rest: *Rest) -> Result:
        mine = known.setdefault(first, {})
        if rest not in mine:
            mine[rest] = function(first, *rest)
        return mine[rest]

    call.__doc__ = function.__doc__
    return call


def remembered(function: Callable[[First, *Rest], Result]) -> Callable[[First, *Rest], Result]:
    """As `derived`, for results with GPU tensors: they come in order with the current stream, whichever they were made on."""
    known: WeakKeyDictionary[First, Kept[tuple[*Rest], Result]] = WeakKeyDictionary()

    def call(first: First, /, *rest: *Rest) -> Result:
        mine = known.setdefault(first, Kept())
        return mine[rest] if rest in mine else mine.keep(rest, function(first, *rest))

    call.__doc__ = function.__doc__
    return call
