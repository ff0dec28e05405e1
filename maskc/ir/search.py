"""Small inputs that show what a mask does: refutations and examples for messages (see `refutation`)."""

from __future__ import annotations

from maskc.ir.nodes import MaskFn
from maskc.ir.verdict import Refuted


def scattered_example(fn: MaskFn) -> str | None:
    return None


def refutation(fn: MaskFn) -> Refuted | None:
    return None
