"""What was to be reached before the kernels were written, what was measured, and why where it was not reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.misses import WHY
from benchmarks.records import NoData, gmean, length, rows_of, table
from benchmarks.tables_kernels import best_peers, cells, gains, gains_of, rates

FEW_HEADS = "few heads: kernels of 0.1 ms or more at 8 and 16 heads with 0.90 of their rate at 512, 8K"
ENOUGH = 0.9
AHEAD = 1.03
"""Times the best other gain that every mask is to reach."""
LONGEST = 131072
T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A line of the table. what: also the name of its explanation. measured None: no data. reached: None where there is none."""

    what: str
    level: str
    wanted: str
    measured: str | None = None
    reached: bool | None = None


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
    missed = [m for m in _marks() if m.reached is False and m.what != FEW_HEADS and not m.what.startswith("masks at")]
    body = [[m.what, m.measured, m.wanted, WHY.get(m.what, UNEXPLAINED)] for m in missed]
    for cell, share in _few():
        if share < ENOUGH:
            body.append([f"{cell}, over 512 heads", f"{share:.3f}", f"{ENOUGH:.3f}", WHY.get(cell, WHY[cell.split(", ")[1]])])
    for seqlen, mask, over in _behind():
        body.append([f"{mask}, {length(seqlen)}, over the best other", f"{over:.3f}", f"{AHEAD:.3f}", WHY.get(mask, UNEXPLAINED)])
    if not body and not cells(8192):
        raise NoData("attention")
    return table(["", "measured", "to reach", "why"], body) if body else "None."


UNEXPLAINED = "**not explained yet**"


def _marks() -> Iterator[Mark]:
    for seqlen, level in ((8192, 1.45), (32768, 1.49), (LONGEST, 1.50)):
        found = _or_none(gains, seqlen)
        what = f"gain over FlexAttention, {length(seqlen)}, geometric mean"
        mean = gmean(found.values()) if found else None
        told = f"{mean:.3f} ({len(found)} masks)" if found and mean else None
        yield Mark(what, f"{level:.2f}", "1.60", told, None if mean is None else mean >= 1.6)
    for seqlen in (8192, 32768, LONGEST):
        over = _over(seqlen)
        ahead = sum(x >= AHEAD for x in over.values())
        what = f"masks at {AHEAD} times the best other gain, {length(seqlen)}"
        yield Mark(what, "", "all", f"{ahead} of {len(over)}" if over else None, ahead == len(over) if over else None)
    for mask, level, forward, backward in (("full", "650 / 600", 670, 625), ("causal", "632 / 604", 660, 620)):
        yield _rate(f"{mask}, 128K, TFLOP/s forward / backward", mask, level, forward, backward)
    for seqlen in (8192, 32768, LONGEST):
        cell = _or_none(cells, seqlen).get("random_eviction")
        rate = rates(cell["maskc"])[2] if cell else None
        what = f"random eviction, {length(seqlen)}, TFLOP/s both"
        yield Mark(what, "385 to 424", "450", f"{rate:.0f}" if rate else None, rate >= 450 if rate else None)
    yield _few_heads()
    for dim in (64, 256):
        found = _or_none(gains_of, dim)
        mean = gmean(found.values()) if found else None
        told = f"{mean:.3f} ({len(found)} masks)" if mean else None
        what = f"head dim {dim}, gain over FlexAttention, 8K"
        yield Mark(what, "1.00", "1.40", told, mean >= 1.4 if mean else None)
    yield _new_mask()


def _rate(what: str, mask: str, level: str, forward: int, backward: int) -> Mark:
    wanted, cell = f"{forward} / {backward}", _or_none(cells, LONGEST).get(mask)
    if cell is None:
        return Mark(what, level, wanted)
    f, b, _ = rates(cell["maskc"])
    return Mark(what, level, wanted, f"{f:.0f} / {b:.0f}", round(f) >= forward and round(b) >= backward)


def _few_heads() -> Mark:
    what, few = FEW_HEADS, _few()
    enough = sum(share >= ENOUGH for _, share in few)
    return Mark(what, "", "all", f"{enough} of {len(few)}", enough == len(few)) if few else Mark(what, "", "all")


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
    for seqlen in (8192, 32768, LONGEST):
        for mask, over in _over(seqlen).items():
            if over < AHEAD:
                yield seqlen, mask, over


def _or_none(read: Callable[[int], dict[str, T]], of: int) -> dict[str, T]:
    try:
        return read(of)
    except NoData:
        return {}


PLACES: tuple[Callable[..., str], ...] = (marks, misses)
