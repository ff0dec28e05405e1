"""Canonical linear forms: integer combinations of atoms, the terms that the prover reasons about.

An atom is an expression that linear arithmetic does not look into: a size, a scalar, `k`, a read, a floor division, a
product of atoms. `Space` numbers atoms; two expressions that are equal by arithmetic get the same form. `len`, `pos`
and `%` are written by start, end and `//`, so they are never atoms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from maskc.ir.nodes import (
    Add,
    BoolField,
    Col,
    Const,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    IfElse,
    InEdge,
    InSet,
    Max,
    Min,
    Mod,
    Mul,
    Pred,
    SegAttr,
    StartOf,
)
from maskc.ir.traverse import reads_row


@dataclass(frozen=True, slots=True)
class Lin:
    """const + sum of coefficient * atom, atoms in increasing number, no zero coefficients."""

    const: int
    terms: tuple[tuple[int, int], ...] = ()

    @property
    def is_const(self) -> bool:
        return not self.terms

    def coef(self, atom: int) -> int:
        return next((c for a, c in self.terms if a == atom), 0)

    def __add__(self, other: Lin | int) -> Lin:
        if isinstance(other, int):
            return Lin(self.const + other, self.terms)
        if not other.terms:
            return Lin(self.const + other.const, self.terms)
        return combine(((1, self), (1, other)))

    def __sub__(self, other: Lin | int) -> Lin:
        if isinstance(other, int):
            return Lin(self.const - other, self.terms)
        return combine(((1, self), (-1, other)))

    def __mul__(self, n: int) -> Lin:
        return Lin(self.const * n, tuple((a, c * n) for a, c in self.terms)) if n else ZERO

    def __neg__(self) -> Lin:
        return self * -1


ZERO = Lin(0)


def combine(parts: Iterable[tuple[int, Lin]]) -> Lin:
    """Sum of multiplier * form."""
    const = 0
    out: dict[int, int] = {}
    for m, lin in parts:
        const += m * lin.const
        for a, c in lin.terms:
            out[a] = out.get(a, 0) + m * c
    return Lin(const, tuple(sorted((a, c) for a, c in out.items() if c)))


class Space:
    """Numbers atoms for one mask; grows as expressions are seen."""

    def __init__(self) -> None:
        self.atoms: list[Expr] = []
        self.factors: list[tuple[int, ...]] = []  # of a product; (itself,) for any other atom
        self._number: dict[Expr, int] = {}
        self._product: dict[tuple[int, ...], int] = {}
        self._cache: dict[Expr, Lin] = {}
        self._rows: dict[int, bool] = {}

    def atom(self, e: Expr) -> int:
        n = self._number.get(e)
        if n is None:
            n = self._number[e] = len(self.atoms)
            self.atoms.append(e)
            self.factors.append((n,))
        return n

    def of(self, atom: int) -> Lin:
        return Lin(0, ((atom, 1),))

    def reads_row(self, atom: int) -> bool:
        if atom not in self._rows:
            self._rows[atom] = reads_row(self.atoms[atom])
        return self._rows[atom]

    def lin(self, e: Expr) -> Lin:
        """The canonical form of an expression."""
        found = self._cache.get(e)
        if found is None:
            found = self._cache[e] = self._lin(e)
        return found

    def canonical(self, e: Expr) -> Expr:
        return self.expr(self.lin(e))

    def boolean(self, p: Pred) -> Pred:
        """A truth atom with its index in canonical form."""
        match p:
            case InSet(of, index):
                return InSet(of, self.canonical(index))
            case InEdge(of, edge, index):
                return InEdge(of, edge, self.canonical(index))
            case BoolField(name, index):
                return BoolField(name, self.canonical(index))
            case _:
                raise AssertionError(p)

    def expr(self, lin: Lin) -> Expr:
        """The form as an expression: positive terms, then negative ones, then the constant."""
        terms = [self._term(a, c) for a, c in sorted(lin.terms, key=lambda t: t[1] < 0)]
        if lin.const or not terms:
            terms.append(Const(lin.const))
        return terms[0] if len(terms) == 1 else Add(tuple(terms))

    def _term(self, atom: int, c: int) -> Expr:
        return self.atoms[atom] if c == 1 else Mul(Const(c), self.atoms[atom])

    def _lin(self, e: Expr) -> Lin:
        match e:
            case Const(value):
                return Lin(value)
            case Add(terms):
                return combine((1, self.lin(t)) for t in terms)
            case Mul(a, b):
                return self.times(self.lin(a), self.lin(b))
            case FloorDiv(a, b):
                return self.floordiv(self.lin(a), self.lin(b))
            case Mod(a, b):
                x, d = self.lin(a), self.lin(b)
                return x - self.times(d, self.floordiv(x, d))
            case SegAttr(of, "len", index):
                return self.lin(SegAttr(of, "end", index)) - self.lin(SegAttr(of, "start", index))
            case SegAttr(of, "pos", index):
                return self.lin(index) - self.lin(SegAttr(of, "start", index))
            case SegAttr(of, attr, index):
                return self.of(self.atom(SegAttr(of, attr, self.canonical(index))))
            case Field(name, index):
                return self.of(self.atom(Field(name, self.canonical(index))))
            case StartOf(of, ordinal):
                return self.of(self.atom(StartOf(of, self.canonical(ordinal))))
            case EdgeStart(of, edge, index):
                return self.of(self.atom(EdgeStart(of, edge, self.canonical(index))))
            case EdgeEnd(of, edge, index):
                return self.of(self.atom(EdgeEnd(of, edge, self.canonical(index))))
            case FirstRow(name, value):
                return self.of(self.atom(FirstRow(name, self.canonical(value))))
            case Min(terms) | Max(terms):
                return self.of(self.atom(type(e)(tuple(self.canonical(t) for t in terms))))
            case IfElse(cond, then, orelse):
                return self.of(self.atom(IfElse(cond, self.canonical(then), self.canonical(orelse))))
            case _:
                return self.of(self.atom(e))

    def times(self, a: Lin, b: Lin) -> Lin:
        """The product; products of atoms become atoms of their own."""
        if a.is_const:
            return b * a.const
        if b.is_const:
            return a * b.const
        parts = [(a.const, Lin(0, b.terms)), (b.const, Lin(0, a.terms)), (1, Lin(a.const * b.const))]
        parts += [(m * n, self.of(self._times(x, y))) for x, m in a.terms for y, n in b.terms]
        return combine(parts)

    def _times(self, x: int, y: int) -> int:
        return self._monomial(tuple(sorted(self.factors[x] + self.factors[y])))

    def _monomial(self, factors: tuple[int, ...]) -> int:
        if len(factors) == 1:
            return factors[0]
        n = self._product.get(factors)
        if n is None:
            e = self.atoms[factors[0]]
            for f in factors[1:]:
                e = Mul(e, self.atoms[f])
            n = self._product[factors] = self.atom(e)
            self.factors[n] = factors
        return n

    def floordiv(self, a: Lin, b: Lin) -> Lin:
        """floor(a / b) for b >= 1, whole multiples of b taken out first."""
        if b.is_const:
            return self._floordiv_const(a, b.const)
        whole, rest = ZERO, a
        if len(b.terms) == 1 and b.terms[0][1] == 1 and b.const == 0:
            divisor = b.terms[0][0]
            for atom, c in a.terms:
                if divisor in self.factors[atom]:
                    left = list(self.factors[atom])
                    left.remove(divisor)
                    quotient = self.of(self._monomial(tuple(left))) * c if left else Lin(c)
                    whole, rest = whole + quotient, rest - self.of(atom) * c
        if rest == ZERO:
            return whole
        return whole + self.of(self.atom(FloorDiv(self.expr(rest), self.expr(b))))

    def _floordiv_const(self, a: Lin, d: int) -> Lin:
        if d == 1:
            return a
        if d < 1:
            return self.of(self.atom(FloorDiv(self.expr(a), Const(d))))
        whole = Lin(a.const // d, tuple((x, c // d) for x, c in a.terms if c % d == 0))
        rest = Lin(a.const % d, tuple((x, c) for x, c in a.terms if c % d))
        if rest.is_const:
            return whole
        g = gcd(d, *(c for _, c in rest.terms))
        if g > 1:
            rest, d = Lin(rest.const // g, tuple((x, c // g) for x, c in rest.terms)), d // g
        return whole + self.of(self.atom(FloorDiv(self.expr(rest), Const(d))))


def column(space: Space) -> int:
    """The number of `k`."""
    return space.atom(Col())
