"""ast.Expr -> typed value: names, types and units of one expression.

Reports every error it finds and goes on; an expression with an error is BAD, and what reads it stays silent. Does not
look at: whether a predicate can be lowered (ir), declarations (typecheck), facts across declarations (facts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from maskc.diagnostics import Span
from maskc.frontend import ast, build, units
from maskc.frontend.hints import ELSEWHERE, count, how_to_declare, is_constant, seen_from, short, short_span, unit_hint
from maskc.frontend.reads import Reads
from maskc.frontend.scope import Macro, Scope
from maskc.frontend.units import PLAIN, POSITION, Kind
from maskc.frontend.values import BAD, Bad, Number, Ref, Truth, Value, describe
from maskc.frontend.words import ATTRIBUTES, BUILTINS, COORDINATES, did_you_mean
from maskc.ir import nodes as ir

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Typer:
    """Types expressions of one place. `item`: the input whose `where` this is. `constant`: only constants are legal."""

    scope: Scope
    params: dict[str, Value] = field(default_factory=dict)
    item: ir.InputDecl | None = None
    constant: bool = False

    # ---- the two questions a declaration asks

    def number(self, e: ast.Expr) -> Number | Bad:
        v = self.value(e)
        match v:
            case Number():
                return v
            case Bad():
                return BAD
            case _:
                hint = "use `if ... then ... else ...` to make a number of a condition" if isinstance(v, Truth) else None
                return self.report("M106", f"`{short(e)}` is {describe(v)}; a number must stand here", e.span, hint)

    def truth(self, e: ast.Expr) -> Truth | Bad:
        v = self.value(e)
        match v:
            case Truth():
                return v
            case Bad():
                return BAD
            case _:
                hint = f"compare it with something, as in `{short(e)} >= 1`" if isinstance(v, Number) else None
                return self.report("M106", f"`{short(e)}` is {describe(v)}; a condition must stand here", e.span, hint)

    def plain_truth(self, e: ast.Expr) -> Truth | Bad:
        """A condition that holds no block table."""
        return self._without_table(self.truth(e))

    def _without_table(self, v: Truth | Bad) -> Truth | Bad:
        if isinstance(v, Truth) and v.tables:
            name, span = v.tables[0]
            text = f"the block table `{name}` may only stand as a top-level `and` term of a mask"
            return self.report("M120", text, span, "join it to the other conditions with `and`")
        return v

    def report(self, code: str, message: str, span: Span, hint: str | None = None) -> Bad:
        return self.scope.report(code, message, span, hint)

    # ---- expressions

    def value(self, e: ast.Expr) -> Value:
        match e:
            case ast.Int():
                return self._int(e.value, e.span)
            case ast.Bool():
                return Truth(ir.BoolConst(e.value, span=e.span))
            case ast.Name():
                return self._name(e)
            case ast.Attr():
                return self._attr(e)
            case ast.Index():
                return self._index(e)
            case ast.Call():
                return self._call(e)
            case ast.Minus():
                return self._minus(e)
            case ast.Arith():
                return self._arith(e)
            case ast.Compare():
                return self._compare(e)
            case ast.In():
                return self._in(e)
            case ast.Not():
                t = self.plain_truth(e.term)
                return Truth(build.negation(t.pred, e.span)) if isinstance(t, Truth) else BAD
            case ast.And():
                return self._and(e)
            case ast.Or():
                terms = [self.plain_truth(t) for t in e.terms]
                good = [t.pred for t in terms if isinstance(t, Truth)]
                return Truth(build.disjunction(good, e.span)) if len(good) == len(terms) else BAD
            case ast.IfElse():
                return self._if_else(e)
            case _:
                assert_never(e)

    def _int(self, value: int, span: Span) -> Value:
        if not INT32_MIN <= value <= INT32_MAX:
            largest = f"the largest number is {INT32_MAX}"
            return self.report("M112", f"`{short_span(span)}` does not fit in 32 bits", span, largest)
        return Number(ir.Const(value, span=span), PLAIN)

    def _folded(self, expr: ir.Expr, unit: units.Unit, span: Span) -> Value:
        """A number whose constant folding may have left int32."""
        return self._int(expr.value, span) if isinstance(expr, ir.Const) else Number(expr, unit)

    # ---- names

    def _name(self, e: ast.Name) -> Value:
        v = self.lookup(e)
        match v:
            case Number() | Truth() | Bad():
                return v
            case Ref():
                return self._bare(v.decl, e)
            case Macro():
                example = f"write `{v.name}({', '.join(v.params)})`"
                return self.report("M114", f"`{v.name}` needs {count(len(v.params), 'argument')}", e.span, example)
            case _:
                assert_never(v)

    def lookup(self, e: ast.Name) -> Value | Macro:
        """The meaning of a name, as seen from here."""
        name = e.text
        if name in self.params:
            return self.params[name]
        found = self._coordinate(name, e.span) if name in COORDINATES else self.scope.lookup(name)
        if self.constant and not is_constant(found):
            return self.report("M112", f"`{name}` is not a constant", e.span, "constants are made of numbers and other constants")
        if found is not None:
            return seen_from(found, e.span)
        if name in BUILTINS:
            example = {"same": "same(doc)", "first": "k in first(doc)", "last": "q in last(doc)", "abs": "abs(q - k)"}
            return self.report("M114", f"`{name}` needs an argument", e.span, f"write `{example.get(name, f'{name}(q, k)')}`")
        candidates = [*self.scope.known_names(), *self.params, *COORDINATES, *BUILTINS, "true", "false"]
        return self.report(
            "M101", f"unknown name `{name}`", e.span, ELSEWHERE.get(name) or did_you_mean(name, candidates, how_to_declare(name))
        )

    def _coordinate(self, name: str, span: Span) -> Number:
        match name:
            case "q":
                return Number(ir.Row(span=span), POSITION)
            case "k":
                return Number(ir.Col(span=span), POSITION)
            case "h":
                return Number(ir.Head(span=span), PLAIN)
            case "nq":
                return Number(ir.Size("nq", span=span), PLAIN)
            case _:
                return Number(ir.Size("nk", span=span), PLAIN)

    def _bare(self, decl: ir.InputDecl, e: ast.Name) -> Value:
        """A set, vector or table without an index: legal for vectors in a `where` over the same axis."""
        name = decl.name
        if decl.is_set:
            hint = f"did you mean `same({name})`, `{name}[k]` (its number) or `k in {name}`?"
            return self.report("M102", f"`{name}` is a set of {decl.kind.value}, not a value", e.span, hint)
        if decl.kind is ir.InputKind.BLOCKS:
            assert decl.block is not None
            hint = f"write `{name}[q // {decl.block[0]}, k // {decl.block[1]}]`"
            return self.report("M103", f"`{name}` is a table; say which tile", e.span, hint)
        if self.item is not None and self.item.per is not None and self.item.per == decl.per:
            return Reads(self.scope, e).element(decl, e.span)
        token = {"head": "h", "row": "q"}.get(decl.per or "", "k")
        which = "head" if decl.per == "head" else "row" if decl.per == "row" else "key" if decl.per == "key" else "token"
        return self.report("M103", f"`{name}` is a vector; say which {which}", e.span, f"write `{name}[{token}]`")

    def set_named(self, e: ast.Name, role: str) -> ir.InputDecl | None:
        """The segments or spans that a name stands for; reports anything else."""
        known = self.params.get(e.text) or self.scope.lookup(e.text)
        match known:
            case Ref(decl) if decl.is_set:
                return decl
            case Bad():
                return None
            case None if e.text not in COORDINATES and e.text not in BUILTINS:
                hint = did_you_mean(e.text, self.scope.sets(), f"declare `input {e.text} : segments`")
                self.report("M101", f"unknown name `{e.text}`", e.span, hint)
            case _:
                hint = did_you_mean(e.text, self.scope.sets(), "declare one, for example `input doc : segments`")
                self.report("M116", f"{role} needs segments or spans; `{e.text}` is no set", e.span, hint)
        return None

    # ---- reads

    def _attr(self, e: ast.Attr) -> Value:
        decl = self.set_named(e.of, f"`.{e.attr.text}`")
        index = None if e.index is None else self.number(e.index)
        if decl is None or isinstance(index, Bad):
            return BAD
        attr = e.attr.text
        if attr not in ATTRIBUTES:
            others = "`" + "`, `".join(f"{e.of.text}.{a}" for a in ATTRIBUTES) + "`"
            hint = f"the number of a segment is `{e.of.text}[k]`" if attr in ("id", "ordinal", "number", "index") else None
            return self.report(
                "M104",
                f"`{e.of.text}` has no attribute `{attr}`",
                e.attr.span,
                hint or did_you_mean(attr, ATTRIBUTES, f"there are {others}"),
            )
        if index is None:
            return self._bare_attr(e, decl)
        assert e.index is not None
        return Reads(self.scope, e).attribute(decl, attr, index, e.index)

    def _bare_attr(self, e: ast.Attr, decl: ir.InputDecl) -> Value:
        """`doc.len`: the segment that a `where` of an input `per doc` is about."""
        of, attr = e.of.text, e.attr.text
        if self.item is None or self.item.per != decl.name:
            return self.report("M102", f"`{of}.{attr}` needs a token", e.span, f"`{of}.{attr}[k]` or `{of}.{attr}[q]`")
        if attr == "pos":
            return self.report(
                "M102", f"`{of}.pos` is the offset of a token; a whole segment has none", e.span, f"use `{of}.len`"
            )
        return Reads(self.scope, e).item_attribute(decl, attr)

    def _index(self, e: ast.Index) -> Value:
        known = self.lookup(e.of)
        args = [self.number(a) for a in e.args]
        if isinstance(known, Bad) or any(isinstance(a, Bad) for a in args):
            return BAD
        name = e.of.text
        match known:
            case Ref(decl):
                good = tuple(a for a in args if isinstance(a, Number))
                return Reads(self.scope, e).indexed(decl, good, e.args)
            case Macro():
                return self.report(
                    "M105", f"`{name}` is a `let` with parameters", e.of.span, f"write `{name}({short(e.args[0])})`"
                )
            case _:
                return self.report("M105", f"`{name}` is one value and takes no index", e.of.span, f"write `{name}`")

    # ---- calls

    def _call(self, e: ast.Call) -> Value:
        name = e.of.text
        if name not in self.params and self.scope.lookup(name) is None and name in BUILTINS:
            return self._builtin(e)
        known = self.lookup(e.of)
        match known:
            case Macro():
                args = tuple(self._argument(a) for a in e.args)
                if len(args) != len(known.params):
                    text = f"`{name}` takes {count(len(known.params), 'argument')}, not {len(args)}"
                    return self.report("M114", text, e.span, f"write `{name}({', '.join(known.params)})`")
                return BAD if any(isinstance(a, Bad) for a in args) else self.scope.expand(name, args, e.span)
            case Bad():
                return BAD
            case Ref():
                return self.report(
                    "M114", f"`{name}` is an input, read with brackets", e.span, f"write `{name}[{short(e.args[0])}]`"
                )
            case _:
                return self.report("M114", f"`{name}` takes no arguments", e.span, f"write `{name}`")

    def _argument(self, e: ast.Expr) -> Value:
        """An argument may be a value, or the name of a set or vector."""
        if isinstance(e, ast.Name):
            known = self.lookup(e)
            if isinstance(known, Ref):
                return known
        return self.value(e)

    def _builtin(self, e: ast.Call) -> Value:
        name, given = e.of.text, len(e.args)
        if name in ("first", "last"):
            hint = f"write `k in {name}({short(e.args[0])})` or `q in {name}({short(e.args[0])})`"
            return self.report("M114", f"`{name}` only stands after `in`", e.span, hint)
        if name == "same":
            arg = e.args[0]
            if given != 1 or not isinstance(arg, ast.Name):
                return self.report(
                    "M116", "`same` takes the name of one set", e.span, "write `same(doc)`: q and k lie in one segment of it"
                )
            decl = self.set_named(arg, "`same`")
            return BAD if decl is None else Truth(ir.Same(decl.name, span=e.span))
        args = [self.number(a) for a in e.args]
        if given != 1 if name == "abs" else given < 2:
            wanted = "one argument" if name == "abs" else "two arguments or more"
            return self.report("M114", f"`{name}` takes {wanted}, not {given}", e.span)
        good = [a for a in args if isinstance(a, Number)]
        if len(good) < given:
            return BAD
        if name == "abs":
            return self._folded(build.absolute(good[0].expr, e.span), good[0].unit, e.span)
        unit = PLAIN
        for arg, number in zip(e.args, good, strict=True):
            joined = units.join(unit, number.unit)
            if joined is None:
                return self.report("M107", f"`{short(arg)}` is {number.unit}, but {unit} stands beside it in `{name}`", arg.span)
            unit = joined
        return self._folded(build.extremum(name, tuple(n.expr for n in good), e.span), unit, e.span)

    # ---- arithmetic

    def _minus(self, e: ast.Minus) -> Value:
        if isinstance(e.term, ast.Int):
            return self._int(-e.term.value, e.span)
        n = self.number(e.term)
        if isinstance(n, Bad):
            return BAD
        unit = n.unit if n.unit.kind in (Kind.LENGTH, Kind.COUNT) else PLAIN
        return self._folded(build.negate(n.expr, e.span), unit, e.span)

    def _arith(self, e: ast.Arith) -> Value:
        a, b = self.number(e.a), self.number(e.b)
        if isinstance(a, Bad) or isinstance(b, Bad):
            return BAD
        if e.op in ("//", "%") and not self._divisor(e, b):
            return BAD
        unit = units.combine(e.op, a.unit, b.unit)
        if unit is None:
            verb, word = ("adds", "to") if e.op == "+" else ("subtracts", "from")
            first, second = (a, b) if e.op == "+" else (b, a)
            hint = "a length is a difference of positions: `q - k`" if {a.unit, b.unit} == {POSITION} else None
            return self.report("M108", f"`{short(e)}` {verb} {first.unit} {word} {second.unit}", e.span, hint)
        make = {
            "+": build.add,
            "-": build.subtract,
            "*": build.multiply,
            "//": build.floor_div,
            "%": build.modulo,
        }[e.op]
        return self._folded(make(a.expr, b.expr, e.span), unit, e.span)

    def _divisor(self, e: ast.Arith, b: Number) -> bool:
        """Divisors are constants or scalar inputs >= 1, so that `//` and `%` mean one thing everywhere."""
        match b.expr:
            case ir.Const(value) if value >= 1:
                return True
            case ir.Const(value):
                text = short(e.b)
                which = f"`{text}`" if text == str(value) else f"`{text}` = {value}"
                self.report("M113", f"a divisor is at least 1, which {which} is not", e.b.span)
            case ir.Scalar(name):
                self.scope.divisor(name, e.b.span)
                return True
            case _:
                hint = "name it: `const B = 4` or `input B : int where B >= 1`"
                self.report("M113", f"the divisor `{short(e.b)}` is neither a constant nor a scalar input", e.b.span, hint)
        return False

    # ---- conditions

    def _compare(self, e: ast.Compare) -> Value:
        values = [self.value(t) for t in e.terms]
        pairs = [self._pair(e, i, values[i], values[i + 1]) for i in range(len(e.ops))]
        good = [p for p in pairs if p is not None]
        return Truth(build.conjunction(good, e.span)) if len(good) == len(pairs) else BAD

    def _pair(self, e: ast.Compare, i: int, a: Value, b: Value) -> ir.Pred | None:
        """The comparison of two neighbours in a chain."""
        left, right, op = e.terms[i], e.terms[i + 1], e.ops[i]
        span = left.span.to(right.span)
        match a, b:
            case Number(), Number():
                if units.join(a.unit, b.unit) is None:
                    text = f"`{short_span(span)}` compares {a.unit} with {b.unit}"
                    self.report("M107", text, span, unit_hint(left, a, b) or unit_hint(right, b, a))
                    return None
                return build.compare(op, a.expr, b.expr, span)
            case (Bad(), _) | (_, Bad()):
                return None
            case Truth(), Truth() if op in ("==", "!="):
                x, y = self._without_table(a), self._without_table(b)
                if isinstance(x, Bad) or isinstance(y, Bad):
                    return None
                other = build.negation(y.pred, span)
                return build.choice(x.pred, *((y.pred, other) if op == "==" else (other, y.pred)), span)
            case Truth(), Truth():
                text = f"`{short_span(span)}` orders two conditions"
                self.report("M106", text, span, "combine conditions with `and`, `or`, `not`, or compare them with `==`")
                return None
            case _:
                odd, where = (left, a) if not isinstance(a, Number) else (right, b)
                hint = "combine conditions with `and`, `or` and `not`" if isinstance(where, Truth) else None
                self.report("M106", f"`{short(odd)}` is {describe(where)}; a number must stand here", odd.span, hint)
                return None

    def _in(self, e: ast.In) -> Value:
        token = self.number(e.token)
        decl = self.set_named(e.of, f"`{e.edge.text}`" if e.edge else "`in`")
        if decl is None or isinstance(token, Bad):
            return BAD
        return Reads(self.scope, e).membership(decl, e.edge.text if e.edge else None, token, e.token)

    def _and(self, e: ast.And) -> Value:
        terms = [self.truth(t) for t in e.terms]
        good = [t for t in terms if isinstance(t, Truth)]
        if len(good) < len(terms):
            return BAD
        tables = tuple(use for t in good for use in t.tables)
        return Truth(build.conjunction([t.pred for t in good], e.span), tables)

    def _if_else(self, e: ast.IfElse) -> Value:
        cond, then, orelse = self.plain_truth(e.cond), self.value(e.then), self.value(e.orelse)
        match then, orelse:
            case Number(), Number():
                unit = units.join(then.unit, orelse.unit)
                if unit is None:
                    text = f"one branch is {then.unit}, the other {orelse.unit}"
                    return self.report("M107", text, e.span, "both must count the same thing")
                return BAD if isinstance(cond, Bad) else Number(build.choose(cond.pred, then.expr, orelse.expr, e.span), unit)
            case Truth(), Truth():
                x, y = self._without_table(then), self._without_table(orelse)
                if isinstance(x, Bad) or isinstance(y, Bad) or isinstance(cond, Bad):
                    return BAD
                return Truth(build.choice(cond.pred, x.pred, y.pred, e.span))
            case (Bad(), _) | (_, Bad()):
                return BAD
            case _:
                text = f"one branch is {describe(then)}, the other {describe(orelse)}"
                return self.report("M106", text, e.span, "both must be numbers or both conditions")
