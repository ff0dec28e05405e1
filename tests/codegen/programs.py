"""Random interval programs over one set of inputs, and random data for them: every kind of node that a column may hold."""

from __future__ import annotations

import random
from itertools import pairwise

from maskc.ir.intervals import VECTORS, Branch, Interval, IntervalProgram, Leaf, Tree
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Col,
    Compare,
    Const,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    Head,
    IfElse,
    InEdge,
    InputDecl,
    InputKind,
    InSet,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Pred,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)
from maskc.ir.reference import Env

SETS = ("doc", "part", "image")
FN = MaskFn(
    "random",
    (
        InputDecl("doc", InputKind.SEGMENTS),
        InputDecl("part", InputKind.SEGMENTS, within="doc"),
        InputDecl("image", InputKind.SPANS),
        InputDecl("at", InputKind.INT, per="key"),
        InputDecl("rising", InputKind.INT, per="row", sorted=True),
        InputDecl("prefix", InputKind.INT, per="doc"),
        InputDecl("kind", InputKind.BOOL, per="key"),
        InputDecl("noisy", InputKind.BOOL, per="image"),
        InputDecl("reach", InputKind.INT, per="head"),
        InputDecl("open", InputKind.BOOL, per="head"),
        InputDecl("shift", InputKind.INT),
        InputDecl("size", InputKind.INT),
    ),
    BoolConst(True),
)


def program(rng: random.Random) -> IntervalProgram:
    return IntervalProgram(_tree(rng, 2), False, VECTORS)


def _tree(rng: random.Random, depth: int) -> Tree:
    if depth == 0 or rng.random() < 0.2:
        return Leaf((), _interval(rng), _interval(rng))
    return Branch(_pred(rng, 2), _tree(rng, depth - 1), _tree(rng, depth - 1))


def _interval(rng: random.Random) -> Interval | None:
    return None if rng.random() < 0.2 else Interval(_expr(rng, 3), _expr(rng, 3))


def _expr(rng: random.Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.3:
        return _read(rng, depth)
    a, b = (_expr(rng, depth - 1) for _ in range(2))
    divisor: Expr = rng.choice((Const(rng.randint(1, 4)), Scalar("size")))
    return rng.choice(
        (
            lambda: Add((a, b)),
            lambda: Add((a, Mul(Const(-1), b), Const(rng.randint(-3, 3)))),
            lambda: Mul(Const(rng.randint(-2, 3)), a),
            lambda: FloorDiv(a, divisor),
            lambda: Mod(a, divisor),
            lambda: Min((a, b, Const(5))),
            lambda: Max((a, b)),
            lambda: IfElse(_pred(rng, depth - 1), a, b),
            lambda: StartOf(rng.choice(SETS), a),
            lambda: FirstRow("rising", a),
        )
    )()


def _read(rng: random.Random, depth: int) -> Expr:
    index = _index(rng, depth)
    of = rng.choice(SETS)
    return rng.choice(
        (
            lambda: Const(rng.randint(-4, 9)),
            lambda: Size(rng.choice(("nq", "nk"))),
            lambda: Scalar("shift"),
            lambda: Mul(Scalar("shift"), Col()),
            Col,
            Col,
            Head,
            lambda: Field("at", index),
            lambda: Field("prefix", index),
            lambda: Field("reach", Head()),
            lambda: SegAttr(of, rng.choice(("start", "end", "len", "pos", "ordinal")), index),
            lambda: SetEnd(of),
            lambda: EdgeStart("part", rng.choice(("first", "last")), index),
            lambda: EdgeEnd("part", rng.choice(("first", "last")), index),
            lambda: EdgeStart("image", rng.choice(("first", "last")), Col()),
            lambda: EdgeEnd("image", rng.choice(("first", "last")), Col()),
        )
    )()


def _index(rng: random.Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.6:
        return Col()
    return rng.choice((Add((Col(), Const(rng.randint(-3, 3)))), SegAttr("doc", "end", Col()), _read(rng, depth - 1)))


def _pred(rng: random.Random, depth: int) -> Pred:
    if depth == 0 or rng.random() < 0.5:
        index = _index(rng, depth)
        return rng.choice(
            (
                lambda: Compare(rng.choice(("<=", "<", "==", "!=", ">=", ">")), _expr(rng, depth), _expr(rng, depth)),
                lambda: Compare(rng.choice(("<=", "<", ">=", ">")), Col(), _expr(rng, depth)),
                lambda: InSet(rng.choice(SETS), index),
                lambda: InEdge("part", rng.choice(("first", "last")), index),
                lambda: InEdge("image", rng.choice(("first", "last")), Col()),
                lambda: BoolField("kind", index),
                lambda: BoolField("noisy", index),
                lambda: BoolField("open", Head()),
            )
        )()
    a, b = (_pred(rng, depth - 1) for _ in range(2))
    return rng.choice((Not(a), And((a, b)), Or((a, b)), And((a, Not(b))), Not(Or((a, b)))))


# ---------------------------------------------------------------- data


def batch(rng: random.Random, nq: int, nk: int, items: int, heads: int) -> list[list[Env]]:
    """`[b][h]`: sets and scalars are those of the item, vectors differ between heads."""
    return [_item(rng, nq, nk, heads) for _ in range(items)]


def _item(rng: random.Random, nq: int, nk: int, heads: int) -> list[Env]:
    doc = _tile(rng, 0, rng.randint(0, nk))
    part = [p for start, end in doc for p in _tile(rng, start, end)]
    edges = sorted(rng.choices(range(nk + 1), k=2 * rng.randint(1, 3)))
    image = list(zip(edges[::2], edges[1::2], strict=True))
    sets = {"doc": doc, "part": part, "image": image}
    scalars = {"shift": rng.randint(-5, 9), "size": rng.randint(1, 5)}
    reach = [rng.randint(-3, nk) for _ in range(heads)]
    opened = [rng.random() < 0.5 for _ in range(heads)]
    return [
        Env(
            nq,
            nk,
            scalars,
            {
                "at": [rng.randint(-3, nk + 3) for _ in range(nk)],
                "rising": sorted(rng.randint(-3, nk) for _ in range(nq)),
                "prefix": [rng.randint(0, nk) for _ in doc],
                "kind": [rng.random() < 0.5 for _ in range(nk)],
                "noisy": [rng.random() < 0.5 for _ in image],
                "reach": reach,
                "open": opened,
            },
            sets,
        )
        for _ in range(heads)
    ]


def _tile(rng: random.Random, start: int, end: int) -> list[tuple[int, int]]:
    """Segments, some of them empty, that tile [start, end)."""
    edges = [start, *sorted(rng.choices(range(start, end + 1), k=rng.randint(0, 3))), end]
    return list(pairwise(edges))
