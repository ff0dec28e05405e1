"""`segments(...)` and `spans(...)`: how a user says which tokens belong together. Holds the data, looks at none of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, get_args

from maskc.diagnostics import Diagnostic, MaskcTypeError, shortened

Form = Literal["cu_seqlens", "lengths", "ids", "positions", "eos", "ranges"]


@dataclass(frozen=True, eq=False, slots=True)
class SetSource:
    """Data of one segment or span input, as given."""

    kind: Literal["segments", "spans"]
    form: Form
    data: object
    pad: int = -1


def segments(
    *unnamed: object,
    cu_seqlens: object = None,
    lengths: object = None,
    ids: object = None,
    pad: int | None = None,
    positions: object = None,
    eos: object = None,
    ranges: object = None,
) -> SetSource:
    """Segments (documents, parts ...) by exactly one form; a leading batch axis, or a list of constructors, is a batch.

    cu_seqlens: [m + 1] offsets from 0, never decreasing. lengths: [m], zero is legal. ids: [n], one number per token,
    equal for neighbours of one segment; `pad` (default -1) marks tokens outside. positions: [n], offset of each token
    in its segment, so 0 starts a new one. eos: bool [n], True on the last token of each segment; tokens after the last
    True are one more segment. ranges: [m, 2], half-open, in order. Lists, numpy arrays or tensors.

    Raises MaskcTypeError (M412) unless exactly one form is given, and for a `pad` that is no integer.
    """
    return _source(
        "segments", unnamed, pad, cu_seqlens=cu_seqlens, lengths=lengths, ids=ids, positions=positions, eos=eos, ranges=ranges
    )


def spans(
    *unnamed: object,
    cu_seqlens: object = None,
    lengths: object = None,
    ids: object = None,
    pad: int | None = None,
    positions: object = None,
    eos: object = None,
    ranges: object = None,
) -> SetSource:
    """Spans (images, dropped parts ...), which may leave gaps; the forms of `segments`. `ids` or `ranges` express gaps."""
    return _source(
        "spans", unnamed, pad, cu_seqlens=cu_seqlens, lengths=lengths, ids=ids, positions=positions, eos=eos, ranges=ranges
    )


def _source(kind: Literal["segments", "spans"], unnamed: tuple[object, ...], pad: int | None, **forms: object) -> SetSource:
    given = [form for form in get_args(Form) if forms[form] is not None]
    listed = " | ".join(f"{form}=" for form in get_args(Form))
    if unnamed or len(given) != 1:
        found = f"{shortened(repr(unnamed[0]))} without a name" if unnamed else " and ".join(given) or "nothing"
        raise MaskcTypeError(
            Diagnostic("M412", f"{kind}(...) takes exactly one form, found {found}", help=f"give one of {listed}")
        )
    if pad is not None and given[0] != "ids":
        raise MaskcTypeError(Diagnostic("M412", f"{kind}({given[0]}=, pad=): `pad` belongs to `ids`", help="leave `pad` out"))
    return SetSource(kind, given[0], forms[given[0]], -1 if pad is None else _integer(kind, pad))


def _integer(kind: str, pad: object) -> int:
    """Also of numpy and of a tensor with one element."""
    try:
        value = None if isinstance(pad, bool) else operator.index(pad)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise MaskcTypeError(Diagnostic("M412", f"{kind}(ids=, pad={pad!r}): `pad` is one of the ids, an integer of 64 bits"))
    return value
