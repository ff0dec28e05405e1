"""The claims of a file: `check causal`, `check isolated by S`, `check no_empty_row`.

A claim holds if a certain predicate is impossible: `mask and q < k`; `mask and not same(S)`; `not mask` at the key
k = q, for rows inside every `segments` input (rows outside are padding and never count as empty). Each case of that
predicate is refuted by the facts, or a small input that breaks the claim is looked for.
"""

from __future__ import annotations

from typing import assert_never

from maskc.ir.facts import Context, FactTable, Ledger
from maskc.ir.linear import Lin, Space
from maskc.ir.lower import Case, lower_cases
from maskc.ir.nodes import And, Check, Col, Compare, InputKind, InSet, MaskFn, Not, Pred, Row, Same, Size
from maskc.ir.normalize import dnf
from maskc.ir.search import broken_claim
from maskc.ir.traverse import substitute, walk
from maskc.ir.verdict import CheckResult, Refuted, Verdict


def run_checks(fn: MaskFn, verdict: Verdict | None = None) -> tuple[CheckResult, ...]:
    """Decide every claim of the mask. The verdict only matters if it refutes the mask itself."""
    if isinstance(verdict, Refuted):
        return tuple(CheckResult(c, "unknown", "the mask itself is refused") for c in fn.checks)
    return tuple(run_check(fn, c) for c in fn.checks)


def run_check(fn: MaskFn, check: Check) -> CheckResult:
    if impossible(fn, violation(fn, check)):
        if check.kind == "no_empty_row" and fn.tables:
            return CheckResult(check, "unknown", "a block table may hide every key of a row")
        return CheckResult(check, "proved")
    example = broken_claim(fn, check)
    if example is not None:
        return CheckResult(check, "refuted", example)
    return CheckResult(check, "unknown", "the facts do not decide it, and no small input breaks it")


def violation(fn: MaskFn, check: Check) -> Pred:
    """What must be impossible for the claim to hold."""
    match check.kind:
        case "causal":
            return And((fn.body, Compare("<", Row(), Col())))
        case "isolated":
            assert check.of is not None
            return And((fn.body, Not(Same(check.of))))
        case "no_empty_row":
            sets = dict.fromkeys(_sets(fn))
            inside = tuple(InSet(s, Col()) for s in sets)
            return And((*inside, Not(on_diagonal(fn.body))))
        case _:
            assert_never(check.kind)


def on_diagonal(p: Pred) -> Pred:
    """The predicate at q = k."""
    for of in {n.of for n in walk(p) if isinstance(n, Same)}:
        p = substitute(p, Same(of), InSet(of, Col()))
    return substitute(p, Row(), Col())


def _sets(fn: MaskFn) -> list[str]:
    return [d.name for d in fn.inputs if d.kind is InputKind.SEGMENTS]


def impossible(fn: MaskFn, p: Pred) -> bool:
    """Whether the facts refute every case of the predicate. Rows and keys range over the whole problem."""
    lowered = lower_cases(fn, dnf(fn, p), Space())
    context = Context(FactTable(fn, lowered.space, lowered.hole_free), Ledger())
    return all(refuted_case(context, c) for c in lowered.cases)


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
