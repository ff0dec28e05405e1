"""`segments(...)` and `spans(...)` -> SegmentTable, on the device of the data, with the checks of each form."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from maskc.binding.bound import SegmentTable
from maskc.binding.checks import Checks
from maskc.binding.constructors import SetSource
from maskc.binding.data import INT32_MAX, Named, few, integers, move, rows
from maskc.diagnostics import Diagnostic
from maskc.ir.nodes import InputDecl


def build_table(
    decl: InputDecl, source: SetSource | Sequence[SetSource], checks: Checks, device: torch.device
) -> tuple[SegmentTable, int | None]:
    """(the table of one input, the number of tokens where its form gives one per token).

    Raises M412, M413 for data of the wrong type or shape; what the numbers themselves break goes to `checks`.
    """
    if isinstance(source, SetSource):
        return _build(decl, source, checks, device)
    built = [_build(decl, item, checks, device, f" of batch item {i}") for i, item in enumerate(source)]
    if any(table.batch != 1 for table, _ in built):
        raise _named(decl, source[0]).error("M413", "has a batch axis inside a list of constructors", "give one item each")
    lengths = {tokens for _, tokens in built if tokens is not None}
    if len(lengths) > 1:
        raise _named(decl, source[0]).error("M413", f"has items of {' and '.join(map(str, sorted(lengths)))} tokens")
    size = max(table.size for table, _ in built)
    both = torch.cat([_widen(table, size) for table, _ in built], 1)
    counts = torch.cat([table.counts for table, _ in built])
    return SegmentTable(both, counts), next(iter(lengths), None)


def _build(
    decl: InputDecl, source: SetSource, checks: Checks, device: torch.device, of_item: str = ""
) -> tuple[SegmentTable, int | None]:
    if (table := _of_few(source)) is not None:
        return table, None
    what = _named(decl, source, of_item)
    match source.form:
        case "lengths":
            return _from_lengths(source.data, what, checks, device), None
        case "cu_seqlens":
            return _from_offsets(source.data, what, checks, device), None
        case "ranges":
            return _from_ranges(source.data, what, checks, device), None
        case _:
            tokens = move(_leading(integers(source.data, what), 2, what), device)
            tokens = tokens if source.form == "eos" else _numbers(tokens, what)
            return _from_tokens(source, tokens, what, checks), tokens.shape[1]


def _numbers(t: Tensor, what: Named) -> Tensor:
    """Truth values are refused: flags given for lengths or ids (an attention mask, say) would be read as something else."""
    if t.dtype == torch.bool:
        raise what.error("M412", "holds truth values, not integers", "True on the last token of each segment? give eos=")
    return t.to(torch.int64)


def _named(decl: InputDecl, source: SetSource, of_item: str = "") -> Named:
    return Named(f"{decl.kind.value} `{decl.name}`{of_item}: {source.form}", decl.span)


def _leading(t: Tensor, rank: int, what: Named) -> Tensor:
    """With a batch axis in front."""
    if t.ndim not in (rank - 1, rank):
        raise what.error("M413", f"has {t.ndim} axes; it takes {rank - 1}, or {rank} with a batch axis")
    if t.ndim == rank and t.shape[0] == 0:
        raise what.error("M413", "is for no batch item")
    return t if t.ndim == rank else t[None]


def _widen(table: SegmentTable, size: int) -> Tensor:
    """Columns up to `size`, filled with the last end."""
    return torch.cat((table.both, table.both[1:, :, -1:].expand(2, -1, size - table.size)), 2)


def _table(starts: Tensor, ends: Tensor, counts: Tensor | list[int] | None, what: Named, checks: Checks) -> SegmentTable:
    batch, size = starts.shape
    if size == 0:
        starts = ends = torch.zeros(batch, 1, dtype=torch.int64, device=starts.device)
        counts = [0] * batch
    checks.forbid(
        lambda: ends > INT32_MAX,
        [ends],
        lambda at, v: Diagnostic("M408", f"{what.text} reaches token {v[0]}, past 2^31 - 1", what.span),
    )
    both = torch.stack((starts, ends)).clamp_(0, INT32_MAX).to(torch.int32)
    if isinstance(counts, list):
        counts = move(torch.tensor(counts, dtype=torch.int32), starts.device)
    return SegmentTable(both, None if counts is None else counts.to(torch.int32))


def _of_few(source: SetSource) -> SegmentTable | None:
    """Segments by lengths or offsets of one batch item, if they are few, lie in host memory, and nothing is wrong with them."""
    if source.form not in ("lengths", "cu_seqlens") or not (numbers := few(source.data)):
        return None
    edges = (0, *accumulate(numbers)) if source.form == "lengths" else tuple(numbers)
    if edges[0] != 0 or len(edges) < 2 or edges[-1] > INT32_MAX or sorted(edges) != [*edges]:
        return None
    both = torch.frombuffer(array("i", edges[:-1] + edges[1:]), dtype=torch.int32)  # which torch.tensor would look at one by one
    return SegmentTable(both.view(2, 1, -1), None, edges)


def _item(what: Named, at: tuple[int, ...], shape: torch.Size) -> str:
    """The data as messages name them: "segments `doc`: lengths[3]", with the batch item where there are several."""
    inside = f"[{at[1]}]"
    return f"{what.text}{inside}" if shape[0] == 1 else f"{what.text}[{at[0]}]{inside}"


def _from_lengths(data: object, what: Named, checks: Checks, device: torch.device) -> SegmentTable:
    given, counts = rows(data, what, "zero")
    lengths = _numbers(move(_leading(given, 2, what), device), what)
    checks.forbid(
        lambda: lengths < 0,
        [lengths],
        lambda at, v: Diagnostic("M403", f"{_item(what, at, lengths.shape)} = {v[0]}: a length is not negative", what.span),
    )
    ends = lengths.cumsum(1)
    return _table(ends - lengths, ends, counts, what, checks)


def _from_offsets(data: object, what: Named, checks: Checks, device: torch.device) -> SegmentTable:
    given, counts = rows(data, what, "last")
    offsets = _numbers(move(_leading(given, 2, what), device), what)
    if offsets.shape[1] == 0 or (counts is not None and min(counts) == 0):
        raise what.error("M403", "is empty", "it starts with 0 and holds one entry more than there are segments")
    first, before, after = offsets[:, :1], offsets[:, :-1], offsets[:, 1:]
    hint = "offsets start at 0 and never decrease; lengths? give lengths= instead"
    checks.forbid(
        lambda: first != 0,
        [first],
        lambda at, v: Diagnostic("M403", f"{_item(what, at, offsets.shape)} = {v[0]}: offsets start at 0", what.span, hint),
    )
    checks.forbid(
        lambda: after < before,
        [before, after],
        lambda at, v: Diagnostic(
            "M403",
            f"{_item(what, (at[0], at[1] + 1), offsets.shape)} = {v[1]} after {v[0]}: offsets never decrease",
            what.span,
            hint,
        ),
    )
    return _table(before, after, None if counts is None else [n - 1 for n in counts], what, checks)


def _from_ranges(data: object, what: Named, checks: Checks, device: torch.device) -> SegmentTable:
    given, counts = rows(data, what, "last")
    if given.numel() == 0:
        given = given.new_zeros((*given.shape[: 1 if given.ndim > 1 and given.shape[0] else 0], 0, 2))
    ragged = counts is not None and given.ndim == 2  # rows themselves are of unequal lengths, not the items of a batch
    found = sorted(set(counts or ())) if ragged else [*given.shape[-1:]]
    if given.ndim >= 2 and found != [2]:
        raise what.error("M413", f"has rows of {' and '.join(map(str, found))} numbers; each is a pair (start, end), half-open")
    pairs = _numbers(move(_leading(given, 3, what), device), what)
    starts, ends = pairs.unbind(2)
    if counts is not None:
        ordinals = torch.arange(starts.shape[1], device=device)
        starts = torch.where(ordinals < move(torch.tensor(counts), device)[:, None], starts, ends)
    checks.forbid(
        lambda: (starts < 0) | (ends < starts),
        [starts, ends],
        lambda at, v: Diagnostic(
            "M419", f"{_item(what, at, starts.shape)} = ({v[0]}, {v[1]}): a range is half-open, 0 <= start <= end", what.span
        ),
    )
    checks.forbid(
        lambda: starts[:, 1:] < ends[:, :-1],
        [ends[:, :-1], starts[:, 1:]],
        lambda at, v: Diagnostic(
            "M419",
            f"{_item(what, (at[0], at[1] + 1), starts.shape)} starts at {v[1]}, before the one ahead of it ends at {v[0]}",
            what.span,
            "ranges stand in order and do not overlap",
        ),
    )
    return _table(starts, ends, counts, what, checks)


def _from_tokens(source: SetSource, tokens: Tensor, what: Named, checks: Checks) -> SegmentTable:
    """From one number per token [batch, n]: ids, positions, or flags of the last token of each segment."""
    inner = tokens[:, 1:], tokens[:, :-1]
    outside = torch.zeros_like(tokens, dtype=torch.bool)
    match source.form:
        case "ids":
            outside, boundary = tokens == source.pad, inner[0] != inner[1]
        case "positions":
            boundary = inner[0] == 0
            _check_positions(tokens, what, checks)
        case _:
            checks.forbid(
                lambda: (tokens != 0) & (tokens != 1),
                [tokens],
                lambda at, v: Diagnostic("M408", f"{_item(what, at, tokens.shape)} = {v[0]} is not a truth value", what.span),
            )
            boundary = inner[1] != 0
    edge = torch.ones_like(tokens[:, :1], dtype=torch.bool)
    opens = torch.cat((edge, boundary), 1)[:, : tokens.shape[1]] & ~outside
    closes = torch.cat((boundary, edge), 1)[:, : tokens.shape[1]] & ~outside
    table = _runs(opens, closes, what, checks)
    if source.form == "ids" and tokens.shape[1] > 0:
        _check_contiguous(tokens, table, what, checks)
    return table


def _runs(opens: Tensor, closes: Tensor, what: Named, checks: Checks) -> SegmentTable:
    """Runs of tokens by their first and last token, bool [batch, n]."""
    batch, n = opens.shape
    if n == 0:
        empty = torch.zeros(batch, 0, dtype=torch.int64, device=opens.device)
        return _table(empty, empty, None, what, checks)
    counts = opens.sum(1)
    room = _room(counts, n)
    token = torch.arange(n, device=opens.device)
    total = torch.where(closes, token + 1, 0).amax(1, keepdim=True)
    ordinal = opens.cumsum(1) - 1

    def scatter(where: Tensor, values: Tensor) -> Tensor:
        out = total.repeat(1, room + 1)  # the last column takes what belongs nowhere
        return out.scatter_(1, torch.where(where, ordinal, room), values.expand(batch, n))[:, :room]

    return _table(scatter(opens, token), scatter(closes, token + 1), counts, what, checks)


def _room(counts: Tensor, n: int) -> int:
    """How many segments a table has room for: on a GPU one per token, as the count is not known before it is read."""
    return max(1, int(counts.max())) if counts.device.type == "cpu" else n


def _check_positions(tokens: Tensor, what: Named, checks: Checks) -> None:
    first, before, after = tokens[:, :1], tokens[:, :-1], tokens[:, 1:]
    hint = "a position is 0 on the first token of a segment and one more on each next one"
    checks.forbid(
        lambda: first != 0,
        [first],
        lambda at, v: Diagnostic(
            "M405", f"{_item(what, at, tokens.shape)} = {v[0]}: the first token starts a segment", what.span, hint
        ),
    )
    checks.forbid(
        lambda: (after != 0) & (after != before + 1),
        [before, after],
        lambda at, v: Diagnostic(
            "M405", f"{_item(what, (at[0], at[1] + 1), tokens.shape)} = {v[1]} after {v[0]}", what.span, hint
        ),
    )


def _check_contiguous(ids: Tensor, table: SegmentTable, what: Named, checks: Checks) -> None:
    """No id comes back after another one (or after padding)."""
    if not checks.enabled:
        return
    starts = table.starts.to(torch.int64)
    labels = ids.gather(1, starts.clamp(max=ids.shape[1] - 1))
    real = torch.arange(table.size, device=ids.device) < table.counts[:, None]
    ordered, order = labels.sort(stable=True, dim=1)  # a run is later than its equals, and unused room later than any run
    again = order[:, 1:]
    checks.forbid(
        (ordered[:, 1:] == ordered[:, :-1]) & real.gather(1, again),
        [starts.gather(1, again), ordered[:, 1:]],
        lambda at, v: Diagnostic(
            "M404",
            f"{_item(what, (at[0], v[0]), ids.shape)} = {v[1]} comes back after another id",
            what.span,
            "tokens of one segment stand side by side; number later segments anew, or sort the tokens",
        ),
    )
