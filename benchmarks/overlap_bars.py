"""What was to be reached between GPUs, cell by cell, from the rows of `benchmarks.overlap_gpus`.

"what two losses allow": a dual-chunk assignment loses its peak over average load, and a plain gather what it exposes; the
step without both is the mean attention of the ranks, so their product is its whole step over that.

Speed-ups, shares and E are middles of the rounds' own where the rows have them (`benchmarks.overlap_pairs`), with an
interval; where this holds the bar, the value is level with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]
DIRECTIONS = ("forward", "backward")
CHUNKED = "gated, chunks"
"""The gated way by a plan that sends more keys, for E alone."""
HIDDEN = {"forward": 0.90, "backward": 0.80}
"""E to reach where communication takes between HALF and all of the time of attention."""
HALF, WHOLE = 0.5, 1.0
MOST_HIDDEN, GATE = 0.90, 0.005
"""On one GPU: of the lesser of copies and attention, where copies take longer; what looks at flags that are set may cost."""
NEAR, LARGE, AT_LEAST = 0.95, 1.6, 1.5
"""Share of what two losses allow; where they allow more than LARGE, the speed-up is to be AT_LEAST."""


@dataclass(frozen=True)
class Bar:
    """holds: None where the bar asks for nothing, and the value is told. exposed_us: beyond attention. possible: at most.

    low, high: 95 % of the value. level: the bar lies between them, so that the rounds do not tell whether it holds.
    """

    cell: str
    what: str
    value: float
    wanted: float | None
    holds: bool | None
    ratio: float | None = None
    exposed_us: float | None = None
    possible: float | None = None
    low: float | None = None
    high: float | None = None
    level: bool = False

    @classmethod
    def of(cls, cell: str, what: str, wanted: float | None, found: Sequence[float], **more: float | None) -> Bar:
        """found: the value, and where it is known its interval."""
        low, high = found[1:] or (None, None)
        level = wanted is not None and low is not None and high is not None and low <= wanted <= high
        holds = None if wanted is None else found[0] >= wanted
        return cls(cell, what, found[0], wanted, holds, low=low, high=high, level=level, **more)

    def __str__(self) -> str:
        verdict = "level" if self.level else {True: "ok", False: "BELOW", None: "told"}[self.holds]
        wanted = "" if self.wanted is None else f" of {self.wanted:.3f}"
        more = "" if self.exposed_us is None else f" (copies/attention {self.ratio:.2f}, exposed {self.exposed_us:.0f} us)"
        more += "" if self.possible is None else f", {self.possible:.3f} possible"
        more += "" if self.low is None else f", {self.low:.3f} to {self.high:.3f}"
        return f"{verdict:5} {self.cell}: {self.what} {self.value:.3f}{wanted}{more}"


def bars(rows: Iterable[Row]) -> list[Bar]:
    """The bars of all cells that have what they look at, and whose hosts were not late in every round."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for r in rows:
        if "step_ms" in r and not r.get("late"):
            cells[tuple(r.get(k) for k in ("mask", "rows_per_device", "heads", "kv_heads", "batch"))][r["way"]] = r
    found = [bar for key, ways in cells.items() if "gated" in ways for bar in _of_cell(_name(key), ways)]
    chunked = [(f"{_name(key)}, in chunks", ways[CHUNKED]) for key, ways in cells.items() if CHUNKED in ways]
    return found + [bar for cell, ours in chunked for bar in _hidden(cell, ours)]


def as_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [asdict(bar) for bar in bars(rows)]


def _name(key: tuple[Any, ...]) -> str:
    mask, rows, heads, heads_kv, batch = key
    return f"{mask}, {rows} rows a GPU, {heads} on {heads_kv} heads" + (f", batch {batch}" if (batch or 1) > 1 else "")


def _hidden(cell: str, ours: Row) -> Iterator[Bar]:
    """E, and beyond what it asks for, how much is hidden."""
    for d in DIRECTIONS:
        attention, comm = ours.get(f"attention_{d}_ms"), ours.get(f"comm_{d}_ms")
        if not attention or not comm or ours[f"e_{d}"] is None:
            continue
        beyond = ours.get(f"beyond_{d}_ms") or (ours[f"{d}_ms"] - attention,)
        ratio, exposed = comm / attention, 1e3 * beyond[0]
        asked = HALF <= ratio <= WHOLE
        wanted = HIDDEN[d] if asked else None
        e = ours[f"e_{d}"], *ours.get(f"e_{d}_interval", ())
        possible = ours.get(f"e_possible_{d}")
        yield Bar.of(cell, f"E {d}", wanted, e, ratio=ratio, exposed_us=exposed, possible=possible)
        if ratio > WHOLE:
            hidden = (attention + comm - ours[f"{d}_ms"]) / attention
            yield Bar(cell, f"hidden over attention, {d}", hidden, None, None, ratio, exposed)


def _of_cell(cell: str, ways: Mapping[str, Row]) -> Iterator[Bar]:
    ours = ways["gated"]
    yield from _hidden(cell, ours)
    dual = ways.get("dual-chunk gather")
    if dual is None:
        return
    for d in (*DIRECTIONS, "step"):
        mean = sum(dual[f"attention_{x}_mean_ms"] for x in (DIRECTIONS if d == "step" else (d,)))
        allowed = dual[f"{d}_ms"] / mean
        faster = ours.get(f"faster_{d}") or (dual[f"{d}_ms"] / ours[f"{d}_ms"],)
        share = ours.get(f"share_{d}") or (mean / ours[f"{d}_ms"],)
        yield Bar.of(cell, f"speed-up over dual chunk with all-gather, {d}", 1.0, faster)
        yield Bar.of(cell, f"share of what two losses allow, {d}", NEAR, share)
        if allowed > LARGE:
            yield Bar.of(cell, f"speed-up where {allowed:.2f} is allowed, {d}", AT_LEAST, faster)
