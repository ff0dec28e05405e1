"""Random small inputs that obey what a mask declares: for counterexamples, examples in messages, and tests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

from maskc.ir.nodes import Col, Head, InputDecl, InputKind, Item, MaskFn, Pred, Row
from maskc.ir.normalize import ancestry
from maskc.ir.reference import Env, Point, broken_fact, facts_of, holds, places
from maskc.ir.traverse import names_in, walk

_TRIES = 40
_FEW = 2  # scalars that are enumerated rather than drawn


def random_env(
    fn: MaskFn,
    rng: random.Random,
    nq: int,
    nk: int,
    hole_free: frozenset[str] = frozenset(),
    tiling: frozenset[str] = frozenset(),
    heads: int = 2,
) -> Env | None:
    """Inputs for nq rows and nk keys, or None if none were found that obey every `where` and `assume`.

    hole_free: sets without padding before or between segments. tiling: sets that also end where their parent ends.
    """
    env = _scalars(fn, rng, nq, nk)
    if env is None:
        return None
    sets: dict[str, list[tuple[int, int]]] = {}
    vectors: dict[str, list[int | bool]] = {}
    tables: dict[str, list[list[bool]]] = {}
    env = Env(nq, nk, env.scalars, vectors, sets, tables)
    for name in hole_free & tiling:  # without holes in a parent that it fills: the parent has none either
        hole_free |= frozenset(ancestry(fn, name))
    for d in fn.inputs:
        if d.is_set:
            sets[d.name] = _set(d, rng, nk, sets, hole_free, tiling)
        elif d.kind is InputKind.BLOCKS:
            assert d.block is not None
            rows, cols = -(-nq // d.block[0]), -(-nk // d.block[1])
            tables[d.name] = [[rng.random() < 0.7 for _ in range(cols)] for _ in range(rows)]
        elif d.per is not None and not _vector(fn, d, rng, env, heads):
            return None
    return env if broken_fact(fn, env) is None else None


def _scalars(fn: MaskFn, rng: random.Random, nq: int, nk: int) -> Env | None:
    names = [d.name for d in fn.inputs if d.kind is InputKind.INT and d.per is None]
    if len(names) <= _FEW:
        solutions = _solutions(fn, nq, nk)
        return Env(nq, nk, rng.choice(solutions)) if solutions else None
    top = max(nq, nk) + 1
    for _ in range(_TRIES):
        env = Env(nq, nk, {name: rng.choice((0, 1, 2, rng.randint(-2, top), rng.randint(0, top))) for name in names})
        if _obeys(fn, env):
            return env
    return None


@lru_cache(64)
def _solutions(fn: MaskFn, nq: int, nk: int) -> tuple[dict[str, int], ...]:
    """All small values of a few scalars that obey the facts about scalars."""
    names = [d.name for d in fn.inputs if d.kind is InputKind.INT and d.per is None]
    values = range(-2, max(nq, nk) + 2)
    choices = (dict(zip(names, v, strict=True)) for v in product(values, repeat=len(names)))
    return tuple(c for c in choices if _obeys(fn, Env(nq, nk, c)))


def _obeys(fn: MaskFn, env: Env) -> bool:
    """Whether the scalars keep the facts that speak of nothing else."""
    about = [p for p in facts_of(fn) if names_in(p) <= env.scalars.keys()]
    return not any(holds(fn, env, p, at, positive=False) for p in about for at in places(fn, env, p))


def _set(
    d: InputDecl,
    rng: random.Random,
    nk: int,
    sets: dict[str, list[tuple[int, int]]],
    hole_free: frozenset[str],
    tiling: frozenset[str],
) -> list[tuple[int, int]]:
    parents = [(0, nk)] if d.within is None else sets[d.within]
    whole = d.name in tiling or rng.random() < 0.6
    spans = d.kind is InputKind.SPANS
    gaps = d.name not in hole_free and d.name not in tiling and (rng.random() < 0.8 if spans else rng.random() < 0.15)
    out: list[tuple[int, int]] = []
    for lo, hi in parents:
        end = hi if whole else rng.randint(lo, hi)
        if d.name in hole_free and lo != (out[-1][1] if out else 0):
            break  # the parent before this one was not filled: nothing may follow
        at = lo
        while at < end:
            if gaps:
                at += rng.choice((0, 0, 1, 2))
            length = rng.choice((0, 1, 1, 2, 3, rng.randint(1, hi - lo)))
            stop = min(end, at + length)
            if stop >= at and at < end:
                out.append((at, stop))
            at = max(stop, at)
    return out


def _vector(fn: MaskFn, d: InputDecl, rng: random.Random, env: Env, heads: int) -> bool:
    assert d.per is not None
    size = {"key": env.nk, "row": env.nq, "head": heads}.get(d.per)
    if size is None:
        size = len(env.sets[d.per])
    values: list[int | bool] = []
    env.vectors[d.name] = values  # type: ignore[index]
    top = max(env.nq, env.nk) + 1
    few = rng.random() < 0.4
    facts = [p for p in facts_of(fn) if _is_about(p, d, env)]
    for i in range(size):
        if d.kind is InputKind.BOOL:
            values.append(rng.random() < 0.5)
            continue
        least = int(values[-1]) if d.sorted and values else -1
        pool = list(range(least, (min(top, 2) if few and not facts else top) + 1)) or [least]
        rng.shuffle(pool)
        for v in pool:
            values.append(v)
            if not any(holds(fn, env, p, _place(d, i), positive=False) for p in facts):
                break
            values.pop()
        else:
            return False
    return True


def _is_about(fact: Pred, d: InputDecl, env: Env) -> bool:
    """Whether a fact speaks of single elements of the vector, and otherwise of nothing that is not drawn yet."""
    names, axis = names_in(fact), {Col: "key", Row: "row", Head: "head"}
    axes = {n.of if isinstance(n, Item) else axis[type(n)] for n in walk(fact) if isinstance(n, Item | Col | Row | Head)}
    return d.name in names and axes == {d.per} and names <= {*env.scalars, *env.vectors, *env.sets}


def _place(d: InputDecl, i: int) -> Point:
    return Point(i, i, i, {d.per: i} if d.per is not None else {})


# ---------------------------------------------------------------- texts


def describe(fn: MaskFn, env: Env) -> tuple[tuple[str, str], ...]:
    """The inputs as short texts: `doc = [2, 2]` (lengths), `image = 1-3 6` (tokens), `kind = 0 1 0`."""
    out = []
    for d in fn.inputs:
        if d.is_set:
            out.append((d.name, _spans_text(env.sets[d.name])))
        elif d.kind is InputKind.BLOCKS:
            out.append((d.name, "all true" if all(map(all, env.tables[d.name])) else "some false"))
        elif d.per is None:
            out.append((d.name, str(env.scalars[d.name])))
        else:
            out.append((d.name, " ".join(str(int(v)) for v in env.vectors[d.name])))
    return tuple(out)


def _spans_text(table: Sequence[tuple[int, int]]) -> str:
    starts = [0, *(e for _, e in table)]
    if all(s == start for (s, _), start in zip(table, starts, strict=False)):
        return f"[{', '.join(str(e - s) for s, e in table)}]"
    return " ".join(runs_text([(s, e)]) if s < e else "empty" for s, e in table) or "[]"


def runs_text(runs: Iterable[tuple[int, int]]) -> str:
    """Half-open runs as `0 | 2-3 | 6-7`."""
    return " | ".join(str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}" for lo, hi in runs)
