"""The grammars for editors know every word of the language, and colour the suite as the compiler reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import maskc
from maskc.frontend.parser import lark_parser
from maskc.frontend.words import ATTRIBUTES, AXES, BUILTINS, CHECKS, COORDINATES, KEYWORDS
from tests.frontend.test_files import SUITE

EDITORS = Path(__file__).parents[2] / "editors"
TYPES = ("segments", "spans", "int", "bool", "sorted", "block")
WORDS = sorted({*KEYWORDS, *TYPES, *AXES, *CHECKS, "by", *COORDINATES, *BUILTINS, *ATTRIBUTES})


def _json(name: str) -> Any:
    return json.loads((EDITORS / "vscode" / name).read_text(encoding="utf-8"))


@cache
def patterns() -> list[tuple[re.Pattern[str], dict[int, str]]]:
    """(regular expression, scope of each group; group 0 is the whole match), in order."""
    out = []
    for p in _json("syntaxes/mask.tmLanguage.json")["patterns"]:
        captures = {int(n): c["name"] for n, c in p.get("captures", {}).items()}
        out.append((re.compile(p["match"], re.MULTILINE), captures or {0: p["name"]}))
    return out


def coloured(text: str) -> Iterator[tuple[int, str, str]]:
    """(offset, piece, scope) as a TextMate engine finds them: the leftmost match, of those the first pattern."""
    at = 0
    while found := [(m.start(), i, m) for i, (p, _) in enumerate(patterns()) if (m := p.search(text, at))]:
        _, i, m = min(found, key=lambda f: f[:2])
        for group, scope in patterns()[i][1].items():
            yield m.start(group), m[group], scope
        at = m.end()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_colour_in_vs_code(word: str) -> None:
    context = {**dict.fromkeys(BUILTINS, "{}(doc)"), **dict.fromkeys(ATTRIBUTES, "doc.{}")}.get(word, "{}")
    scopes = {piece: scope for _, piece, scope in coloured(context.format(word))}
    assert not scopes[word].startswith("variable.other.mask"), f"`{word}` looks like any name"


def test_every_word_has_a_colour_in_vim() -> None:
    text = (EDITORS / "vim" / "syntax" / "mask.vim").read_text(encoding="utf-8")
    known = {w for line in re.findall(r"^syntax keyword \w+ +(.*)$", text, re.MULTILINE) for w in line.split()}
    (attributes,) = re.findall(r"syntax match maskAttribute .*\\\((.*)\\\)", text)
    known |= set(attributes.split(r"\|"))
    assert known == set(WORDS)
    groups = set(re.findall(r"^syntax (?:keyword|match) (\w+)", text, re.MULTILINE))
    assert groups == set(re.findall(r"^highlight default link (\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("path", SUITE, ids=lambda p: p.stem)
def test_the_suite_is_coloured_as_it_is_read(path: Path) -> None:
    """Keywords, numbers and names where the compiler's lexer has them, and nothing else there."""
    text = path.read_text(encoding="utf-8")
    scopes = {offset: (piece, scope) for offset, piece, scope in coloured(text)}
    for token in lark_parser().lex(text):
        piece, scope = scopes.get(token.start_pos, ("", ""))
        if token in KEYWORDS:
            assert scope.startswith(("keyword.", "constant.language.")), f"{token} at {token.start_pos}: {scope}"
        elif token.type == "INT":
            assert scope == "constant.numeric.mask"
        elif token.type == "NAME":
            assert not scope.startswith("keyword."), f"{token} at {token.start_pos}: {scope}"
        else:
            continue
        assert piece == token
    comments = [piece for piece, scope in scopes.values() if scope.startswith("comment")]
    assert comments == re.findall(r"#.*", text)


def test_the_extension_names_its_files() -> None:
    package = _json("package.json")
    contributes = package["contributes"]
    (language,), (grammar,) = contributes["languages"], contributes["grammars"]
    assert language["extensions"] == [".mask"]
    assert grammar["language"] == language["id"]
    assert (EDITORS / "vscode" / grammar["path"]).is_file()
    assert (EDITORS / "vscode" / language["configuration"]).is_file()
    assert _json("syntaxes/mask.tmLanguage.json")["scopeName"] == grammar["scopeName"]
    assert package["version"] == maskc.__version__


@pytest.mark.skipif(shutil.which("vim") is None, reason="no Vim here")
def test_vim_reads_the_syntax_file(tmp_path: Path) -> None:
    path = tmp_path / "causal.mask"
    path.write_text("mask causal = k <= q\n")
    asked = "call writefile([&filetype, get(b:, 'current_syntax', ''), synIDattr(synID(1, 1, 1), 'name'), v:errmsg], 'answer')"
    command = [
        "vim",
        "-N",
        "-u",
        "NONE",
        "-es",
        "-c",
        f"set rtp^={EDITORS / 'vim'}",
        "-c",
        "filetype plugin on",
        "-c",
        "syntax on",
    ]
    subprocess.run([*command, "-c", f"edit {path}", "-c", asked, "-c", "qa!"], cwd=tmp_path, check=False, timeout=60)
    kind, syntax, first, _ = (tmp_path / "answer").read_text().split("\n")[:4]
    if kind == "mask" and not syntax:
        pytest.skip("this Vim is built without syntax files")
    assert (kind, syntax, first) == ("mask", "mask", "maskDeclaration")
