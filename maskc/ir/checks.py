"""The claims of a file: `check causal`, `check isolated by S`, `check no_empty_row`.

A claim holds if a certain predicate is impossible: `mask and q < k`; `mask and not same(S)`; a row, inside every
`segments` input (rows outside are padding and never count as empty), that sees none of a few likely keys: its own, the
one as far from the end, the first, the last. Each case of that predicate is refuted by the facts, or a small input that
breaks the claim is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from maskc.diagnostics import MaskcError
from maskc.ir.facts import Context, FactTable, Ledger, compare_facts
from maskc.ir.linear import Lin, Space
from maskc.ir.lower import Case, lower_cases, needs_hole_free
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    Check,
    Col,
    Compare,
    Const,
    Expr,
    InputKind,
    InSet,
    MaskFn,
    Mul,
    Not,
    Or,
    Pred,
    Row,
    Same,
    SegAttr,
    Size,
)
from maskc.ir.normalize import dnf, nnf
from maskc.ir.search import broken_claim
from maskc.ir.traverse import Node, rewrite, substitute
from maskc.ir.verdict import CheckResult, Refuted, Verdict

BRANCHES = 2000  # of one claim


def run_checks(fn: MaskFn, verdict: Verdict | None = None) -> tuple[CheckResult, ...]:
    """Decide every claim of the mask. The verdict only matters if it refutes the mask itself."""
    if isinstance(verdict, Refuted):
        return tuple(CheckResult(c, "unknown", "the mask itself is refused") for c in fn.checks)
    return tuple(run_check(fn, c) for c in fn.checks)


def run_check(fn: MaskFn, check: Check) -> CheckResult:
    rows = check.kind == "no_empty_row"
    refuted = every_row_refuted if rows else impossible
    if any(refuted(fn, v) for v in violations(fn, check)):
        if rows and fn.tables:
            return CheckResult(check, "unknown", "a block table may hide every key of a row")
        return CheckResult(check, "proved")
    example = broken_claim(fn, check)
    if example is not None:
        return CheckResult(check, "refuted", example)
    return CheckResult(check, "unknown", "the facts do not decide it, and no small input breaks it")


def violations(fn: MaskFn, check: Check) -> Iterator[Pred]:
    """Predicates of which one must be impossible for the claim to hold. For `no_empty_row` the row is written `k`."""
    match check.kind:
        case "causal":
            yield And((fn.body, Compare("<", Row(), Col())))
        case "isolated":
            assert check.of is not None
            yield And((fn.body, Not(Same(check.of))))
        case "no_empty_row":
            inside = tuple(InSet(d.name, Col()) for d in fn.inputs if d.kind is InputKind.SEGMENTS)
            # in the normal form what reads must be inside is said: then the negation is true of every row that sees nothing
            blind = tuple(Not(nnf(fn, _sees(fn.body, key))) for key in _likely_keys(fn))
            yield from (And((*inside, b)) for b in blind)
            if len(blind) > 1:
                yield And((*inside, *blind))
        case _:
            assert_never(check.kind)


def _likely_keys(fn: MaskFn) -> tuple[Expr, ...]:
    """Keys that a row `k` may see."""
    if fn.square:
        return (Col(),)
    from_end = Add((Col(), Size("nk"), Mul(Const(-1), Size("nq"))))
    return Col(), from_end, Const(0), Add((Size("nk"), Const(-1)))


def _sees(body: Pred, key: Expr) -> Pred:
    """Whether the row written `k` sees the key; the key must exist."""

    def at(n: Node) -> Node | None:
        match n:
            case Col():
                return key
            case Same(of) if key == Col():
                return InSet(of, key)
            case Same(of):
                equal = Compare("==", SegAttr(of, "ordinal", Row()), SegAttr(of, "ordinal", key))
                return And((InSet(of, Row()), InSet(of, key), equal))
            case _:
                return None

    seen = substitute(rewrite(body, at), Row(), Col())
    return And((Compare("<=", Const(0), key), Compare("<", key, Size("nk")), seen))


def impossible(fn: MaskFn, p: Pred) -> bool:
    """Whether the facts refute every case of the predicate, for every row and key."""
    try:
        lowered = lower_cases(fn, dnf(fn, p), Space())
    except MaskcError:  # too many cases, or a form that only the negation has
        return False
    context = Context(FactTable(fn, lowered.space, lowered.hole_free), Ledger())
    return all(refuted_case(context, c) for c in lowered.cases)


def every_row_refuted(fn: MaskFn, p: Pred) -> bool:
    """Whether the facts refute a predicate over `k`, which stands for a row, by splitting its `or`s one at a time."""
    space = Space()
    context = Context(FactTable(fn, space, needs_hole_free(fn), rows=True), Ledger())
    budget = iter(range(BRANCHES))

    def closed(context: Context, goals: list[Pred], forms: tuple[Lin, ...]) -> bool:
        waiting: list[Or] = []
        for g in goals:
            for p in g.terms if isinstance(g, And) else (g,):
                match p:
                    case Or():
                        waiting.append(p)
                    case Compare("!=", a, b):
                        waiting.append(Or((Compare("<", a, b), Compare(">", a, b))))
                    case Compare():
                        for f in compare_facts(space, p):
                            forms += (f.form, -f.form) if f.equal else (f.form,)
                    case BoolConst(value):
                        if not value:
                            return True
                    case _:
                        value = not isinstance(p, Not)
                        atom = context.table.space.boolean(p.term if isinstance(p, Not) else p)
                        if context.known.get(atom, value) != value:
                            return True
                        context = context.assume_bool(atom, value)
        if next(budget, None) is None:
            return False
        if context.contradicts(*forms):
            return True
        if not waiting:
            return False
        return all(closed(context, [branch, *waiting[1:]], forms) for branch in waiting[0].terms)

    return closed(context, [nnf(fn, p)], ())


def refuted_case(context: Context, c: Case, *extra: Lin) -> bool:
    """Whether the case together with the extra forms (>= 0, over q and k) is impossible for every row."""
    space, inner = context.table.space, context
    q = space.lin(Row())
    forms: list[Lin] = [q, space.lin(Size("nq")) - q - 1, *extra]
    for g in c.guards:
        if isinstance(g, tuple):
            if inner.known.get(g[0], g[1]) != g[1]:
                return True
            inner = inner.assume_bool(*g)
        else:
            forms.append(g)
    forms += [q - lo for lo in c.lows]
    forms += [hi - q - 1 for hi in c.highs]
    return inner.contradicts(*forms)


def starts_at_diagonal(context: Context, cases: tuple[Case, ...]) -> bool:
    """Whether no row q < k sees key k in any case: the free triangle may be used."""
    space = context.table.space
    return all(refuted_case(context, c, space.lin(Col()) - space.lin(Row()) - 1) for c in cases)
