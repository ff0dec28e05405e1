"""Files in, typed files out: `parse_file`, `parse_text`, `use` and the packaged standard masks (`std:causal`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from maskc.diagnostics import Diagnostic, MaskcError, SourceFile, Span, error
from maskc.frontend import ast
from maskc.frontend.parser import parse
from maskc.frontend.session import Session
from maskc.frontend.typecheck import Checker
from maskc.frontend.words import did_you_mean, quoted
from maskc.ir.nodes import MaskFn

STD = "std:"
MAX_FILES = 50
"""That use one another in a row."""


@dataclass(frozen=True, slots=True)
class TypedFile:
    """The masks of one file, in its order. `path` is what the user typed."""

    path: str
    masks: tuple[MaskFn, ...]
    warnings: tuple[Diagnostic, ...]

    def pick(self, name: str | None = None) -> MaskFn:
        """The mask `name`; without a name, or by the file's own name, the only mask of the file."""
        for m in self.masks:
            if m.name == name:
                return m
        names = [m.name for m in self.masks]
        stem = self.path.removeprefix(STD) if self.path.startswith(STD) else Path(self.path).stem
        if name in (None, stem):
            if len(self.masks) == 1:
                return self.masks[0]
            if not self.masks:
                raise error("M124", f"{self.path} declares no mask", None, "add `mask name = ...`")
            raise error(
                "M124",
                f"{self.path} declares {len(names)} masks",
                None,
                f"say which: {quoted((f'{self.path}:{n}' for n in names), 'or')}",
            )
        raise error("M124", f"{self.path} has no mask `{name}`", None, did_you_mean(name or "", names, f"it has {quoted(names)}"))


def split_target(target: str) -> tuple[str, str | None]:
    """`file.mask:name` or `std:file:name` -> (file, name); without a name, (file, None)."""
    prefix = STD if target.startswith(STD) else ""
    head, colon, tail = target[len(prefix) :].rpartition(":")
    if colon and head and tail.isidentifier():
        return prefix + head, tail
    return target, None


@cache
def std_names() -> tuple[str, ...]:
    """The files of the standard set, as in `std:NAME`."""
    folder = files("maskc").joinpath("std")
    return tuple(sorted(f.name.removesuffix(".mask") for f in folder.iterdir() if f.name.endswith(".mask")))


def parse_file(path: str | Path) -> TypedFile:
    """Reads and types a file, or `std:NAME`; raises MaskcError with every error found in it and in what it uses."""
    text_path = str(path)
    return _Loader().typed(SourceFile(text_path, _read(text_path, Path(), None)), _key(text_path, Path()))


def parse_module(path: str | Path) -> ast.Module:
    """The syntax tree of a file or `std:NAME`, names unresolved; raises MaskcError with every syntax error."""
    source = SourceFile(str(path), _read(str(path), Path(), None))
    parsed = parse(source)
    if parsed.errors:
        raise MaskcError(parsed.errors)
    return parsed.module


def parse_text(text: str, name: str = "<text>") -> TypedFile:
    """As parse_file, for a text; `use` paths are relative to the current folder."""
    return _Loader().typed(SourceFile(name, text), None)


class _Loader:
    """The files of one compilation, each read once."""

    def __init__(self) -> None:
        self._session = Session()
        self._done: dict[str, Checker] = {}
        self._open: list[tuple[str, str]] = []  # (key, shown path) of files whose `use`s are being followed

    def typed(self, source: SourceFile, key: str | None) -> TypedFile:
        root = self._check(source, key or source.path, Path() if key is None else _folder(source.path, Path()))
        masks = root.masks()
        for file in (root, *self._done.values()):
            file.check_divisors()
        errors = sorted(
            self._session.errors, key=lambda d: (d.span is None or d.span.source is not source, d.span.start if d.span else 0)
        )
        if errors:
            raise MaskcError(errors)
        assert len(masks) == sum(isinstance(d, ast.Mask) for d in root.module.decls), "a mask was lost without an error"
        warnings = tuple(w for w in self._session.warnings if w.span is not None and w.span.source is source)
        return TypedFile(source.path, masks, warnings)

    def _check(self, source: SourceFile, key: str, folder: Path) -> Checker:
        self._open.append((key, source.path))
        try:
            return Checker(parse(source), self._session, self._opener(folder))
        finally:
            self._open.pop()

    def _opener(self, folder: Path) -> Callable[[ast.Use], Checker | None]:
        def open_file(use: ast.Use) -> Checker | None:
            key = _key(use.path, folder)
            if key in self._done:
                return self._done[key]
            keys = [k for k, _ in self._open]
            if key in keys:
                chain = [shown for _, shown in self._open[keys.index(key) :]]
                text = f"files use each other in a circle: {' -> '.join([*chain, use.path])}"
                self._session.report(Diagnostic("M118", text, use.path_span, "move what both need into a third file"))
                return None
            if len(self._open) > MAX_FILES:
                text = f"files that use files, more than {MAX_FILES} deep"
                self._session.report(Diagnostic("M118", text, use.path_span, "move what all need into one file"))
                return None
            try:
                source = SourceFile(_shown(use.path, folder), _read(use.path, folder, use.path_span))
            except MaskcError as e:
                self._session.report(e.diagnostics[0])
                return None
            self._done[key] = self._check(source, key, _folder(use.path, folder))
            return self._done[key]

        return open_file


def _key(path: str, folder: Path) -> str:
    """One string per file, however it is written. What cannot be a path is said by whoever reads it."""
    try:
        return path if path.startswith(STD) else str((folder / path).resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, links in a circle
        return str(folder / path)


def _folder(path: str, folder: Path) -> Path:
    """Where the `use` paths of a file start."""
    return Path(str(files("maskc").joinpath("std"))) if path.startswith(STD) else (folder / path).parent


def _shown(path: str, folder: Path) -> str:
    return path if path.startswith(STD) else str(folder / path)


def _read(path: str, folder: Path, span: Span | None) -> str:
    """The text of a file. M009 for a file given by the user, M117 for one that a `use` names."""
    code = "M009" if span is None else "M117"
    if path.startswith(STD):
        name = path.removeprefix(STD)
        if name not in std_names():
            hint = did_you_mean(name, std_names(), f"there are {quoted(std_names())}")
            message = f"there is no standard mask `{name}`" if name else "`std:` needs the name of a standard mask"
            raise error(code, message, span, hint)
        return files("maskc").joinpath("std", f"{name}.mask").read_text("utf-8")
    where = folder / path
    try:
        return where.read_text("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(code, f"cannot read {where}: it is not UTF-8 text (byte {e.start})", span) from None
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        hint = None if span is None else "paths are relative to the folder of the file that has the `use`"
        if isinstance(e, FileNotFoundError) and where.parent.is_dir():
            hint = did_you_mean(where.name, (f.name for f in where.parent.glob("*.mask")), hint)
        raise error(code, f"cannot read {where}: {reason}", span, hint) from None
