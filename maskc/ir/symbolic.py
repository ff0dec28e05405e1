"""The proof: at most two masked runs per column, beside the free triangle, for every input that obeys its facts.

`prove` lowers the mask to guarded intervals and searches a small decision tree: guards first, then comparisons
between bounds that the facts leave open, until every leaf knows the order of its intervals and has at most two gaps
that are not provably empty. The number of nodes is budgeted, never the time, so every machine reaches the same
verdict. A mask without such a tree is refuted by a small column, or left Unknown (data decide at binding).
"""

from __future__ import annotations

from dataclasses import replace

from maskc.ir.arrange import Gap, Sorted, arrange
from maskc.ir.bounds import Bound, bound_expr, stripped
from maskc.ir.certificates import certificate, confirm
from maskc.ir.checks import starts_at_diagonal
from maskc.ir.facts import Context, FactTable, Ledger
from maskc.ir.intervals import VECTORS, Branch, Interval, IntervalProgram, Leaf, Tree, Vector, leaves
from maskc.ir.linear import Lin
from maskc.ir.lower import Case, Guard, Lowered, lower, nonneg_pred
from maskc.ir.nodes import Col, Const, Expr, InEdge, MaskFn, Size
from maskc.ir.recombine import merge_branches
from maskc.ir.traverse import reads_row, walk
from maskc.ir.verdict import Proven, Unknown, Verdict

NODE_BUDGET = 200
DEPTH = 10


class Stuck(Exception):
    """No tree was found; carries the reason."""


def prove(fn: MaskFn, certify: bool = False) -> Verdict:
    """Proven with a program, Refuted with the smallest column found, or Unknown. Raises M201/M302 (form).

    certify: keep a certificate for every entailment (`Proven.certificates`) and check each of them again with sympy.
    """
    lowered = lower(fn)
    ledger = Ledger(proofs=[] if certify else None)
    reason = ""
    for tiling in dict.fromkeys((frozenset[str](), edge_sets(fn))):
        try:
            program = _Search(fn, lowered, tiling, ledger).program()
        except Stuck as stuck:
            reason = reason or str(stuck)
            continue
        proofs = ledger.proofs or []
        certificates = tuple(dict.fromkeys(certificate(lowered.space, goal, row) for goal, row in proofs))
        confirm(certificates)
        return Proven(program, certificates, ledger.queries, ledger.splits)
    from maskc.ir.search import refutation

    return refutation(fn) or Unknown(reason)


def edge_sets(fn: MaskFn) -> frozenset[str]:
    """Sets whose first or last segment holds rows: the proof may need that they fill their parent."""
    return frozenset(n.of for n in walk(fn.body) if isinstance(n, InEdge) and reads_row(n))


class _Search:
    def __init__(self, fn: MaskFn, lowered: Lowered, tiling: frozenset[str], ledger: Ledger) -> None:
        table = FactTable(fn, lowered.space, lowered.hole_free, tiling)
        self.space = lowered.space
        self.cases = lowered.cases
        self.ledger = ledger
        self.root = Context(table, ledger, table.always())
        ledger.nodes = 0
        self.zero = Lin(0)
        self.nq = self.space.lin(Size("nq"))
        self.k = self.space.lin(Col())
        self.causal = False

    def program(self) -> IntervalProgram:
        self.causal = starts_at_diagonal(self.root, self.cases)
        tree = place_all_masked(self._solve(self.root, self.cases, 0))
        vectors = used_vectors(tree)
        table = self.root.table
        return IntervalProgram(tree, self.causal, vectors, tuple(sorted(table.hole_free)), tuple(sorted(table.tiling)))

    # ------------------------------------------------------------ the tree

    def _solve(self, context: Context, cases: tuple[Case, ...], depth: int) -> Tree:
        self.ledger.nodes += 1
        if self.ledger.nodes > NODE_BUDGET:
            raise Stuck(f"the proof needs more than {NODE_BUDGET} case splits")
        live = [c for c in (settle(context, c) for c in cases) if c is not None]
        everything = [c for c in live if not c.guards and not c.lows and not c.highs]
        live = everything[:1] or live
        waiting = next((c for c in live if c.guards), None)
        if waiting is not None:
            return self._split(context, tuple(live), waiting.guards[0], depth)
        found = arrange(context, [(c.lows, c.highs) for c in live], self.nq, self.k if self.causal else None)
        if isinstance(found, Sorted):
            return self._leaf(found)
        if found is None:
            raise Stuck("a column has more than two masked runs that the facts do not rule out")
        return self._split(context, tuple(live), found, depth)

    def _split(self, context: Context, cases: tuple[Case, ...], guard: Guard, depth: int) -> Tree:
        if depth >= DEPTH:
            raise Stuck(f"the proof needs more than {DEPTH} nested case splits")
        if isinstance(guard, tuple):
            pred, yes, no = guard[0], context.assume_bool(guard[0], True), context.assume_bool(guard[0], False)
            known = no if yes.contradicts() else yes if no.contradicts() else None
        else:
            pred, yes, no = nonneg_pred(self.space, guard), context.assume(guard), context.assume(-guard - 1)
            known = no if context.entails(-guard - 1) else yes if context.entails(guard) else None
        if known is not None:
            return self._solve(known, cases, depth)
        self.ledger.splits += 1
        then = self._solve(yes, cases, depth + 1)
        orelse = self._solve(no, cases, depth + 1)
        return merge_branches(pred, then, orelse, yes, no)

    # ------------------------------------------------------------ leaves

    def _leaf(self, found: Sorted) -> Leaf:
        visible = tuple(self._interval(lo, hi) for lo, hi in found.intervals)
        lower, upper = assign_slots(found.gaps)
        return Leaf(
            visible,
            None if lower is None else self._interval(lower.lo, lower.hi),
            None if upper is None else self._interval(upper.lo, upper.hi),
        )

    def _interval(self, lo: Bound, hi: Bound) -> Interval:
        return Interval(
            bound_expr(self.space, stripped(lo, self.zero, self.nq)), bound_expr(self.space, stripped(hi, self.zero, self.nq))
        )


def settle(context: Context, c: Case) -> Case | None:
    """The case without the guards that hold here; None if one fails."""
    open_guards: list[Guard] = []
    for g in c.guards:
        if isinstance(g, tuple):
            known = context.known.get(g[0])
            if known is None:
                open_guards.append(g)
            elif known != g[1]:
                return None
        elif not open_guards:  # a form may read what an open guard before it protects
            if context.entails(g):
                continue
            if context.entails(-g - 1):
                return None
            open_guards.append(g)
        else:
            open_guards.append(g)
    return replace(c, guards=tuple(open_guards))


def assign_slots(gaps: tuple[Gap, ...]) -> tuple[Gap | None, Gap | None]:
    """(lower, upper): the bottom gap is the lower slot, the top gap the upper one, a middle gap takes the free slot."""
    lower = next((g for g in gaps if g.place in ("bottom", "all")), None)
    upper = next((g for g in gaps if g.place == "top"), None)
    for g in gaps:
        if g.place == "middle":
            if lower is None:
                lower = g
            else:
                upper = g
    return lower, upper


def place_all_masked(tree: Tree) -> Tree:
    """Leaves that see nothing are masked in every slot that other leaves use.

    Either slot alone would do; both keep the extremes of a block of keys sharp where such columns stand among others
    (the padded tail of a batch).
    """
    nothing = Interval(Const(0), Size("nq"))
    rest = [leaf for leaf in leaves(tree) if leaf.lower != nothing]
    upper = any(leaf.upper is not None for leaf in rest)
    lower = any(leaf.lower is not None for leaf in rest) or not upper
    masked = Leaf((), nothing if lower else None, nothing if upper else None)

    def go(t: Tree) -> Tree:
        if isinstance(t, Branch):
            return Branch(t.guard, go(t.then), go(t.orelse))
        return masked if t.lower == nothing else t

    return go(tree)


def used_vectors(tree: Tree) -> tuple[Vector, ...]:
    """The vectors that exist: LTE is absent if it always reads nq, UTS if it always reads 0."""
    nq: Expr = Size("nq")
    lowers = [leaf.lower for leaf in leaves(tree) if leaf.lower is not None]
    uppers = [leaf.upper for leaf in leaves(tree) if leaf.upper is not None]
    used = {
        "lts": bool(lowers),
        "lte": any(i.hi != nq for i in lowers),
        "uts": any(i.lo != Const(0) for i in uppers),
        "ute": bool(uppers),
    }
    return tuple(v for v in VECTORS if used[v])
