"""What a rank enqueued, as the stand-in and its driver wrote it down, told from addresses alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.overlap.stand_in import STREAMS

Enqueued = list[tuple[str, str]]
"""(stream, what), in order."""


class Row(NamedTuple):
    """Of a head, where it goes: what it is copied for, and from where: so many bytes into a tensor."""

    what: str
    of: str
    offset: int
    size: int


@dataclass
class Reader:
    """words: by address. rows: by the address that they are copied to. bases: addresses of tensors that are known; others are
    told by their first copy. compute: handle of the stream that is current. kept: whether what is pushed must have been kept for
    its stream. widest: CTAs of the largest attention kernel. summed: addresses of the parts of dK and dV, in turn."""

    words: Mapping[int, str]
    rows: Mapping[int, Row]
    bases: dict[str, int]
    compute: int
    kept: bool = False
    widest: int = 0
    summed: list[int] = field(default_factory=list)
    out: Enqueued = field(default_factory=list)

    def read(self, log: Sequence[str]) -> Enqueued:
        """Raises AssertionError where a copy is not one of the call, reads another place, or is missing."""
        self._total, self._done = Counter(row.what for row in self.rows.values()), Counter[str]()
        self._recorded: dict[str, tuple[str, int]] = {}
        self._keeps: list[tuple[str, int, int]] = []
        names = {handle: name for name, handle in STREAMS.items() if name != "compute"} | {self.compute: "compute"}
        batch = ""
        for line in log:
            kind, *given = line.split()
            stream = names[int(found[1])] if (found := re.search(r"stream (\d+)", line)) else ""
            match kind:
                case "keep":
                    self._keeps.append((stream, int(given[0]), int(given[0]) + int(given[1])))
                case "wait" | "write":
                    self._say(stream, kind, given[2], given[0])
                case "operation":
                    self._say(batch, ("", "wait", "write")[int(given[0])], given[4], given[2])
                case "launch":
                    self._add(stream, what := _kernel(given[0]))
                    self.widest = max(self.widest, int(given[2])) if what == "attend" else self.widest
                case "torch":
                    assert given[0] not in ("brings", "waits"), line
                    self.summed += [int(given[1])] if given[0] == "sums" else []
                    settles = stream == "compute" and given[0] == "copies"
                    self._add(stream, "settle" if settles else f"torch {given[0]}")
                case "copy":
                    self._copy(stream, line)
                case "record":
                    self._recorded[given[1]] = stream, self._count(stream)
                case "follow" if given[1] in self._recorded:  # else tables of calls before are waited for
                    other, then = self._recorded[given[1]]
                    late = self._count(other) - then
                    self.out.append((stream, f"follow {other}" + (f", {late} operations late" if late else "")))
                case "push" | "pop" | "map" | "allow" | "load" | "follow":
                    continue
                case _:
                    batch = stream
                    assert given[0] == "words", line
        missing = [what for what, count in self._total.items() if self._done[what] != count]
        assert not missing, f"not copied, or not once: {missing}"
        assert len(set(self.bases.values())) == len(self.bases), f"two tensors in one place: {self.bases}"
        return self.out

    def _count(self, stream: str) -> int:
        return sum(s == stream for s, _ in self.out)

    def _add(self, stream: str, what: str) -> None:
        """Several kernels of one attention, several copies of own keys, are one thing."""
        if (stream, what) not in self.out[-1:] or what not in ("attend", "settle", "torch sums", "torch zeros"):
            self.out.append((stream, what))

    def _say(self, stream: str, verb: str, address: str, value: str) -> None:
        self.out.append((stream, f"{verb} {self.words[int(address)]} {value}"))

    def _copy(self, stream: str, line: str) -> None:
        for into, source in _copied(line, self.rows):
            row = self.rows[into]
            if (stream, row.what) not in self.out[-1:]:
                assert not self._done[row.what], f"{row.what} is not in one piece: {self.out[-3:]}, {line}"
                self.out.append((stream, row.what))
            self._done[row.what] += 1
            if self.kept and row.what.startswith("push"):
                assert any(s == stream and start <= source < end for s, start, end in self._keeps), f"{row.what} is not kept"
            else:
                base = self.bases.setdefault(row.of, source - row.offset)
                assert source == base + row.offset, f"{row.what} reads {source - base} bytes into {row.of}, not {row.offset}"


def _copied(line: str, rows: Mapping[int, Row]) -> Iterator[tuple[int, int]]:
    """(into, source) of every row that a copy takes."""
    if found := re.match(r"copy (\d+) from (\d+) to (\d+)", line):
        size, source, into = map(int, found.groups())
        pieces, of, to = 1, 0, 0
    else:
        found = re.match(r"copy (\d+) x (\d+) from (\d+) by (\d+) to (\d+) by (\d+)", line)
        assert found is not None, line
        pieces, size, source, of, into, to = map(int, found.groups())
    row = rows[into].size
    assert size % row == 0, line
    yield from ((into + i * to + at, source + i * of + at) for i in range(pieces) for at in range(0, size, row))


def _kernel(name: str) -> str:
    return {"fill": "settle", "sum_gradients": "sum"}.get(name, "attend" if name.startswith("attn") else name)
