"""Checks after a stage, under --check / MASKC_CHECK: 1 reads the text forms back, 2 also asks the oracle.

A failure is a fault of maskc (M599), never of the mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maskc.diagnostics import error
from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import MaskFn

if TYPE_CHECKING:
    from maskc.ir.reference import Env

SIZES = range(1, 10)
TRIALS = 8  # for each size
HEADS = 2


def verify_fn(fn: MaskFn) -> None:
    """The IR text reads back as the same mask."""
    from maskc.ir.printer import print_fn
    from maskc.ir.reader import read_fn

    if read_fn(print_fn(fn)) != fn:
        raise error("M599", f"internal error: the IR text of `{fn.name}` does not read back")


def verify_program(fn: MaskFn, program: IntervalProgram) -> None:
    """The text of the lowered mask reads back as the same program."""
    from maskc.ir.printer import print_program
    from maskc.ir.reader import read_program

    if read_program(print_program(program)) != program:
        raise error("M599", f"internal error: the intervals of `{fn.name}` do not read back")


def verify_with_oracle(fn: MaskFn, program: IntervalProgram) -> None:
    """The lowered mask equals the predicate, element by element, on small random inputs that obey the declared facts."""
    from maskc.ir.evaluate import evaluate_column, masked_rows
    from maskc.ir.reference import dense

    for env in _environments(fn, program):
        for h in range(HEADS):
            seen = dense(fn, env, h)
            for k in range(env.nk):
                masked = masked_rows(program, env, k, evaluate_column(fn, program, env, k, h))
                if masked != [not row[k] for row in seen]:
                    raise error("M599", f"internal error: key {k} of `{fn.name}` is lowered wrongly for {env}")


def _environments(fn: MaskFn, program: IntervalProgram) -> Iterator[Env]:
    from maskc.ir.samples import random_env

    for n in SIZES:
        rng = random.Random(n)
        for _ in range(TRIALS):
            nq, nk = (n, n) if fn.square else (n, rng.choice(SIZES))
            env = random_env(fn, rng, nq, nk, frozenset(program.hole_free), frozenset(program.tiling), HEADS)
            if env is not None:
                yield env
