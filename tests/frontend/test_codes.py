"""The explanations of `maskc explain CODE`: their examples do what they say, and no code lacks one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import maskc.frontend
from maskc.frontend import parse_text
from maskc.frontend.codes import CODES
from tests.frontend.marked import errors_of

WITHOUT_EXAMPLE = {"M007", "M009", "M118", "M124", "M125", "W101", "W102"}


def example(code: str, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:    .*\n)+)", CODES[code], re.MULTILINE)
    assert found is not None, f"{code} has no example `{title}`"
    return re.sub("^    ", "", found.group(1), flags=re.MULTILINE)


@pytest.mark.parametrize("code", sorted(set(CODES) - WITHOUT_EXAMPLE))
def test_examples(code: str) -> None:
    wrong = errors_of(parse_text, example(code, "Wrong"))
    assert {d.code for d in wrong} == {code}
    assert errors_of(parse_text, example(code, "Right")) == ()


def test_messages(golden: Callable[[str, str], None]) -> None:
    """How the errors look on a terminal."""
    shown = [d.render() for c in sorted(set(CODES) - WITHOUT_EXAMPLE) for d in errors_of(parse_text, example(c, "Wrong"))]
    golden("frontend/errors.txt", "\n\n".join(shown) + "\n")


def test_every_code_is_explained() -> None:
    folder = Path(maskc.frontend.__file__).parent
    raised = {c for f in folder.glob("*.py") if f.name != "codes.py" for c in re.findall(r'"([MW]\d{3})"', f.read_text("utf-8"))}
    assert raised == set(CODES)


def test_explanations_have_a_title() -> None:
    for code, text in CODES.items():
        title, blank, *rest = text.split("\n")
        assert title, code
        assert blank == "", code
        assert rest, code
