"""`maskc diff`: do two masks show the same cells? Proved for every input, found different, or compared on given data.

Without data: the proof of `maskc.ir.equal`, else a search for the smallest input that obeys the facts of both and tells
them apart. With data: the boundary vectors are compared column by column in O(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from maskc.diagnostics import MaskcError
from maskc.inputs import read_inputs
from maskc.ir.equal import joined, proved_equal
from maskc.ir.lower import needs_hole_free
from maskc.ir.nodes import MaskFn
from maskc.ir.reference import Env, dense
from maskc.ir.samples import describe
from maskc.ir.search import heads_of, smallest

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.boundary import BoundaryVectors
    from maskc.compiled import CompiledMask

SIZES = range(1, 10)
TRIALS = 60  # per size
WINDOW = 32  # rows and keys of a picture of a large mask
_SLAB = 1 << 24  # elements compared at once where there are block tables

Outcome = Literal["proved", "equal", "different", "undecided"]


@dataclass(frozen=True, slots=True)
class Cell:
    """The first cell, in row order, that differs: `seen_by` is the name of the mask that shows it."""

    batch: int
    head: int
    row: int
    key: int
    seen_by: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `maskc diff` prints.

    outcome: proved equal for every input; equal on the given data; different; or undecided, when neither the proof nor the
    search found an answer. inputs: (name, text) of the smallest input found. pictures: both masks around the cell, keys from
    `first_key` on.
    """

    names: tuple[str, str]
    outcome: Outcome
    nq: int = 0
    nk: int = 0
    cell: Cell | None = None
    differing: int = 0
    cells: int = 0
    inputs: tuple[tuple[str, str], ...] = ()
    pictures: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    first_key: int = 0

    def render(self) -> str:
        return "\n".join(self._lines())

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def _lines(self) -> Iterator[str]:
        a, b = self.names
        match self.outcome:
            case "proved":
                yield f"{a} and {b} are equal: proved for every input that obeys the declared facts"
            case "equal":
                yield f"{a} and {b} are equal on these data ({self.nq} rows, {self.nk} keys)"
            case "undecided":
                yield f"{a} and {b} are neither proved equal nor found to differ; compare them on your data with --inputs"
            case "different":
                yield from self._difference()

    def _difference(self) -> Iterator[str]:
        assert self.cell is not None
        c = self.cell
        where = (f", batch item {c.batch}" if c.batch else "") + (f", head {c.head}" if c.head else "")
        a, b = self.names
        yield f"{a} and {b} differ: row {c.row}{where} sees key {c.key} in {c.seen_by} only"
        yield f"{self.differing} of {self.cells} cells differ ({self.nq} x {self.nk})"
        if self.inputs:
            yield "smallest input found: " + ", ".join(f"{name} = {text}" for name, text in self.inputs)
        left, right = self.pictures
        width = max(len(line) for line in (a, *left))
        if self.first_key:
            yield f"the pictures begin with key {self.first_key}"
        yield ""
        for x, y in zip((a, *left), (b, *right), strict=True):
            yield f"    {x:<{width}}    {y}".rstrip()


def compare(a: CompiledMask, b: CompiledMask, names: tuple[str, str], inputs: Path | None = None) -> Comparison:
    """Compare two compiled masks. Raises M550 where they declare an input differently, and what binding raises."""
    both = joined(a.fn, b.fn)
    if proved_equal(a.fn, b.fn):
        return Comparison(names, "proved")
    return _on_data(a, b, names, inputs) if inputs is not None else _search(both, a.fn, b.fn, names)


# ---------------------------------------------------------------- without data


def _search(both: MaskFn, a: MaskFn, b: MaskFn, names: tuple[str, str]) -> Comparison:
    pair = replace(both, body=a.body, tables=a.tables), replace(both, body=b.body, tables=b.tables)

    def test(env: Env) -> tuple[list[list[bool]], list[list[bool]], int] | None:
        for h in heads_of(both):
            mine, other = dense(pair[0], env, h), dense(pair[1], env, h)
            if mine != other:
                return mine, other, h
        return None

    found = smallest(both, needs_hole_free(a) | needs_hole_free(b), SIZES, TRIALS, test)
    if found is None:
        return Comparison(names, "undecided")
    env, (mine, other, head) = found
    wrong = [(q, k) for q in range(env.nq) for k in range(env.nk) if mine[q][k] != other[q][k]]
    q, k = wrong[0]
    cell = Cell(0, head, q, k, names[0] if mine[q][k] else names[1])
    pictures = _drawn(mine), _drawn(other)
    inputs = describe(both, env)
    return Comparison(names, "different", env.nq, env.nk, cell, len(wrong), env.nq * env.nk, inputs, pictures)


def _drawn(rows: list[list[bool]], first: int = 0) -> tuple[str, ...]:
    width = len(str(first + len(rows)))
    return tuple(f"{first + q:>{width}} " + "".join("#" if seen else "." for seen in row) for q, row in enumerate(rows))


# ---------------------------------------------------------------- with data


def _on_data(a: CompiledMask, b: CompiledMask, names: tuple[str, str], path: Path) -> Comparison:
    v, w = _vectors(_bound(a, b, path), _bound(b, a, path))
    found = _first(v, w)
    if found is None:
        return Comparison(names, "equal", v.nq, v.nk)
    batch, head, row, key, differing = found
    r0, c0 = (max(0, min(at - WINDOW // 2, size - WINDOW)) for at, size in ((row, v.nq), (key, v.nk)))
    tiles = [_tile(x, batch, head, r0, c0) for x in (v, w)]
    cell = Cell(batch, head, row, key, names[0] if tiles[0][row - r0][key - c0] else names[1])
    cells = v.nq * v.nk * max(v.batch, w.batch) * max(v.heads, w.heads)
    pictures = _drawn(tiles[0], r0), _drawn(tiles[1], r0)
    return Comparison(names, "different", v.nq, v.nk, cell, differing, cells, (), pictures, c0)


def _bound(mask: CompiledMask, other: CompiledMask, path: Path) -> BoundMask:
    """The mask with those inputs of the file that it declares; a name that neither declares is refused (M411)."""
    given = read_inputs(path)
    mine, theirs = ({d.name for d in m.fn.inputs} for m in (mask, other))
    values = {name: value for name, value in given.values.items() if name in mine or name not in theirs}
    from maskc.binding.bind import bind

    return bind(mask, nq=given.nq, nk=given.nk, batch=given.batch, validate=True, inputs=values)


def _vectors(a: BoundMask, b: BoundMask) -> tuple[BoundaryVectors, BoundaryVectors]:
    """Both for one size, which either may know."""
    try:
        v = a.vectors()
    except MaskcError as e:
        if e.code != "M415":
            raise
        w = b.vectors()
        return a.vectors(w.nq, w.nk), w
    return v, b.vectors(v.nq, v.nk)


def _first(v: BoundaryVectors, w: BoundaryVectors) -> tuple[int, int, int, int, int] | None:
    """(batch item, head, row, key, how many cells) of the first difference in row order."""
    from maskc.convert.columns import difference

    if v.blocks is None and w.blocks is None:
        d = difference(v, w)
        return None if d is None else (d.batch, d.head, d.row, d.key, d.cells)
    first, total = None, 0
    step = max(1, _SLAB // max(1, v.nk * max(v.batch, w.batch) * max(v.heads, w.heads)))
    for r0 in range(0, v.nq, step):
        wrong = v.masked_tile(r0, min(r0 + step, v.nq), 0, v.nk) != w.masked_tile(r0, min(r0 + step, v.nq), 0, v.nk)
        total += int(wrong.sum())
        if first is None and bool(wrong.any()):
            cells = wrong.nonzero()
            at = cells[(cells[:, 2] * v.nk + cells[:, 3]).argmin()].tolist()
            first = at[0], at[1], r0 + at[2], at[3]
    return None if first is None else (*first, total)


def _tile(v: BoundaryVectors, batch: int, head: int, r0: int, c0: int) -> list[list[bool]]:
    """Visible cells of a window."""
    masked = v.masked_tile(r0, min(r0 + WINDOW, v.nq), c0, min(c0 + WINDOW, v.nk))
    out: list[list[bool]] = (~masked[min(batch, masked.shape[0] - 1), min(head, masked.shape[1] - 1)]).tolist()
    return out
