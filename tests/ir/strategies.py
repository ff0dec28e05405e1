"""Hypothesis strategies for IR trees: every node type, with no regard for sense."""

from __future__ import annotations

from hypothesis import strategies as st

from maskc.ir.intervals import VECTORS, Branch, Interval, IntervalProgram, Leaf, Tree
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Check,
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
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Pred,
    Row,
    Same,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)

NAMES = st.sampled_from(["doc", "image", "w", "first", "min_", "x1"])
EDGES = st.sampled_from(["first", "last"])
ATTRS = st.sampled_from(["start", "end", "len", "pos", "ordinal"])
OPS = st.sampled_from(["<=", "<", "==", "!=", ">=", ">"])
CONSTS = st.builds(Const, st.integers(-9, 9))

_leaves: st.SearchStrategy[Expr] = st.one_of(
    CONSTS,
    st.sampled_from([Row(), Col(), Head(), Size("nq"), Size("nk")]),
    st.builds(Scalar, NAMES),
    st.builds(SetEnd, NAMES),
    st.builds(Item, NAMES),
)


def _several(items: st.SearchStrategy) -> st.SearchStrategy[tuple]:  # type: ignore[type-arg]
    return st.lists(items, min_size=2, max_size=3).map(tuple)


def _grow_expr(e: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.builds(Field, NAMES, e),
        st.builds(SegAttr, NAMES, ATTRS, e),
        st.builds(Add, _several(e)),
        st.builds(Mul, e, e),
        st.builds(Mul, CONSTS, e),
        st.builds(FloorDiv, e, e),
        st.builds(Mod, e, e),
        st.builds(Min, _several(e)),
        st.builds(Max, _several(e)),
        st.builds(IfElse, st.builds(Compare, OPS, e, e), e, e),
        st.builds(StartOf, NAMES, e),
        st.builds(EdgeStart, NAMES, EDGES, e),
        st.builds(EdgeEnd, NAMES, EDGES, e),
        st.builds(FirstRow, NAMES, e),
    )


exprs: st.SearchStrategy[Expr] = st.recursive(_leaves, _grow_expr, max_leaves=8)

_atoms: st.SearchStrategy[Pred] = st.one_of(
    st.builds(BoolConst, st.booleans()),
    st.builds(BoolField, NAMES, exprs),
    st.builds(Compare, OPS, exprs, exprs),
    st.builds(Same, NAMES),
    st.builds(InSet, NAMES, exprs),
    st.builds(InEdge, NAMES, EDGES, exprs),
)

preds: st.SearchStrategy[Pred] = st.recursive(
    _atoms,
    lambda p: st.one_of(st.builds(And, _several(p)), st.builds(Or, _several(p)), st.builds(Not, p)),
    max_leaves=5,
)


@st.composite
def decls(draw: st.DrawFn, name: str) -> InputDecl:
    kind = draw(st.sampled_from(InputKind))
    facts = tuple(draw(st.lists(preds, max_size=2)))
    match kind:
        case InputKind.SEGMENTS | InputKind.SPANS:
            return InputDecl(name, kind, within=draw(st.none() | NAMES), where=facts)
        case InputKind.BLOCKS:
            return InputDecl(name, kind, block=draw(st.tuples(st.integers(1, 256), st.integers(1, 256))))
        case InputKind.BOOL:
            return InputDecl(name, kind, per=draw(st.sampled_from(["key", "row", "head", "doc"])))
        case _:
            per = draw(st.none() | st.sampled_from(["key", "row", "head", "doc"]))
            default = draw(st.none() | st.integers(-5, 5)) if per is None else None
            return InputDecl(name, kind, per, per is not None and draw(st.booleans()), default=default, where=facts)


@st.composite
def masks(draw: st.DrawFn) -> MaskFn:
    names = draw(st.lists(st.sampled_from(["a", "b", "c_1"]), unique=True))
    checks = st.sampled_from([Check("causal"), Check("isolated", "doc"), Check("no_empty_row")])
    return MaskFn(
        "m",
        tuple(draw(decls(n)) for n in names),
        draw(preds),
        tuple(draw(st.lists(preds, max_size=2))),
        tuple(draw(st.lists(NAMES, max_size=2))),
        tuple(draw(st.lists(checks, max_size=2))),
        draw(st.booleans()),
    )


_intervals = st.builds(Interval, exprs, exprs)
_trees: st.SearchStrategy[Tree] = st.recursive(
    st.builds(Leaf, st.lists(_intervals, max_size=3).map(tuple), st.none() | _intervals, st.none() | _intervals),
    lambda t: st.builds(Branch, preds, t, t),
    max_leaves=4,
)
_names = st.lists(NAMES, unique=True, max_size=2).map(tuple)
programs = st.builds(
    IntervalProgram,
    _trees,
    st.booleans(),
    st.sets(st.sampled_from(VECTORS)).map(lambda s: tuple(v for v in VECTORS if v in s)),
    _names,
    _names,
)
