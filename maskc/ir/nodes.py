"""Typed mask IR: one predicate over a query row `q` and a key column `k`.

Frozen nodes, closed unions, no units (the type checker has used them up) and no names other than those of inputs:
`let`, `const` and `use` are inlined. Spans point at the user's sub-expression and never take part in equality.

Meaning of reads outside: a token that lies in no segment of S makes `Same`, `InSet` and `InEdge` of S false, makes a
per-segment `BoolField` false, and makes every comparison that reads a `SegAttr` or a per-segment `Field` of it false
in both polarities (negation is pushed inward first, so `not (a < b)` means `a >= b`). So does a per-key or per-row
read whose index lies outside its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from maskc.diagnostics import SourceFile, Span

Attr = Literal["start", "end", "len", "pos", "ordinal"]
Edge = Literal["first", "last"]
Op = Literal["<=", "<", "==", "!=", ">=", ">"]


def _span() -> Span | None:
    return field(default=None, compare=False, repr=False, kw_only=True)


# ---------------------------------------------------------------- integer expressions


@dataclass(frozen=True, slots=True)
class Const:
    value: int
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Size:
    """Number of query rows or of key columns."""

    name: Literal["nq", "nk"]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar `int` input."""

    name: str
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Row:
    """The query row `q`."""

    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Col:
    """The key column `k`."""

    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Head:
    """The mask head `h`."""

    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Item:
    """Inside `where` of an input that is `per S`: the segment the fact is about."""

    of: str
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Field:
    """`name[index]`: an int input per key, row or head, or per segment (then of the segment that holds the token)."""

    name: str
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class SegAttr:
    """`of.attr[index]`; `ordinal` is the plain `of[index]`, `pos` the offset of the token in its segment."""

    of: str
    attr: Attr
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Add:
    terms: tuple[Expr, ...]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Mul:
    a: Expr
    b: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """Rounds towards minus infinity; the divisor is a const or scalar input that is known to be >= 1."""

    a: Expr
    b: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Mod:
    """Has the divisor's sign, as in Python; divisor as in `FloorDiv`."""

    a: Expr
    b: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Min:
    terms: tuple[Expr, ...]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Max:
    terms: tuple[Expr, ...]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class IfElse:
    cond: Pred
    then: Expr
    orelse: Expr
    span: Span | None = _span()


# Made by lowering only (never by the type checker): gathers that turn ordered row-side reads into row positions.


@dataclass(frozen=True, slots=True)
class StartOf:
    """First token of the first segment whose ordinal is >= `ordinal`; the end of the last segment if there is none."""

    of: str
    ordinal: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class SetEnd:
    """End of the last segment of `of`; 0 if it has no segments."""

    of: str
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class EdgeStart:
    """Start of the first/last non-empty segment of S inside the parent of the token `index`.

    Where S has no parent, of all of S, whatever `index` is. If there is no such segment, the end of that parent (0
    without a parent). Read only where `index` lies in the parent.
    """

    of: str
    edge: Edge
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """End of the same segment as `EdgeStart`."""

    of: str
    edge: Edge
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class FirstRow:
    """First index i of a `sorted` vector with `name[i] >= value`; the length of the vector if there is none.

    The index is a row for `per row`, a key for `per key` and an ordinal for a vector per segment.
    """

    name: str
    value: Expr
    span: Span | None = _span()


Expr = (
    Const | Size | Scalar | Row | Col | Head | Item | Field | SegAttr | Add | Mul | FloorDiv | Mod | Min | Max | IfElse
    | StartOf | SetEnd | EdgeStart | EdgeEnd | FirstRow
)  # fmt: skip


# ---------------------------------------------------------------- predicates


@dataclass(frozen=True, slots=True)
class BoolConst:
    value: bool
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class BoolField:
    """`name[index]` of a bool input per key, row, head or segment."""

    name: str
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Compare:
    op: Op
    a: Expr
    b: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Same:
    """`same(of)`: q and k lie in one segment of `of`."""

    of: str
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class InSet:
    """`index in of`: the token lies in some segment or span of `of`."""

    of: str
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class InEdge:
    """`index in first(of)` / `last(of)`: in the first/last non-empty `of` of its parent (of all where it has none)."""

    of: str
    edge: Edge
    index: Expr
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class And:
    terms: tuple[Pred, ...]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Or:
    terms: tuple[Pred, ...]
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class Not:
    term: Pred
    span: Span | None = _span()


Pred = BoolConst | BoolField | Compare | Same | InSet | InEdge | And | Or | Not


# ---------------------------------------------------------------- declarations


class InputKind(Enum):
    SEGMENTS = "segments"  # tile [0, total)
    SPANS = "spans"  # may leave gaps
    INT = "int"
    BOOL = "bool"
    BLOCKS = "blocks"  # bool per block(block_q, block_kv)


@dataclass(frozen=True, slots=True)
class InputDecl:
    """`input name : type = default where facts`.

    per: "key", "row", "head", the name of a segment/span input, or None (a scalar).
    within: the parent of a segment/span input. where: facts for the prover and checks at binding.
    """

    name: str
    kind: InputKind
    per: str | None = None
    sorted: bool = False
    within: str | None = None
    block: tuple[int, int] | None = None
    default: int | None = None
    where: tuple[Pred, ...] = ()
    span: Span | None = _span()

    @property
    def is_set(self) -> bool:
        return self.kind in (InputKind.SEGMENTS, InputKind.SPANS)


@dataclass(frozen=True, slots=True)
class Check:
    """`check causal`, `check isolated by of`, `check no_empty_row`: claims the prover must decide."""

    kind: Literal["causal", "isolated", "no_empty_row"]
    of: str | None = None
    span: Span | None = _span()


@dataclass(frozen=True, slots=True)
class MaskFn:
    """One mask of a file, inlined and typed: row q may see key k iff `body` and every table of `tables` allow it.

    inputs: every input of the file, parents before children. assumes: file-level facts, checked at binding.
    tables: names of `bool per block` inputs that stand as top-level conjuncts (not part of `body`).
    square: the mask needs nq == nk (it uses segments that serve rows and keys alike).
    """

    name: str
    inputs: tuple[InputDecl, ...]
    body: Pred
    assumes: tuple[Pred, ...] = ()
    tables: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    square: bool = False
    source: SourceFile | None = field(default=None, compare=False, repr=False)
    span: Span | None = _span()

    def input(self, name: str) -> InputDecl:
        return next(d for d in self.inputs if d.name == name)
