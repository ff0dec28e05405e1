"""Linear forms, elimination and certificates: sound on integers, re-checked by sympy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_file, parse_text
from maskc.ir import certificates
from maskc.ir.certificates import certificate, check, confirm, to_sympy
from maskc.ir.fourier import Fact, refute, solve
from maskc.ir.linear import Lin, Space
from maskc.ir.nodes import Expr, MaskFn, Scalar
from maskc.ir.printer import print_certificate, print_term
from maskc.ir.reader import read_expr, read_fn
from maskc.ir.reference import Env, Point, value_of
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Certificate, Cut, Proven
from tests.ir.test_suite import FORMS, SUITE
from tests.ir.theorems import print_theorem, prove_theorem, theorems

ATOMS = ("x", "y", "z")
SPACE = Space()
X, Y, Z = (SPACE.atom(Scalar(a)) for a in ATOMS)
BOX = range(-5, 6)

forms = st.builds(
    lambda const, coefs: Lin(const, tuple((a, c) for a, c in zip((X, Y, Z), coefs, strict=True) if c)),
    st.integers(-6, 6),
    st.lists(st.integers(-3, 3), min_size=3, max_size=3),
)
facts = st.builds(Fact, forms, st.sampled_from([False, False, False, True]))


def holds(f: Fact, point: tuple[int, int, int]) -> bool:
    value = f.form.const + sum(c * point[a] for a, c in f.form.terms)
    return value == 0 if f.equal else value >= 0


@settings(max_examples=400, deadline=None)
@given(st.lists(facts, min_size=1, max_size=6), forms)
def test_no_refuted_system_has_a_solution(system: list[Fact], goal: Lin) -> None:
    row = refute(solve(system), [Fact(goal)])
    if row is None:
        return
    assert not any(all(holds(f, p) for f in (*system, Fact(goal))) for p in product(BOX, repeat=3))
    assert check(certificate(SPACE, Lin(-1), row))


@settings(max_examples=60, deadline=None)
@given(st.lists(forms, min_size=1, max_size=4), forms)
def test_linear_arithmetic_of_sympy_agrees(system: list[Lin], goal: Lin) -> None:
    """What is refuted without rounding is unsatisfiable over the rationals, and the other way round."""
    from sympy import And, Q
    from sympy.logic.inference import satisfiable

    def term(f: Lin) -> Any:
        return to_sympy(SPACE.expr(f))

    constant = [f for f in (*system, goal) if f.is_const]
    clauses = [Q.ge(term(f), 0) for f in (*system, goal) if not f.is_const]
    possible = all(f.const >= 0 for f in constant) and bool(satisfiable(And(*clauses), use_lra_theory=True) if clauses else True)
    solved = solve([Fact(f) for f in system])
    found = (refute(solved, [Fact(goal), Fact(f)]) for f in (*system, goal))  # every connected part
    row = next((r for r in found if r is not None), None)
    if not possible:
        assert row is not None
    if row is not None and possible:  # only an integer argument
        assert certificate(SPACE, Lin(-1), row).cuts


def test_integers_need_rounding() -> None:
    """2 x = 2 y + 1 has rational solutions only."""
    system = [Fact(Lin(-1, ((X, 2), (Y, -2)))), Fact(Lin(1, ((X, -2), (Y, 2))))]
    row = refute(solve(system), [system[0]])
    assert row is not None
    made = certificate(SPACE, Lin(-1), row)
    assert made.cuts
    assert check(made)


def test_a_forged_certificate_is_noticed() -> None:
    good = Certificate("y >= 0", ((1, "y - x"), (1, "x"), (1, "-1 - y")))
    assert check(good)
    assert not check(replace(good, combination=((2, "y - x"), *good.combination[1:])))
    assert not check(replace(good, combination=((1, "y - x"), (-1, "-1 * x"), (1, "-1 - y"))))
    assert check(replace(good, combination=((-1, "0 == x - y"), (1, "x"), (1, "-1 - y"))))
    cut = Cut("x - y - 1", 2, ((1, "2 * x - 2 * y - 1"),))
    with_cut = Certificate("contradiction", ((1, "x - y - 1"), (1, "y - x")), (cut,))
    assert check(with_cut)
    assert not check(replace(with_cut, cuts=(replace(cut, row="x - y - 2"),)))
    assert not check(replace(with_cut, cuts=(replace(cut, divisor=1),)))


def test_a_proof_with_a_forged_certificate_is_refused() -> None:
    confirm([Certificate("y >= 0", ((1, "y - x"), (1, "x"), (1, "-1 - y")))])
    with pytest.raises(MaskcError, match="M304"):
        confirm([Certificate("y >= 0", ((1, "y - x"), (1, "-1 - y")))])


def test_a_proof_that_sympy_does_not_confirm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = parse_text("mask window = k <= q < k + 3").pick(None)
    assert isinstance(prove(fn, certify=True), Proven)
    monkeypatch.setattr(certificates, "check", lambda c: False)
    with pytest.raises(MaskcError, match="M304"):
        prove(fn, certify=True)


@pytest.mark.parametrize("stem", FORMS)
def test_every_entailment_of_the_suite_is_rechecked(stem: str) -> None:
    fn = parse_file(next(p for p in SUITE if p.stem == stem)).pick(None)
    verdict = prove(fn, certify=True)
    assert isinstance(verdict, Proven)
    assert stem in ("01_full", "27_bottom_right") or verdict.certificates
    for c in verdict.certificates:
        assert check(c), print_certificate(c)


@pytest.mark.parametrize("theorem", theorems(), ids=lambda t: t.name)
def test_theorems(theorem: Any) -> None:
    certificates = prove_theorem(theorem)
    assert certificates, f"{theorem.name} is not proved"
    print(print_theorem(theorem, certificates))
    assert all(check(c) for c in certificates)


def test_theorems_need_their_facts() -> None:
    """Without its last fact no theorem is proved: none holds for want of content."""
    for t in theorems():
        if t.name.startswith(("SKIP", "localization")):
            assert prove_theorem(replace(t, facts=t.facts[:-1])) is None, t.name


# ---------------------------------------------------------------- linear forms

_FN: MaskFn = read_fn("mask m\ninput x : int\ninput y : int\ninput b : int where b >= 1\nvisible true\n")
_leaf = st.sampled_from(["x", "y", "b", "k", "nk", "0", "1", "-2", "3"]).map(read_expr)


def _grow(e: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    def build(template: str) -> st.SearchStrategy[Expr]:
        return st.builds(lambda a, c: read_expr(template.format(_wrapped(a), _wrapped(c))), e, e)

    def divide(template: str) -> st.SearchStrategy[Expr]:
        return st.builds(lambda a, d: read_expr(template.format(_wrapped(a), d)), e, st.sampled_from(["b", "1", "2", "4"]))

    return st.one_of(
        build("{} + {}"), build("{} - {}"), build("{} * {}"), build("min({}, {})"), divide("{} // {}"), divide("{} % {}")
    )


def _wrapped(e: Expr) -> str:
    text = print_term(e)
    return text if text.isalnum() else f"({text})"


@settings(max_examples=300, deadline=None)
@given(st.recursive(_leaf, _grow, max_leaves=7), st.lists(st.integers(-7, 7), min_size=3, max_size=3), st.integers(1, 5))
def test_canonical_forms_keep_the_value(e: Expr, values: list[int], b: int) -> None:
    env = Env(9, 9, {"x": values[0], "y": values[1], "b": b})
    at = Point(0, values[2] % 9)
    space = Space()
    assert value_of(_FN, env, space.canonical(e), at) == value_of(_FN, env, e, at)


@settings(deadline=None)
@given(st.recursive(_leaf, _grow, max_leaves=5), st.recursive(_leaf, _grow, max_leaves=5))
def test_canonical_forms_agree_with_sympy(a: Expr, b: Expr) -> None:
    """Sums and products are equal as forms iff they are equal as sympy polynomials of their atoms."""
    import sympy

    space = Space()
    same = sympy.expand(to_sympy(space.canonical(a)) - to_sympy(space.canonical(b))) == 0
    assert (space.lin(a) == space.lin(b)) == same


@pytest.mark.parametrize(
    "text",
    [
        "input e : int per key where e[k - 1] <= e[k]\nmask m = k <= q < e[k]",
        "input e : int per key where e[e[k] + 1] + e[2 * k] <= e[k]\nmask m = k <= q < e[k]",
        "input doc : segments\ninput e : int per key where e[doc.end[k]] <= e[k]\nmask m = same(doc) and k <= q < e[k]",
    ],
)
def test_facts_that_bring_in_ever_more_elements_come_to_an_end(text: str) -> None:
    assert isinstance(prove(parse_text(text).masks[0]), Proven)
