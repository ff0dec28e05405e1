"""Figures in the documentation, from benchmarks/results/*.json: none is typed by hand, so none can drift.

    python -m benchmarks.tables          put the present figures into README.md, docs/*.md and docs/glance.svg

A page holds places, `<!--NAME-->...<!--/-->`, in a line or on lines of their own; what stands between the marks is made by
`PLACES[NAME]`, or says that it is not measured yet. Names with a colon take an argument: `<!--gain:causal-->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import glance, tables_kernels, tables_marks, tables_overlap, tables_ranks
from benchmarks.records import ROOT, NoData, origin

PLACE = re.compile(r"<!--([a-z_]+)(?::([^>]+))?-->(.*?)<!--/-->", re.DOTALL)
PLACES = {
    f.__name__: f for f in (origin, *tables_kernels.PLACES, *tables_marks.PLACES, *tables_overlap.PLACES, *tables_ranks.PLACES)
}


def main() -> int:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (now := fill(text)) != text:
            page.write_text(now, encoding="utf-8")
            print(page.relative_to(ROOT))
    glance.FILE.write_text(glance.glance(), encoding="utf-8")
    return 0


def pages() -> list[Path]:
    """The pages that hold places."""
    return [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if PLACE.search(p.read_text(encoding="utf-8"))]


def fill(text: str) -> str:
    """The text with every place as the results have it now."""

    def made(match: re.Match[str]) -> str:
        name, argument, before = match.groups()
        try:
            text = PLACES[name](argument) if argument else PLACES[name]()
        except NoData as e:
            text = str(e) if "\n" in before else "not measured yet"
        mark = f"{name}:{argument}" if argument else name
        return f"<!--{mark}-->\n\n{text}\n\n<!--/-->" if "\n" in before else f"<!--{mark}-->{text}<!--/-->"

    return PLACE.sub(made, text)


if __name__ == "__main__":
    raise SystemExit(main())
