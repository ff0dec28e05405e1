"""HTML pages that stand alone: one file, nothing to fetch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from maskc import __version__
from maskc.report.cases import Subject, case
from maskc.report.predicate import Json

if TYPE_CHECKING:
    from jinja2 import Environment

LOGIC = ("core.js", "predicate.js", "exchange.js")
"""Scripts without a document: what tests run beside the library."""
FOOTER = "Words, vectors, tile counts, workloads and assignments are the library's own; times are a model."
VIEWS = ("draw.js", "mask_view.js", "queue_view.js", "local_view.js", "balance_view.js", "time_view.js", "app.js")


def explain_page(subjects: Iterable[Subject], title: str, tick: Callable[[str], None] = lambda _: None) -> str:
    """The page of some masks, the first one shown first; `tick` is told what is being worked at."""
    cases: list[Json] = [dict(case(s, tick)) for s in subjects]
    return render(
        "page.html.j2",
        title=title,
        data=as_json({"version": __version__, "cases": cases}),
        scripts=(*LOGIC, *VIEWS),
        footer=f"Made by maskc {__version__}. {FOOTER}",
    )


def render(template: str, **context: object) -> str:
    """A template of this folder. Its text is HTML; `asset(name)` puts a script or style sheet in as it is."""
    return _environment().get_template(template).render(asset=asset, **context)


@cache
def asset(name: str) -> str:
    return (files("maskc.report") / "assets" / name).read_text(encoding="utf-8").strip()


def as_json(data: Json) -> str:
    """JSON that may stand inside a <script> element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(loader=PackageLoader("maskc.report", "."), undefined=StrictUndefined, keep_trailing_newline=True)
