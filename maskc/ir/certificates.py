"""Certificates of entailment: made from the prover's derivations, checked again by sympy.

A certificate lists rows (forms that are >= 0: facts, the negated goal, cuts) with integer multipliers whose sum is a
negative constant. `check` expands that sum with sympy and looks at nothing the prover computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

from maskc.diagnostics import error
from maskc.ir.fourier import Fact, Row
from maskc.ir.linear import Lin, Space
from maskc.ir.nodes import Add, Const, Expr, Mul
from maskc.ir.printer import print_certificate, print_term
from maskc.ir.verdict import Certificate, Cut

if TYPE_CHECKING:
    import sympy


def certificate(space: Space, goal: Lin, contradiction: Row) -> Certificate:
    """The certificate of `goal >= 0` from the contradiction that its negation leads to."""
    cuts: dict[int, tuple[str, Cut]] = {}
    parts = _integral(_expand(space, contradiction, cuts))
    text = "contradiction" if goal == Lin(-1) else f"{_text(space, goal)} >= 0"
    return Certificate(text, parts, tuple(c for _, c in cuts.values()))


def _text(space: Space, form: Lin) -> str:
    return print_term(space.expr(form))


def _expand(space: Space, row: Row, cuts: dict[int, tuple[str, Cut]]) -> dict[str, Fraction]:
    """The row as a rational combination of fact and cut texts."""
    total: dict[str, Fraction] = {}
    for m, part in row.parts:
        if isinstance(part, Fact):
            text = ("0 == " if part.equal else "") + _text(space, part.form)
            inner = {text: Fraction(1)}
        elif part.divisor > 1:
            inner = _divided(space, part, cuts)
        else:
            inner = _expand(space, part, cuts)
        for text, c in inner.items():
            total[text] = total.get(text, Fraction(0)) + m * c
    return {t: c for t, c in total.items() if c}


def _divided(space: Space, row: Row, cuts: dict[int, tuple[str, Cut]]) -> dict[str, Fraction]:
    """A row divided by its gcd: a plain fraction if nothing was rounded, a cut otherwise."""
    found = cuts.get(id(row))
    if found is not None:
        return {found[0]: Fraction(1)}
    inner = _expand(space, row, cuts)
    const = sum(m * (p.form.const if isinstance(p, Fact) else p.const) for m, p in row.parts)
    if const == row.const * row.divisor:
        return {t: c / row.divisor for t, c in inner.items()}
    text = _text(space, Lin(row.const, tuple(sorted(row.coef.items()))))
    scale = lcm(*(c.denominator for c in inner.values()))
    parts = tuple((int(c * scale), t) for t, c in inner.items())
    cuts[id(row)] = (text, Cut(text, row.divisor * scale, parts))
    return {text: Fraction(1)}


def _integral(parts: dict[str, Fraction]) -> tuple[tuple[int, str], ...]:
    scale = lcm(*(c.denominator for c in parts.values()))
    return tuple((int(c * scale), t) for t, c in parts.items())


def confirm(certificates: Iterable[Certificate]) -> None:
    """Check certificates with sympy. Raises M304 for one that it does not confirm: the prover has a bug."""
    for c in certificates:
        if not check(c):
            raise error(
                "M304", f"sympy does not confirm a step of the proof: {print_certificate(c)}", None, "please report this mask"
            )


def check(c: Certificate) -> bool:
    """Whether sympy confirms the certificate: every cut is a sound rounding and the sum is a negative constant."""
    known = {cut.row for cut in c.cuts}
    if not all(
        m > 0 or text.startswith("0 == ") for parts in (c.combination, *(x.combination for x in c.cuts)) for m, text in parts
    ):
        return False
    for cut in c.cuts:
        row = to_sympy(_read(cut.row))
        coefficients = row.as_coefficients_dict()
        if any(not v.is_integer for v in coefficients.values()):
            return False
        rest = (_sum(cut.combination) - cut.divisor * row).expand()
        if not (rest.is_Integer and 0 <= rest < cut.divisor):
            return False
    total = _sum(c.combination)
    return bool(total.is_Integer and total < 0) and known <= {cut.row for cut in c.cuts}


def _sum(parts: tuple[tuple[int, str], ...]) -> Any:
    import sympy

    return sympy.expand(sympy.Add(*(m * to_sympy(_read(text.removeprefix("0 == "))) for m, text in parts)))


def _read(text: str) -> Expr:
    from maskc.ir.reader import read_expr

    return read_expr(text)


def to_sympy(e: Expr) -> sympy.Expr:
    """The expression as a sympy polynomial; reads, floors and gathers are integer symbols named by their text."""
    import sympy

    match e:
        case Const(value):
            return sympy.Integer(value)
        case Add(terms):
            return sympy.Add(*(to_sympy(t) for t in terms))
        case Mul(a, b):
            return sympy.Mul(to_sympy(a), to_sympy(b))
        case _:
            return sympy.Symbol(print_term(e), integer=True)
