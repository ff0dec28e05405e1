"""The words of the language: which are keywords, which names are taken, and "did you mean" for everything else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Words that open a declaration: the parser recovers from an error at the next of them.
DECLARATIONS = ("use", "const", "input", "let", "mask", "check", "assume")
KEYWORDS = frozenset(DECLARATIONS) | {
    "from",
    "where",
    "within",
    "per",
    "if",
    "then",
    "else",
    "and",
    "or",
    "not",
    "in",
    "true",
    "false",
}

COORDINATES = ("q", "k", "h", "nq", "nk")
FUNCTIONS = ("abs", "min", "max")
EDGES = ("first", "last")
BUILTINS = frozenset({*FUNCTIONS, *EDGES, "same"})
ATTRIBUTES = ("start", "end", "len", "pos")
AXES = ("row", "key", "head")
CHECKS = ("causal", "isolated", "no_empty_row")

# Keyword arguments of maskc.run and of bind: an input of that name could not be given by keyword.
_RUN = ("spec", "q", "k", "v", "group", "plan", "strategy", "scale", "return_lse", "deterministic", "backend")
_BIND = ("self", "nq", "nk", "batch", "validate")
CALL_KEYWORDS = frozenset({*_RUN, *_BIND})

_MANY = 1000


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was probably meant to be, if any: same letters in another case first."""
    pool = sorted(set(candidates) - {word})
    if len(pool) > _MANY:  # a generated file: guessing would take longer than everything else
        return None
    for c in pool:
        if c.lower() == word.lower():
            return c
    found = difflib.get_close_matches(word, pool, n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str | None = None) -> str | None:
    """A help line for an unknown word."""
    guess = closest(word, candidates)
    return f"did you mean `{guess}`?" if guess is not None else otherwise


def quoted(words: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`."""
    items = [f"`{w}`" for w in words]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else "none"
