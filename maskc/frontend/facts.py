"""Facts about inputs (`where`, `assume`): which are legal, what they say about scalars and about the two sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from maskc.diagnostics import Diagnostic, Span
from maskc.frontend import build
from maskc.frontend.session import Session
from maskc.ir import nodes as ir
from maskc.ir.traverse import Node, walk


def check_elementwise(fact: ir.Pred, span: Span, session: Session) -> bool:
    """Facts are checked when data are bound, element by element in O(n)."""
    found = build.sides(fact)
    if len(found) <= 1:
        return True
    if "item" in found:
        text = "a fact is either about whole segments or about tokens, not about both"
        session.report(Diagnostic("M121", text, span, "leave out the index, as in `0 <= prefix <= doc.len`"))
    else:
        text = "a fact may not relate rows, keys and heads with each other: it is checked element by element"
        session.report(Diagnostic("M121", text, span, "state it about `q` alone, `k` alone or `h` alone"))
    return False


def conjuncts(facts: Iterable[ir.Pred]) -> Iterator[ir.Pred]:
    """The facts, with those that `and` joins one by one."""
    for fact in facts:
        if isinstance(fact, ir.And):
            yield from conjuncts(fact.terms)
        else:
            yield fact


def at_least_one(inputs: Iterable[ir.InputDecl], assumes: Iterable[ir.Pred]) -> frozenset[str]:
    """The scalar inputs that their own `where` or an `assume` bounds below by 1 or more.

    These facts are checked whenever the input is bound; what the `where` of another input says is not, if a mask can do
    without that one.
    """
    assumed = _bounded(assumes)
    return frozenset(d.name for d in inputs if d.name in assumed or d.name in _bounded(d.where))


def _bounded(facts: Iterable[ir.Pred]) -> frozenset[str]:
    found: set[str] = set()
    for c in conjuncts(facts):
        if not isinstance(c, ir.Compare):
            continue
        match c.op, c.a, c.b:
            case (">=" | "==", ir.Scalar(name), ir.Const(low)) | ("<=" | "==", ir.Const(low), ir.Scalar(name)) if low >= 1:
                found.add(name)
            case (">", ir.Scalar(name), ir.Const(low)) | ("<", ir.Const(low), ir.Scalar(name)) if low >= 0:
                found.add(name)
            case _:
                pass
    return frozenset(found)


def two_sided(inputs: Iterable[ir.InputDecl], facts: Iterable[ir.Pred]) -> bool:
    """Whether a file speaks of rows and keys as different sequences.

    It does if it declares inputs `per row` and inputs `per key`, or states a fact that relates nq and nk other than
    their equality.
    """
    if {"row", "key"} <= {d.per for d in inputs}:
        return True
    both = {ir.Size("nq"), ir.Size("nk")}
    relations = [c for c in conjuncts(facts) if both <= {n for n in walk(c) if isinstance(n, ir.Size)}]
    equalities = [c for c in relations if isinstance(c, ir.Compare) and c.op == "==" and {c.a, c.b} == both]
    return len(relations) > len(equalities)


def divisors(node: Node) -> Iterator[ir.Scalar]:
    """The scalar inputs that divide."""
    for n in walk(node):
        match n:
            case ir.FloorDiv(b=ir.Scalar() as b) | ir.Mod(b=ir.Scalar() as b):
                yield b
            case _:
                pass
