"""docs/masks.md: every mask there is proved, and its picture is what its data give.

A mask of the page is three blocks: ```mask (the text), ```json (the data of `maskc explain --inputs`) and ```text (what is
made of both here). Text under a heading that names `std:NAME` is that file.
"""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

import pytest

from maskc.binding.bound import BoundMask
from maskc.compiled import CompiledMask
from maskc.frontend import parse_text
from maskc.inputs import bind_file
from maskc.ir.verdict import Proven
from maskc.pictures import picture
from maskc.targets import compile_fn
from tests.blocks import FENCE, ROOT, blocks

PAGE = ROOT / "docs" / "masks.md"


def entries() -> list[tuple[str, str, str]]:
    """(mask, json, text) of every mask of the page that has data."""
    page = [b for b in blocks(PAGE) if b.info in ("mask", "json", "text")]
    threes = zip(page, page[1:], page[2:], strict=False)
    found = [(a.text, b.text, c.text) for a, b, c in threes if (a.info, b.info, c.info) == ("mask", "json", "text")]
    assert len(found) == sum(b.info == "json" for b in page)
    return found


def figure(mask: str, data: str, folder: Path) -> str:
    """A line about the proof of each mask of the text, then their pictures side by side, a picture for every head."""
    inputs = folder / "inputs.json"
    inputs.write_text(data)
    lines, columns = [], []
    for fn in parse_text(mask, "the page").masks:
        compiled = compile_fn(fn, certify=True)
        lines.append(_proof(compiled))
        spec = bind_file(compiled, inputs)
        columns += _pictures(compiled.name, spec)
    if len(columns) == 1:
        columns = [columns[0][1:]]
    widths = [max(map(len, c)) for c in columns]
    rows = zip_longest(*columns, fillvalue="")
    body = ("   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, "", *body]) + "\n"


def _proof(mask: CompiledMask) -> str:
    assert isinstance(mask.verdict, Proven)
    program = mask.verdict.program
    reads = [*(["causal triangle"] if program.causal else []), *(name.upper() for name in program.vectors)]
    size = f" ({4 * len(program.vectors)} bytes a key)" if program.vectors else ""
    return f"{mask.name}: proved, {len(mask.verdict.certificates)} certificates; reads {', '.join(reads) or 'nothing'}{size}"


def _pictures(name: str, spec: BoundMask) -> list[list[str]]:
    v = spec.vectors()
    marks = sorted({int(s) for t in spec.inputs.sets.values() for s in (*t.starts[0].tolist(), *t.ends[0].tolist())})
    heads = range(v.heads)
    return [[f"{name}, head {h}" if v.heads > 1 else name, *picture(v, marks, head=h)] for h in heads]


def test_the_pictures_of_the_page(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = entries()
    assert len(found) >= 20
    page = now = PAGE.read_text(encoding="utf-8")
    for mask, data, shown in found:
        given = f"```json\n{data}```\n\n```text\n"
        now = now.replace(f"{given}{shown}```", f"{given}{figure(mask, data, tmp_path)}```", 1)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(now, encoding="utf-8")
    else:
        assert now == page, "a picture is stale: pytest --update-golden"


def test_standard_masks_are_shown_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        for name in re.findall(r"`std:(\w+)`", title):
            shown = next(m[2] for m in FENCE.finditer(section) if m[1] == "mask")
            assert shown == files("maskc").joinpath("std", f"{name}.mask").read_text("utf-8"), f"std:{name} has changed"
