"""IntervalProgram -> C text: the masked rows of one key column, from the bound inputs alone.

One text serves the preparation kernel and, compiled as host C++, its test. It needs `device/columns.cuh`. What it does
not look at: whether the data obey the `where` clauses (binding does), batch broadcasting (strides of 0 do), and block
tables (they act on tiles, not on columns).

Arithmetic is exact: 64-bit, and a mask whose values could leave 64 bits is refused here (M609).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from maskc.codegen.ranges import check_fits_int64
from maskc.ir.intervals import Branch, Interval, IntervalProgram, Leaf, Tree, Vector, tree_expressions, tree_nodes
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
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
    IfElse,
    InEdge,
    InputDecl,
    InputKind,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Or,
    Pred,
    Row,
    Same,
    Scalar,
    SegAttr,
    SetEnd,
    Size,
    StartOf,
)
from maskc.ir.normalize import NEGATED
from maskc.ir.traverse import walk

# Nodes whose value comes from memory, or differs between mask heads.
_DATA = Field | SegAttr | StartOf | SetEnd | EdgeStart | EdgeEnd | FirstRow | Head | BoolField | InSet | InEdge

SlotType = Literal["Segments", "Vector", "Flags", "Scalar"]


class Slot(NamedTuple):
    """One member of the struct `MaskInputs`: the input `name` as `{type} {name}_` (see device/columns.cuh)."""

    name: str
    type: SlotType


@dataclass(frozen=True, slots=True)
class ColumnCode:
    """`text` defines `struct MaskInputs` and

        Bounds mask_column(const MaskInputs& in, int b, int h, int key)

    for batch item b, mask head h and key column `key`. `slots` are the members of the struct after `int nq, nk`, in order.
    """

    text: str
    slots: tuple[Slot, ...]
    vectors: tuple[Vector, ...]
    causal: bool


def column_code(fn: MaskFn, program: IntervalProgram) -> ColumnCode:
    """The per-column text of a lowered mask. Raises M609 where an expression may leave 64 bits."""
    check_fits_int64(tree_expressions(program.tree))
    slots = tuple(_slot(d) for d in fn.inputs if d.name in _names(fn, program))
    members = "".join(f"  {s.type} {s.name}_;\n" for s in slots)
    body = _Emitter(fn).function(program)
    text = (
        f"struct MaskInputs {{\n  int nq, nk;\n{members}}};\n\n"
        f"MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {{\n{body}}}\n"
    )
    return ColumnCode(text, slots, program.vectors, program.causal)


# ---------------------------------------------------------------- what a program reads


def _names(fn: MaskFn, program: IntervalProgram) -> set[str]:
    """Inputs that the program reads; with the edges of a set comes its parent."""
    names: set[str] = set()
    for node in tree_nodes(program.tree):
        match node:
            case Scalar(name=name):
                names.add(name)
            case Field(name=name) | BoolField(name=name) | FirstRow(name=name):
                names.add(name)
                names |= {fn.input(name).per or ""} & {d.name for d in fn.inputs}
            case SegAttr(of=of) | StartOf(of=of) | SetEnd(of=of) | InSet(of=of):
                names.add(of)
            case EdgeStart(of=of) | EdgeEnd(of=of) | InEdge(of=of):
                names.add(of)
                names |= {fn.input(of).within or of}
    return names


def _slot(decl: InputDecl) -> Slot:
    match decl.kind:
        case InputKind.SEGMENTS | InputKind.SPANS:
            return Slot(decl.name, "Segments")
        case InputKind.INT:
            return Slot(decl.name, "Scalar" if decl.per is None else "Vector")
        case InputKind.BOOL:
            return Slot(decl.name, "Flags")
        case InputKind.BLOCKS:
            raise AssertionError(f"a block table stands in no column: {decl.name}")
        case _:
            assert_never(decl.kind)


# ---------------------------------------------------------------- text

_SUM, _PRODUCT, _ATOM = 0, 1, 2  # binding strength of the text of an expression
_OR, _AND, _TEST = 0, 1, 2  # and of a predicate
_PLACES = {"nq": "in.nq", "nk": "in.nk", "k": "key"}


class _Emitter:
    """Writes the body of `mask_column`. Reads become named locals, hoisted to the scope that first needs them.

    Every read is safe whatever the data: outside its tensor or set it yields 0 and says so, and a comparison that
    depends on it is false in both polarities.
    """

    def __init__(self, fn: MaskFn) -> None:
        self._fn = fn
        self._lines: list[str] = []
        self._scopes: list[dict[str, str]] = []  # text of a read -> its local
        self._taken = {"find_first", "find_last", "set_end", "start_of"}  # functions that a local must not hide
        self._known: list[str] = []  # tests that hold in the branch being written

    def function(self, program: IntervalProgram) -> str:
        self._tree(program.tree, 1)
        body = "\n".join(self._lines) + "\n"
        sizes = [f"{name} = {text}" for name, text in _PLACES.items() if re.search(rf"\b{name}\b", body)]
        return f"  const idx {', '.join(sizes)};\n{body}"

    def _line(self, depth: int, text: str) -> None:
        self._lines.append("  " * depth + text)

    def _tree(self, tree: Tree, depth: int) -> None:
        self._scopes.append({})
        self._depth = depth
        match tree:
            case Branch(guard=guard, then=then, orelse=orelse):
                test = self._pred(guard, True, _OR)
                self._line(depth, f"if ({test}) {{")
                taken = set(self._taken)
                self._known.append(test)
                self._tree(then, depth + 1)
                self._known.pop()
                self._taken = taken
                self._line(depth, "}")
                self._tree(orelse, depth)
            case Leaf(lower=lower, upper=upper):
                low = self._interval(lower) or "nq, nq"
                high = self._interval(upper) or "0, 0"
                self._line(depth, f"return bounds(nq, {low}, {high});")
            case _:
                assert_never(tree)
        self._scopes.pop()

    def _interval(self, interval: Interval | None) -> str | None:
        return None if interval is None else f"{self._value(interval.lo)}, {self._value(interval.hi)}"

    # ---- reads

    def _read(self, name: str, type_: str, call: str) -> str:
        """The local that holds `call`."""
        for scope in self._scopes:
            if call in scope:
                return scope[call]
        local, n = name, 2
        while local in self._taken:
            local, n = f"{name}_{n}", n + 1
        self._taken.add(local)
        self._scopes[-1][call] = local
        self._line(self._depth, f"const {type_} {local} = {call};")
        return local

    def _found(self, of: str, index: Expr) -> str:
        return self._read(f"{of}_at_{_short(index)}", "Found", f"find(in.{of}_, b, {self._index(index)})")

    def _edge(self, of: str, edge: str, index: Expr) -> str:
        parent = self._fn.input(of).within
        if parent is None:
            return self._read(f"{of}_{edge}", "Found", f"find_{edge}(in.{of}_, b)")
        found = self._found(parent, index)
        return self._read(f"{of}_{edge}_at_{_short(index)}", "Found", f"find_{edge}(in.{of}_, b, {found})")

    def _field(self, name: str, index: Expr) -> str:
        per = self._fn.input(name).per
        assert per is not None
        match per:
            case "head":
                at = "0"  # h picks the head of every vector
            case "key" | "row":
                at = self._index(index)
            case _:
                at = f"{self._found(per, index)}.i"
        return self._read(f"{name}_at_{_short(index)}", "Read", f"read(in.{name}_, b, h, {at})")

    def _index(self, index: Expr) -> str:
        """An index, -1 where it depends on a read outside: no set and no tensor has a token -1."""
        inside = _unique(self._inside(index))
        return f"({' && '.join(inside)} ? {self._value(index)} : -1)" if inside else self._value(index)

    # ---- integers

    def _value(self, e: Expr, strength: int = _SUM) -> str:
        text, own = self._value_of(e)
        return text if own >= strength else f"({text})"

    def _value_of(self, e: Expr) -> tuple[str, int]:
        constant = _constant(e)
        if constant is not None:
            return str(constant), _ATOM if constant >= 0 else _SUM
        match e:
            case Size(name=name):
                return name, _ATOM
            case Scalar(name=name):
                return self._read(f"{name}_value", "idx", f"scalar(in.{name}_, b)"), _ATOM
            case Col():
                return "k", _ATOM
            case Head():
                return "idx(h)", _ATOM
            case Field(name=name, index=index):
                return f"{self._field(name, index)}.value", _ATOM
            case SegAttr(of=of, attr=attr, index=index):
                found = self._found(of, index)
                match attr:
                    case "start" | "end":
                        return f"{found}.{attr}", _ATOM
                    case "ordinal":
                        return f"{found}.i", _ATOM
                    case "len":
                        return f"{found}.end - {found}.start", _SUM
                    case "pos":
                        return f"{self._value(index, _PRODUCT)} - {found}.start", _SUM
                    case _:
                        assert_never(attr)
            case Add():
                return self._sum(e), _SUM
            case Mul(a=a, b=b):
                if a == Const(-1):
                    return f"-{self._value(b, _ATOM)}", _SUM
                return f"{self._value(a, _PRODUCT)} * {self._value(b, _ATOM)}", _PRODUCT
            case FloorDiv(a=a, b=b):
                return f"floor_div({self._value(a)}, {self._value(b)})", _ATOM
            case Mod(a=a, b=b):
                return f"floor_mod({self._value(a)}, {self._value(b)})", _ATOM
            case Min(terms=terms):
                return self._nested("min2", terms), _ATOM
            case Max(terms=terms):
                return self._nested("max2", terms), _ATOM
            case IfElse(cond=cond, then=then, orelse=orelse):
                test = self._pred(cond, True, _TEST)
                return f"({test} ? idx({self._value(then)}) : idx({self._value(orelse)}))", _ATOM
            case StartOf(of=of, ordinal=ordinal):
                return self._read(f"{of}_start_of", "idx", f"start_of(in.{of}_, b, {self._value(ordinal)})"), _ATOM
            case EdgeStart(of=of, edge=edge, index=index):
                return f"{self._edge(of, edge, index)}.start", _ATOM
            case EdgeEnd(of=of, edge=edge, index=index):
                return f"{self._edge(of, edge, index)}.end", _ATOM
            case FirstRow(name=name, value=value):
                return self._read(f"{name}_first", "idx", f"first_at_least(in.{name}_, b, h, {self._value(value)})"), _ATOM
            case SetEnd(of=of):
                return self._read(f"{of}_end", "idx", f"set_end(in.{of}_, b)"), _ATOM
            case Const() | Row() | Item():
                raise AssertionError(f"not an expression of a column: {e}")
            case _:
                assert_never(e)

    def _sum(self, e: Add) -> str:
        """Constants last and folded, negative terms subtracted."""
        text, rest = "", 0
        for term in e.terms:
            constant = _constant(term)
            if constant is not None:
                rest += constant
            elif isinstance(term, Mul) and term.a == Const(-1) and text:
                text += f" - {self._value(term.b, _PRODUCT)}"
            else:
                text += f"{' + ' if text else ''}{self._value(term, _PRODUCT if text else _SUM)}"
        return text if rest == 0 else f"{text} {'+' if rest > 0 else '-'} {abs(rest)}"

    def _nested(self, function: str, terms: tuple[Expr, ...]) -> str:
        text = self._value(terms[-1])
        for term in reversed(terms[:-1]):
            text = f"{function}({self._value(term)}, {text})"
        return text

    # ---- truth

    def _pred(self, p: Pred, want: bool, strength: int) -> str:
        """Text that is true iff `p` is `want`."""
        text, own = self._pred_of(p, want)
        return text if own >= strength else f"({text})"

    def _pred_of(self, p: Pred, want: bool) -> tuple[str, int]:
        match p:
            case BoolConst(value=value):
                return ("true" if value is want else "false"), _TEST
            case BoolField(name=name, index=index):
                return f"{'' if want else '!'}{self._field(name, index)}.value", _TEST
            case Compare(op=op, a=a, b=b):
                test = f"{self._value(a)} {op if want else NEGATED[op]} {self._value(b)}"
                inside = [t for t in _unique([*self._inside(a), *self._inside(b)]) if t not in self._known]
                return (" && ".join([*inside, test]), _AND) if inside else (test, _TEST)
            case InSet(of=of, index=index):
                return f"{self._found(of, index)}.i {'>=' if want else '<'} 0", _TEST
            case InEdge(of=of, edge=edge, index=index):
                at = self._value(index)
                return f"{'' if want else '!'}inside({self._edge(of, edge, index)}, {at})", _TEST
            case Not(term=term):
                return self._pred_of(term, not want)
            case And(terms=terms) | Or(terms=terms):
                both = isinstance(p, And) is want
                parts = _unique([self._pred(t, want, _AND if both else _TEST) for t in terms])
                if not parts:
                    return ("true" if both else "false"), _TEST
                if len(parts) == 1:
                    return parts[0], _AND if both else _TEST
                return (" && " if both else " || ").join(parts), _AND if both else _OR
            case Same():
                raise AssertionError("`same` depends on the row")
            case _:
                assert_never(p)

    def _inside(self, e: Expr) -> list[str]:
        """Tests that hold iff every read of `e` lies inside its tensor and its set."""
        match e:
            case Field(name=name, index=index):
                return [f"{self._field(name, index)}.ok"]
            case SegAttr(of=of, index=index):
                return [f"{self._found(of, index)}.i >= 0"]
            case EdgeStart(of=of, edge=edge, index=index) | EdgeEnd(of=of, edge=edge, index=index):
                return [] if self._fn.input(of).within is None else [f"{self._edge(of, edge, index)}.i >= 0"]
            case Add(terms=terms) | Min(terms=terms) | Max(terms=terms):
                return [c for t in terms for c in self._inside(t)]
            case Mul(a=a, b=b) | FloorDiv(a=a, b=b) | Mod(a=a, b=b):
                return [*self._inside(a), *self._inside(b)]
            case StartOf(ordinal=inner) | FirstRow(value=inner):
                return self._inside(inner)
            case IfElse(cond=cond, then=then, orelse=orelse):
                yes, no = _unique(self._inside(then)), _unique(self._inside(orelse))
                if not yes and not no and not any(isinstance(n, _DATA) for n in walk(cond)):
                    return []  # one side or the other holds, and either is fine
                true, false = self._pred(cond, True, _TEST), self._pred(cond, False, _AND)
                return [f"({true} ? {' && '.join(yes) or 'true'} : {' && '.join([false, *no])})"]
            case _:
                return []


def _constant(e: Expr) -> int | None:
    """The value of an expression that reads nothing, else None."""
    match e:
        case Const(value=value):
            return value
        case Add(terms=terms) | Min(terms=terms) | Max(terms=terms):
            values = [_constant(t) for t in terms]
            known = [v for v in values if v is not None]
            if len(known) < len(values):
                return None
            return sum(known) if isinstance(e, Add) else min(known) if isinstance(e, Min) else max(known)
        case Mul(a=a, b=b) | FloorDiv(a=a, b=b) | Mod(a=a, b=b):
            x, y = _constant(a), _constant(b)
            if x is None or y is None:
                return None
            return x * y if isinstance(e, Mul) else x // y if isinstance(e, FloorDiv) else x % y
        case _:
            return None


def _short(index: Expr) -> str:
    return "k" if isinstance(index, Col) else "h" if isinstance(index, Head) else "other"


def _unique(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))
