"""`maskc explain`: what a mask means, in words, as data that prints itself.

Without data: which rows see a key, which boundary vectors there are and why the others are not, what was proved of it.
With data: sizes, density, tile classes, and a picture of a small mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from maskc.ir.intervals import VECTORS, IntervalProgram, Vector, leaves
from maskc.ir.nodes import Check, MaskFn
from maskc.ir.verdict import CheckResult
from maskc.prose import Prose

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.compiled import CompiledMask

PICTURE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the data of one batch add. `tiles`: (class name, count) for block_q x block_kv tiles."""

    nq: int
    nk: int
    batch: int
    heads: int
    visible: int
    block: tuple[int, int]
    tiles: tuple[tuple[str, int], ...]
    picture: tuple[str, ...]

    @property
    def density(self) -> float:
        """Visible pairs / all pairs."""
        return self.visible / max(1, self.nq * self.nk * self.batch * self.heads)


@dataclass(frozen=True, slots=True)
class Explanation:
    """`rows`: lines that say which rows see key k. `needs`: what data must be like. `vectors`, `properties`: (name, text)."""

    mask: str
    source: str
    verdict: str
    rows: tuple[str, ...]
    needs: tuple[str, ...]
    vectors: tuple[tuple[str, str], ...]
    properties: tuple[tuple[str, str], ...]
    data: DataFacts | None = None

    def render(self) -> str:
        return "\n".join(self._lines())

    def as_json(self) -> dict[str, object]:
        return {
            "mask": self.mask,
            "source": self.source,
            "verdict": self.verdict,
            "rows": list(self.rows),
            "needs": list(self.needs),
            "vectors": dict(self.vectors),
            "properties": dict(self.properties),
            "data": None if self.data is None else _data_json(self.data),
        }

    def _lines(self) -> Iterator[str]:
        yield f"{self.mask}: {self.verdict}"
        yield ""
        yield from (f"    {line}" for line in self.source.splitlines())
        yield ""
        yield "key k is seen by (a .. b: rows a to b - 1)"
        yield from (f"    {line}" for line in self.rows)
        if self.needs:
            yield ""
            yield "where the data"
            yield from (f"    {line}" for line in self.needs)
        for title, pairs in (("boundary vectors", self.vectors), ("properties", self.properties)):
            if pairs:
                yield ""
                yield title
                width = max(len(name) for name, _ in pairs)
                yield from (f"    {name:<{width}}  {text}" for name, text in pairs)
        if self.data is not None:
            yield ""
            yield from _data_lines(self.data)


def explain(compiled: CompiledMask, bound: BoundMask | None = None, block: tuple[int, int] = (128, 128)) -> Explanation:
    """Explain a compiled mask and, if given, the data bound to it."""
    fn, program = compiled.fn, compiled.program
    data = data_facts(bound, block) if bound is not None else None
    if program is None:
        rows = ["not known in advance: this mask is neither proved nor refuted, so each batch decides when it is bound"]
        return Explanation(fn.name, _text(fn), "undecided", tuple(rows), (), (), (), data)
    rows = Prose(fn).cases(program.tree) + [f"only where the block table `{t}` keeps the block" for t in fn.tables]
    needs = tuple(needed(program))
    properties = tuple(_property(c) for c in _properties(compiled))
    return Explanation(fn.name, _text(fn), "proved", tuple(rows), needs, tuple(vector_notes(fn, program)), properties, data)


def needed(program: IntervalProgram) -> Iterator[str]:
    """What data must be like, beside the declared facts, for the rows to be as told; binding sees to it."""
    yield from (
        f"have no padding before or between segments of `{name}` (else binding refuses them)" for name in program.hole_free
    )
    yield from (f"cover every token with `{name}` (else the batch is folded, or refused)" for name in program.tiling)


def vector_notes(fn: MaskFn, program: IntervalProgram) -> Iterator[tuple[str, str]]:
    """(vector, its values in words, or why it is not there) for the causal flag and the four vectors."""
    lower = any(leaf.lower is not None for leaf in leaves(program.tree))
    upper = any(leaf.upper is not None for leaf in leaves(program.tree))
    above = "above its visible rows a key is masked only where q < k" if program.causal else "no key has rows masked above"
    absent = {
        "lts": "no key has rows masked below its visible rows",
        "lte": "the lower interval always runs to the last row" if lower else "as LTS",
        "uts": "the upper interval always begins with row 0" if upper else "as UTE",
        "ute": above,
    }
    free = "rows q < k are masked for free, without a vector" if program.causal else "off: some key may be seen by an earlier row"
    yield "causal", free
    for name in VECTORS:
        yield name.upper(), _values(fn, program, name) if name in program.vectors else f"absent: {absent[name]}"


def _values(fn: MaskFn, program: IntervalProgram, vector: Vector) -> str:
    """What a vector holds in one leaf or another."""
    meaning = {
        "lts": "first masked row of the lower interval",
        "lte": "end of the lower interval",
        "uts": "first masked row of the upper interval",
        "ute": "end of the upper interval",
    }
    slots = [leaf.lower if vector in ("lts", "lte") else leaf.upper for leaf in leaves(program.tree)]
    bounds = [slot.lo if vector in ("lts", "uts") else slot.hi for slot in slots if slot is not None]
    return f"{meaning[vector]}: {' | '.join(dict.fromkeys(map(Prose(fn).expr, bounds)))}"


def data_facts(bound: BoundMask, block: tuple[int, int]) -> DataFacts:
    """Density, tile classes and, up to 64 x 64, a picture of the first batch item and head."""
    from maskc.pictures import picture, tile_counts, visible_pairs
    from maskc.tiles import classify

    v = bound.vectors()
    tiles = tuple((c.name, n) for c, n in tile_counts(classify(v, *block)).items())
    small = max(v.nq, v.nk) <= PICTURE_LIMIT
    drawn = tuple(picture(v, boundaries(bound))) if small else ()
    return DataFacts(v.nq, v.nk, v.batch, v.heads, visible_pairs(v), block, tiles, drawn)


def boundaries(bound: BoundMask) -> tuple[int, ...]:
    """Starts of the outermost segments of the first batch item, to mark in a picture."""
    outer = next((d.name for d in bound.compiled.fn.inputs if d.is_set and d.within is None), None)
    return tuple(bound.inputs.sets[outer].starts[0].tolist()) if outer is not None else ()


def _properties(compiled: CompiledMask) -> tuple[CheckResult, ...]:
    """Every claim that could be made of the mask, decided."""
    from maskc.ir.checks import run_checks

    fn = compiled.fn
    isolated = (Check("isolated", d.name) for d in fn.inputs if d.is_set)
    asked = replace(fn, checks=(Check("causal"), *isolated, Check("no_empty_row")))
    return run_checks(asked, compiled.verdict)


def _property(result: CheckResult) -> tuple[str, str]:
    check = result.check
    titles = {"causal": "causal", "isolated": f"isolated by {check.of}", "no_empty_row": "no empty row"}
    answer = {"proved": "yes, proved", "refuted": "no", "unknown": "not decided"}[result.status]
    return titles[check.kind], answer + (f": {result.detail}" if result.detail else "")


def _text(fn: MaskFn) -> str:
    """The file as written, without its comments."""
    lines = [line.partition("#")[0].rstrip() for line in (fn.source.text if fn.source is not None else fn.name).splitlines()]
    return "\n".join(line for line in lines if line)


def _data_lines(d: DataFacts) -> Iterator[str]:
    shape = (
        f"{d.nq} rows x {d.nk} keys"
        + (f", batch {d.batch}" if d.batch > 1 else "")
        + (f", {d.heads} mask heads" if d.heads > 1 else "")
    )
    yield f"with these data: {shape}"
    yield f"    density  {d.density:.4f} ({d.visible} visible pairs)"
    total = max(1, sum(n for _, n in d.tiles))
    counts = ", ".join(f"{n} {name} ({n / total:.1%})" for name, n in d.tiles)
    yield f"    tiles    {d.block[0]} x {d.block[1]}: {counts}"
    if d.picture:
        yield ""
        if d.batch * d.heads > 1:
            yield "    the first batch item and mask head:"
        yield from (f"    {line}".rstrip() for line in d.picture)


def _data_json(d: DataFacts) -> dict[str, object]:
    return {
        "nq": d.nq,
        "nk": d.nk,
        "batch": d.batch,
        "heads": d.heads,
        "visible": d.visible,
        "density": d.density,
        "block": list(d.block),
        "tiles": dict(d.tiles),
        "picture": list(d.picture),
    }
