"""The suite and the standard set: every file parses and types, the trees are golden, the grammar has no conflicts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from maskc.frontend import parse_file, parse_module, split_target, std_names
from maskc.frontend.ast import print_module
from maskc.frontend.fmt import format_text

SUITE = sorted((Path(__file__).parent.parent / "data" / "suite").glob("*.mask"))
FAMILY = (
    "full", "causal", "sliding_window", "doc_causal", "doc_full", "share_question", "global_window", "causal_blockwise",
    "doc_prefix", "prefix_lm", "qk_sparse", "random_eviction",
)  # fmt: skip


def test_the_suite_is_here() -> None:
    assert len(SUITE) == 37


@pytest.mark.parametrize("path", SUITE, ids=lambda p: p.stem)
def test_suite_types_without_warnings(path: Path) -> None:
    file = parse_file(path)
    assert len(file.masks) == 1
    assert file.warnings == ()
    assert file.pick(path.stem) is file.masks[0]


def test_suite_trees(golden: Callable[[str, str], None]) -> None:
    text = "".join(f"# {p.name}\n{print_module(parse_module(p))}\n" for p in SUITE)
    golden("frontend/suite.ast", text)


@pytest.mark.parametrize("name", std_names())
def test_standard_masks(name: str) -> None:
    """Typed, formatted, and with one comment line that says what the mask is."""
    text = files("maskc").joinpath("std", f"{name}.mask").read_text("utf-8")
    assert [line.startswith("#") for line in text.splitlines()].count(True) == 1
    assert text.startswith("# ")
    assert format_text(text) == text
    file = parse_file(f"std:{name}")
    assert file.warnings == ()
    assert [m.name for m in file.masks] == (["local", "global"] if name == "gemma3" else [name])


def test_the_family_is_in_the_standard_set_and_equals_the_suite() -> None:
    assert set(FAMILY) <= set(std_names())
    suite = {p.stem[3:]: p for p in SUITE}
    for name in FAMILY:
        assert parse_file(f"std:{name}").masks == parse_file(suite[name]).masks


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("a.mask", ("a.mask", None)),
        ("a.mask:local", ("a.mask", "local")),
        ("C:\\x\\a.mask", ("C:\\x\\a.mask", None)),
        ("C:\\x\\a.mask:m", ("C:\\x\\a.mask", "m")),
        ("std:causal", ("std:causal", None)),
        ("std:gemma3:local", ("std:gemma3", "local")),
    ],
)
def test_targets(target: str, parts: tuple[str, str | None]) -> None:
    assert split_target(target) == parts


def test_grammar_has_no_conflicts() -> None:
    """LALR(1) with no shift taken silently, and no two terminals that match one text."""
    from lark import Lark
    from lark.exceptions import GrammarError

    grammar = files("maskc.frontend").joinpath("mask.lark").read_text("utf-8")
    options = {"parser": "lalr", "lexer": "basic", "start": ["file", "declaration"], "strict": True}
    Lark(grammar, **options)
    with pytest.raises(GrammarError, match="Shift/Reduce"):  # the check is able to fail
        Lark(grammar.replace('"if" expr "then" expr "else" expr', '"if" expr "then" expr ["else" expr]'), **options)


def test_importing_the_frontend_is_cheap() -> None:
    code = "import sys, maskc.frontend; sys.exit(any(m in sys.modules for m in ('lark', 'torch', 'sympy', 'numpy', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
