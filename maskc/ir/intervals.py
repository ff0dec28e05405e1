"""IntervalProgram: for one key column, which rows see it, as a small decision tree of k-only row bounds.

Every bound is an `Expr` and every guard a `Pred` that mentions no `Row`. An interval with lo >= hi is empty. The two
masked slots of a leaf are the boundary vectors: masked rows of key k are [lts, lte) and [uts, ute), in either order;
with `causal`, rows q < k are masked as well. An absent LTE reads as nq, an absent UTS as 0; an empty lower slot is
(nq, nq), an empty upper slot (0, 0).

Bounds are exact integers (64 bit) that may lie outside [0, nq]: whoever evaluates a slot clamps both of its bounds into
[0, nq], which leaves the set of rows as it is. A bound reads attributes of outside tokens in branches not taken only,
so an evaluator that computes all branches may read anything there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from maskc.ir.nodes import Expr, Pred
from maskc.ir.traverse import Node, walk

Vector = Literal["lts", "lte", "uts", "ute"]
VECTORS: tuple[Vector, ...] = ("lts", "lte", "uts", "ute")


@dataclass(frozen=True, slots=True)
class Interval:
    """Rows lo <= q < hi."""

    lo: Expr
    hi: Expr


@dataclass(frozen=True, slots=True)
class Leaf:
    """Visible rows of a column (sorted, may be empty intervals) and its masked rows in the two slots (None: empty)."""

    visible: tuple[Interval, ...]
    lower: Interval | None
    upper: Interval | None


@dataclass(frozen=True, slots=True)
class Branch:
    guard: Pred
    then: Tree
    orelse: Tree


Tree = Leaf | Branch


@dataclass(frozen=True, slots=True)
class IntervalProgram:
    """The lowered mask. `vectors` are those that exist; `causal` is the free triangle (rows q < k masked).

    What the data must obey for the program to be exact, beside the declared facts: `hole_free` segment inputs have no
    padding before or between segments (rows are found by their order); `tiling` inputs fill their parent, or
    [0, nk), completely. Where data break either, the fold of `maskc.ir.lower.interval_cases` (which needs `hole_free`
    only) says whether they still fit.
    """

    tree: Tree
    causal: bool
    vectors: tuple[Vector, ...]
    hole_free: tuple[str, ...] = ()
    tiling: tuple[str, ...] = ()


def leaves(tree: Tree) -> Iterator[Leaf]:
    """From `then` to `orelse`."""
    match tree:
        case Branch(_, then, orelse):
            yield from leaves(then)
            yield from leaves(orelse)
        case Leaf():
            yield tree
        case _:
            assert_never(tree)


def tree_nodes(tree: Tree) -> Iterator[Node]:
    """Every expression and predicate that the slots of a column are computed from, with its sub-terms."""
    match tree:
        case Branch(guard, then, orelse):
            yield from walk(guard)
            yield from tree_nodes(then)
            yield from tree_nodes(orelse)
        case Leaf(_, lower, upper):
            for interval in (lower, upper):
                if interval is not None:
                    yield from walk(interval.lo)
                    yield from walk(interval.hi)
        case _:
            assert_never(tree)


def tree_expressions(tree: Tree) -> Iterator[Expr]:
    """The integer expressions among them."""
    return (node for node in tree_nodes(tree) if isinstance(node, Expr))
