"""`maskc check`: each mask of each file is proved, refused or undecided, with every diagnostic that was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maskc.diagnostics import Diagnostic, MaskcError
from maskc.ir.nodes import MaskFn
from maskc.targets import compile_fn

Outcome = Literal["proved", "undecided", "refused", "empty"]


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of one mask; of a file that could not be read or holds no mask ("empty"), `mask` is None."""

    target: str
    mask: str | None
    outcome: Outcome
    causal: bool
    vectors: tuple[str, ...]
    claims: int
    diagnostics: tuple[Diagnostic, ...]

    def failed(self, strict: bool) -> bool:
        """Whether `maskc check` ends with status 1 because of this mask."""
        return self.outcome == "refused" or (strict and self.outcome == "undecided")

    def render(self) -> str:
        """The diagnostics, then one line: `doc.mask: doc_causal is proved (causal; lts), 2 claims hold`."""
        lines = [d.render() for d in self.diagnostics]
        if self.outcome == "proved":
            parts = [*(["causal"] if self.causal else []), *([" ".join(self.vectors)] if self.vectors else [])]
            claims = f", {self.claims} claim{'s' * (self.claims > 1)} hold{'s' * (self.claims == 1)}" if self.claims else ""
            lines.append(f"{self.target}: {self.mask} is proved ({'; '.join(parts) or 'no vector'}){claims}")
        elif self.outcome == "empty":
            lines.append(f"{self.target} holds no mask")
        elif self.mask is not None:
            lines.append(f"{self.target}: {self.mask} is {self.outcome}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        return {
            "target": self.target,
            "mask": self.mask,
            "outcome": self.outcome,
            "causal": self.causal,
            "vectors": list(self.vectors),
            "claims": self.claims,
            "diagnostics": [d.as_json() for d in self.diagnostics],
        }


def check_targets(targets: Sequence[str]) -> list[Report]:
    """Reports in the order of the command line. Raises only for targets that are no mask files (M5xx)."""
    return [report for target in targets for report in _check(target)]


def _check(target: str) -> list[Report]:
    from maskc.frontend import parse_file, split_target

    try:
        path, name = split_target(target)
        file = parse_file(path)
        masks = file.masks if name is None else (file.pick(name),)
    except MaskcError as e:
        return [_refused(target, None, e.diagnostics)]
    if not masks:
        return [Report(target, None, "empty", False, (), 0, file.warnings)]
    about_file = file.warnings
    return [_check_mask(path, fn, about_file if fn is masks[0] else ()) for fn in masks]


def _check_mask(path: str, fn: MaskFn, warnings: tuple[Diagnostic, ...]) -> Report:
    try:
        compiled = compile_fn(fn, certify=True)
    except MaskcError as e:
        return _refused(path, fn.name, (*warnings, *e.diagnostics))
    program = compiled.program
    found = (*warnings, *compiled.warnings)
    if program is None:
        return Report(path, fn.name, "undecided", False, (), 0, found)
    return Report(path, fn.name, "proved", program.causal, program.vectors, len(compiled.checks), found)


def _refused(path: str, mask: str | None, diagnostics: tuple[Diagnostic, ...]) -> Report:
    return Report(path, mask, "refused", False, (), 0, diagnostics)
