"""Declared facts against data: `where` and `assume` elementwise, `sorted`, `within`, and sets that must have no holes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.binding.checks import Checks
from maskc.binding.evaluate import Frame, Number
from maskc.compiled import CompiledMask
from maskc.diagnostics import Diagnostic
from maskc.ir.nodes import BoolField, Col, Expr, Field, Head, InputDecl, Item, MaskFn, Pred, Row, Scalar, SegAttr, Size
from maskc.ir.traverse import names_in, walk


@dataclass(frozen=True, eq=False, slots=True)
class Fact:
    """Something that a file says of its inputs. owner: the declaration whose `where` it is, None for an `assume`.

    names: inputs that it reads. sizes: which of nq and nk must be known to check it. places: what it is about: keys, rows,
    heads, segments. reads: what a message shows of it.
    """

    owner: InputDecl | None
    pred: Pred
    names: frozenset[str]
    sizes: frozenset[str]
    places: tuple[Col | Row | Head | Item, ...]
    reads: tuple[Expr | Pred, ...]

    @classmethod
    def of(cls, owner: InputDecl | None, pred: Pred) -> Fact:
        nodes = list(dict.fromkeys(walk(pred)))
        places = tuple(node for node in nodes if isinstance(node, Col | Row | Head | Item))
        named = {"nk" if isinstance(node, Col) else "nq" for node in places if isinstance(node, Col | Row)}
        sizes = frozenset(named | {node.name for node in nodes if isinstance(node, Size)})
        return cls(owner, pred, frozenset(names_in(pred)), sizes, places, tuple(_reads(nodes)))


@dataclass(frozen=True, eq=False, slots=True)
class Declared:
    """What the file of a mask says of its inputs. required: those that the mask reads, and those that these are declared by.

    names: of all of them. any_head: the mask reads `h` and no input `per head`, which would say how many heads there are.
    """

    facts: tuple[Fact, ...]
    required: frozenset[str]
    names: frozenset[str]
    any_head: bool

    def facts_of(self, given: set[str]) -> tuple[Fact, ...]:
        """The facts that speak of nothing but inputs that were given (and sizes)."""
        return tuple(f for f in self.facts if f.names <= given and (f.owner is None or f.owner.name in given))


_declared: WeakKeyDictionary[CompiledMask, Declared] = WeakKeyDictionary()


def declared(mask: CompiledMask) -> Declared:
    """Read from the file once: walking its terms would take longer than checking the data of a batch."""
    found = _declared.get(mask)
    if found is None:
        fn = mask.fn
        of_inputs = [Fact.of(decl, fact) for decl in fn.inputs for fact in decl.where]
        facts = (*of_inputs, *(Fact.of(None, fact) for fact in fn.assumes))
        required = frozenset(_required(fn))
        per_head = any(fn.input(name).per == "head" for name in required)
        any_head = not per_head and any(isinstance(node, Head) for node in walk(fn.body))
        found = _declared[mask] = Declared(facts, required, frozenset(d.name for d in fn.inputs), any_head)
    return found


def _required(fn: MaskFn) -> set[str]:
    """The inputs that the mask reads, and those that these are declared by, over any number of steps."""
    decls = {d.name: d for d in fn.inputs}
    needed: set[str] = set()
    todo = names_in(fn.body) | set(fn.tables) | {name for fact in fn.assumes for name in names_in(fact)}
    while todo:
        decl = decls.get(todo.pop())
        if decl is not None and decl.name not in needed:
            needed.add(decl.name)
            todo |= {x for x in (decl.per, decl.within) if x is not None and x not in ("key", "row", "head")}
            todo |= {name for fact in decl.where for name in names_in(fact)}
    return needed


def check_fact(fn: MaskFn, fact: Fact, inputs: BoundInputs, nq: int | None, nk: int | None, checks: Checks) -> None:
    """One fact at every key, row, head or segment that it is about; a read of an outside token is not checked."""
    owner, pred, reads = fact.owner, fact.pred, fact.reads
    frame, real = _frame(fn, fact, inputs, nq, nk)
    broken = frame.truth(pred, positive=False)
    if isinstance(broken, Tensor) and real is not None:
        broken = broken & real

    def numbers() -> list[Number]:
        return [frame.truth(r) if isinstance(r, Pred) else frame.value(r).number for r in reads]

    def explain(at: tuple[int, ...], values: list[int]) -> Diagnostic:
        shown = [f"{_read_text(read, at)} = {v}" for read, v in zip(reads, values, strict=True)]
        place = _place_text(at[:1] if frame.head is not None else at[:2], broken.shape) if isinstance(broken, Tensor) else ""
        word = "declared" if owner is not None else "assumed"
        where = f" ({pred.span.where()})" if pred.span is not None else ""
        text = " ".join(pred.span.text.split()) if pred.span is not None else "a fact"
        return Diagnostic("M402", f"{', '.join(shown) or 'this'}{place}, but `{text}` was {word}{where}", pred.span)

    checks.forbid(broken, numbers, explain)


def _reads(nodes: list[Expr | Pred]) -> list[Expr | Pred]:
    """Of all terms of a fact what a message shows: everything that is read, and the place itself where no index shows it."""
    read: list[Expr | Pred] = [node for node in nodes if isinstance(node, Field | BoolField | SegAttr | Scalar | Size)]
    if any(isinstance(node, Field | BoolField | SegAttr) for node in read):
        return read
    return [*read, *(node for node in nodes if isinstance(node, Col | Row | Head))]


def _frame(fn: MaskFn, fact: Fact, inputs: BoundInputs, nq: int | None, nk: int | None) -> tuple[Frame, Tensor | None]:
    """The places that a fact is about, and which of them are real (None: all). The type checker allows one kind of place."""

    def count(n: int) -> Tensor:
        return torch.arange(n, device=inputs.device)

    frame, real = Frame(fn, inputs, nq, nk), None
    for node in fact.places:
        match node:
            case Col():
                assert nk is not None
                frame.col = count(nk)[None, None]
            case Row():
                assert nq is not None
                frame.row = count(nq)[None, None]
            case Head():
                heads = max([1, *(t.shape[1] for t in inputs.vectors.values())])
                frame.head = count(heads)[None, :, None]
            case Item(of):
                table = inputs.sets[of]
                frame.items[of] = count(table.size)[None, None]
                real = None if table.edges is not None else frame.items[of] < table.counts[:, None, None]
            case _:
                assert_never(node)
    return frame, real


def _read_text(read: Expr | Pred, at: tuple[int, ...]) -> str:
    match read:
        case Field(name, index) | BoolField(name, index):
            return f"{name}[{_index_text(index, at)}]"
        case SegAttr(of, attr, index):
            return f"{of}[{_index_text(index, at)}]" if attr == "ordinal" else f"{of}.{attr}[{_index_text(index, at)}]"
        case Scalar(name) | Size(name):
            return name
        case Col() | Row() | Head():
            return {Col: "k", Row: "q", Head: "h"}[type(read)]
        case _:
            raise AssertionError(read)


def _index_text(index: Expr, at: tuple[int, ...]) -> str:
    """Where a read is: the number of its token, segment or head; an index that is computed as it was written."""
    match index:
        case Head():
            return str(at[1])
        case Item() | Col() | Row():
            return str(at[2])
        case _:
            return index.span.text if index.span is not None else "..."


def _place_text(at: tuple[int, ...], shape: torch.Size) -> str:
    """ "in batch item 2, head 1" where there are several."""
    parts = [f"{what} {i}" for what, i, n in zip(("batch item", "head"), at, shape, strict=False) if n > 1]
    return f" in {', '.join(parts)}" if parts else ""


def check_sorted(decl: InputDecl, vector: Tensor, count: Tensor | None, checks: Checks) -> None:
    """`sorted`: never decreasing, over the first `count` entries [batch] where given."""
    before, after = vector[..., :-1], vector[..., 1:]
    falls = after < before
    if count is not None:
        falls = falls & (torch.arange(1, vector.shape[-1], device=vector.device) < count[:, None, None])

    def explain(at: tuple[int, ...], v: list[int]) -> Diagnostic:
        i, place = at[2], _place_text(at[:2], falls.shape)
        return Diagnostic(
            "M407", f"{decl.name}[{i + 1}] = {v[1]} after {decl.name}[{i}] = {v[0]}{place}, but `sorted` was declared", decl.span
        )

    checks.forbid(falls, [before, after], explain)


def check_within(decl: InputDecl, child: SegmentTable, parent: SegmentTable, checks: Checks) -> None:
    """Every non-empty segment of `child` lies inside one segment of the parent."""
    if not checks.enabled:
        return
    lead = max(child.batch, parent.batch)
    starts, ends = (t.expand(lead, -1).contiguous() for t in (child.starts, child.ends))
    outer_starts, outer_ends = (t.expand(lead, -1).contiguous() for t in (parent.starts, parent.ends))
    holder = torch.searchsorted(outer_starts, starts, right=True) - 1
    low, high = (t.gather(1, holder.clamp(min=0)) for t in (outer_starts, outer_ends))
    inside = (holder >= 0) & (low <= starts) & (ends <= high)

    def explain(at: tuple[int, ...], v: list[int]) -> Diagnostic:
        place = _place_text(at[:1], starts.shape)
        return Diagnostic(
            "M406",
            f"{decl.name} {at[1]} holds tokens [{v[0]}, {v[1]}){place}, which lie in no one `{decl.within}`",
            decl.span,
            f"`{decl.name}` was declared `within {decl.within}`: cut it where a `{decl.within}` ends",
        )

    checks.forbid(~inside & (starts < ends), [starts, ends], explain)


def check_hole_free(fn: MaskFn, decl: InputDecl, table: SegmentTable, checks: Checks) -> None:
    """Segments stand without padding before or between them."""
    if table.edges is not None:
        return
    reached = torch.cat((torch.zeros_like(table.ends[:, :1]), table.ends[:, :-1]), 1)

    def explain(at: tuple[int, ...], v: list[int]) -> Diagnostic:
        place = _place_text(at[:1], table.starts.shape)
        return Diagnostic(
            "M409",
            f"`{decl.name}` leaves tokens [{v[0]}, {v[1]}) outside{place}, but `{fn.name}` compares the order of segments",
            decl.span,
            "put padding after the last segment, give it a segment of its own, or declare `spans`",
        )

    checks.forbid(table.starts != reached, [reached, table.starts], explain)
