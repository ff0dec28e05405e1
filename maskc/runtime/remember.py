"""Results remembered as long as the object they were made from lives: no global cache keeps a batch's tensors alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from maskc.binding.streams import Kept

First = TypeVar("First")
Rest = TypeVarTuple("Rest")
Result = TypeVar("Result")


def remembered(function: Callable[[First, *Rest], Result]) -> Callable[[First, *Rest], Result]:
    """A function whose results are kept per first argument, weakly, and per other arguments, which are hashable.

    GPU tensors in a result come in order with the current stream, whichever stream they were made on.
    """
    known: WeakKeyDictionary[First, Kept[tuple[*Rest], Result]] = WeakKeyDictionary()

    def call(first: First, /, *rest: *Rest) -> Result:
        mine = known.setdefault(first, Kept())
        return mine[rest] if rest in mine else mine.keep(rest, function(first, *rest))

    call.__doc__ = function.__doc__
    return call
