"""Arguments of `maskc.plan`, checked: every rank must make of them the same plain integers, or none a plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from maskc.diagnostics import error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from maskc.binding.bound import BoundMask
    from maskc.boundary import BoundaryVectors

Order: TypeAlias = Literal["contiguous", "zigzag", "zigzag-document", "balanced"]
Spec: TypeAlias = "BoundMask | BoundaryVectors"
WORLD_LIMIT = 4096
"""Ranks of a plan at most: it holds numbers per pair of them."""


def masks_of(specs: Spec | Sequence[Spec]) -> tuple[Spec, ...]:
    """The masks of the plan. Raises M717 for what is no bound mask."""
    masks = tuple(specs) if isinstance(specs, (list, tuple)) else (specs,)
    if not masks:
        raise error("M715", "a plan needs at least one mask")
    return tuple(map(mask_of, masks))


def mask_of(spec: Spec) -> Spec:
    """One mask of the plan. Raises M717 for what is no bound mask."""
    from maskc.binding.bound import BoundMask
    from maskc.boundary import BoundaryVectors

    if not isinstance(spec, BoundMask | BoundaryVectors):
        raise error("M717", f"a mask of the plan is {type(spec).__name__}, not a bound mask", None, "give mask.bind(...)")
    return spec


def world_of(world_size: int | None, group: ProcessGroup | None) -> int:
    """Number of ranks, given or counted. Raises M701."""
    if world_size is not None and not _whole(world_size, 1):
        raise error("M701", f"world_size is {world_size!r}; a plan needs the number of ranks, >= 1, or a group")
    if world_size is not None and world_size > WORLD_LIMIT:
        raise error("M701", f"world_size is {world_size}; a plan has at most {WORLD_LIMIT} ranks")
    if group is None:
        if world_size is None:
            raise error("M701", "neither world_size nor a group is given; a plan needs the number of ranks")
        return int(world_size)
    import torch.distributed as dist

    if hasattr(group, "get_group"):
        raise error("M701", f"group is a {type(group).__name__}", None, 'give the group of a dimension: mesh.get_group("cp")')
    try:
        count = operator.index(dist.get_world_size(group))  # a tensor has a size, too
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise error("M701", f"group is {type(group).__name__}, not a process group") from None
    if count < 1:
        raise error("M701", "this rank is not in the group", None, "give world_size, which every rank knows")
    if world_size not in (None, count):
        raise error("M701", f"world_size is {world_size}, the group has {count} ranks")
    return count


def nodes_of(nodes: int, world: int) -> int:
    """Number of nodes. Raises M716 unless it divides the ranks."""
    if not _whole(nodes, 1) or world % nodes:
        raise error("M716", f"{world} ranks do not stand in {nodes!r} nodes of equal size")
    return int(nodes)


def weights_of(weights: Sequence[int] | None, masks: int) -> tuple[int, ...]:
    """Layers per mask. Raises M715."""
    if weights is None:
        return (1,) * masks
    if not isinstance(weights, (list, tuple)) or len(weights) != masks or not all(_whole(w, 1) for w in weights):
        raise error("M715", f"weights are layers per mask, whole numbers >= 1: got {weights!r} for {masks} masks")
    return tuple(int(w) for w in weights)


def size_of(name: str, value: int | None, least: int = 1, code: str = "M717") -> int | None:
    """An optional size. Raises `code` for what is no whole number >= least."""
    return None if value is None else count_of(name, value, least, code)


def count_of(name: str, value: int, least: int = 1, code: str = "M717") -> int:
    """Raises `code` for what is no whole number >= least."""
    if not _whole(value, least):
        raise error(code, f"{name} is {value!r}, not a whole number >= {least}")
    return int(value)


def owners_of(assign: Sequence[int] | None) -> tuple[int, ...] | None:
    """Ranks given by hand. Raises M702 for what are no ranks; whether they exist and fit the chunks is seen later."""
    if assign is None:
        return None
    if not isinstance(assign, (list, tuple)) or not all(_whole(rank, 0) for rank in assign):
        raise error("M702", f"assign is {assign!r}, not a list with the rank of every chunk")
    return tuple(int(rank) for rank in assign)


def check_order(order: str, assign: Sequence[int] | None) -> None:
    """Raise M713 for an unknown order, M702 where `assign` contradicts it."""
    if order not in get_args(Order):
        raise error("M713", f"unknown order {order!r}", None, f"one of {', '.join(get_args(Order))}")
    if assign is not None and order != "balanced":
        raise error("M702", f"assign gives every chunk its rank, and so does order {order}", None, "give one of them")


def check_epsilon(epsilon: float | None, order: str, assign: Sequence[int] | None) -> None:
    """Raise M717 unless the band is a finite number >= 0, for an order that swaps chunks."""
    if epsilon is None:
        return
    known = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
    if not (known and math.isfinite(epsilon) and epsilon >= 0):
        raise error("M717", f"epsilon is {epsilon!r}, not a finite number >= 0", None, "0.02 means 2 %")
    if order != "balanced" or assign is not None:
        fixed = f"order {order}" if assign is None else "assign"
        raise error("M717", f"epsilon is {epsilon!r}, but {fixed} leaves no chunk to swap", None, "it goes with order balanced")


def check_documents(documents: Sequence[Sequence[tuple[int, int]]] | None, segments: Sequence[str]) -> None:
    """Raise M712 unless there is one list of documents for all batch items. segments: inputs that could be meant."""
    if documents is None or len(documents) != 1:
        names = ", ".join(f"`{name}`" for name in segments)
        held = "here they differ" if documents else f"these masks have {names}" if segments else "these masks have none"
        need = "order zigzag-document needs one segments input, the same in every batch item"
        raise error("M712", f"{need}; {held}", None, "give plan(documents=NAME) where there are several")


def check_switches(**switches: bool | None) -> None:
    """Raise M717 for a switch that is neither on nor off (None: the default)."""
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise error("M717", f"{name} is {value!r}, not True or False")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise M717 for a value of another type."""
    if not isinstance(value, kind):
        raise error("M717", f"{name} is {type(value).__name__}, not {kind.__name__}")


def _whole(value: object, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least
