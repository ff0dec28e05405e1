"""The command line. Exit status: 0 well, 1 the mask is wrong, 2 misuse or a tool that is missing, 70 a fault of maskc.

Every command is one function from parsed arguments to an exit status; what it needs is imported inside, so that
`maskc --help` and a syntax error are quick.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from maskc import __version__
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.files import OUT_OF_ROOM, read_text, unwritable
from maskc.inputs import JSON_HELP, bind_file
from maskc.options import VARIABLES, Options

Command = Callable[[argparse.Namespace], int]

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
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        arguments.options = options
        command: Command = arguments.command
        status = command(arguments)
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
    if a.html is not None or a.gallery:
        raise error("M540", "explain writes JSON or a page, not both; --gallery goes with --html FILE")
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


# ---------------------------------------------------------------- arguments

TARGET = "FILE[:MASK]"
TARGET_HELP = "a .mask file, one mask of it, or std:NAME (`maskc explain std:` lists these)"
INPUTS_HELP = "data of one batch: a JSON file, see below"
INPUTS_FORM = f"data of a batch: {JSON_HELP}\n`maskc explain M542` tells more"
STATUSES = """  0   done; all is well
  1   the mask is wrong (diff: the masks differ; fuzz: a result is wrong; fmt --check: a file would change)
  2   misuse, data that do not fit, or a tool or package that is missing
  70  a fault of maskc"""


class _Parser(argparse.ArgumentParser):
    """argparse, with errors in the form that all errors of maskc have."""

    def error(self, message: str) -> NoReturn:
        raise error("M540", message, None, f"`{self.prog} --help` lists what it takes")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; `maskc help check` is `maskc check --help`. Raises M540."""
    parser, names = build_parser()
    if argv and argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        near = difflib.get_close_matches(argv[0], names, 1)
        told = f"did you mean `maskc {near[0]}`?" if near else f"there are {', '.join(names)}"
        raise error("M540", f"there is no command {argv[0]!r}", None, told)
    return parser.parse_args(argv)


def build_parser() -> tuple[argparse.ArgumentParser, tuple[str, ...]]:
    """The parser, and the names of the commands."""
    variables = "\n".join(f"  {name:<16} {meaning}" for name, meaning in VARIABLES)
    parser = _Parser(
        prog="maskc",
        description="A compiler for attention masks: from one predicate to proved row intervals and specialised kernels.",
        epilog=f"environment:\n{variables}\n\nexit status:\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"maskc {__version__}")

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return MISUSE

    parser.set_defaults(command=show_help)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    _add_compile(commands)
    _add_check(commands)
    _add_explain(commands)
    _add_diff(commands)
    _add_fuzz(commands)
    _add_fmt(commands)
    _add_plan(commands)
    _add_bench(commands)
    _command(commands, "doctor", doctor_command, "versions, GPU, NVRTC, cache, and which backend would run")
    cache = _command(commands, "cache", cache_command, "where compiled kernels are kept")
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="show (default), or delete all")
    return parser, tuple(commands.choices)


def _command(commands: argparse._SubParsersAction[_Parser], name: str, run: Command, summary: str) -> _Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_compile(commands: argparse._SubParsersAction[_Parser]) -> None:
    from maskc.driver import DTYPES, STAGES

    parser = _command(commands, "compile", compile_command, "turn a mask into kernels, or show one stage of that")
    parser.epilog = "stages:\n" + "\n".join(f"  {s.name:<10} {s.summary}" for s in STAGES) + f"\n\n{INPUTS_FORM}"
    parser.add_argument("target", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help="folder for sources, cubins and manifest.json")
    parser.add_argument("--emit", metavar="STAGE", choices=[s.name for s in STAGES], help="print this stage (see below)")
    parser.add_argument("--inputs", metavar="JSON", type=Path, help=f"{INPUTS_HELP}; for the stages vectors and tiles")
    parser.add_argument("--head-dim", metavar="N", type=int, default=128, help="head dimension of the kernels (default 128)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="element type of the kernels (default bf16)")
    parser.add_argument("--kernel", metavar="LIST", type=_names, help="some of prep,fwd,bwd (default all)")
    parser.add_argument("--deterministic", action="store_true", help="a backward kernel whose dQ is bitwise repeatable")
    _add_tile(parser)
    parser.add_argument("--dump-dir", metavar="DIR", type=Path, help="write every stage there, as NN-stage")
    parser.add_argument("--time", action="store_true", help="print how long each stage took")
    parser.add_argument(
        "--check", metavar="LEVEL", type=int, choices=(0, 1, 2), help="0, 1 or 2: as MASKC_CHECK, see `maskc --help`"
    )


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "check", check_command, "prove masks and their claims; report every error of every file")
    parser.add_argument("files", nargs="+", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--strict", action="store_true", help="a mask that is neither proved nor refuted is an error")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_explain(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "explain", explain_command, "say in words what a mask means, or what a code such as M301 means")
    parser.epilog = INPUTS_FORM
    parser.add_argument("target", nargs="?", metavar=f"{TARGET}|CODE", help=f"{TARGET_HELP}; or a code such as M301")
    parser.add_argument("--inputs", metavar="JSON", type=Path, help=f"{INPUTS_HELP}; adds density, tiles and a picture")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page to look at instead: tiles, queue, ranks, balance")
    parser.add_argument("--gallery", action="store_true", help="with --html: the standard masks, planned at 32K tokens")
    parser.add_argument("--json", action="store_true", help="machine-readable explanation")
    _add_tile(parser)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "bench", bench_command, "time a mask against FlexAttention on this machine, once both agree")
    parser.epilog = INPUTS_FORM
    parser.add_argument("target", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--inputs", metavar="JSON", type=Path, required=True, help=INPUTS_HELP)
    parser.add_argument("--heads", metavar="N", type=_positive, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", "--heads-kv", metavar="N", type=_positive, help="key heads (default: as many)")
    parser.add_argument("--head-dim", metavar="N", type=_positive, default=128, help="head dimension (default 128)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="element type (default bf16)")
    parser.add_argument("--batch", metavar="N", type=_positive, default=1, help="batch items, where the data are of one")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_diff(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "diff", diff_command, "whether two masks are the same, and the first cell where they differ")
    parser.epilog = INPUTS_FORM
    parser.add_argument("first", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("second", metavar=TARGET, help="the mask to compare with, named likewise")
    parser.add_argument("--inputs", metavar="JSON", type=Path, help=f"compare on {INPUTS_HELP}")
    parser.add_argument("--strict", action="store_true", help="masks that are not proved equal end with status 1")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_fuzz(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "fuzz", fuzz_command, "run a mask on random inputs in every way, against dense attention")
    parser.add_argument("target", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--cases", metavar="N", type=_positive, default=40, help="random inputs (default 40)")
    parser.add_argument("--largest", metavar="N", type=_positive, default=24, help="largest number of rows (default 24)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, other inputs (default 0)")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_fmt(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "fmt", fmt_command, "rewrite .mask files in the one layout")
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a .mask file")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a file would change")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "plan", plan_command, "which rank computes what under context parallelism")
    parser.epilog = INPUTS_FORM
    parser.add_argument("target", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--inputs", metavar="JSON", type=Path, required=True, help=INPUTS_HELP)
    parser.add_argument("--world", metavar="P", type=_positive, required=True, help="number of ranks")
    parser.add_argument("--nodes", metavar="N", type=_positive, default=1, help="number of machines they live on (default 1)")
    parser.add_argument(
        "--chunk",
        metavar="N",
        type=_positive,
        help="rows that move as a whole (default: a few long pieces a rank, or about 8 or 4 chunks)",
    )
    orders = "balanced (default), contiguous, zigzag or zigzag-document"
    parser.add_argument("--order", metavar="NAME", default="balanced", help=f"how chunks are given to ranks: {orders}")
    parser.add_argument("--documents", metavar="INPUT", help="the segments input that zigzag-document goes by")
    parser.add_argument("--assign", metavar="LIST", type=_ranks, help="the rank of each chunk instead, such as 0,1,1,0")
    parser.add_argument("--epsilon", metavar="E", type=float, help="trade so much balance, such as 0.02, for less traffic")
    parser.add_argument("--heads", metavar="N", type=_positive, help="query heads of the model (default 32)")
    parser.add_argument("--kv-heads", "--heads-kv", metavar="N", type=_positive, help="key heads of the model (default 8)")
    parser.add_argument("--head-dim", metavar="N", type=_positive, help="head dim of the model (default 128)")
    parser.add_argument("--emit", choices=("local-vectors",), help="print each rank's own boundary vectors instead")


def _add_tile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block-q", metavar="N", type=_positive, default=128, help="rows of a tile (default 128)")
    parser.add_argument("--block-kv", metavar="N", type=_positive, default=128, help="columns of a tile (default 128)")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,1,1,0")
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
