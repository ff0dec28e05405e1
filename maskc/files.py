"""Reading and writing text files with errors that a user can act on (M541)."""

from __future__ import annotations

import errno
from pathlib import Path

from maskc.diagnostics import MaskcError, error

# what a write fails with where a disk or a quota is full, or a device is broken
OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file. Raises M541."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except IsADirectoryError:
        raise error("M541", f"{path} is a directory, not a file") from None
    except OSError as e:
        raise error("M541", f"cannot read {path}: {_reason(e)}") from None
    except UnicodeDecodeError as e:
        raise error("M541", f"{path} is not UTF-8 text (byte {e.start})") from None


def unwritable(path: str | Path, e: OSError) -> MaskcError:
    """M541 for a file or folder that could not be written."""
    return error("M541", f"cannot write {e.filename or path}: {_reason(e)}")


def _reason(e: OSError) -> str:
    return (e.strerror or str(e)).lower()
