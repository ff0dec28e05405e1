"""Small inputs that show what a mask does: the refutation of a mask, of a claim, and examples for messages.

The search tries sizes from small to large with a fixed number of seeded trials (a count, never a clock), so every
machine finds the same column. What it finds is confirmed by the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar, assert_never

from maskc.ir.evaluate import Run, masked_runs, visible_runs
from maskc.ir.lower import GuardedIntervals, interval_cases, needs_hole_free
from maskc.ir.nodes import And, Check, Head, InputKind, MaskFn, Or, Pred
from maskc.ir.printer import print_term
from maskc.ir.reference import Env, Point, dense, holds, visible
from maskc.ir.samples import describe, random_env, runs_text
from maskc.ir.traverse import walk
from maskc.ir.verdict import Counterexample, Refuted

_T = TypeVar("_T")
SIZES = range(3, 13)
TRIALS = 100  # per size, for a mask of at most FEW_CASES cases; fewer where every column takes longer
FEW_CASES = 20
HEADS = 2
_LONG = 70  # characters of a quoted condition


def smallest(
    fn: MaskFn, hole_free: frozenset[str], sizes: range, trials: int, test: Callable[[Env], _T | None]
) -> tuple[Env, _T] | None:
    """Of the inputs that obey the declared facts and pass the test, the simplest of the smallest size, with its result."""
    for n in sizes:
        found = [(env, hit) for env in _environments(fn, hole_free, n, trials) if (hit := test(env)) is not None]
        if found:
            return min(found, key=lambda pair: _weight(pair[0]))
    return None


def _environments(fn: MaskFn, hole_free: frozenset[str], n: int, trials: int) -> Iterator[Env]:
    rng = random.Random(n)
    for _ in range(trials):
        nq = n if fn.square else rng.choice((n, n, rng.randint(1, n)))
        nk = n if fn.square else rng.choice((n, n, rng.randint(1, n)))
        env = random_env(fn, rng, nq, nk, hole_free, heads=HEADS if _per_head(fn) else 1)
        if env is not None:
            yield env


def _per_head(fn: MaskFn) -> bool:
    return any(d.per == "head" for d in fn.inputs) or any(isinstance(node, Head) for node in walk(fn.body))


def heads_of(fn: MaskFn) -> range:
    return range(HEADS if _per_head(fn) else 1)


# ---------------------------------------------------------------- the column form


def refutation(fn: MaskFn) -> Refuted | None:
    """The smallest input found whose mask no boundary vectors can hold, or None.

    Vectors hold two masked runs per column, and beside them the free triangle if no row sees a later key.
    """
    fn = _without_tables(fn)
    cases = interval_cases(fn)
    trials = TRIALS * FEW_CASES // max(FEW_CASES, len(cases))
    found = smallest(fn, needs_hole_free(fn), SIZES, trials, lambda env: _overfull(fn, cases, env))
    if found is None:
        return None
    env, (h, k, runs) = found
    seen = [q for q in range(env.nq) if visible(fn, env, q, k, h)]
    assert seen == [q for q in range(env.nq) if not any(lo <= q < hi for lo, hi in runs)]
    inputs = describe(fn, env)
    text = f"{_sizes(env)}{_inputs(inputs)}{_head(fn, h)}key {k}: masked rows {runs_text(runs)} (seen by {_rows(seen)})"
    return Refuted(Counterexample(env.nq, env.nk, k, inputs, tuple(runs), text, _why(fn, env, seen, k, h)))


def _without_tables(fn: MaskFn) -> MaskFn:
    """The mask without its block tables: they act on tiles and leave the form of its columns alone."""
    return replace(fn, tables=(), inputs=tuple(d for d in fn.inputs if d.kind is not InputKind.BLOCKS))


def _why(fn: MaskFn, env: Env, seen: list[int], k: int, h: int) -> str:
    """Which alternative of the mask shows the key to each group of rows."""
    out = []
    for group in _groups(seen):
        chosen = _alternatives(fn, env, fn.body, Point(group[0], k, h))
        if not chosen:
            return ""
        rows = runs_text([group])
        out.append(f"{'rows' if '-' in rows else 'row'} {rows} by {' and '.join(f'`{t}`' for t in chosen)}")
    return "; ".join(out)


def _alternatives(fn: MaskFn, env: Env, p: Pred, at: Point) -> list[str]:
    """The source text of the first true term of every outermost `or`."""
    match p:
        case And(terms):
            return [text for t in terms for text in _alternatives(fn, env, t, at)]
        case Or(terms):
            term = next((t for t in terms if holds(fn, env, t, at)), None)
            if term is None:
                return []
            text = " ".join(term.span.text.split()) if term.span is not None else print_term(term)
            text = _without_outer_parentheses(text)
            return [text if len(text) <= _LONG else text[: _LONG - 1] + "…"]
        case _:
            return []


def _overfull(fn: MaskFn, cases: GuardedIntervals, env: Env) -> tuple[int, int, list[Run]] | None:
    """(head, key, masked runs) of the fullest column, if this input has no vectors."""
    columns = [(h, k, visible_runs(fn, cases, env, k, h)) for h in heads_of(fn) for k in range(env.nk)]
    if all(len(masked_runs(v, env.nq)) <= 2 for _, _, v in columns):
        return None
    causal = all(lo >= k for _, k, v in columns for lo, _ in v)
    if causal and all(len(masked_runs(v, env.nq, min(k, env.nq))) <= 2 for _, k, v in columns):
        return None
    h, k, v = max(columns, key=lambda c: len(masked_runs(c[2], env.nq)))
    return h, k, masked_runs(v, env.nq)


def _weight(env: Env) -> tuple[int, ...]:
    """Simpler inputs weigh less."""
    segments = sum(len(s) for s in env.sets.values())
    empty = sum(s == e for table in env.sets.values() for s, e in table)
    outside = sum(env.nk - sum(e - s for s, e in table) for table in env.sets.values())
    return (
        empty,
        outside,
        segments,
        sum(abs(v) for v in env.scalars.values()),
        sum(abs(int(x)) for v in env.vectors.values() for x in v),
    )


def _sizes(env: Env) -> str:
    return f"n = {env.nq}, " if env.nq == env.nk else f"nq = {env.nq}, nk = {env.nk}, "


def _inputs(inputs: tuple[tuple[str, str], ...]) -> str:
    return "".join(f"{name} = {text}, " for name, text in inputs)


def _head(fn: MaskFn, h: int) -> str:
    return f"head {h}, " if _per_head(fn) else ""


def _without_outer_parentheses(text: str) -> str:
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 and i > 0 else text
    return text


def _groups(rows: list[int]) -> list[tuple[int, int]]:
    """Sorted rows as half-open runs."""
    runs: list[tuple[int, int]] = []
    for q in rows:
        if runs and runs[-1][1] == q:
            runs[-1] = (runs[-1][0], q + 1)
        else:
            runs.append((q, q + 1))
    return runs


def _rows(rows: list[int]) -> str:
    return ", ".join(runs_text([r]) for r in _groups(rows)) or "no row"


# ---------------------------------------------------------------- messages and claims


def scattered_example(fn: MaskFn) -> str | None:
    """A small input with a key that two separate groups of rows see, as `kind = 0 1 0: key 0 is seen by rows 0 and 2`."""
    fn = _without_tables(fn)
    found = smallest(fn, frozenset(), range(3, 10), 60, lambda env: _scattered(fn, env))
    if found is None:
        return None
    env, (h, k, groups) = found
    inputs = ", ".join(f"{name} = {text}" for name, text in describe(fn, env)) or f"n = {env.nq}"
    return f"{inputs}: {_head(fn, h)}key {k} is seen by rows {', '.join(groups[:-1])} and {groups[-1]}"


def _scattered(fn: MaskFn, env: Env) -> tuple[int, int, list[str]] | None:
    for h in heads_of(fn):
        table = dense(fn, env, h)
        for k in range(env.nk):
            groups = _rows([q for q in range(env.nq) if table[q][k]]).split(", ")
            if len(groups) > 1:
                return h, k, groups
    return None


def broken_claim(fn: MaskFn, check: Check) -> str | None:
    """A small input that breaks a claim, in words, or None."""
    found = smallest(fn, needs_hole_free(fn), range(2, 9), 60, lambda env: broken_claim_of(fn, check, env))
    if found is None:
        return None
    env, text = found
    hint = "" if env.nq == env.nk else " (if rows and keys are one sequence: `assume nq == nk`)"
    return f"{_sizes(env)}{_inputs(describe(fn, env))}{text}{hint}"


def broken_claim_of(fn: MaskFn, check: Check, env: Env) -> str | None:
    """How a claim is broken on this input, in words, or None."""
    for h in heads_of(fn):
        seen = dense(fn, env, h)
        match check.kind:
            case "causal":
                text = _breaks_causal(env, seen)
            case "isolated":
                text = _breaks_isolated(env, seen, check.of or "")
            case "no_empty_row":
                sets = frozenset(d.name for d in fn.inputs if d.kind is InputKind.SEGMENTS)
                text = _breaks_no_empty_row(env, seen, sets)
            case _:
                assert_never(check.kind)
        if text is not None:
            return _head(fn, h) + text
    return None


def _breaks_causal(env: Env, seen: list[list[bool]]) -> str | None:
    return next((f"row {q} sees key {k}" for q, row in enumerate(seen) for k in range(q + 1, env.nk) if row[k]), None)


def _breaks_isolated(env: Env, seen: list[list[bool]], of: str) -> str | None:
    for q, row in enumerate(seen):
        for k in range(env.nk):
            if row[k] and (env.segment(of, q) is None or env.segment(of, q) != env.segment(of, k)):
                return f"row {q} sees key {k}, which is not in its `{of}`"
    return None


def _breaks_no_empty_row(env: Env, seen: list[list[bool]], sets: frozenset[str]) -> str | None:
    for q, row in enumerate(seen):
        if not any(row) and all(env.segment(s, q) is not None for s in sets):
            return f"row {q} sees no key"
    return None
