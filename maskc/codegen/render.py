"""Template + context -> CudaSource: the text NVRTC sees, with every header it includes. The only user of Jinja here.

Templates live in `maskc/templates` and look like C++ to an editor: line statements `//%`, line comments `//#`,
variables `${x}`, blocks `<% %>`, comments `<# #>`. A missing name is an error, also inside an expression; write
`${a if c else ""}` with its `else`, for Jinja renders an `if` without one as nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*', re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*){2,}\n")


@dataclass(frozen=True, slots=True)
class CudaSource:
    """One translation unit. `headers` are (name as included, text) pairs in the order of their first inclusion."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()

    def flat(self) -> str:
        """The same unit as one text that any CUDA compiler takes: each header stands where it is first included."""
        return _flatten(self.text, dict(self.headers))


def render(template: str, /, **context: object) -> CudaSource:
    """Render `template` (a path below maskc/templates) and every header that it includes with quotes.

    `#include "device/x.cuh"` takes `device/x.cuh` as it stands or, where only `device/x.cuh.j2` exists, that template
    rendered with the same context.
    """
    text = render_text(template, **context)
    headers: dict[str, str] = {}
    _collect(text, context, headers)
    return CudaSource(template.removesuffix(".j2"), text, tuple(headers.items()))


def render_text(template: str, /, **context: object) -> str:
    """One rendered template, without its headers."""
    return _BLANK_LINES.sub("\n\n", _environment().get_template(template).render(**context)).lstrip("\n")


def _collect(text: str, context: dict[str, object], headers: dict[str, str]) -> None:
    for name in _INCLUDE.findall(text):
        if name in headers:
            continue
        plain = _read(name)
        headers[name] = plain if plain is not None else render_text(name + ".j2", **context)
        _collect(headers[name], context, headers)


def _flatten(text: str, headers: dict[str, str]) -> str:
    """`text` with its includes replaced; takes from `headers` what it has used."""

    def put_in(match: re.Match[str]) -> str:
        header = headers.pop(match[1], None)
        return (
            ""
            if header is None
            else f"// ---- {match[1]}\n{_flatten(header.replace('#pragma once', ''), headers).strip()}\n// ----"
        )

    return _INCLUDE.sub(put_in, text)


def _read(name: str) -> str | None:
    path = files("maskc").joinpath("templates", *name.split("/"))
    return path.read_text(encoding="utf-8") if path.is_file() else None


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
