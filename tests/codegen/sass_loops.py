"""Loops of a SASS text: what runs between a label and a branch back to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_OPCODE = re.compile(r"^(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w.]+)?)")


@dataclass(frozen=True)
class Loop:
    start: int
    end: int
    body: tuple[str, ...]  # instruction texts
    skips: tuple[tuple[int, int], ...] = ()  # branches forward inside the body: (branch, target)

    def usual(self, rare: int = 40) -> tuple[str, ...]:
        """The body without blocks of more than `rare` instructions that a branch skips."""
        gone = {i for start, end in self.skips if end - start > rare for i in range(start + 1, end)}
        return tuple(text for i, text in enumerate(self.body) if i not in gone)

    def count(self, *opcodes: str) -> int:
        return sum(opcode(i) in opcodes for i in self.body)


def opcode(instruction: str) -> str:
    found = _OPCODE.match(instruction)
    return found[1] if found else ""


def loops(sass: str) -> list[Loop]:
    """Every backward branch of the text with the instructions from its target on, innermost first."""
    instructions: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            instructions.append((int(found[1], 16), found[2]))
    branches = []
    for at, (_, text) in enumerate(instructions):
        target = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        if target and target[1] in labels:
            branches.append((at, labels[target[1]]))
    out = []
    for at, start in branches:
        if start <= at:
            body = tuple(t for _, t in instructions[start : at + 1])
            skips = tuple((b - start, t - start) for b, t in branches if start <= b < t <= at)
            out.append(Loop(start, at, body, skips))
    return sorted(out, key=lambda loop: len(loop.body))


def tensor_loops(sass: str) -> list[Loop]:
    """Innermost loops that issue wgmma: the steady loops of a kernel, shortest first."""
    found: list[Loop] = []
    for loop in loops(sass):
        inner = any(other.start >= loop.start and other.end <= loop.end for other in found)
        if loop.count("HGMMA") and not inner:
            found.append(loop)
    return found
