"""Random masks over one fixed set of inputs: every atom of the language, admissible or not, under and/or/not."""

from __future__ import annotations

import random
from collections.abc import Callable

from maskc.ir.nodes import (
    Add,
    And,
    BoolField,
    Col,
    Compare,
    Const,
    Expr,
    Field,
    FloorDiv,
    Head,
    IfElse,
    InEdge,
    InSet,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Op,
    Or,
    Pred,
    Row,
    Same,
    Scalar,
    SegAttr,
)
from maskc.ir.reader import read_fn
from maskc.ir.traverse import walk

DECLS = read_fn(
    """mask inputs
input doc : segments
input part : segments within doc
input image : spans within doc
input drop : spans
input w : int where w >= 1
input g : int
input b : int where b >= 1
input evict : int per key where evict[k] > k
input prefix : int per doc where 0 <= prefix[@doc], prefix[@doc] <= doc.len[@doc]
input rank : sorted int per row
input level : sorted int per doc
input noised : bool per image
input streaming : bool per head
input keep : bool per key
visible true
"""
).inputs
PARENTS = {"part": "doc", "image": "doc", "prefix": "doc", "level": "doc", "noised": "image"}
OPS: tuple[Op, ...] = ("<=", "<", "==", "!=", ">=", ">")
Q, K = Row(), Col()


def random_mask(seed: int, square: bool = True) -> MaskFn:
    r = random.Random(seed)
    body = _pred(r, r.choice((1, 2, 2, 3)), square)
    if r.random() < 0.5:
        body = And((Same("doc") if square and r.random() < 0.5 else Compare("<=", K, Q), body))
    names = {getattr(n, a) for n in walk(body) for a in ("name", "of") if hasattr(n, a)}
    while more := {PARENTS[n] for n in names if n in PARENTS} - names:
        names |= more
    return MaskFn(f"m{seed}", tuple(d for d in DECLS if d.name in names), body, square=square)


def _pred(r: random.Random, depth: int, square: bool) -> Pred:
    if depth == 0 or r.random() < 0.25:
        atom = r.choice(_SQUARE + _FREE if square else _FREE)(r)
        return Not(atom) if r.random() < 0.2 else atom
    terms = tuple(_pred(r, depth - 1, square) for _ in range(r.choice((2, 2, 3))))
    p: Pred = And(terms) if r.random() < 0.6 else Or(terms)
    return Not(p) if r.random() < 0.12 else p


def _op(r: random.Random) -> Op:
    return r.choice(OPS)


def _near(r: random.Random, e: Expr) -> Expr:
    return Add((e, Const(r.randint(-2, 3))))


def _small(r: random.Random) -> Expr:
    return Const(r.randint(-2, 3))


def _segments(r: random.Random) -> str:
    return r.choice(("doc", "part"))


def _set(r: random.Random) -> str:
    return r.choice(("doc", "part", "image", "drop"))


def _pos(e: Expr) -> Expr:
    return SegAttr("doc", "pos", e)


_DISTANCE = Max((Add((Q, Mul(Const(-1), K))), Add((K, Mul(Const(-1), Q)))))
Atom = Callable[[random.Random], Pred]

_FREE: tuple[Atom, ...] = (
    lambda r: Compare("<=", K, Q),
    lambda r: Compare(_op(r), Q, _near(r, K)),
    lambda r: Compare(_op(r), Q, Scalar("g")),
    lambda r: Compare(_op(r), K, Scalar("g")),
    lambda r: Compare("<", Q, Add((K, Scalar("w")))),
    lambda r: Compare(_op(r), _DISTANCE, Scalar("w")),
    lambda r: Compare(_op(r), FloorDiv(Q, Const(3)), FloorDiv(K, Const(3))),
    lambda r: Compare(_op(r), FloorDiv(Q, Scalar("b")), FloorDiv(K, Scalar("b"))),
    lambda r: Compare(_op(r), Q, Field("evict", K)),
    lambda r: Compare(_op(r), Field("rank", Q), K),
    lambda r: Compare(_op(r), Field("rank", _near(r, Q)), K),
    lambda r: BoolField("streaming", Head()),
    lambda r: BoolField("keep", K),
    lambda r: Compare(_op(r), Mod(Q, Const(3)), Mod(K, Const(3))),
    lambda r: Compare(_op(r), Mod(K, Const(2)), _small(r)),
    lambda r: Compare(_op(r), Q, Min((_near(r, K), Scalar("g")))),
    lambda r: Compare(_op(r), Field("evict", _near(r, K)), Q),
    lambda r: Compare(_op(r), Add((Q, Const(1))), Mul(Const(2), K)),
)

_SQUARE: tuple[Atom, ...] = (
    lambda r: Same(_set(r)),
    lambda r: Same("doc"),
    lambda r: InSet(_set(r), K),
    lambda r: InSet(_segments(r), Q),
    lambda r: InEdge(_segments(r), r.choice(("first", "last")), K),
    lambda r: InEdge(_segments(r), r.choice(("first", "last")), Q),
    lambda r: Compare(_op(r), FloorDiv(_pos(Q), Const(2)), FloorDiv(_pos(K), Const(2))),
    lambda r: Compare(_op(r), _pos(K), _small(r)),
    lambda r: Compare(_op(r), _pos(Q), _small(r)),
    lambda r: Compare(_op(r), _pos(Q), _pos(K)),
    lambda r: Compare(_op(r), _pos(K), Field("prefix", K)),
    lambda r: Compare(_op(r), _pos(Q), Field("prefix", Q)),
    lambda r: _ordinals(r, _segments(r), Q),
    lambda r: _ordinals(r, "doc", Add((Q, Const(-1)))),
    lambda r: _ordinals(r, "image", Q),
    lambda r: Compare(_op(r), SegAttr(_segments(r), "start", Q), _near(r, K)),
    lambda r: Compare(_op(r), SegAttr(_segments(r), "end", Q), _near(r, K)),
    lambda r: Compare(_op(r), Field("rank", Q), Field("rank", K)),
    lambda r: Compare(_op(r), Field("level", Q), _small(r)),
    lambda r: BoolField("noised", K),
    lambda r: Compare(_op(r), Q, SegAttr(_set(r), "start", K)),
    lambda r: Compare(_op(r), Q, SegAttr(_set(r), "end", K)),
    lambda r: _choice(r, _set(r)),
)


def _ordinals(r: random.Random, of: str, row: Expr) -> Pred:
    return Compare(_op(r), SegAttr(of, "ordinal", row), _near(r, SegAttr(of, "ordinal", K)))


def _choice(r: random.Random, of: str) -> Pred:
    return Compare(_op(r), Q, IfElse(InSet(of, K), SegAttr(of, "end", K), K))
