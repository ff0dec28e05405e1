"""Integer entailment by Fourier-Motzkin elimination with gcd tightening; every refutation carries its certificate.

A `Fact` says form >= 0, or form == 0. `refute` looks for a combination of facts that is a negative constant. It is
sound for integers, and complete for rationals as long as it stays under its row limit; dividing a row by the gcd of
its coefficients and rounding the constant down makes it stronger on integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from maskc.ir.linear import Lin

ROW_LIMIT = 400


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """form >= 0 (== 0 if `equal`)."""

    form: Lin
    equal: bool = False


class Row:
    """A derived inequality sum coef * atom + const >= 0: (sum of multiplier * part) / divisor, rounded down."""

    __slots__ = ("coef", "const", "divisor", "history", "parts")

    def __init__(
        self, coef: dict[int, int], const: int, parts: tuple[tuple[int, Row | Fact], ...], history: int, divisor: int = 1
    ) -> None:
        self.coef = coef
        self.const = const
        self.parts = parts
        self.divisor = divisor
        self.history = history  # the inequalities it comes from, as bits


def tightened(row: Row) -> Row:
    """The row divided by the gcd of its coefficients."""
    if not row.coef:
        return row
    g = gcd(*row.coef.values())
    if g > 1:
        row.coef = {a: c // g for a, c in row.coef.items()}
        row.const //= g
        row.divisor *= g
    return row


def _add(m: int, x: Row, n: int, y: Row) -> Row:
    coef = {a: m * c for a, c in x.coef.items()} if m != 1 else dict(x.coef)
    for a, c in y.coef.items():
        total = coef.get(a, 0) + n * c
        if total:
            coef[a] = total
        else:
            del coef[a]
    return tightened(Row(coef, m * x.const + n * y.const, ((m, x), (n, y)), x.history | y.history))


@dataclass(frozen=True, slots=True)
class Solved:
    """Equations solved for one atom each, in order, and the inequalities with those atoms substituted."""

    equations: tuple[tuple[int, Row], ...]
    rows: tuple[Row, ...]
    contradiction: Row | None


def solve(facts: Sequence[Fact]) -> Solved:
    """Uses up the equations that have an atom with coefficient 1 or -1; others become two inequalities."""
    equations: list[tuple[int, Row]] = []
    rows: list[Row] = []
    for f in facts:
        if f.equal:
            row = _substituted(Row(dict(f.form.terms), f.form.const, ((1, f),), 0), equations)
            unit = next((a for a, c in reversed(row.coef.items()) if c in (1, -1)), None)
            if unit is not None:
                equations.append((unit, row))
            elif row.coef or row.const:
                rows += [tightened(_scaled(row, 1)), tightened(_scaled(row, -1))]
    rows += [Row(dict(f.form.terms), f.form.const, ((1, f),), 0) for f in facts if not f.equal]
    best: dict[tuple[tuple[int, int], ...], Row] = {}
    for i, r in enumerate(rows):
        row = tightened(_substituted(r, equations))
        if not row.coef:
            if row.const < 0:
                return Solved(tuple(equations), (), row)
            continue
        row.history = 1 << i
        _keep(best, row)
    return Solved(tuple(equations), tuple(best.values()), None)


def _scaled(row: Row, m: int) -> Row:
    return Row({a: m * c for a, c in row.coef.items()}, m * row.const, ((m, row),), row.history)


def _substituted(row: Row, equations: Iterable[tuple[int, Row]]) -> Row:
    for atom, eq in equations:
        c = row.coef.get(atom)
        if c:
            row = _add_exact(row, -c * eq.coef[atom], eq)
    return row


def _add_exact(x: Row, n: int, y: Row) -> Row:
    coef = dict(x.coef)
    for a, c in y.coef.items():
        total = coef.get(a, 0) + n * c
        if total:
            coef[a] = total
        else:
            del coef[a]
    return Row(coef, x.const + n * y.const, ((1, x), (n, y)), x.history)


def _keep(best: dict[tuple[tuple[int, int], ...], Row], row: Row) -> bool:
    key = tuple(sorted(row.coef.items()))
    old = best.get(key)
    if old is None or row.const < old.const:
        best[key] = row
        return True
    return False


def refute(solved: Solved, extra: Sequence[Fact]) -> Row | None:
    """A contradiction (a row with no atoms and a negative constant) of the facts and the extra inequalities, if found."""
    if solved.contradiction is not None:
        return solved.contradiction
    goals = []
    for i, f in enumerate(extra):
        row = tightened(_substituted(Row(dict(f.form.terms), f.form.const, ((1, f),), 0), solved.equations))
        if not row.coef:
            if row.const < 0:
                return row
            continue
        row.history = 1 << (len(solved.rows) + i + 64)
        goals.append(row)
    if not goals:
        return None
    return _eliminate([*goals, *_connected(goals, solved.rows)])


def _connected(goals: list[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows that share atoms with the goals, directly or through other rows."""
    seen = {a for g in goals for a in g.coef}
    left, out, grew = list(rows), [], True
    while grew and left:
        grew, rest = False, []
        for r in left:
            if not seen.isdisjoint(r.coef):
                seen.update(r.coef)
                out.append(r)
                grew = True
            else:
                rest.append(r)
        left = rest
    return out


def _eliminate(rows: list[Row]) -> Row | None:
    best: dict[tuple[tuple[int, int], ...], Row] = {}
    for r in rows:
        _keep(best, r)
    rows = list(best.values())
    eliminated = 0
    while rows:
        ups: dict[int, int] = {}
        downs: dict[int, int] = {}
        for r in rows:
            for a, c in r.coef.items():
                side = ups if c > 0 else downs
                side[a] = side.get(a, 0) + 1
        # an atom bounded on one side only cannot take part in a contradiction
        free = ups.keys() ^ downs.keys()
        if free:
            rows = [r for r in rows if free.isdisjoint(r.coef)]
            continue
        atom = min(ups, key=lambda a: (ups[a] * downs[a] - ups[a] - downs[a], a))
        eliminated += 1
        best = {}
        lower: list[Row] = []
        upper: list[Row] = []
        for r in rows:
            if atom in r.coef:
                (lower if r.coef[atom] > 0 else upper).append(r)
            else:
                _keep(best, r)
        for x in lower:
            for y in upper:
                # a row from more than eliminated + 1 originals is implied by others (Chernikov)
                if (x.history | y.history).bit_count() > eliminated + 1:
                    continue
                m, n = -y.coef[atom], x.coef[atom]
                g = gcd(m, n)
                row = _add(m // g, x, n // g, y)
                if not row.coef:
                    if row.const < 0:
                        return row
                    continue
                _keep(best, row)
        rows = list(best.values())
        if len(rows) > ROW_LIMIT:
            return None
    return None
