"""ast.Module -> MaskFn: names, imports, inputs, facts, masks and checks of one file, `let`s inlined.

Finds all errors of a file in one run. Guarantees of its result: every name is resolved, every number and condition
stands where it may, units agree, divisors are >= 1, facts are elementwise, every input is used. Does not look at:
whether a mask can be lowered or proved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from maskc.diagnostics import Diagnostic, Span
from maskc.frontend import ast, build, facts, inputs, lints
from maskc.frontend.expressions import Typer
from maskc.frontend.parser import Parsed
from maskc.frontend.scope import Macro
from maskc.frontend.session import Session
from maskc.frontend.units import PLAIN
from maskc.frontend.values import BAD, Bad, Number, Ref, Truth, Value
from maskc.frontend.words import AXES, BUILTINS, CALL_KEYWORDS, COORDINATES, did_you_mean, quoted
from maskc.ir import nodes as ir
from maskc.ir.traverse import names_in, walk


@dataclass(frozen=True, slots=True)
class Import:
    """A name that `use` brings in from another file."""

    name: str
    file: Checker
    use: ast.Use
    span: Span


Definition = ast.Const | ast.Let | ast.Mask
Entity = ast.Const | ast.Input | ast.Let | ast.Mask | Import


class Checker:
    """One file. `open_file` loads the file of a `use`, or reports why it cannot and returns None."""

    def __init__(self, parsed: Parsed, session: Session, open_file: Callable[[ast.Use], Checker | None]) -> None:
        self.module, self.session = parsed.module, session
        self.inputs: dict[str, ir.InputDecl] = {}
        self.assumes: list[ir.Pred] = []
        self._broken = set(parsed.broken)
        self._incomplete = bool(parsed.errors)
        self._entities: dict[str, Entity] = {}
        self._values: dict[str, Value] = {}
        self._active: list[str] = []
        self._divisors: list[tuple[str, Span]] = []
        for d in parsed.errors:
            session.report(d)
        for decl in self.module.decls:
            self._collect(decl, open_file)
        self._declare_inputs()
        for decl in self.module.decls:
            if isinstance(decl, ast.Assume):
                self._assume(decl)

    # ---- Scope: what expressions ask

    def report(self, code: str, message: str, span: Span, hint: str | None = None) -> Bad:
        self.session.report(Diagnostic(code, message, span, hint))
        return BAD

    def lookup(self, name: str) -> Value | Macro | None:
        if name in self._broken:
            return BAD
        match self._entities.get(name):
            case None:
                return None
            case ast.Input():
                decl = self.inputs.get(name)
                if decl is None:
                    return BAD
                scalar = decl.kind is ir.InputKind.INT and decl.per is None
                return Number(ir.Scalar(name), PLAIN) if scalar else Ref(decl)
            case ast.Let() as let if let.params:
                return Macro(name, tuple(p.text for p in let.params))
            case Import(other, file):
                return file.lookup(other)
            case ast.Const() | ast.Let() | ast.Mask() as d:
                return self._evaluate(d)

    def expand(self, name: str, args: tuple[Value, ...], span: Span) -> Value:
        let = self._entities[name]
        if isinstance(let, Import):
            return let.file.expand(let.name, args, span)
        assert isinstance(let, ast.Let)
        if name in self._active:
            self._circular(name, self._active)
            return BAD
        outermost = not self.session.expands
        with self.session.expanding(span) as affordable, self._defining(name):
            if not affordable:
                return self._too_much(span)
            params = {p.text: a for p, a in zip(let.params, args, strict=True)}
            try:
                value = Typer(self, params).value(let.body)
            except RecursionError:  # macros within macros, deeper than Python's stack
                if not outermost:
                    raise
                value = self._too_much(span)
        return self._sized(value, span)

    def known_names(self) -> list[str]:
        return [*self._entities, *self._broken]

    def sets(self) -> list[str]:
        return [*(d.name for d in self.inputs.values() if d.is_set), *self._broken]

    def divisor(self, name: str, span: Span) -> None:
        self._divisors.append((name, span))

    def is_declared(self, name: str) -> bool:
        return name in self._entities or name in self._broken

    # ---- values of names

    def _evaluate(self, d: Definition) -> Value:
        """What a name means. What it is defined by comes first: a chain of names may be longer than Python's stack."""
        for below in self._in_order(d):
            if below.name.text not in self._values:
                self._values[below.name.text] = self._define(below)
        return self._values.get(d.name.text, BAD)

    def _in_order(self, d: Definition) -> list[Definition]:
        """What a definition rests on and is not known yet, each after what it rests on, itself last. Reports circles."""
        order: dict[str, Definition] = {}
        path = [(d, iter(_mentions(d)))] if d.name.text not in self._values else []
        on_path = {*self._active, d.name.text}
        while path:
            at, mentions = path[-1]
            name = next(mentions, None)
            if name is None:
                path.pop()
                on_path.discard(at.name.text)
                order[at.name.text] = at
                continue
            below = self._entities.get(name)
            if not isinstance(below, Definition) or name in order or name in self._values:
                continue
            if name in on_path:
                self._circular(name, [*self._active, *(x.name.text for x, _ in path)])
                self._values[name] = BAD
            else:
                path.append((below, iter(_mentions(below))))
                on_path.add(name)
        return [x for x in order.values() if not (isinstance(x, ast.Let) and x.params)]

    def _define(self, d: Definition) -> Value:
        value: Value
        with self._defining(d.name.text):
            match d:
                case ast.Const():
                    value = Typer(self, constant=True).number(d.value)
                case ast.Let():
                    value = Typer(self).value(d.body)
                case ast.Mask():
                    value = Typer(self).truth(d.body)
        return self._sized(value, d.name.span)

    @contextmanager
    def _defining(self, name: str) -> Iterator[None]:
        self._active.append(name)
        try:
            yield
        finally:
            self._active.pop()

    def _circular(self, name: str, active: list[str]) -> None:
        entity, chain = self._entities[name], [*active[active.index(name) :], name]
        assert isinstance(entity, Definition)
        text = f"`{name}` is defined by itself: {' -> '.join(chain)}"
        self.report("M111", text, entity.name.span, "there is no recursion")

    def _sized(self, v: Value, span: Span) -> Value:
        """Shared `let`s can double the size of a mask with every step; downstream sees trees."""
        node = v.pred if isinstance(v, Truth) else v.expr if isinstance(v, Number) else None
        if node is not None and self.session.too_big(node):
            return self._too_much(span)
        return v

    def _too_much(self, span: Span) -> Bad:
        if not self.session.spent:
            self.session.spent = True
            self.report("M125", f"`{span.text}` expands to too large an expression", span, "simplify the `let`s")
        return BAD

    # ---- declarations

    def _collect(self, d: ast.Decl, open_file: Callable[[ast.Use], Checker | None]) -> None:
        match d:
            case ast.Use():
                self._use(d, open_file(d))
            case ast.Check() | ast.Assume():
                pass
            case _:
                if isinstance(d, ast.Let):
                    self._params(d)
                if self._may_be_called(d):
                    self._enter(d.name, d)

    def _enter(self, name: ast.Name, entity: Entity) -> None:
        first = self._entities.get(name.text)
        if first is None:
            self._entities[name.text] = entity
            return
        at = first.span if isinstance(first, Import) else first.name.span
        note = ("first", f"{at.where()}: `{self._line(at)}`")
        self.session.report(Diagnostic("M109", f"`{name.text}` is declared twice", name.span, "choose another name", (note,)))

    @staticmethod
    def _line(span: Span) -> str:
        return span.source.line(span.source.line_col(span.start)[0]).strip()

    def _may_be_called(self, d: ast.Const | ast.Input | ast.Let | ast.Mask) -> bool:
        """Whether the declared name is free: neither a word of the language nor a keyword of the Python functions."""
        name, why = d.name.text, None
        if name in COORDINATES:
            why = "it always means " + {"q": "the query row", "k": "the key column", "h": "the head"}.get(name, "a size")
        elif name in BUILTINS:
            why = "it is a function of the language"
        elif isinstance(d, ast.Input) and name in CALL_KEYWORDS:
            why = "it is a keyword of `maskc.run` or `bind`, where inputs are given by keyword"
        elif isinstance(d, ast.Input) and d.type.kind in ("segments", "spans") and name in (*AXES, "block"):
            why = f"`per {name}` would mean two things"
        if why is not None:
            self._broken.add(name)
            self.report("M110", f"`{name}` cannot be a name: {why}", d.name.span, f"try `{name}_` or a longer word")
        return why is None

    def _params(self, d: ast.Let) -> None:
        seen: set[str] = set()
        for p in d.params:
            if p.text in COORDINATES or p.text in BUILTINS:
                self.report("M110", f"`{p.text}` cannot be a parameter: it is a word of the language", p.span, "try `t`")
            elif p.text in seen:
                self.report("M109", f"the parameter `{p.text}` stands twice", p.span)
            else:
                seen.add(p.text)
                continue
            self._broken.add(d.name.text)

    def _use(self, d: ast.Use, file: Checker | None) -> None:
        for name in d.names:
            if file is None:
                self._broken.add(name.text)
                continue
            entity = file._entities.get(name.text)
            if isinstance(entity, ast.Input):
                text = f"`{name.text}` is an input of `{d.path}`; inputs come along with the masks and lets that read them"
                self.report("M119", text, name.span, f"remove it, or declare `input {name.text}` here as well")
                self._broken.add(name.text)
            elif entity is None and name.text not in file._broken:
                hint = did_you_mean(name.text, file._entities, f"it has {quoted(file._entities)}")
                self.report("M119", f"`{d.path}` has no `{name.text}`", name.span, hint)
                self._broken.add(name.text)
            else:
                self._enter(name, Import(name.text, file, d, name.span))

    def _declare_inputs(self) -> None:
        nodes = {n: d for n, d in self._entities.items() if isinstance(d, ast.Input)}
        sets = {n: d for n, d in nodes.items() if d.type.kind in ("segments", "spans")}
        for name, d in sorted(nodes.items(), key=lambda item: item[1].type.block is not None):  # sizes may name inputs
            decl = inputs.declare(d, self, sets)
            if decl is None:
                self._broken.add(name)
            else:
                self.inputs[name] = decl
        self.inputs = {name: self.inputs[name] for name in nodes if name in self.inputs}
        for name in self.inputs:
            self.inputs[name] = inputs.complete(nodes[name], self.inputs[name], self)

    def _assume(self, d: ast.Assume) -> None:
        t = Typer(self).plain_truth(d.fact)
        if isinstance(t, Truth) and facts.check_elementwise(t.pred, d.fact.span, self.session):
            self.assumes.append(t.pred)

    def check_divisors(self) -> None:
        """Every scalar input of this file that divides must be declared >= 1, by its `where` or an `assume`."""
        self._check_divisors(self._divisors, facts.at_least_one(self.inputs.values(), self.assumes), self.inputs)

    def _check_divisors_of(self, fn: ir.MaskFn) -> None:
        """Likewise in a mask: an input that is given to a macro of another file divides in that file."""
        nodes = (fn.body, *fn.assumes, *(w for d in fn.inputs for w in d.where))
        found = [(s.name, s.span) for node in nodes for s in facts.divisors(node) if s.span is not None]
        self._divisors += [(name, span) for name, span in found if name in self.inputs]
        brought = {d.name for d in fn.inputs} - set(self.inputs)
        self._check_divisors(found, facts.at_least_one(fn.inputs, fn.assumes), brought)

    def _check_divisors(self, found: list[tuple[str, Span]], known: Container[str], of: Container[str]) -> None:
        """Of each name the first place is reported."""
        for name, span in dict(reversed(found)).items():
            if name in of and name not in known:
                hint = f"declare `input {name} : int where {name} >= 1`"
                self.report("M113", f"the divisor `{name}` may be zero or negative", span, hint)

    # ---- the masks of the file

    def masks(self) -> tuple[ir.MaskFn, ...]:
        """All masks, typed; call `check_divisors` of every file and look at the session's errors before using them."""
        for d in self.module.decls:
            if isinstance(d, (ast.Const, ast.Let, ast.Mask)) and self._entities.get(d.name.text) is d:
                self.lookup(d.name.text)
                if isinstance(d, ast.Let) and d.params:
                    self._check_unapplied(d)
        checks = tuple(c for d in self.module.decls if isinstance(d, ast.Check) if (c := self._check(d)) is not None)
        all_inputs, assumes = self._with_imports()
        self._report_unused()
        common = ir.MaskFn("", all_inputs, ir.BoolConst(True), tuple(assumes), (), checks, source=self.module.source)
        return tuple(
            self._mask_fn(d.name, value, common)
            for d in self.module.decls
            if isinstance(d, ast.Mask) and self._entities.get(d.name.text) is d
            if isinstance(value := self.lookup(d.name.text), Truth)
        )

    def _mask_fn(self, name: ast.Name, value: Truth, common: ir.MaskFn) -> ir.MaskFn:
        """One mask, on top of what all masks of the file have in common."""
        by_name = {d.name: d for d in common.inputs}
        two_sided = facts.two_sided(common.inputs, [*common.assumes, *(w for d in common.inputs for w in d.where)])
        if (lint := lints.one_sided_window(value.pred)) is not None:
            self.session.report(lint)
        crosses = self._crosses(value.pred, by_name, two_sided)
        used = {n for file, n in self._reach([name.text]) if n in file.inputs}
        has_set = any(by_name[n].is_set for n in used if n in by_name)
        fn = replace(
            common,
            name=name.text,
            body=value.pred,
            tables=tuple(dict.fromkeys(table for table, _ in value.tables)),
            square=not two_sided and (has_set or crosses),
            span=name.span,
        )
        self._check_divisors_of(fn)
        return fn

    def _check_unapplied(self, d: ast.Let) -> None:
        """What is wrong in a `let` with parameters whatever its arguments are."""
        with self._defining(d.name.text):
            Typer(self, {p.text: BAD for p in d.params}).value(d.body)

    def _check(self, d: ast.Check) -> ir.Check | None:
        if d.of is None:
            return ir.Check(d.kind, span=d.span)
        decl = Typer(self).set_named(d.of, "`check isolated by`")
        return None if decl is None else ir.Check(d.kind, decl.name, span=d.span)

    def _crosses(self, body: ir.Pred, by_name: dict[str, ir.InputDecl], two_sided: bool) -> bool:
        """Whether the mask reads a `per key` input at a row or a `per row` input at a key: then nq == nk is needed."""
        found = False
        for n in walk(body):
            if not isinstance(n, (ir.Field, ir.BoolField)) or (decl := by_name.get(n.name)) is None:
                continue
            wrong = {"key": "q", "row": "k"}.get(decl.per or "")
            if wrong is None or wrong not in build.sides(n.index):
                continue
            found = True
            if two_sided and n.span is not None:
                own, other = ("row", "key") if wrong == "q" else ("key", "row")
                text = f"`{n.span.text}` reads an input `per {other}` at a {own}; here rows and keys are two sequences"
                self.report("M122", text, n.span, f"declare a second input `per {own}`")
        return found

    # ---- who uses what

    def _reach(self, roots: list[str]) -> set[tuple[Checker, str]]:
        """Every declaration that the named ones mention, over any number of steps and files."""
        seen: set[tuple[Checker, str]] = set()
        todo: list[tuple[Checker, str]] = [(self, r) for r in roots]
        while todo:
            file, name = todo.pop()
            entity = file._entities.get(name)
            if (file, name) in seen or entity is None:
                continue
            seen.add((file, name))
            if isinstance(entity, Import):
                todo.append((entity.file, entity.name))
            else:
                todo += [(file, n) for n in _mentions(entity)]
        return seen

    def _with_imports(self) -> tuple[tuple[ir.InputDecl, ...], list[ir.Pred]]:
        """The inputs and assumptions of the file, with those that imported masks and lets bring along."""
        merged, assumes = dict(self.inputs), list(self.assumes)
        for name, entity in self._entities.items():
            if not isinstance(entity, Import):
                continue
            reached = self._reach([name])
            brought: dict[Checker, set[str]] = {}
            for file, n in reached:
                if file is not self:
                    brought.setdefault(file, set())
                    if n in file.inputs:
                        brought[file].add(n)
            for file, names in brought.items():
                for n in file.inputs:
                    if n in names:
                        self._bring(n, file.inputs[n], name, entity, merged)
                assumes += [a for a in facts.conjuncts(file.assumes) if a not in assumes and names_in(a) <= names]
        return inputs.parents_first(list(merged.values())), assumes

    def _bring(self, n: str, decl: ir.InputDecl, name: str, entity: Import, merged: dict[str, ir.InputDecl]) -> None:
        if n in merged:
            both = inputs.joined(merged[n], decl)
            if both is None:
                text = f"`{name}` of `{entity.use.path}` needs the input `{n}`, which is declared otherwise here"
                self.report("M119", text, entity.span, "give both declarations the same type, or rename one")
            else:
                merged[n] = both
        elif n in self._entities:
            text = f"`{name}` of `{entity.use.path}` needs the input `{n}`, but `{n}` is something else here"
            self.report("M119", text, entity.span, f"rename `{n}` in this file")
        else:
            merged[n] = decl

    def _report_unused(self) -> None:
        """An input that no mask uses was meant to matter; a `let` that nothing uses may be a leftover."""
        if self._incomplete or {"M101", "M109", "M110"} & {d.code for d in self.session.errors}:
            return  # a misspelt or broken name may be the missing use
        decls = self.module.decls
        masks = [d.name.text for d in decls if isinstance(d, ast.Mask)]
        library = not masks
        roots = masks or [n for n, e in self._entities.items() if isinstance(e, ast.Let)]
        claimed = [d.of.text for d in decls if isinstance(d, ast.Check) and d.of is not None]
        used = {n for file, n in self._reach([*roots, *claimed]) if file is self}
        stated = {n.text for d in decls if isinstance(d, ast.Assume) for n in ast.names(d.fact)}
        stated |= {n.text for d in decls if isinstance(d, ast.Input) for e in d.where for n in ast.names(e)}
        stated |= {n.text for d in decls if isinstance(d, ast.Input) and d.type.block for e in d.type.block for n in ast.names(e)}
        spoken = {n for file, n in self._reach(sorted(stated)) if file is self}
        for name, entity in self._entities.items():
            if isinstance(entity, ast.Input) and name not in used:
                hint = "remove it, or use it in a mask: data given for it would change nothing"
                self.report("M115", f"no mask uses the input `{name}`", entity.name.span, hint)
            elif isinstance(entity, (ast.Const, ast.Let, Import)) and name not in used | spoken and not library:
                what = {ast.Const: "constant", ast.Let: "`let`", Import: "imported name"}[type(entity)]
                span = entity.span if isinstance(entity, Import) else entity.name.span
                self.report("W101", f"the {what} `{name}` is never used", span)


def _mentions(d: ast.Const | ast.Input | ast.Let | ast.Mask) -> list[str]:
    """The names that a declaration mentions."""
    match d:
        case ast.Const():
            return [n.text for n in ast.names(d.value)]
        case ast.Mask():
            return [n.text for n in ast.names(d.body)]
        case ast.Let():
            own = {p.text for p in d.params}
            return [n.text for n in ast.names(d.body) if n.text not in own]
        case ast.Input():
            found = [n.text for e in (*d.where, *((d.default,) if d.default else ())) for n in ast.names(e)]
            return found + [n.text for n in (d.type.within, d.type.per) if n is not None]
