"""Every error and warning code with its explanation: what `maskc explain M301` prints and docs/errors.md lists.

Each part of the package keeps the table of the codes it raises; here they come together.
"""

from __future__ import annotations

import difflib
import importlib
import re

from maskc.diagnostics import error

# in the order of the codes; only data in these modules, so importing them is cheap
TABLES: tuple[str, ...] = (
    "maskc.frontend.codes",
    "maskc.ir.codes",
    "maskc.binding.codes",
    "maskc.convert.codes",
    "maskc.codes",
    "maskc.integrations.codes",
    "maskc.codegen.codes",
    "maskc.runtime.codes",
)

FAMILIES: tuple[tuple[str, str], ...] = (
    ("M0", "syntax"),
    ("M1", "names, types and units"),
    ("M2", "form: the mask cannot be written as row intervals per key"),
    ("M3", "proof"),
    ("M4", "bound data"),
    ("M5", "use of the Python API and of the command line"),
    ("M6", "toolchain"),
    ("M7", "distributed runs"),
    ("W", "warnings"),
)

CODES: dict[str, str] = {
    "M540": """The command line is not one that maskc understands

A command, flag or value is misspelt, missing or does not go with the others. Every command describes itself:
`maskc compile --help`. Exit status 2.
""",
    "M541": """A file cannot be read or written

It does not exist, is a directory, is not UTF-8 text, or permission is missing. The message gives the path as you typed
it and the reason that the system gave.
""",
    "M542": """The file given to `--inputs` is not the JSON that describes the inputs of a mask

Write one object, or a list of them for a batch:
    {"nq": 16, "nk": 16, "inputs": {"doc": {"segments": {"lengths": [7, 5, 4]}}, "prefix": [3, 0, 2]}}
A segment or span input is {"segments": {...}} or {"spans": {...}} with one of cu_seqlens, lengths, ids, positions, eos,
ranges; every other input is a number, true or false, or a list.
""",
    "M543": """An environment variable holds a value that has no meaning

maskc reads MASKC_CACHE_DIR and MASKC_DUMP_DIR (folders), MASKC_CHECK (0, 1 or 2) and MASKC_TRACE (0 or 1).
""",
    "M544": """A stage needs more than the mask file

`vectors` and `tiles` are made from data: give them with `--inputs FILE.json`. `intervals` needs a mask that is proved: one that
is undecided (W301) has no intervals of its own; only the data of a batch decide.
""",
    "M545": """There is no code of this name

`maskc explain` takes a .mask file or one of the codes that an error message shows in brackets, such as M301.
""",
    "M546": """A package that this command needs is not installed

`maskc check`, `fmt` and most of `compile` need no torch; everything that binds or draws data does. `pip install` with the name of
the package, or maskc itself once more, brings it. `maskc doctor` says what else is missing. Exit status 2.
""",
    "M550": """Two masks declare one input differently

`maskc diff` compares masks on the same inputs, so a name means one thing in both: the same kind, `per`, `within` and block
size. Their facts may differ; masks are compared where both hold.
""",
    "M599": """An internal error: maskc did something its authors did not foresee

This is a fault of maskc, not of your input. Please report it with the command, the mask and the traceback that the same
command prints with MASKC_TRACE=1.
""",
}


def all_codes() -> dict[str, str]:
    """Code -> explanation, sorted by code."""
    tables = (importlib.import_module(name).CODES for name in TABLES)
    return dict(sorted((code, text) for table in tables for code, text in table.items()))


def is_code(text: str) -> bool:
    """Whether a word has the form of a code, known or not."""
    return re.fullmatch(r"[MWmw]\d+", text) is not None


def explain_code(code: str) -> str:
    """The long text of a code such as `M301`, in either case. Raises M545 for an unknown one."""
    codes = all_codes()
    wanted = code.upper()
    if wanted not in codes:
        near = difflib.get_close_matches(wanted, codes, 1)
        raise error(
            "M545", f"no code {code!r}", None, f"did you mean {near[0]}?" if near else "`maskc explain M301` explains M301"
        )
    title, body = entry(codes[wanted])
    return f"{wanted}: {title}\n\n{body}"


def entry(text: str) -> tuple[str, str]:
    """(title, text) of one explanation."""
    title, _, body = text.strip().partition("\n")
    return title.rstrip("."), body.strip()


def errors_page() -> str:
    """docs/errors.md: every code under its family. `pytest --update-golden` writes it."""
    out = [
        "# Error codes",
        "",
        "`maskc explain M301` prints the same text. Made from the tables in the sources; do not edit.",
        "",
    ]
    codes = all_codes()
    for prefix, title in FAMILIES:
        members = {code: text for code, text in codes.items() if code.startswith(prefix)}
        if members:
            out += [f"## {prefix}: {title}" if prefix == "W" else f"## {prefix}xx: {title}", ""]
        for code, text in members.items():
            title, body = entry(text)
            out += [f"### {code}: {title}", "", body, ""]
    return "\n".join(out)
