"""What can be typed: the commands of `maskc`, their arguments and what `--help` says of them.

Parsing runs nothing: the name of the command is the attribute `command` of what comes out, None where there is none.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from maskc import __version__
from maskc.diagnostics import error
from maskc.inputs import JSON_HELP
from maskc.options import VARIABLES

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


def parse(argv: Sequence[str]) -> argparse.Namespace:
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

    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    _add_compile(commands)
    _add_check(commands)
    _add_explain(commands)
    _add_diff(commands)
    _add_fuzz(commands)
    _add_fmt(commands)
    _add_plan(commands)
    _add_bench(commands)
    _command(commands, "doctor", "versions, GPU, NVRTC, cache, and which backend would run")
    cache = _command(commands, "cache", "where compiled kernels are kept")
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="show (default), or delete all")
    return parser, tuple(commands.choices)


def _command(commands: argparse._SubParsersAction[_Parser], name: str, summary: str) -> _Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name)
    return parser


def _add_compile(commands: argparse._SubParsersAction[_Parser]) -> None:
    from maskc.driver import DTYPES, STAGES

    parser = _command(commands, "compile", "turn a mask into kernels, or show one stage of that")
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
    parser = _command(commands, "check", "prove masks and their claims; report every error of every file")
    parser.add_argument("files", nargs="+", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--strict", action="store_true", help="a mask that is neither proved nor refuted is an error")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_explain(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "explain", "say in words what a mask means, or what a code such as M301 means")
    parser.epilog = INPUTS_FORM
    parser.add_argument("target", nargs="?", metavar=f"{TARGET}|CODE", help=f"{TARGET_HELP}; or a code such as M301")
    parser.add_argument("--inputs", metavar="JSON", type=Path, help=f"{INPUTS_HELP}; adds density, tiles and a picture")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page to look at instead: tiles, queue, ranks, balance")
    parser.add_argument("--gallery", action="store_true", help="with --html: the standard masks, planned at 32K tokens")
    parser.add_argument("--json", action="store_true", help="machine-readable explanation")
    _add_tile(parser)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "bench", "time a mask against FlexAttention on this machine, once both agree")
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
    parser = _command(commands, "diff", "whether two masks are the same, and the first cell where they differ")
    parser.epilog = INPUTS_FORM
    parser.add_argument("first", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("second", metavar=TARGET, help="the mask to compare with, named likewise")
    parser.add_argument("--inputs", metavar="JSON", type=Path, help=f"compare on {INPUTS_HELP}")
    parser.add_argument("--strict", action="store_true", help="masks that are not proved equal end with status 1")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_fuzz(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "fuzz", "run a mask on random inputs in every way, against dense attention")
    parser.add_argument("target", metavar=TARGET, help=TARGET_HELP)
    parser.add_argument("--cases", metavar="N", type=_positive, default=40, help="random inputs (default 40)")
    parser.add_argument("--largest", metavar="N", type=_positive, default=24, help="largest number of rows (default 24)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed, other inputs (default 0)")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def _add_fmt(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "fmt", "rewrite .mask files in the one layout")
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a .mask file")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a file would change")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _command(commands, "plan", "which rank computes what under context parallelism")
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
