"""What is known about a mask after proof: Proven, Refuted with a real column, or Unknown with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import Check


@dataclass(frozen=True, slots=True)
class Cut:
    """An integer rounding: `combination` is divisor * row + rest with 0 <= rest < divisor, so `row` >= 0 as well."""

    row: str
    divisor: int
    combination: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """One entailment: facts plus the negated goal, each an expression >= 0, sum to a negative constant.

    Multipliers are non-negative; facts that start with `0 == ` are equations and take either sign. `cuts` are derived
    rows that the combination uses besides. Text forms only; `maskc.ir.certificates` re-checks them with sympy.
    """

    goal: str
    combination: tuple[tuple[int, str], ...]
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The smallest column found that needs more than two masked runs.

    text: one line, `n = 8, doc = [3, 5], key 4: masked rows 0-1 | 3 | 7 (seen by 2, 4-6)`. why: which alternatives of
    the mask show the key to which rows; empty if the mask has none.
    """

    nq: int
    nk: int
    column: int
    inputs: tuple[tuple[str, str], ...]
    masked_runs: tuple[tuple[int, int], ...]  # half-open
    text: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: Check
    status: Literal["proved", "refuted", "unknown"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Proven:
    """`program` equals the predicate for every input that satisfies the declared facts."""

    program: IntervalProgram
    certificates: tuple[Certificate, ...]
    queries: int
    splits: int


@dataclass(frozen=True, slots=True)
class Refuted:
    counterexample: Counterexample


@dataclass(frozen=True, slots=True)
class Unknown:
    """Neither proved nor refuted: data decide at binding (fold), with warning W301."""

    reason: str


Verdict = Proven | Refuted | Unknown
