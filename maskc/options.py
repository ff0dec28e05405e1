"""The few knobs of maskc, read once. The only module that reads the environment.

An environment variable is a default for a command-line flag, never a second way to say something else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from maskc.diagnostics import error

CheckLevel = Literal[0, 1, 2]

# name, what it sets, what it means: shown by `maskc --help` and by `maskc doctor`
VARIABLES: tuple[tuple[str, str], ...] = (
    ("MASKC_CACHE_DIR", "folder of compiled kernels (default: $XDG_CACHE_HOME/maskc or ~/.cache/maskc)"),
    ("MASKC_DUMP_DIR", "write every stage of a compile there, as --dump-dir does"),
    ("MASKC_CHECK", "0 no checks, 1 read every text form back, 2 also compare with the oracle on small inputs"),
    ("MASKC_TRACE", "1: print the time of every stage, and the Python traceback of an internal error"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """cache_dir: folder of compiled kernels. dump_dir: where stages are written, or None. check: see `VARIABLES`."""

    cache_dir: Path
    dump_dir: Path | None = None
    check: CheckLevel = 0
    trace: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Options:
        """Options of an environment (of this process by default). Raises M543 for a value that has no meaning."""
        env = os.environ if env is None else env
        dump = env.get("MASKC_DUMP_DIR")
        return cls(
            cache_dir=_cache_dir(env),
            dump_dir=Path(dump) if dump else None,
            check=_check_level(env.get("MASKC_CHECK") or "0"),
            trace=_switch("MASKC_TRACE", env.get("MASKC_TRACE") or "0"),
        )


def _cache_dir(env: Mapping[str, str]) -> Path:
    own = env.get("MASKC_CACHE_DIR")
    return Path(own).expanduser() if own else default_cache_dir(env)


def default_cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """The folder of compiled kernels where MASKC_CACHE_DIR does not name one."""
    env = os.environ if env is None else env
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared) / "maskc"
    return Path(env.get("HOME") or Path.home()) / ".cache" / "maskc"


def _check_level(text: str) -> CheckLevel:
    for level in get_args(CheckLevel):
        if text == str(level):
            return level  # type: ignore[no-any-return]
    raise error("M543", f"MASKC_CHECK = {text!r} is not a check level", None, "use 0, 1 or 2")


def _switch(name: str, text: str) -> bool:
    if text in ("0", "1"):
        return text == "1"
    raise error("M543", f"{name} = {text!r} is not a switch", None, "use 0 or 1")
