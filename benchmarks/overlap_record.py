"""The record of benchmarks/overlap.py: rows of one device and one set of kernels, a cell and direction at a time."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.overlap_cells import Cell

Row = dict[str, Any]
KEY = ("mask", "seqlen", "heads", "kv_heads", "world", "link", "direction")


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in KEY)


@dataclass
class Record:
    """head: what all rows have in common: the device, digests of its kernels."""

    path: Path
    head: Row
    rows: list[Row] = field(default_factory=list)

    def resume(self) -> None:
        """Take over what the file has of the same device and kernels; of others, nothing."""
        if self.path.exists():
            head, rows = _read(self.path)
            self.rows = rows if head == self.head else []

    def has(self, cell: Cell, direction: str) -> bool:
        made = asdict(cell)
        wanted = tuple({**made, "kv_heads": made["heads_kv"], "direction": direction}[k] for k in KEY)
        return any(key_of(r) == wanted for r in self.rows)

    def put(self, rows: list[Row]) -> None:
        """In place of older ones of the same cell and direction."""
        new = {key_of(r) for r in rows}
        self.rows = [r for r in self.rows if key_of(r) not in new] + rows
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")


def merged(into: Path, paths: Iterable[Path]) -> Record:
    """Rows of all files, later ones in place of earlier ones. Raises ValueError where devices or kernels differ."""
    out: Record | None = None
    for path in paths:
        head, rows = _read(path)
        out = out or Record(into, head)
        if head != out.head:
            raise ValueError(f"{path} is of another device or of other kernels: {head}, not {out.head}")
        new = {key_of(r) for r in rows}
        out.rows = [r for r in out.rows if key_of(r) not in new] + rows
    assert out is not None
    return out


def claim(path: Path | None, cell: Cell) -> bool:
    """Whether this process is to run a cell: the first of those that deal cells by the same file, or the only one."""
    if path is None:
        return True
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        mine = str(cell) not in file.read().splitlines()
        if mine:
            file.write(f"{cell}\n")
    return mine


def _read(path: Path) -> tuple[Row, list[Row]]:
    data: Row = json.loads(path.read_text(encoding="utf-8"))
    rows: list[Row] = data.pop("rows")
    return data, rows
