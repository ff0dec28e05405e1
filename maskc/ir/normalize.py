"""Predicates to disjunctive normal form: negation inward, choices lifted out of comparisons, definedness made explicit.

After `dnf` every conjunction is a tuple of literals: `Compare` (always positive), or one of `Same`, `InSet`, `InEdge`,
`BoolField`, or `Not` of one of these four. The result means the same as the input for every token, outside ones
included: a comparison that reads attributes of outside tokens is false in both polarities, so each comparison is
accompanied by the literals that say that its reads are inside.

The negation of `A and B` keeps its context: `not A or (A and not B)`, where A is `same(S)` or an equality of blocks.
That is what lets `not (same(doc) and doc.pos[q] < 5)` be lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, assert_never

from maskc.diagnostics import Span, error
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
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
    Item,
    MaskFn,
    Max,
    Min,
    Mul,
    Not,
    Op,
    Or,
    Pred,
    Row,
    Same,
    SegAttr,
    Size,
)
from maskc.ir.traverse import FALSE, TRUE, Node, children, rebuild, walk

DNF_CAP = 256
NEGATED: dict[Op, Op] = {"<=": ">", "<": ">=", "==": "!=", "!=": "==", ">=": "<", ">": "<="}
Literals = tuple[Pred, ...]


# ---------------------------------------------------------------- constructors that fold


def conj(terms: Iterable[Pred], span: Span | None = None) -> Pred:
    """And, flattened and folded."""
    out: list[Pred] = []
    for t in terms:
        if isinstance(t, And):
            out += [x for x in t.terms if x not in out]
        elif t == FALSE:
            return FALSE
        elif t != TRUE and t not in out:
            out.append(t)
    return TRUE if not out else out[0] if len(out) == 1 else And(tuple(out), span=span)


def disj(terms: Iterable[Pred], span: Span | None = None) -> Pred:
    """Or, flattened and folded."""
    out: list[Pred] = []
    for t in terms:
        if isinstance(t, Or):
            out += [x for x in t.terms if x not in out]
        elif t == TRUE:
            return TRUE
        elif t != FALSE and t not in out:
            out.append(t)
    return FALSE if not out else out[0] if len(out) == 1 else Or(tuple(out), span=span)


# ---------------------------------------------------------------- negation normal form


def nnf(fn: MaskFn, p: Pred, positive: bool = True) -> Pred:
    """And/Or over literals that means `p`, or its inward-pushed negation."""
    match p:
        case BoolConst(value):
            return TRUE if value == positive else FALSE
        case Not(term):
            return nnf(fn, term, not positive)
        case Compare():
            return _comparison(fn, p if positive else Compare(NEGATED[p.op], p.a, p.b, span=p.span))
        case Same() | InSet() | InEdge() | BoolField():
            return p if positive else Not(p, span=p.span)
        case And(terms) | Or(terms):
            if isinstance(p, And) == positive:
                return conj((nnf(fn, t, positive) for t in terms), p.span)
            if isinstance(p, And):
                return _negated_and(fn, p)
            return disj((nnf(fn, t) for t in terms), p.span)
        case _:
            assert_never(p)


def _negated_and(fn: MaskFn, p: And) -> Pred:
    """`not (A and B and ...)` = `not A or (A and not B) or ...`, keeping as context the terms that help and are exact."""
    terms = sorted(_flat(p), key=lambda t: not isinstance(t, Same))
    context: list[Pred] = []
    out: list[Pred] = []
    for t in terms:
        out.append(conj([*context, nnf(fn, t, positive=False)], t.span))
        if isinstance(t, Same) or (_is_block_equality(t) and _inside(fn, t, context)):
            context.append(t)
    return disj(out, p.span)


def _flat(p: And) -> list[Pred]:
    return [x for t in p.terms for x in (_flat(t) if isinstance(t, And) else [t])]


def _is_block_equality(t: Pred) -> bool:
    sides = (t.a, t.b) if isinstance(t, Compare) and t.op == "==" else ()
    return any(isinstance(e, FloorDiv) and any(isinstance(n, Row) for n in walk(e)) for e in sides)


def _inside(fn: MaskFn, t: Pred, context: list[Pred]) -> bool:
    """Whether all reads of `t` are inside, given the `same(S)` of the context: then `t` and its negation are complements."""
    known = {s for c in context if isinstance(c, Same) for s in ancestry(fn, c.of)}
    return all(isinstance(d, InSet) and isinstance(d.index, Row | Col) and d.of in known for d in definedness(fn, t))


def ancestry(fn: MaskFn, of: str) -> tuple[str, ...]:
    """The set and all the sets it lies in, innermost first."""
    out = [of]
    while (parent := fn.input(out[-1]).within) is not None:
        out.append(parent)
    return tuple(out)


# ---------------------------------------------------------------- comparisons


def _comparison(fn: MaskFn, c: Compare) -> Pred:
    """A comparison as literals: IfElse, Min and Max lifted out, with the literals that say that its reads are inside."""
    choice = next((n for n in (*walk_values(c.a), *walk_values(c.b)) if isinstance(n, IfElse)), None)
    if choice is not None:
        yes, no = (_comparison(fn, _replace_in(c, choice, e)) for e in (choice.then, choice.orelse))
        return disj([conj([nnf(fn, choice.cond), yes]), conj([nnf(fn, choice.cond, positive=False), no])], c.span)
    folded = _ordinal_equality(c)
    if folded is not None:
        return folded
    return conj([*definedness(fn, c), _lift_extrema(c)], c.span)


def _ordinal_equality(c: Compare) -> Pred | None:
    """`S[q] == S[k]` is `same(S)`."""
    match c:
        case Compare("==", SegAttr(of, "ordinal", Row()), SegAttr(other, "ordinal", Col())) if of == other:
            return Same(of, span=c.span)
        case Compare("==", SegAttr(of, "ordinal", Col()), SegAttr(other, "ordinal", Row())) if of == other:
            return Same(of, span=c.span)
        case _:
            return None


def walk_values(e: Node) -> Iterable[Node]:
    """Sub-terms of an expression without the conditions of its choices."""
    yield e
    for child in children(e)[1:] if isinstance(e, IfElse) else children(e):
        yield from walk_values(child)


def _replace_in(c: Compare, old: IfElse, new: Expr) -> Compare:
    def go(n: Node) -> Node:
        if n is old:
            return new
        return rebuild(n, tuple(go(x) for x in children(n)))

    return Compare(c.op, go(c.a), go(c.b), span=c.span)  # type: ignore[arg-type]


def definedness(fn: MaskFn, node: Node) -> list[Pred]:
    """Literals that are true iff all reads under `node` are inside. Reads that never fail give none."""
    out: list[Pred] = []
    for n in walk(node):
        match n:
            case SegAttr(of, _, index) if not isinstance(index, Item):
                out.append(InSet(of, index, span=n.span))
            case Field(name, index):
                out += _field_inside(fn, name, index, n.span)
            case _:
                pass
    return [p for i, p in enumerate(out) if p not in out[:i]]


def _field_inside(fn: MaskFn, name: str, index: Expr, span: Span | None) -> list[Pred]:
    per = fn.input(name).per
    if isinstance(index, Item | Head) or per is None or per == "head":
        return []
    if per not in ("key", "row"):
        return [InSet(per, index, span=span)]
    natural: tuple[type, ...] = (Row, Col) if fn.square else (Col,) if per == "key" else (Row,)
    if isinstance(index, natural):
        return []
    size = Size("nk" if per == "key" else "nq")
    if isinstance(index, Row | Col):
        return [Compare("<", index, size, span=span)]
    return [Compare(">=", index, Const(0), span=span), Compare("<", index, size, span=span)]


Shape = Expr | tuple[Literal["min", "max"], tuple["Shape", ...]]


def _lift_extrema(c: Compare) -> Pred:
    """`a <= min(b, c)` is `a <= b and a <= c`, and so on for every place where an extremum stands monotonically."""
    if not any(isinstance(n, Min | Max) for n in walk(c)):
        return c
    span = c.span
    d = Add((c.b, Mul(Const(-1), c.a)))  # b - a
    match c.op:
        case "<=":
            return _nonneg(_shape(d), span)
        case "<":
            return _nonneg(_shape(Add((d, Const(-1)))), span)
        case ">=":
            return _nonneg(_shape(_minus(d)), span)
        case ">":
            return _nonneg(_shape(Add((_minus(d), Const(-1)))), span)
        case "==":
            return conj([_nonneg(_shape(d), span), _nonneg(_shape(_minus(d)), span)], span)
        case "!=":
            above, below = Add((d, Const(-1))), Add((_minus(d), Const(-1)))
            return disj([_nonneg(_shape(above), span), _nonneg(_shape(below), span)], span)
        case _:
            assert_never(c.op)


def _minus(e: Expr) -> Expr:
    return Mul(Const(-1), e)


def _nonneg(s: Shape, span: Span | None) -> Pred:
    if isinstance(s, tuple):
        kind, parts = s
        return (conj if kind == "min" else disj)((_nonneg(p, span) for p in parts), span)
    return Compare(">=", s, Const(0), span=span)


def _shape(e: Expr) -> Shape:
    """The expression as a tree of extrema over expressions."""
    if not any(isinstance(n, Min | Max) for n in walk(e)):
        return e
    match e:
        case Min(terms) | Max(terms):
            return ("min" if isinstance(e, Min) else "max", tuple(_shape(t) for t in terms))
        case Add(terms):
            total: Shape = _shape(terms[0])
            for t in terms[1:]:
                total = _combine(total, _shape(t))
            return total
        case Mul(Const(n), x) | Mul(x, Const(n)):
            return _scale(_shape(x), n)
        case FloorDiv(a, b) if not any(isinstance(n, Min | Max) for n in walk(b)):
            return _each(_shape(a), lambda x: FloorDiv(x, b, span=e.span))
        case _:
            return e


def _combine(a: Shape, b: Shape) -> Shape:
    if isinstance(a, tuple):
        return (a[0], tuple(_combine(x, b) for x in a[1]))
    if isinstance(b, tuple):
        return (b[0], tuple(_combine(a, x) for x in b[1]))
    return Add((a, b))


def _scale(s: Shape, n: int) -> Shape:
    if isinstance(s, tuple):
        kind: Literal["min", "max"] = s[0] if n >= 0 else "max" if s[0] == "min" else "min"
        return (kind, tuple(_scale(x, n) for x in s[1]))
    return Mul(Const(n), s)


def _each(s: Shape, change: Callable[[Expr], Expr]) -> Shape:
    if isinstance(s, tuple):
        return (s[0], tuple(_each(x, change) for x in s[1]))
    return change(s)


# ---------------------------------------------------------------- disjunctive normal form


def dnf(fn: MaskFn, p: Pred) -> tuple[Literals, ...]:
    """Conjunctions of literals, at most DNF_CAP of them (else M302). No two contain one another."""
    out = _dnf(nnf(fn, p), p.span or fn.span)
    return tuple(c for i, c in enumerate(out) if not _absorbed(c, i, out))


def _absorbed(c: Literals, i: int, cases: list[Literals]) -> bool:
    mine = set(c)
    return any(j != i and set(d) <= mine and (set(d) != mine or j < i) for j, d in enumerate(cases))


def _dnf(p: Pred, span: Span | None) -> list[Literals]:
    match p:
        case BoolConst(value):
            return [()] if value else []
        case Or(terms):
            return _capped([c for t in terms for c in _dnf(t, span)], span)
        case And(terms):
            cases: list[Literals] = [()]
            for t in terms:
                more = _dnf(t, span)
                merged = (_join(a, b) for a in cases for b in more)
                cases = _capped([m for m in merged if m is not None], span)
            return cases
        case _:
            return [(p,)]


def _join(a: Literals, b: Literals) -> Literals | None:
    """The union of two conjunctions; None if it contains a literal and its negation."""
    new = tuple(x for x in b if x not in a)
    for x in new:
        other = x.term if isinstance(x, Not) else Not(x)
        if other in a:
            return None
    return a + new


def _capped(cases: list[Literals], span: Span | None) -> list[Literals]:
    check_cap(len(cases), span)
    return cases


def check_cap(cases: int, span: Span | None) -> None:
    """Raises M302 for more than DNF_CAP cases."""
    if cases > DNF_CAP:
        raise error(
            "M302",
            f"this mask has more than {DNF_CAP} cases when its `or`s are multiplied out",
            span,
            "split the mask, or factor common conditions out of the `or`s",
        )
