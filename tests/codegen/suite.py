"""The masks of the suite, proved and lowered."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from maskc.frontend import parse_file
from maskc.ir.intervals import IntervalProgram
from maskc.ir.nodes import MaskFn
from maskc.ir.symbolic import prove
from maskc.ir.verdict import Proven

SUITE = Path(__file__).parent.parent / "data" / "suite"


@cache
def suite() -> dict[str, tuple[MaskFn, IntervalProgram]]:
    """By name; every file but those that are bad on purpose."""
    out = {}
    for path in sorted(SUITE.glob("*.mask")):
        if "_bad_" in path.name:
            continue
        for fn in parse_file(path).masks:
            verdict = prove(fn)
            assert isinstance(verdict, Proven), path
            out[fn.name] = fn, verdict.program
    assert len(out) >= 34
    return out
