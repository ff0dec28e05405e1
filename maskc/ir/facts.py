"""Facts about the atoms of one mask, and `Context`: what is known at one node of the decision tree.

Every fact is linear over integers. Facts about a token hold where the token is inside, so they carry conditions: truth
values of `InSet`, `InEdge` and `BoolField` atoms, or forms that must be known to be >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from maskc.ir.fourier import Fact, Row, Solved, refute, solve
from maskc.ir.linear import ZERO, Lin, Space
from maskc.ir.nodes import (
    BoolField,
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
    InEdge,
    InputDecl,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Pred,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)
from maskc.ir.nodes import Row as QueryRow
from maskc.ir.normalize import ancestry, definedness, dnf
from maskc.ir.traverse import Node, reads_row, rewrite, walk

Bool = Pred  # InSet, InEdge or BoolField with a canonical index and no span

# A declared fact about one element may speak of others (`e[k - 1] <= e[k]`), and the fact about those of more: it is
# stated of what the mask reads, and of what such facts bring in this many times.
_STEPS = 2


@dataclass(frozen=True, slots=True)
class Conditional:
    """A fact that holds where all atoms of `when` have the value given and all forms of `given` are >= 0."""

    fact: Fact
    when: tuple[tuple[Bool, bool], ...] = ()
    given: tuple[Lin, ...] = ()


class FactTable:
    """All facts of a mask, generated on demand as atoms appear.

    rows: `k` stands for a row, which need not be a key (see `maskc.ir.checks`).
    """

    def __init__(
        self,
        fn: MaskFn,
        space: Space,
        hole_free: frozenset[str] = frozenset(),
        tiling: frozenset[str] = frozenset(),
        rows: bool = False,
    ) -> None:
        self.fn = fn
        self.rows = rows
        self.space = space
        self.hole_free = hole_free
        self.tiling = tiling
        self.facts: list[Conditional] = []
        self._done = 0
        self._steps: dict[int, int] = {}  # how many declared facts lie between an atom and the mask
        self._step = 0  # of the atom that facts are made for
        self._tokens: set[tuple[str, Expr]] = set()
        self._decls = {d.name: d for d in fn.inputs}
        k = space.lin(Col())
        self._ge(k)
        self._ge(space.lin(Size("nq" if rows else "nk")) - k - 1)
        self._ge(space.lin(Size("nk")) - 1)
        self._ge(space.lin(Size("nq")))
        if fn.square:
            self._eq(space.lin(Size("nq")) - space.lin(Size("nk")))
        for fact in fn.assumes:
            self._declared(fact, ())

    # ------------------------------------------------------------ adding

    def _ge(self, lin: Lin, *when: tuple[Bool, bool]) -> None:
        self.facts.append(Conditional(Fact(lin), when))

    def _eq(self, lin: Lin, *when: tuple[Bool, bool]) -> None:
        self.facts.append(Conditional(Fact(lin, equal=True), when))

    def grow(self) -> None:
        """Facts for all atoms the space knows by now, and for those that these facts bring in."""
        while self._done < len(self.space.atoms):
            atom = self.space.atoms[self._done]
            self._step = self._steps.get(self._done, 0)
            self._done += 1
            if not reads_row(atom):
                known = len(self.space.atoms)
                self._about(atom)
                self._mark(known, self._step)

    def _mark(self, known: int, step: int) -> None:
        """The atoms after the first `known` ones were brought in by a fact."""
        for atom in range(known, len(self.space.atoms)):
            self._steps.setdefault(atom, step)

    def _about(self, atom: Expr) -> None:
        lin = self.space.lin
        match atom:
            case Scalar(name):
                for fact in self._decls[name].where:
                    self._declared(fact, ())
            case SegAttr(of, _, index):
                self._token(of, index)
            case Field(name, index):
                self._field(self._decls[name], index)
            case FloorDiv(a, b):
                f, x, d = lin(atom), lin(a), lin(b)
                self._ge(x - self.space.times(d, f))
                self._ge(self.space.times(d, f) + d - 1 - x)
            case SetEnd():
                self._ge(lin(atom))
                self._ge(lin(Size("nk")) - lin(atom))
            case StartOf(of, _):
                self._ge(lin(atom))
                self._ge(lin(SetEnd(of)) - lin(atom))
            case FirstRow(name, _):
                self._ge(lin(atom))
                per = self._decls[name].per
                if per in ("key", "row"):
                    self._ge(lin(Size("nk" if per == "key" else "nq")) - lin(atom))
            case EdgeStart(of, edge, index) | EdgeEnd(of, edge, index):
                if isinstance(atom, EdgeStart):
                    self._edge(of, edge, index)
                else:
                    lin(EdgeStart(of, edge, index))
            case Min(terms):
                for t in terms:
                    self._ge(lin(t) - lin(atom))
            case Max(terms):
                for t in terms:
                    self._ge(lin(atom) - lin(t))
            case _:
                pass

    def _token(self, of: str, index: Expr) -> None:
        """Facts about the segment of `of` that holds the token."""
        if (of, index) in self._tokens:
            return
        self._tokens.add((of, index))
        lin = self.space.lin
        start, end, i = lin(SegAttr(of, "start", index)), lin(SegAttr(of, "end", index)), lin(index)
        inside = (InSet(of, index), True)
        self._ge(start, inside)
        self._ge(i - start, inside)
        self._ge(end - i - 1, inside)
        self._ge(lin(Size("nk")) - end, inside)
        self._ge(lin(SegAttr(of, "ordinal", index)), inside)
        decl = self._decls[of]
        if decl.within is not None:
            self._ge(start - lin(SegAttr(decl.within, "start", index)), inside)
            self._ge(lin(SegAttr(decl.within, "end", index)) - end, inside)
        if of in self.hole_free:
            self._ge(lin(SetEnd(of)) - end, inside)
            if isinstance(index, Col):
                self._ge(i - lin(SetEnd(of)), (InSet(of, index), False))
        for fact in decl.where:
            self._declared(_at(fact, Item(of), index), (inside,))

    def _field(self, decl: InputDecl, index: Expr) -> None:
        """What `where` says about one element."""
        place: Node
        match decl.per:
            case "key":
                place = Col()
            case "row":
                place = QueryRow()
            case "head":
                place = Head()
            case None:
                return
            case of:
                for fact in decl.where:
                    self._declared(_at(fact, Item(of), index), ((InSet(of, index), True),))
                return
        for fact in decl.where:
            inside = () if isinstance(index, Col) and not self.rows else self._in_range(decl, index)
            self._declared(_at(fact, place, index), (), inside)

    def _in_range(self, decl: InputDecl, index: Expr) -> tuple[Lin, ...]:
        if decl.per == "head":
            return ()
        i, size = self.space.lin(index), self.space.lin(Size("nk" if decl.per == "key" else "nq"))
        return (i, size - i - 1)

    def _declared(self, fact: Pred, when: tuple[tuple[Bool, bool], ...], given: tuple[Lin, ...] = ()) -> None:
        """A declared fact: used if it is a conjunction of comparisons whose reads are inside."""
        if reads_row(fact) or self._step > _STEPS:
            return
        if self.rows and any(isinstance(n, Col) for n in walk(fact)):  # it speaks of keys, and the row may be none
            given += (self.space.lin(Size("nk")) - self.space.lin(Col()) - 1,)
        known = len(self.space.atoms)
        reads = definedness(self.fn, fact)
        cases = dnf(self.fn, fact)
        if len(cases) != 1:
            return
        for r in reads:
            if isinstance(r, Compare):  # an index in range
                given += tuple(f.form for f in compare_facts(self.space, r))
            else:
                when += ((self.space.boolean(r), True),)
        for literal in cases[0]:
            if isinstance(literal, Compare) and literal not in reads:
                for f in compare_facts(self.space, literal):
                    self.facts.append(Conditional(f, when, given))
        self._mark(known, self._step + 1)

    def _edge(self, of: str, edge: str, index: Expr) -> None:
        lin = self.space.lin
        start = lin(EdgeStart(of, edge, index))  # type: ignore[arg-type]
        end = lin(EdgeEnd(of, edge, index))  # type: ignore[arg-type]
        parent = self._decls[of].within
        if parent is None:
            self._ge(start)
            self._ge(lin(Size("nk")) - end)
            self._ge(end - start)
            token: Expr = Col()
        else:
            there = (InSet(parent, index), True)
            self._ge(start - lin(SegAttr(parent, "start", index)), there)
            self._ge(lin(SegAttr(parent, "end", index)) - end, there)
            self._ge(end - start, there)
            token = index
        inside, at_edge = (InSet(of, token), True), InEdge(of, edge, token)  # type: ignore[arg-type]
        s, e = lin(SegAttr(of, "start", token)), lin(SegAttr(of, "end", token))
        self._eq(start - s, (at_edge, True))
        self._eq(end - e, (at_edge, True))
        if of in self.tiling:
            inside_parent: tuple[tuple[Bool, bool], ...] = () if parent is None else ((InSet(parent, index), True),)
            if edge == "last":
                self._eq(end - lin(Size("nk") if parent is None else SegAttr(parent, "end", index)), *inside_parent)
            else:
                self._eq(start - (ZERO if parent is None else lin(SegAttr(parent, "start", index))), *inside_parent)
        if edge == "last":
            self._ge(start - s, inside)
            self._ge(end - e, inside)
            self._ge(start - e, inside, (at_edge, False))
        else:
            self._ge(s - start, inside)
            self._ge(e - end, inside)
            self._ge(s - end, inside, (at_edge, False))

    # ------------------------------------------------------------ reading

    def always(self) -> dict[Bool, bool]:
        """Truth values that hold everywhere."""
        roots = [s for s in self.tiling if self._decls[s].within is None]
        return dict(fact for s in roots for fact in self.implied(InSet(s, Col()), True))

    def implied(self, p: Bool, value: bool) -> list[tuple[Bool, bool]]:
        """Truth values that follow from one, itself included."""
        out = [(p, value)]
        match p:
            case InSet(of, index) if value:
                out += [(InSet(s, index), True) for s in ancestry(self.fn, of)[1:]]
                out += [(InSet(s, index), True) for s in self.tiling if self._decls[s].within == of]
            case InEdge(of, _, index) if value:
                out += self.implied(InSet(of, index), True)
            case InSet(of, index):
                for d in self.fn.inputs:
                    if d.is_set and of in ancestry(self.fn, d.name):
                        out.append((InSet(d.name, index), False))
                        out += [(InEdge(d.name, edge, index), False) for edge in ("first", "last")]
                    elif d.per is not None and d.per in self._decls and of in ancestry(self.fn, d.per):
                        out.append((BoolField(d.name, index), False))
            case BoolField(name, index) if value:
                per = self._decls[name].per
                if per in self._decls and per is not None:
                    out += self.implied(InSet(per, index), True)
            case _:
                pass
        return out


def _at(fact: Pred, place: Node, index: Expr) -> Pred:
    return rewrite(fact, lambda n: index if n == place else None)


def compare_facts(space: Space, c: Compare) -> list[Fact]:
    """A comparison as facts; `!=` gives none."""
    d = space.lin(c.b) - space.lin(c.a)
    match c.op:
        case "<=":
            return [Fact(d)]
        case "<":
            return [Fact(d - 1)]
        case ">=":
            return [Fact(-d)]
        case ">":
            return [Fact(-d - 1)]
        case "==":
            return [Fact(d, equal=True)]
        case _:
            return []


@dataclass
class Ledger:
    """What a proof used: counts, and the refutations behind its entailments."""

    queries: int = 0
    splits: int = 0
    nodes: int = 0
    proofs: list[tuple[Lin, Row]] | None = None


@dataclass
class Context:
    """Known truth values and inequalities at one node of the tree, and entailment under them."""

    table: FactTable
    ledger: Ledger
    known: dict[Bool, bool] = field(default_factory=dict)
    extra: tuple[Fact, ...] = ()
    _solved: Solved | None = None
    _atoms: int = 0  # known when `_solved` was made
    _memo: dict[Lin, bool] = field(default_factory=dict)

    def assume_bool(self, p: Bool, value: bool) -> Context:
        known = dict(self.known)
        known.update(self.table.implied(p, value))
        return Context(self.table, self.ledger, known, self.extra, _memo={g: True for g, v in self._memo.items() if v})

    def assume(self, *forms: Lin) -> Context:
        """The context in which these forms are >= 0 as well."""
        extra = self.extra + tuple(Fact(f) for f in forms)
        return Context(self.table, self.ledger, self.known, extra, _memo={g: True for g, v in self._memo.items() if v})

    def solved(self) -> Solved:
        if self._solved is None or self._atoms < len(self.table.space.atoms):
            self.table.grow()
            facts, pending = list(self.extra), []
            for c in self.table.facts:
                if all(self.known.get(p) == v for p, v in c.when):
                    if c.given:
                        pending.append(c)
                    else:
                        facts.append(c.fact)
            solved = solve(facts)
            for c in pending:
                if all(refute(solved, [Fact(-g - 1)]) is not None for g in c.given):
                    facts.append(c.fact)
            lemmas = _monotone_lemmas(self.table, solve(facts) if pending else solved)
            self._solved = solve([*facts, *lemmas]) if pending or lemmas else solved
            self._atoms = len(self.table.space.atoms)
        return self._solved

    def entails(self, form: Lin) -> bool:
        """Whether form >= 0 follows."""
        if form.is_const:
            return form.const >= 0
        found = self._memo.get(form)
        if found is None:
            self.ledger.queries += 1
            row = refute(self.solved(), [Fact(-form - 1)])
            found = self._memo[form] = row is not None
            if row is not None and self.ledger.proofs is not None:
                self.ledger.proofs.append((form, row))
        return found

    def le(self, a: Lin, b: Lin) -> bool:
        return self.entails(b - a)

    def contradicts(self, *forms: Lin) -> bool:
        """Whether the forms cannot all be >= 0."""
        self.ledger.queries += 1
        row = refute(self.solved(), [Fact(f) for f in forms])
        if row is not None and self.ledger.proofs is not None:
            self.ledger.proofs.append((Lin(-1), row))
        return row is not None


def _monotone_lemmas(table: FactTable, solved: Solved) -> list[Fact]:
    """Gathers and floors are monotone: a <= b gives f(a) <= f(b). Tried for every pair of like atoms."""
    space = table.space
    gathers: dict[tuple[str, str], list[tuple[Lin, Lin]]] = {}
    floors: dict[Lin, list[tuple[Lin, Lin]]] = {}
    for atom in space.atoms:
        match atom:
            case StartOf(of, value):
                gathers.setdefault(("start", of), []).append((space.lin(value), space.lin(atom)))
            case FirstRow(name, value):
                gathers.setdefault(("row", name), []).append((space.lin(value), space.lin(atom)))
            case FloorDiv(a, b) if not isinstance(b, Const) and not reads_row(a):
                floors.setdefault(space.lin(b), []).append((space.lin(a), space.lin(atom)))
            case _:
                pass

    def le(a: Lin, b: Lin) -> bool:
        d = b - a
        return d.const >= 0 if d.is_const else refute(solved, [Fact(-d - 1)]) is not None

    def ordered(members: list[tuple[Lin, Lin]]) -> list[Lin]:
        pairs = [pair for x, y in combinations(members, 2) for pair in ((x, y), (y, x))]
        return [fb - fa for (a, fa), (b, fb) in pairs if le(a, b)]

    out = [form for members in gathers.values() for form in ordered(members)]
    for divisor, members in floors.items():
        # with a symbolic divisor the product divisor * floor is an unknown of its own
        steps = ordered(members) + [f for x, f in members if le(ZERO, x)]
        out += steps + [space.times(divisor, f) for f in steps]
    return [Fact(form) for form in out]
