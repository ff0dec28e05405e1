"""Files for `--inputs`: JSON -> the keywords of `CompiledMask.bind`.

    {"nq": 16, "nk": 16, "inputs": {"doc": {"segments": {"lengths": [7, 5, 4]}}, "prefix": [3, 0, 2]}}

A segment or span input is `{"segments": {...}}` or `{"spans": {...}}` with the keywords of that constructor; every other
input is a number, a truth value or a list. A batch is a list of such objects, one for every item.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from maskc.diagnostics import Diagnostic, MaskcError, SourceFile, Span, error

JSON_HELP = 'the form is {"nq": 16, "nk": 16, "inputs": {"doc": {"segments": {"lengths": [7, 5, 4]}}, "prefix": [3, 0, 2]}}'
CONSTRUCTORS = ("segments", "spans")

JsonObject = dict[str, object]


def read_inputs(path: str | Path) -> JsonObject:
    """Keywords for `bind`: nq and nk where the file gives them, batch for a list, and every input.

    Raises M541 for a file that cannot be read and M542 for one that is not such JSON, with its line and column.
    """
    items = _items(path)
    names = list(_inputs(items[0], path))
    for number, item in enumerate(items):
        if list(_inputs(item, path)) != names:
            raise _bad(path, f"item {number} of the batch gives {_listed(_inputs(item, path))}, item 0 gives {_listed(names)}")
    sizes = {size: _common(size, items, path) for size in ("nq", "nk") if size in items[0]}
    columns = {name: [_value(name, _inputs(item, path)[name], path) for item in items] for name in names}
    if len(items) == 1:
        return {**sizes, **{name: values[0] for name, values in columns.items()}}
    return {**sizes, "batch": len(items), **columns}


def _items(path: str | Path) -> list[JsonObject]:
    data = _load(path)
    items = data if isinstance(data, list) else [data]
    if not items:
        raise _bad(path, "the batch is empty")
    for item in items:
        if not isinstance(item, dict):
            raise _bad(path, f"expected an object with nq, nk and inputs, found {json.dumps(item)[:40]}")
        if unknown := [key for key in item if key not in ("nq", "nk", "inputs")]:
            raise _bad(path, f"unknown key {unknown[0]!r}: an object holds nq, nk and inputs")
    return cast(list[JsonObject], items)


def _load(path: str | Path) -> object:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except IsADirectoryError:
        raise error("M541", f"{path} is a directory, not a JSON file of inputs") from None
    except OSError as e:
        raise error("M541", f"cannot read {path}: {(e.strerror or str(e)).lower()}") from None
    except UnicodeDecodeError as e:
        raise error("M541", f"{path} is not UTF-8 text (byte {e.start})", None, JSON_HELP) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        span = Span(SourceFile(str(path), text), e.pos, e.pos + 1)
        raise MaskcError(Diagnostic("M542", f"not JSON: {e.msg.lower()}", span, JSON_HELP)) from None


def _inputs(item: JsonObject, path: str | Path) -> JsonObject:
    inputs = item.get("inputs", {})
    if not isinstance(inputs, dict):
        raise _bad(path, f"`inputs` is an object of names and values, not {json.dumps(inputs)[:40]}")
    return inputs


def _common(size: str, items: list[JsonObject], path: str | Path) -> int:
    values = {json.dumps(item.get(size)) for item in items}
    value = items[0][size]
    if len(values) > 1:
        raise _bad(path, f"all items of a batch have one {size}, found {', '.join(sorted(values))}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad(path, f"{size} = {json.dumps(value)[:40]} is not a size")
    return value


def _value(name: str, value: object, path: str | Path) -> object:
    """A JSON value as `bind` takes it."""
    if not isinstance(value, dict):
        return value
    from maskc.binding import constructors

    if len(value) != 1 or (kind := next(iter(value))) not in CONSTRUCTORS or not isinstance(value[kind], dict):
        raise _bad(path, f'input `{name}`: an object here is {{"segments": {{...}}}} or {{"spans": {{...}}}}')
    construct = constructors.segments if kind == "segments" else constructors.spans
    return construct(**value[kind])


def _listed(names: JsonObject | list[str]) -> str:
    return ", ".join(names) or "nothing"


def _bad(path: str | Path, message: str) -> MaskcError:
    return error("M542", f"{path}: {message}", None, JSON_HELP)
