"""Declared facts against data: `where` and `assume` elementwise, `sorted`, `within`, and sets that must have no holes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from maskc.binding.bound import BoundInputs, SegmentTable
from maskc.binding.checks import Checks
from maskc.binding.evaluate import Frame, Number
from maskc.diagnostics import Diagnostic
from maskc.ir.nodes import BoolField, Col, Expr, Field, Head, InputDecl, Item, MaskFn, Pred, Row, Scalar, SegAttr, Size
from maskc.ir.traverse import walk

Fact = tuple[InputDecl | None, Pred]  # the declaration whose `where` it is, None for an `assume`


def facts_of(fn: MaskFn, given: set[str]) -> Iterator[Fact]:
    """The facts that speak of nothing but inputs that were given (and sizes)."""
    everything: list[Fact] = [(decl, fact) for decl in fn.inputs if decl.name in given for fact in decl.where]
    for owner, fact in [*everything, *((None, fact) for fact in fn.assumes)]:
        if names_in(fact) <= given:
            yield owner, fact


def names_in(fact: Pred | Expr) -> set[str]:
    """The inputs that an expression reads."""
    found = set()
    for node in walk(fact):
        name = getattr(node, "name", None) if not isinstance(node, Size) else None
        of = getattr(node, "of", None)
        found |= {x for x in (name, of) if isinstance(x, str)}
    return found


def sizes_in(fact: Fact) -> set[str]:
    """Which of nq and nk must be known to check a fact."""
    named = {"nk" if isinstance(node, Col) else "nq" for node in walk(fact[1]) if isinstance(node, Col | Row)}
    return named | {node.name for node in walk(fact[1]) if isinstance(node, Size)}


def check_fact(fn: MaskFn, fact: Fact, inputs: BoundInputs, nq: int | None, nk: int | None, checks: Checks) -> None:
    """One fact at every key, row, head or segment that it is about; a read of an outside token is not checked."""
    owner, pred = fact
    frame, real = _frame(fn, pred, inputs, nq, nk)
    broken = frame.truth(pred, positive=False)
    if isinstance(broken, Tensor) and real is not None:
        broken = broken & real
    reads = _reads(pred)
    numbers: list[Number] = [frame.truth(r) if isinstance(r, Pred) else frame.value(r).number for r in reads]

    def explain(at: tuple[int, ...], values: list[int]) -> Diagnostic:
        shown = [f"{_read_text(read, at)} = {v}" for read, v in zip(reads, values, strict=True)]
        place = _place_text(at[:1] if frame.head is not None else at[:2], broken.shape) if isinstance(broken, Tensor) else ""
        word = "declared" if owner is not None else "assumed"
        where = f" ({pred.span.where()})" if pred.span is not None else ""
        text = " ".join(pred.span.text.split()) if pred.span is not None else "a fact"
        return Diagnostic("M402", f"{', '.join(shown) or 'this'}{place}, but `{text}` was {word}{where}", pred.span)

    checks.forbid(broken, numbers, explain)


def _reads(pred: Pred) -> list[Expr | Pred]:
    """What a message shows: everything that is read, and the place itself where no index shows it."""
    nodes = list(dict.fromkeys(walk(pred)))
    read: list[Expr | Pred] = [node for node in nodes if isinstance(node, Field | BoolField | SegAttr | Scalar | Size)]
    if any(isinstance(node, Field | BoolField | SegAttr) for node in read):
        return read
    return [*read, *(node for node in nodes if isinstance(node, Col | Row | Head))]


def _frame(fn: MaskFn, pred: Pred, inputs: BoundInputs, nq: int | None, nk: int | None) -> tuple[Frame, Tensor | None]:
    """The places that a fact is about, and which of them are real (None: all). The type checker allows one kind of place."""

    def count(n: int) -> Tensor:
        return torch.arange(n, device=inputs.device)

    frame, real = Frame(fn, inputs, nq, nk), None
    for node in walk(pred):
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
                real = frame.items[of] < table.counts[:, None, None]
            case _:
                pass
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
