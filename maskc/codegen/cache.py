"""A folder of compiled kernels, addressed by content: one file per entry, written whole or not at all.

Guarantees: a reader never sees a half-written entry (temporary file + rename), a damaged one reads as absent and is
replaced, and a folder that cannot be written costs time, never correctness. Any number of processes may share it;
two that miss together both compile, and either result may stay, for equal keys give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"maskc-cache 1\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """`meta` is plain JSON data; `blobs` are named byte strings."""

    meta: Mapping[str, object]
    blobs: Mapping[str, bytes]


def content_key(*parts: str | bytes | Iterable[str]) -> str:
    """sha256 over the parts, each framed by its length, so that no two lists of parts share a key."""
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    for part in parts:
        if isinstance(part, bytes):
            add(part)
        elif isinstance(part, str):
            add(part.encode())
        else:
            items = list(part)
            add(b"list %d" % len(items))
            for item in items:
                add(item.encode())
    return digest.hexdigest()


def load(folder: Path, key: str) -> Entry | None:
    """The entry of a key, or None where there is none or it is damaged."""
    try:
        data = _path(folder, key).read_bytes()
    except OSError:
        return None
    return _decode(data)


def store(folder: Path, key: str, entry: Entry) -> bool:
    """Write an entry; False where the folder cannot be written (read-only, full, no such drive)."""
    path = _path(folder, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _encode(entry))
    except OSError:
        return False
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step. Raises OSError, leaving the old file and no temporary one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:16]}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def entries(folder: Path) -> list[Path]:
    """The files of all entries, for `maskc cache`."""
    return sorted(folder.glob("??/*.bin"))


def clear(folder: Path) -> int:
    """Delete every entry and every temporary file that a killed writer left; the number of entries deleted."""
    found = entries(folder)
    for path in [*found, *folder.glob("??/.*.tmp")]:
        path.unlink(missing_ok=True)
    return len(found)


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.bin"


def _encode(entry: Entry) -> bytes:
    sizes = {name: len(blob) for name, blob in entry.blobs.items()}
    head = json.dumps({"meta": entry.meta, "sizes": sizes}, sort_keys=True).encode()
    body = head + b"\n" + b"".join(entry.blobs.values())
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(data: bytes) -> Entry | None:
    if not data.startswith(_MAGIC):
        return None
    checksum, _, body = data[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    line, _, rest = body.partition(b"\n")
    head = json.loads(line)
    blobs, at = {}, 0
    for name, size in head["sizes"].items():
        blobs[name] = rest[at : at + size]
        at += size
    return Entry(head["meta"], blobs)
