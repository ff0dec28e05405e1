"""Files for `--inputs`: JSON -> the keywords of `CompiledMask.bind`.

    {"nq": 16, "nk": 16, "inputs": {"doc": {"segments": {"lengths": [7, 5, 4]}}, "prefix": [3, 0, 2]}}

A segment or span input is `{"segments": {...}}` or `{"spans": {...}}` with the keywords of that constructor; every other
input is a number, a truth value or a list. A batch is a list of such objects, one for every item.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from maskc.diagnostics import Diagnostic, MaskcError, SourceFile, Span, error
from maskc.files import read_text

if TYPE_CHECKING:
    from maskc.binding.bound import BoundMask
    from maskc.compiled import CompiledMask

JSON_HELP = 'the form is {"nq": 16, "nk": 16, "inputs": {"doc": {"segments": {"lengths": [7, 5, 4]}}, "prefix": [3, 0, 2]}}'
BATCH = "; a batch is a list of such objects"
CONSTRUCTORS = ("segments", "spans")

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of `bind` that a file gives; `values` are the mask's inputs by name."""

    nq: int | None
    nk: int | None
    batch: int | None
    values: JsonObject


def bind_file(mask: CompiledMask, path: str | Path) -> BoundMask:
    """`mask.bind` with what the file gives. Raises M541, M542 and what `bind` raises."""
    given = read_inputs(path)
    try:
        return bind_inputs(mask, given)
    except MaskcError as e:
        raise MaskcError([_in_json(d) for d in e.diagnostics]) from None


def _in_json(d: Diagnostic) -> Diagnostic:
    """What to do about a missing input, in the words of the file instead of those of `bind`."""
    return replace(d, help=JSON_HELP) if d.code == "M410" else d


def bind_inputs(mask: CompiledMask, given: Inputs) -> BoundMask:
    """`mask.bind` with what was read."""
    from maskc.binding.bind import bind

    return bind(mask, nq=given.nq, nk=given.nk, batch=given.batch, validate=True, inputs=given.values)


def read_inputs(path: str | Path) -> Inputs:
    """Raises M541 for a file that cannot be read and M542 for one that is not such JSON, with its line and column."""
    items = _items(path)
    names = list(_inputs(items[0], path))
    for number, item in enumerate(items):
        if sorted(_inputs(item, path)) != sorted(names):
            raise _bad(path, f"item {number} of the batch gives {_listed(_inputs(item, path))}, item 0 gives {_listed(names)}")
    columns = {name: [_value(name, _inputs(item, path)[name], path) for item in items] for name in names}
    batch = len(items) if len(items) > 1 else None
    values: JsonObject = {name: column if batch else column[0] for name, column in columns.items()}
    return Inputs(_size("nq", items, path), _size("nk", items, path), batch, values)


def _items(path: str | Path) -> list[JsonObject]:
    data = _load(path)
    items = data if isinstance(data, list) else [data]
    if not items:
        raise _bad(path, "the batch is empty")
    for item in items:
        if not isinstance(item, dict):
            raise _bad(path, f"expected an object with nq, nk and inputs, found {json.dumps(item)[:40]}")
        if unknown := [key for key in item if key not in ("nq", "nk", "inputs")]:
            raise _bad(
                path, f"unknown key {unknown[0]!r}: an object holds nq, nk and inputs{BATCH if unknown[0] == 'batch' else ''}"
            )
    return cast(list[JsonObject], items)


def _load(path: str | Path) -> object:
    def object_of(pairs: list[tuple[str, object]]) -> JsonObject:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _bad(path, f"{twice!r} is given twice in one object")
        return found

    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise _bad(path, "lists or objects within one another, deeper than any input") from None
    except json.JSONDecodeError as e:
        span = Span(SourceFile(str(path), text), e.pos, e.pos + 1)
        raise MaskcError(Diagnostic("M542", f"not JSON: {e.msg.lower()}", span, JSON_HELP)) from None


def _inputs(item: JsonObject, path: str | Path) -> JsonObject:
    inputs = item.get("inputs", {})
    if not isinstance(inputs, dict):
        raise _bad(path, f"`inputs` is an object of names and values, not {json.dumps(inputs)[:40]}")
    return inputs


def _size(size: str, items: list[JsonObject], path: str | Path) -> int | None:
    value = items[0].get(size)
    if any(item.get(size) != value for item in items):
        found = ", ".join(json.dumps(item.get(size)) for item in items)
        raise _bad(path, f"all items of a batch have one {size}, found {found}")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise _bad(path, f"{size} = {json.dumps(value)[:40]} is not a size")
    return value


def _value(name: str, value: object, path: str | Path) -> object:
    """A JSON value as `bind` takes it."""
    if not isinstance(value, dict):
        return value
    from maskc.binding import constructors

    if len(value) != 1 or (kind := next(iter(value))) not in CONSTRUCTORS or not isinstance(value[kind], dict):
        raise _bad(path, f'input `{name}`: an object here is {{"segments": {{...}}}} or {{"spans": {{...}}}}')
    given, words = value[kind], (*get_args(constructors.Form), "pad")
    if unknown := [word for word in given if word not in words]:
        close = difflib.get_close_matches(unknown[0], words, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(words)}"
        raise _bad(path, f"input `{name}`: {kind} have no {unknown[0]!r}: {meant}")
    construct = constructors.segments if kind == "segments" else constructors.spans
    return construct(**given)


def _listed(names: JsonObject | list[str]) -> str:
    return ", ".join(names) or "nothing"


def _bad(path: str | Path, message: str) -> MaskcError:
    return error("M542", f"{path}: {message}", None, JSON_HELP)
