"""maskc: a compiler for attention masks.

    mask = maskc.compile("doc_prefix.mask")
    spec = mask.bind(doc=maskc.segments(lengths=[3145, 2203, 2844]), prefix=[885, 296, 528])
    out = maskc.run(spec, q, k, v)

Names load on first use, so that `import maskc` needs neither torch nor any other package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from maskc.diagnostics import Diagnostic, MaskcError, MaskcTypeError, MaskcWarning

if TYPE_CHECKING:
    from maskc.api import compile as compile  # noqa: A004
    from maskc.api import compile_text, load, run
    from maskc.binding.bound import BoundMask
    from maskc.binding.constructors import segments, spans
    from maskc.compiled import CompiledMask
    from maskc.runtime.metrics import metrics
    from maskc.runtime.plan import AttentionPlan, plan

__version__ = "0.1.0"

_HOMES = {
    "compile": "maskc.api",
    "compile_text": "maskc.api",
    "load": "maskc.api",
    "run": "maskc.api",
    "plan": "maskc.runtime.plan",
    "AttentionPlan": "maskc.runtime.plan",
    "metrics": "maskc.runtime.metrics",
    "segments": "maskc.binding.constructors",
    "spans": "maskc.binding.constructors",
    "CompiledMask": "maskc.compiled",
    "BoundMask": "maskc.binding.bound",
}

__all__ = [
    "AttentionPlan",
    "BoundMask",
    "CompiledMask",
    "Diagnostic",
    "MaskcError",
    "MaskcTypeError",
    "MaskcWarning",
    "compile",
    "compile_text",
    "load",
    "metrics",
    "plan",
    "run",
    "segments",
    "spans",
]


def __getattr__(name: str) -> object:
    if name == "convert":
        return import_module("maskc.convert")
    if name not in _HOMES:
        raise AttributeError(f"module 'maskc' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
