"""What the user names -> a proved mask: `FILE`, `FILE:MASK`, `std:NAME` or a text become a `CompiledMask`.

The one place that turns a verdict into errors (M301, M303) and warnings (W301, W302).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from maskc.diagnostics import Diagnostic, MaskcError, MaskcTypeError
from maskc.ir.printer import print_check
from maskc.ir.verdict import CheckResult, Counterexample, Proven, Refuted, Unknown

if TYPE_CHECKING:
    from maskc.compiled import CompiledMask
    from maskc.frontend import TypedFile
    from maskc.ir.intervals import IntervalProgram
    from maskc.ir.nodes import MaskFn


def load(target: str | Path) -> CompiledMask:
    """The mask that `FILE`, `FILE:MASK` or `std:NAME` names, parsed, lowered and proved.

    Raises MaskcError: of the front end (M0xx, M1xx), M201 for a form that has no row intervals, M301 with the smallest
    counterexample, M303 for a claim (`check`) that does not hold.
    """
    if not isinstance(target, str | PathLike):
        raise _no_name(target)
    return _standard(str(target)) if str(target).startswith("std:") else _load(str(target))


def _load(target: str) -> CompiledMask:
    from maskc.frontend import parse_file, split_target

    path, name = split_target(target)
    return compile_file(parse_file(path), name)


_standard = cache(_load)
"""Masks of the standard set do not change: `maskc.run("std:causal", ...)` proves its mask once a process."""


def _no_name(target: object) -> MaskcTypeError:
    message = f'a mask is named by a path or "std:NAME"; this is {type(target).__name__}'
    hint = "a FlexAttention mask_mod? maskc.convert.from_mask_mod(mask_mod, nq, nk)" if callable(target) else None
    return MaskcTypeError(Diagnostic("M511", message, help=hint))


def load_text(text: str, name: str | None = None) -> CompiledMask:
    """As `load`, from the text of a file."""
    from maskc.frontend import parse_text

    return compile_file(parse_text(text), name)


def compile_file(file: TypedFile, name: str | None = None) -> CompiledMask:
    """The named mask of a file, or its only one."""
    return compile_fn(file.pick(name), file.warnings)


def compile_fn(fn: MaskFn, warnings: Sequence[Diagnostic] = (), *, certify: bool = False) -> CompiledMask:
    """Lower and prove one mask; decide its claims. certify: keep the certificates, each checked again by sympy.

    Raises M609 for a mask whose bounds some data could drive out of 64 bits, beside what `load` says.
    """
    from maskc.codegen.ranges import check_fits_int64
    from maskc.compiled import CompiledMask
    from maskc.ir.checks import run_checks
    from maskc.ir.intervals import tree_expressions
    from maskc.ir.symbolic import prove

    verdict = prove(fn, certify)
    program: IntervalProgram | None = None
    match verdict:
        case Proven():
            program = verdict.program
            check_fits_int64(tree_expressions(program.tree), fn.span)
        case Unknown(reason):
            warnings = (*warnings, _undecided(fn, reason))
        case Refuted(counterexample):
            raise MaskcError(_refused(fn, counterexample))
        case _:
            assert_never(verdict)
    checks = run_checks(fn, verdict)
    if broken := tuple(_broken(fn, c) for c in checks if c.status == "refuted"):
        raise MaskcError(broken)
    warnings = (*warnings, *(_undecided_claim(c) for c in checks if c.status == "unknown"))
    return CompiledMask(fn, verdict, program, checks, tuple(warnings))


def _refused(fn: MaskFn, example: Counterexample) -> Diagnostic:
    notes = [("smallest case found", example.text), *([("why", example.why)] if example.why else [])]
    return Diagnostic(
        "M301",
        f"a key needs {len(example.masked_runs)} masked runs; the column form holds 2",
        fn.span,
        "make two calls and merge them by their log-sum-exp, or store the tokens in an order that joins the runs",
        tuple(notes),
    )


def _undecided(fn: MaskFn, reason: str) -> Diagnostic:
    return Diagnostic(
        "W301",
        f"`{fn.name}` is neither proved nor refuted ({reason}); every batch is checked when its data are bound",
        fn.span,
        "state what you know of the inputs in `where` or `assume`; --strict makes this an error",
    )


def _broken(fn: MaskFn, result: CheckResult) -> Diagnostic:
    return Diagnostic(
        "M303", f"`{print_check(result.check)}` does not hold for `{fn.name}`", result.check.span, None, _detail(result)
    )


def _undecided_claim(result: CheckResult) -> Diagnostic:
    return Diagnostic(
        "W302", f"`{print_check(result.check)}` is neither proved nor refuted", result.check.span, None, _detail(result)
    )


def _detail(result: CheckResult) -> tuple[tuple[str, str], ...]:
    return (("because", result.detail),) if result.detail else ()
