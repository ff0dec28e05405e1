"""Inputs that somebody broke: a coded error or, where the mutation left them legal, an explanation. Never a traceback."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from maskc.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
DOC_PREFIX = str(EXAMPLES / "doc_prefix.mask")
JUNK: tuple[Any, ...] = (
    None,
    True,
    "doc",
    "",
    -1,
    0,
    3,
    17,
    2**31,
    2**63,
    -(2**70),
    1.5,
    1e308,
    [],
    [1],
    [[1, 2], [3]],
    {},
    {"lengths": [1]},
)
FORMS: dict[str, Any] = {
    "lengths": [7, 5, 4],
    "cu_seqlens": [0, 7, 12, 16],
    "ids": [0] * 7 + [1] * 5 + [2] * 4,
    "positions": [*range(7), *range(5), *range(4)],
    "eos": [i in (6, 11, 15) for i in range(16)],
    "ranges": [[0, 7], [7, 12], [12, 16]],
}
WORDS = (*FORMS, "pad", "segments", "spans", "nq", "nk", "inputs", "prefix", "lenghts", "")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every part of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(p for key in keys for p in places(value[key], (*path, key)))]


def broken(rng: random.Random) -> str:
    """The packed example with one to three parts replaced, renamed, removed or doubled, or its text cut."""
    data: Any = json.loads((EXAMPLES / "doc_prefix_16.json").read_text())
    form = rng.choice(list(FORMS))
    data["inputs"]["doc"]["segments"] = {form: FORMS[form], **({"pad": -1} if form == "ids" else {})}
    data = json.loads(json.dumps(data))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(places(data))
        if not path:
            data = rng.choice(([data, deepcopy(data)], [data], data))
            continue
        *outer, last = path
        holder = data
        for key in outer:
            holder = holder[key]
        match rng.randint(0, 4):
            case 0:
                del holder[last]
            case 4 if isinstance(holder, dict):
                holder[rng.choice(WORDS)] = holder.pop(last)
            case 1 if isinstance(holder, list):
                holder.insert(last, deepcopy(holder[last]))
            case _:
                holder[last] = deepcopy(rng.choice(JUNK))
    text = json.dumps(data)
    return text if rng.random() < 0.8 else text[: rng.randrange(len(text))] + rng.choice(("", "{", "\0", "é", "]"))


@pytest.mark.parametrize("seed", range(10))
def test_mutated_inputs(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    path = tmp_path / "inputs.json"
    refused = 0
    for _ in range(25):
        path.write_text(broken(rng))
        status = main(["explain", DOC_PREFIX, "--inputs", str(path)])
        _, err = capsys.readouterr()
        assert "Traceback" not in err, path.read_text()
        assert status in (0, 2), path.read_text() + err
        assert (status == 2) == err.startswith(("error[M4", "error[M5")), path.read_text() + err
        refused += status == 2
    assert refused > 5
