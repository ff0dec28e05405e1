"""The examples in the explanations of codes raise those codes."""

from __future__ import annotations

import re

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from maskc.ir.codes import CODES
from maskc.targets import compile_fn


@pytest.mark.parametrize("code", ["M201", "M301", "M303"])
def test_example(code: str) -> None:
    lines = [line[4:].split("#")[0] for line in CODES[code].splitlines() if line.startswith("    ")]
    with pytest.raises(MaskcError) as caught:
        compile_fn(parse_text("\n".join(lines)).pick(None))
    assert caught.value.code == code


@pytest.mark.parametrize("code", CODES)
def test_form(code: str) -> None:
    assert re.fullmatch(r"[MW][23]\d\d", code)
    title, blank, *rest = CODES[code].splitlines()
    assert title
    assert not blank
    assert any(line.startswith("What to do:") for line in rest)
