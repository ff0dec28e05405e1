"""What was to be reached before the kernels were written, what was measured, and why where it was not reached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from benchmarks.misses import WHY
from benchmarks.records import NoData, gmean, length, rows_of, table, tflops
from benchmarks.tables_kernels import best_peers, cells, gains, gains_of

ENOUGH = 0.9
AHEAD = 1.03
"""Times the best other gain that every mask is to reach."""
LONGEST = 131072
LENGTHS = (8192, 32768, LONGEST)
UNEXPLAINED = "**not explained yet**"
T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A line of the table. what: also the name of its explanation. measured None: no data. reached: None where there is none.

    counts: cells that reach theirs, so that each that does not is explained instead.
    """

    what: str
    level: str
    wanted: str
    measured: str | None = None
    reached: bool | None = None
    counts: bool = False


def marks() -> str:
    """Every mark; "level" is where the best of all peers stood in the run that set them."""
    found = list(_marks())
    if all(m.measured is None for m in found):
        raise NoData("attention")
    word = {True: "yes", False: "**no**", None: ""}
    return table(
        ["", "level", "to reach", "measured", "reached"],
        [[m.what, m.level, m.wanted, m.measured or "not in the record", word[m.reached]] for m in found],
    )


def misses() -> str:
    """Every mark and every cell that is not reached, with the reason."""
    missed = [m for m in _marks() if m.reached is False and not m.counts]
    body = [[m.what, m.measured, m.wanted, WHY.get(m.what, UNEXPLAINED)] for m in missed]
    for cell, share in _few():
        if share < ENOUGH:
            body.append([f"{cell}, over 512 heads", f"{share:.3f}", f"{ENOUGH:.3f}", WHY.get(cell, WHY[cell.split(", ")[1]])])
    for seqlen, mask, over in _behind():
        body.append([f"{mask}, {length(seqlen)}, over the best other", f"{over:.3f}", f"{AHEAD:.3f}", WHY.get(mask, UNEXPLAINED)])
    if not body and not cells(8192):
        raise NoData("attention")
    return table(["", "measured", "to reach", "why"], body) if body else "None."


def _marks() -> Iterator[Mark]:
    for seqlen, best in zip(LENGTHS, (1.45, 1.49, 1.50), strict=True):
        yield _mean(f"gain over FlexAttention, {length(seqlen)}, geometric mean", best, 1.6, _or_none(gains, seqlen))
    for seqlen in LENGTHS:
        over = _over(seqlen).values()
        yield _all(f"masks at {AHEAD} times the best other gain, {length(seqlen)}", over, AHEAD)
    for mask, level, forward, backward in (("full", "650 / 600", 670, 625), ("causal", "632 / 604", 660, 620)):
        yield _rate(f"{mask}, 128K, TFLOP/s forward / backward", mask, level, forward, backward)
    for seqlen in LENGTHS:
        cell = _or_none(cells, seqlen).get("random_eviction")
        rate = tflops(cell["maskc"])[2] if cell else None
        what = f"random eviction, {length(seqlen)}, TFLOP/s both"
        yield Mark(what, "385 to 424", "450", f"{rate:.0f}" if rate else None, rate >= 450 if rate else None)
    few = "few heads: kernels of 0.1 ms or more at 8 and 16 heads with 0.90 of their rate at 512, 8K"
    yield _all(few, [share for _, share in _few()], ENOUGH)
    for dim in (64, 256):
        yield _mean(f"head dim {dim}, gain over FlexAttention, 8K", 1.0, 1.4, _or_none(gains_of, dim))
    yield _new_mask()


def _mean(what: str, level: float, wanted: float, found: dict[str, float]) -> Mark:
    """Of the gains of masks."""
    mark = Mark(what, f"{level:.2f}", f"{wanted:.2f}")
    if not found:
        return mark
    mean = gmean(found.values())
    return replace(mark, measured=f"{mean:.3f} ({len(found)} masks)", reached=mean >= wanted)


def _all(what: str, found: Collection[float], wanted: float) -> Mark:
    """How many of the cells have what is wanted of each."""
    mark, enough = Mark(what, "", "all", counts=True), sum(x >= wanted for x in found)
    return replace(mark, measured=f"{enough} of {len(found)}", reached=enough == len(found)) if found else mark


def _rate(what: str, mask: str, level: str, forward: int, backward: int) -> Mark:
    wanted, cell = f"{forward} / {backward}", _or_none(cells, LONGEST).get(mask)
    if cell is None:
        return Mark(what, level, wanted)
    f, b, _ = tflops(cell["maskc"])
    return Mark(what, level, wanted, f"{f:.0f} / {b:.0f}", round(f) >= forward and round(b) >= backward)


def _few() -> list[tuple[str, float]]:
    """Kernels of 0.1 ms or more at 8 and 16 heads, in the order that a call gets, over their own rate at 512 heads."""
    rows = []
    with suppress(NoData):
        rows = [r for r in rows_of("scheduler", "ms", "tflops", "batch_heads") if r.get("default")]
    most = {(r["direction"], r["mask"]): r["tflops"] for r in rows if r["batch_heads"] == 512}
    few = [r for r in rows if r["batch_heads"] <= 16 and r["ms"] >= 0.1 and (r["direction"], r["mask"]) in most]
    way = {"fwd": "forward", "bwd": "backward"}
    return [
        (f"{r['mask']}, {way[r['direction']]}, {r['batch_heads']} heads", r["tflops"] / most[r["direction"], r["mask"]])
        for r in few
    ]


def _new_mask() -> Mark:
    what = "a new mask at 128K, one mask head: ms on the GPU (waits for the GPU)"
    level, wanted = "37 to 46 (create_block_mask)", "0.15 (0)"
    with suppress(NoData):
        rows = rows_of("new_mask", "step_gpu_ms", "step_syncs")
        rows = [r for r in rows if r["peer"] == "maskc" and r["seqlen"] == LONGEST and r["heads"] == 1]
        if rows:
            ms, waits = max(r["step_gpu_ms"] for r in rows), max(r["step_syncs"] for r in rows)
            return Mark(what, level, wanted, f"{ms:.2g} at most ({waits})", ms < 0.15 and waits == 0)
    return Mark(what, level, wanted)


def _over(seqlen: int) -> dict[str, float]:
    """Mask -> its gain over the best other's."""
    best = best_peers(seqlen)
    return {mask: gain / best[mask][1] for mask, gain in _or_none(gains, seqlen).items() if mask in best}


def _behind() -> Iterator[tuple[int, str, float]]:
    for seqlen in LENGTHS:
        for mask, over in _over(seqlen).items():
            if over < AHEAD:
                yield seqlen, mask, over


def _or_none(read: Callable[[int], dict[str, T]], of: int) -> dict[str, T]:
    try:
        return read(of)
    except NoData:
        return {}


PLACES: tuple[Callable[..., str], ...] = (marks, misses)
