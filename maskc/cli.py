"""The command line. Exit status: 0 well, 1 the mask is wrong, 2 misuse or a tool that is missing, 70 a fault of maskc.

Every command is one function from parsed arguments to an exit status; what it needs is imported inside, so that
`maskc --help` and a syntax error are quick.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from maskc.command_line import build_parser, parse
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.files import OUT_OF_ROOM, read_text, unwritable
from maskc.inputs import bind_file
from maskc.options import Options

# a file that cannot be read, a mask that the file does not hold
NOT_THE_MASK = ("M009", "M124")

OK, WRONG_MASK, MISUSE, INTERNAL = 0, 1, 2, 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status and prints, never raises, what is wrong."""
    trace = False
    try:
        _print_whatever_the_terminal_takes()
        options = Options.from_env()
        trace = options.trace
        arguments = parse(sys.argv[1:] if argv is None else argv)
        arguments.options = options
        status = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()  # here, where what fails can still be told
        return status
    except MaskcError as e:
        return _report(e)
    except BrokenPipeError:  # the reader of our output has gone, as in `maskc ... | head`
        _discard_output()
        return OK
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        if trace:
            raise
        return _report(_unforeseen(e))


def _print_whatever_the_terminal_takes() -> None:
    """Characters that the terminal's encoding lacks are escaped instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What is still to be printed goes nowhere: Python would try once more at its end, and complain."""
    with contextlib.suppress(OSError, ValueError):  # not a file, as in a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(e: Exception) -> MaskcError:
    match e:
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] != "maskc":
            return error("M546", f"this needs the package {name!r}, which is not installed", None, f"pip install {name}")
        case OSError(filename=None) if e.errno in OUT_OF_ROOM:
            _discard_output()
            return unwritable("the output", e)
    place = f"{type(e).__name__}: {e}".split("\n")[0]
    return error("M599", f"internal error: {place}", None, "please report it with the output of MASKC_TRACE=1")


def exit_status(diagnostics: Sequence[Diagnostic]) -> int:
    """1 where a mask is at fault (M0xx to M3xx), 70 for a fault of maskc, else 2."""
    codes = [d.code for d in diagnostics if not d.is_warning]
    if "M599" in codes:
        return INTERNAL
    if any(code[:2] in ("M0", "M1", "M2", "M3") and code not in NOT_THE_MASK for code in codes):
        return WRONG_MASK
    return MISUSE if codes else OK


def _report(e: MaskcError) -> int:
    for diagnostic in e.diagnostics:
        print(diagnostic.render(), file=sys.stderr)
    return exit_status(e.diagnostics)


# ---------------------------------------------------------------- commands


def compile_command(a: argparse.Namespace) -> int:
    """`maskc compile`: one stage as text, or every kernel into a folder."""
    from maskc import driver

    options = replace(a.options, dump_dir=a.dump_dir or a.options.dump_dir, check=a.options.check if a.check is None else a.check)
    request = driver.Request(a.target, options, a.inputs, a.head_dim, a.dtype, a.kernel, a.deterministic, a.block_q, a.block_kv)
    run = driver.Driver(driver.Job(request))
    if a.emit is None:
        print(driver.build(run, a.out), end="")
    elif a.out is not None:
        for path in run.write(driver.stage(a.emit), a.out):
            print(path)
    else:
        _show(run.outputs(driver.stage(a.emit)))
    _warn(run.warnings())
    if a.time or options.trace:
        print(run.times_text(), end="", file=sys.stderr)
    return OK


def _warn(warnings: Sequence[Diagnostic]) -> None:
    for warning in warnings:
        print(warning.render(), file=sys.stderr)


def _show(outputs: list[tuple[str, str | bytes]]) -> None:
    """Print the outputs of a stage; several kernels each under a heading."""
    for kernel, content in outputs:
        if isinstance(content, bytes):
            if sys.stdout.isatty() or len(outputs) > 1:
                raise error("M540", "a cubin is binary", None, "name a folder, -o DIR, or one kernel and a file to redirect to")
            sys.stdout.buffer.write(content)
        else:
            heading = f"==> {kernel} <==\n" if len(outputs) > 1 else ""
            sys.stdout.write(heading + content.rstrip("\n") + "\n")


def check_command(a: argparse.Namespace) -> int:
    """`maskc check`: every mask of every file, all errors of all files."""
    from maskc.checking import check_targets

    reports = check_targets(a.files)
    if a.json:
        print(json.dumps([r.as_json() for r in reports], indent=2))
    else:
        for report in reports:
            print(report.render(), file=sys.stderr if report.failed(a.strict) else sys.stdout)
    misuse = any(exit_status(r.diagnostics) == MISUSE for r in reports)
    return MISUSE if misuse else WRONG_MASK if any(r.failed(a.strict) for r in reports) else OK


def explain_command(a: argparse.Namespace) -> int:
    """`maskc explain`: a mask in words, as a page, or a code."""
    from maskc.codes import explain_code, is_code

    code = a.target is not None and is_code(a.target)
    useless = [f"--{name}" for name in ("inputs", "html", "gallery", "json") if code and getattr(a, name)]
    if useless:
        raise error("M540", f"{a.target} is a code, which is explained without {' and '.join(useless)}")
    if a.html is not None and not a.json:
        from maskc.report.write import write_explain

        print(write_explain(a.html, a.target, a.inputs, a.gallery))
        return OK
    if a.html is not None:
        raise error("M540", f"explain writes JSON or a page, not both --json and --html {a.html}")
    if a.gallery:
        raise error("M540", "--gallery goes with --html FILE")
    if a.target is None:
        raise error("M540", "explain needs a mask or a code")
    if code:
        print(explain_code(a.target))
        return OK
    from maskc.explain import explain
    from maskc.targets import load

    compiled = load(a.target)
    bound = bind_file(compiled, a.inputs) if a.inputs is not None else None
    explanation = explain(compiled, bound, (a.block_q, a.block_kv))
    print(json.dumps(explanation.as_json(), indent=2) if a.json else explanation.render())
    _warn(compiled.warnings)
    return OK


def bench_command(a: argparse.Namespace) -> int:
    """`maskc bench`: a mask with data, timed against FlexAttention."""
    from maskc.bench import STEPS, Setting, bench, default_device
    from maskc.inputs import read_inputs
    from maskc.report.progress import progress
    from maskc.targets import load

    if a.device == "cuda" and default_device() != "cuda":
        raise error("M540", "--device cuda: torch sees no GPU here", None, "`maskc doctor` says what is missing")
    setting = Setting(a.heads, a.kv_heads, a.head_dim, a.dtype, a.batch, a.device or default_device())
    with progress("maskc bench", STEPS) as tick:
        report = bench(load(a.target), read_inputs(a.inputs), setting, tick)
    print(json.dumps(report.as_json(), indent=2) if a.json else report.render())
    return OK


def diff_command(a: argparse.Namespace) -> int:
    """`maskc diff`: whether two masks are the same; status 1 where they are not."""
    from maskc.diff import compare
    from maskc.targets import load

    found = compare(load(a.first), load(a.second), (a.first, a.second), a.inputs)
    print(json.dumps(found.as_json(), indent=2) if a.json else found.render())
    return WRONG_MASK if found.outcome == "different" or (a.strict and found.outcome == "undecided") else OK


def fuzz_command(a: argparse.Namespace) -> int:
    """`maskc fuzz`: a mask on random inputs in every way it can run; status 1 where one is wrong."""
    from maskc.fuzz import fuzz
    from maskc.report.progress import progress
    from maskc.targets import load

    with progress("maskc fuzz", a.cases) as tick:
        report = fuzz(load(a.target), cases=a.cases, largest=a.largest, seed=a.seed, tick=tick)
    print(json.dumps(report.as_json(), indent=2) if a.json else report.render())
    return WRONG_MASK if report.failure is not None else OK


def fmt_command(a: argparse.Namespace) -> int:
    """`maskc fmt`: rewrite files in the one layout; with --check only say which would change."""
    from maskc.frontend.fmt import format_text

    changed = 0
    for path in a.files:
        text = read_text(path)
        formatted = format_text(text, str(path))
        if formatted == text:
            continue
        changed += 1
        if a.check:
            print(f"would reformat {path}")
        else:
            _rewrite(path, formatted)
            print(f"reformatted {path}")
    return WRONG_MASK if a.check and changed else OK


def _rewrite(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable(path, e) from None


def plan_command(a: argparse.Namespace) -> int:
    """`maskc plan`: which rank computes what under context parallelism."""
    from maskc.runtime.plan import plan
    from maskc.runtime.plan_report import local_vectors, report
    from maskc.targets import load

    bound = bind_file(load(a.target), a.inputs)
    p = plan(
        bound,
        world_size=a.world,
        nodes=a.nodes,
        chunk=a.chunk,
        order=a.order,
        assign=a.assign,
        epsilon=a.epsilon,
        documents=a.documents,
        heads=a.heads,
        heads_kv=a.kv_heads,
        head_dim=a.head_dim,
    )
    print((local_vectors if a.emit == "local-vectors" else report)(bound, p), end="")
    return OK


def doctor_command(a: argparse.Namespace) -> int:
    """`maskc doctor`: what this machine has, and what would run."""
    from maskc.doctor import examine

    for line in examine(a.options):
        print(line)
    return OK


def cache_command(a: argparse.Namespace) -> int:
    """`maskc cache`: where compiled kernels are kept, and how many."""
    from maskc.codegen import cache

    folder: Path = a.options.cache_dir
    if a.action == "clear":
        print(f"{_counted(cache.clear(folder), 'entry', 'entries')} deleted from {folder}")
        return OK
    entries = cache.entries(folder)
    size = sum(path.stat().st_size for path in entries)
    print(f"{folder}: {_counted(len(entries), 'entry', 'entries')}, {size / 1e6:.1f} MB")
    return OK


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def help_command(_: argparse.Namespace) -> int:
    """`maskc` alone."""
    build_parser()[0].print_help(sys.stderr)
    return MISUSE


# ---------------------------------------------------------------- by name

COMMANDS: Mapping[str | None, Callable[[argparse.Namespace], int]] = {
    "compile": compile_command,
    "check": check_command,
    "explain": explain_command,
    "diff": diff_command,
    "fuzz": fuzz_command,
    "fmt": fmt_command,
    "plan": plan_command,
    "bench": bench_command,
    "doctor": doctor_command,
    "cache": cache_command,
    None: help_command,
}
"""By name, as `maskc.command_line.build_parser` knows them."""
