"""Theorems that the package rests on, proved by the prover of masks, each with re-checkable certificates.

1. Tile rules. From the smallest and largest value of each boundary vector over a block of keys, a tile is SKIP (all
   masked) or UNMASKED (none masked); for one, two and four vectors, in either order, with and without the triangle.
2. Localization. A rank owns chunks of rows in ascending order; L(x) counts its rows before x. For every owned row y with
   local number l: s <= y < e iff L(s) <= l < L(e). For chunks of any sizes (L as a sum of clips) and for equal chunks (L
   as the clip-shift-max formula), up to four chunks, all offsets and sizes symbolic.

A statement is refuted negated: every branch of its negation must contradict the facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from maskc.ir.certificates import certificate
from maskc.ir.facts import compare_facts
from maskc.ir.fourier import Fact, Row, refute, solve
from maskc.ir.linear import Lin, Space
from maskc.ir.nodes import And, BoolConst, Compare, MaskFn, Or, Pred
from maskc.ir.normalize import nnf
from maskc.ir.printer import print_certificate
from maskc.ir.reader import read_pred
from maskc.ir.verdict import Certificate


@dataclass(frozen=True, slots=True)
class Theorem:
    """facts imply claim, for all integers; both as predicates over scalars, `q` and `k` in the text form of the IR."""

    name: str
    facts: tuple[str, ...]
    claim: str


def prove_theorem(t: Theorem) -> tuple[Certificate, ...] | None:
    """A certificate for every branch of the negated claim, or None if some branch is not refuted."""
    space = Space()
    nothing = MaskFn("theorem", (), BoolConst(True))
    parts = [nnf(nothing, read_pred(f)) for f in t.facts]
    rows = _refuted(space, [*parts, nnf(nothing, read_pred(t.claim), positive=False)], [])
    if rows is None:
        return None
    return tuple(dict.fromkeys(certificate(space, Lin(-1), row) for row in rows))


def _refuted(space: Space, goals: list[Pred], facts: list[Fact]) -> list[Row] | None:
    """Contradictions that close every branch of the conjunction of `goals`; the first open `or` is split."""
    waiting: list[Or] = []
    for g in goals:
        for p in g.terms if isinstance(g, And) else (g,):
            if isinstance(p, Compare):
                facts = facts + compare_facts(space, p)
            elif isinstance(p, Or):
                waiting.append(p)
            elif isinstance(p, BoolConst) and not p.value:
                return []
    found = _contradiction(facts)
    if found is not None:
        return [found]
    if not waiting:
        return None
    out: list[Row] = []
    for branch in waiting[0].terms:
        closed = _refuted(space, [branch, *waiting[1:]], facts)
        if closed is None:
            return None
        out += closed
    return out


def _contradiction(facts: list[Fact]) -> Row | None:
    """All facts together; elimination starts from each fact's own connected part."""
    solved = solve(facts)
    if solved.contradiction is not None:
        return solved.contradiction
    return next((row for f in reversed(facts) if not f.equal and (row := refute(solved, [f])) is not None), None)


def print_theorem(t: Theorem, certificates: tuple[Certificate, ...]) -> str:
    facts = "".join(f"  given {f}\n" for f in t.facts)
    return f"theorem {t.name}\n{facts}  then  {t.claim}\n" + "".join(print_certificate(c) for c in certificates)


# ---------------------------------------------------------------- tile rules

Slot = tuple[str, str]
FORMS: dict[str, tuple[tuple[Slot, ...], bool]] = {
    "one vector beside the triangle": ((("lts", "nq"),), True),
    "one vector, upper": ((("0", "ute"),), False),
    "two vectors, one interval beside the triangle": ((("lts", "lte"),), True),
    "two vectors, two intervals": ((("lts", "nq"), ("0", "ute")), False),
    "four vectors": ((("lts", "lte"), ("uts", "ute")), False),
    "four vectors beside the triangle": ((("lts", "lte"), ("uts", "ute")), True),
    "four vectors, intervals swapped": ((("uts", "ute"), ("lts", "lte")), True),
}


def tile_theorems() -> Iterator[Theorem]:
    """Rows [r0, r1) and keys [c0, c1): what the extrema of the vectors over the keys say about every (q, k) of the tile."""
    for name, (slots, causal) in FORMS.items():
        vectors = [v for slot in slots for v in slot if v not in ("0", "nq")]
        facts = ["r0 <= q", "q < r1", "r1 <= nq", "0 <= r0", "c0 <= k", "k < c1"]
        facts += [f for v in vectors for f in (f"{v}_min <= {v}", f"{v} <= {v}_max")]
        masked = [f"({lo} <= q and q < {hi})" for lo, hi in slots] + (["q < k"] if causal else [])
        core = [f"({_max(lo)} <= q and q < {_min(hi)})" for lo, hi in slots] + (["q < c0"] if causal else [])
        yield Theorem(f"SKIP, {name}", (*facts, _any(core)), _any(masked))
        outside = [f"(r1 <= {_min(lo)} or {_max(hi)} <= r0 or {_max(hi)} <= {_min(lo)})" for lo, hi in slots]
        beyond = ["c1 - 1 <= r0"] if causal else []
        yield Theorem(f"UNMASKED, {name}", (*facts, *(o[1:-1] for o in outside), *beyond), f"not {_any(masked, True)}")


def _min(v: str) -> str:
    return v if v in ("0", "nq") else f"{v}_min"


def _max(v: str) -> str:
    return v if v in ("0", "nq") else f"{v}_max"


def _any(terms: list[str], wrapped: bool = False) -> str:
    if len(terms) == 1:
        return terms[0] if wrapped else terms[0].removeprefix("(").removesuffix(")")
    return f"({' or '.join(terms)})" if wrapped else " or ".join(terms)


# ---------------------------------------------------------------- localization

CHUNKS = range(1, 5)


def localization_theorems() -> Iterator[Theorem]:
    """For each number of chunks and each chunk that may hold the row y."""
    for kappa in CHUNKS:
        for own in range(kappa):
            sizes = [f"c{i}" for i in range(kappa)]
            place = f"{kappa} {'chunk' if kappa == 1 else 'chunks'}, row in chunk {own}"
            sums = (_clip_sum("s", sizes), _clip_sum("e", sizes))
            yield _localization(f"chunks of any size, {place}", own, sizes, *sums)
            yield _localization(f"clip-shift-max, {place}", own, ["c"] * kappa, _clip_max("s", kappa), _clip_max("e", kappa))


def _localization(name: str, own: int, sizes: list[str], before_s: str, before_e: str) -> Theorem:
    """before_x: L(x), the number of owned rows before x."""
    facts = [f"1 <= {c}" for c in dict.fromkeys(sizes)]
    facts += [f"o{i} + {c} <= o{i + 1}" for i, c in enumerate(sizes[:-1])]
    facts += [f"o{own} <= y", f"y < o{own} + {sizes[own]}"]
    local = " + ".join(["y", *sizes[:own]]) + f" - o{own}"
    start = f"((s <= y and {before_s} <= {local}) or (s > y and {before_s} > {local}))"
    end = f"((y < e and {local} < {before_e}) or (y >= e and {local} >= {before_e}))"
    return Theorem(f"localization, {name}", tuple(facts), f"{start} and {end}")


def _clip_sum(x: str, sizes: list[str]) -> str:
    """The sum of clip(x - o, 0, c) over the chunks."""
    terms = [f"(if {x} <= o{i} then 0 else (if {x} <= o{i} + {c} then ({x} - o{i}) else {c}))" for i, c in enumerate(sizes)]
    return f"({' + '.join(terms)})" if len(terms) > 1 else terms[0]


def _clip_max(x: str, kappa: int) -> str:
    """The maximum over the chunks of clip(x - o, 0, c), plus i * c where the clip is positive."""
    terms = [
        f"(if {x} <= o{i} then 0 else (if {x} <= o{i} + c then ({x} - o{i} + {i} * c) else ({i + 1} * c)))" for i in range(kappa)
    ]
    return f"max({', '.join(terms)})"


def theorems() -> tuple[Theorem, ...]:
    return (*tile_theorems(), *localization_theorems())
