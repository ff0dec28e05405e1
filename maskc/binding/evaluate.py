"""IR expressions on tensors: one value per key column (or per row, head or segment, where facts are checked).

A value is a Python int or an int64 tensor that broadcasts to [batch, heads, n], with a bool tensor that says where it is
defined (None: everywhere). A read of an outside token, or out of range, is not, and a comparison of it is false in both
polarities. Undefined places hold arbitrary numbers; no read ever leaves its tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.codegen.ranges import check_fits_int64
from maskc.ir.nodes import (
    Add,
    And,
    BoolConst,
    BoolField,
    Col,
    Compare,
    Const,
    Edge,
    EdgeEnd,
    EdgeStart,
    Expr,
    Field,
    FirstRow,
    FloorDiv,
    Head,
    IfElse,
    InEdge,
    InSet,
    Item,
    MaskFn,
    Max,
    Min,
    Mod,
    Mul,
    Not,
    Op,
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

Number = int | Tensor
Truth = bool | Tensor


class Value(NamedTuple):
    """A number per place and where it is defined (None: everywhere)."""

    number: Number
    defined: Tensor | None = None


@dataclass(eq=False)
class Frame:
    """The places at which expressions are evaluated: what `q`, `k`, `h` and a bare segment stand for.

    row, col: consecutive tokens [1, 1, n] from `first` on. head: [1, Hm, 1]. items: all ordinals [1, 1, m] by set.
    """

    fn: MaskFn
    inputs: BoundInputs
    nq: int | None
    nk: int | None
    row: Tensor | None = None
    col: Tensor | None = None
    head: Tensor | None = None
    items: dict[str, Tensor] = field(default_factory=dict)
    first: int = 0
    _known: dict[Expr, Value] = field(default_factory=dict)

    # ------------------------------------------------------------ predicates

    def truth(self, p: Pred, positive: bool = True) -> Truth:
        """Where `p` holds, or where its inward-pushed negation does."""
        match p:
            case BoolConst(value):
                return value == positive
            case Not(term):
                return self.truth(term, not positive)
            case And(terms) | Or(terms):
                combine = both if isinstance(p, And) == positive else _either
                return reduce(combine, (self.truth(t, positive) for t in terms))
            case Compare(op, a, b):
                return self._compare(op if positive else NEGATED[op], self.value(a), self.value(b))
            case Same(of):
                raise AssertionError(f"same({of}) reads a row and a key at once")
            case InSet(of, index):
                return _polar(_defined(self._holder(of, index)), positive)
            case InEdge(of, edge, index):
                return _polar(self._in_edge(of, edge, index), positive)
            case BoolField(name, index):
                read = self._read(name, index)
                return _polar(both(self._tensor(read), _defined(read)), positive)
            case _:
                assert_never(p)

    def _compare(self, op: Op, a: Value, b: Value) -> Truth:
        result: Truth = _COMPARE[op](a.number, b.number)
        for defined in (a.defined, b.defined):
            result = result if defined is None else both(result, defined)
        return result

    # ------------------------------------------------------------ numbers

    def value(self, e: Expr) -> Value:
        """The value of an expression; the same expression is evaluated once."""
        known = self._known.get(e)
        if known is None:  # terms are hashed as seldom as can be: each time the whole of them
            known = self._known[e] = self._value(e)
        return known

    def _value(self, e: Expr) -> Value:
        match e:
            case Const(value):
                return Value(value)
            case Size(name):
                size = self.nq if name == "nq" else self.nk
                assert size is not None, f"{name} is not known yet"
                return Value(size)
            case Scalar(name):
                scalar = self.inputs.scalars[name]
                return Value(scalar if isinstance(scalar, int) else scalar.to(torch.int64)[:, None, None])
            case Row() | Col() | Head() | Item():
                return Value(self._place(e))
            case Field(name, index):
                return self._read(name, index)
            case SegAttr(of, attr, index):
                return self._attribute(of, attr, index)
            case Add(terms):
                _check_fits(e)
                return self._fold(terms, operator.add)
            case Mul(a, b):
                _check_fits(e)
                return self._fold((a, b), operator.mul)
            case FloorDiv(a, b):
                return self._fold((a, b), _floordiv)
            case Mod(a, b):
                return self._fold((a, b), _mod)
            case Min(terms):
                return self._fold(terms, minimum)
            case Max(terms):
                return self._fold(terms, maximum)
            case IfElse(cond, then, orelse):
                return self._choose(cond, self.value(then), self.value(orelse))
            case StartOf(of, ordinal):
                return self._start_of(of, self.value(ordinal))
            case SetEnd(of):
                return Value(self.inputs.sets[of].ends[:, None, -1:].to(torch.int64))
            case EdgeStart(of, edge, index):
                return self._edge(of, edge, index)[0]
            case EdgeEnd(of, edge, index):
                return self._edge(of, edge, index)[1]
            case FirstRow(name, value):
                return self._first_row(name, self.value(value))
            case _:
                assert_never(e)

    def spread(self, number: Number) -> Tensor:
        """A number as int32 [batch or 1, heads or 1, columns]."""
        assert self.col is not None
        columns = self.col.shape[-1]
        if isinstance(number, int):
            return torch.full((1, 1, columns), number, dtype=torch.int32, device=self.col.device)
        return number.to(torch.int32).expand(*number.shape[:2], columns)

    def _tensor(self, value: Value) -> Tensor:
        number = value.number
        return number if isinstance(number, Tensor) else torch.full((1, 1, 1), number, device=self.inputs.device)

    def _place(self, e: Row | Col | Head | Item) -> Tensor:
        place = {Row: self.row, Col: self.col, Head: self.head}[type(e)] if not isinstance(e, Item) else self.items[e.of]
        assert place is not None, f"{e} does not stand for anything here"
        return place

    def _fold(self, terms: tuple[Expr, ...], combine: Callable[[Number, Number], Number]) -> Value:
        values = [self.value(t) for t in terms]
        number = reduce(combine, (v.number for v in values))
        return Value(number, reduce(_meet, (v.defined for v in values)))

    def _choose(self, cond: Pred, then: Value, orelse: Value) -> Value:
        yes, no = self.truth(cond), self.truth(cond, positive=False)
        if isinstance(yes, bool) and isinstance(no, bool) and yes != no:
            return then if yes else orelse
        defined = _either(both(yes, _defined(then)), both(no, _defined(orelse)))
        return Value(torch.where(self._mask(yes), then.number, orelse.number), self._mask(defined))

    def _mask(self, truth: Truth) -> Tensor:
        return truth if isinstance(truth, Tensor) else torch.full((1, 1, 1), truth, device=self.inputs.device)

    # ------------------------------------------------------------ reads

    def _read(self, name: str, index: Expr) -> Value:
        """`name[index]` of a vector: per key, row and head by position, per segment by the segment of the token."""
        vector, per = self.inputs.vectors[name], self.fn.input(name).per
        if per == "head":
            return Value(vector if vector.dtype == torch.bool else vector.to(torch.int64))
        if isinstance(index, Col | Row) and per == ("key" if isinstance(index, Col) else "row"):
            place = self._place(index)
            own = vector[..., self.first : self.first + place.shape[-1]]
            return Value(own if own.dtype == torch.bool else own.to(torch.int64))
        if per not in ("key", "row"):
            assert per is not None
            return Value(self._of_holder(vector, per, index), self._holder(per, index).defined)
        token = self.value(index)
        inside = (self._tensor(token) >= 0) & (self._tensor(token) < vector.shape[-1])
        return Value(_gather(vector, self._tensor(token)), _meet(token.defined, inside))

    def _holder(self, of: str, index: Expr) -> Value:
        """Ordinal of the segment of `of` that holds the token; defined where there is one."""
        if isinstance(index, Item) and index.of == of:
            return Value(self.items[of])
        key = SegAttr(of, "ordinal", index)
        if key not in self._known:
            table, token = self.inputs.sets[of], self.value(index)
            ordinal = _search(table.starts[:, None], self._tensor(token), right=True) - 1
            defined = (ordinal >= 0) & (self._tensor(token) < _gather(table.ends[:, None], ordinal))
            self._known[key] = Value(ordinal, _meet(token.defined, defined))
        return self._known[key]

    def _of_holder(self, values: Tensor, of: str, index: Expr) -> Tensor:
        """What the holder of each token has of `values`, one for each segment of `of`. int64 or bool."""
        if isinstance(index, Item) and index.of == of:  # each segment its own
            return values if values.dtype == torch.bool else values.to(torch.int64)
        return _gather(values, self._tensor(self._holder(of, index)))

    def _attribute(self, of: str, attr: str, index: Expr) -> Value:
        table, holder = self.inputs.sets[of], self._holder(of, index)
        if attr == "ordinal":
            return holder
        start = self._of_holder(table.starts[:, None], of, index)
        if attr == "start":
            return Value(start, holder.defined)
        if attr == "pos":
            return Value(self._tensor(self.value(index)) - start, holder.defined)
        end = self._of_holder(table.ends[:, None], of, index)
        return Value(end if attr == "end" else end - start, holder.defined)

    def _start_of(self, of: str, ordinal: Value) -> Value:
        table = self.inputs.sets[of]
        starts = torch.cat((table.starts, table.ends[:, -1:]), 1)[:, None]
        return Value(_gather(starts, self._tensor(ordinal)), ordinal.defined)

    def _first_row(self, name: str, value: Value) -> Value:
        return Value(_search(self.inputs.vectors[name], self._tensor(value)), value.defined)

    def _edge(self, of: str, edge: Edge, index: Expr) -> tuple[Value, Value]:
        """Start and end of the first/last non-empty segment of `of` in the parent of the token."""
        parent = self.fn.input(of).within
        if parent is None:
            start, end = edge_table(self.inputs.sets[of], None, edge)
            return Value(start[:, None]), Value(end[:, None])
        start, end = edge_table(self.inputs.sets[of], self.inputs.sets[parent], edge)
        holder = self._holder(parent, index)
        return (
            Value(_gather(start[:, None], self._tensor(holder)), holder.defined),
            Value(_gather(end[:, None], self._tensor(holder)), holder.defined),
        )

    def _in_edge(self, of: str, edge: Edge, index: Expr) -> Tensor:
        token, (start, end) = self.value(index), self._edge(of, edge, index)
        inside = (self._tensor(start) <= self._tensor(token)) & (self._tensor(token) < self._tensor(end))
        return inside & _defined(start) & _defined(token)


def edge_table(child: SegmentTable, parent: SegmentTable | None, edge: Edge) -> tuple[Tensor, Tensor]:
    """Start and end, int64 [batch, mp], of the first/last non-empty child of each parent (mp = 1 without parent).

    A parent without such a child gives its own end twice (0 without parent).
    """
    starts, ends = child.starts.to(torch.int64), child.ends.to(torch.int64)
    low = torch.zeros_like(starts[:, :1]) if parent is None else parent.starts.to(torch.int64)
    high = ends[:, -1:] if parent is None else parent.ends.to(torch.int64)
    size, full = starts.shape[1], ends > starts
    ordinals = torch.arange(size, device=starts.device)
    if edge == "last":  # the last child that starts before the end, then back over empty ones
        full_before = torch.where(full, ordinals, -1).cummax(1).values
        chosen = _search(child.starts, high) - 1
        chosen = torch.where(chosen >= 0, _gather(full_before, chosen), -1)
    else:
        full_after = torch.where(full, ordinals, size).flip(1).cummin(1).values.flip(1)
        chosen = _search(child.starts, low)
        chosen = torch.where(chosen < size, _gather(full_after, chosen), size)
    start, end = _gather(starts, chosen), _gather(ends, chosen)
    none = 0 if parent is None else high
    found = (chosen >= 0) & (chosen < size) & (start >= low) & (start < high)
    return torch.where(found, start, none), torch.where(found, end, none)


# ---------------------------------------------------------------- small things


_COMPARE: dict[Op, Callable[[Number, Number], Truth]] = {
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


@lru_cache(maxsize=1024)
def _check_fits(e: Expr) -> None:
    """Raise M609 where some data could drive the value out of 64 bits."""
    check_fits_int64((e,))


def _floordiv(a: Number, b: Number) -> Number:
    """Facts are evaluated before it is known whether they hold, so a divisor may be anything here."""
    return a // maximum(b, 1)


def _mod(a: Number, b: Number) -> Number:
    return a % maximum(b, 1)


def minimum(a: Number, b: Number) -> Number:
    """Elementwise minimum of numbers and tensors."""
    if isinstance(a, int):
        return min(a, b) if isinstance(b, int) else b.clamp(max=a)
    return a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b)


def maximum(a: Number, b: Number) -> Number:
    """Elementwise maximum of numbers and tensors."""
    if isinstance(a, int):
        return max(a, b) if isinstance(b, int) else b.clamp(min=a)
    return a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b)


def concatenate(slices: list[Tensor]) -> Tensor:
    """Slices along the last axis, each broadcast to the largest leading axes."""
    if len(slices) == 1:
        return slices[0]
    lead = [max(t.shape[axis] for t in slices) for axis in (0, 1)]
    return torch.cat([t.expand(*lead, -1) for t in slices], -1)


def both(a: Truth, b: Truth) -> Truth:
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def _either(a: Truth, b: Truth) -> Truth:
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


def _polar(truth: Truth, positive: bool) -> Truth:
    if positive:
        return truth
    return not truth if isinstance(truth, bool) else ~truth


def _defined(value: Value) -> Truth:
    return True if value.defined is None else value.defined


def _meet(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a & b


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """table[..., index] over broadcast leading axes; an index out of range reads the nearest entry. int64 or bool."""
    if table.shape[-1] == 0:  # no key or no row, and a read at a constant place: outside for whoever asks
        table = table.new_zeros(*table.shape[:-1], 1)
    index = index.clamp(0, table.shape[-1] - 1)
    if table.dtype != torch.bool and table.numel() <= index.numel():
        table = table.to(torch.int64)  # sooner than all that is read of it
    if table.numel() == table.shape[-1]:
        found = table.reshape(-1).index_select(0, index.reshape(-1)).reshape(index.shape)
    else:
        found = torch.take_along_dim(table, index, -1)
    return found if found.dtype == torch.bool else found.to(torch.int64)


def _search(ordered: Tensor, sought: Tensor, right: bool = False) -> Tensor:
    """First index along the last axis with ordered >= sought (> with `right`); leading axes broadcast. int64."""
    ordered = ordered.to(sought.dtype)
    if ordered.numel() == ordered.shape[-1]:
        return torch.searchsorted(ordered.reshape(-1), sought.contiguous(), right=right)
    lead = [max(a, b) for a, b in zip(ordered.shape[:-1], sought.shape[:-1], strict=True)]
    ordered, sought = ordered.expand(*lead, -1), sought.expand(*lead, -1)
    return torch.searchsorted(ordered.contiguous(), sought.contiguous(), right=right)
