"""Command lines put together at random, over data files that somebody broke: status 0, 1 or 2 and coded errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from maskc.cli import main
from tests.cli.test_mutated_inputs import DOC_PREFIX, EXAMPLES, broken

COMMANDS: dict[str, tuple[str, ...]] = {  # what the command needs; DATA and OUT are replaced
    "check": (DOC_PREFIX,),
    "explain": (DOC_PREFIX, "--inputs", "DATA"),
    "compile": (DOC_PREFIX, "--emit", "vectors", "--inputs", "DATA"),
    "plan": (DOC_PREFIX, "--inputs", "DATA", "--world", "2"),
    "diff": ("std:doc_causal", DOC_PREFIX),
}
PIECES = """std:causal std:gemma3 std:gemma3:local std:nope M301 X -1 0 3 2.5 nan --inputs DATA --json --world --nodes --assign
0,1 0,1,1,0 a,b --emit ir tiles proof spec local-vectors --kernel prep --head-dim 64 96 --dtype bf16 fp8 --block-q --block-kv 4
128 -o OUT --strict --deterministic --dump-dir --time --order balanced zigzag --epsilon"""


@pytest.mark.parametrize("seed", range(3))
def test_random_command_lines(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some name folders to write
    rng, pieces = random.Random(seed), PIECES.split()
    data = tmp_path / "data.json"
    good = (EXAMPLES / "doc_prefix_16.json").read_text()
    places = {"DATA": str(data), "OUT": str(tmp_path / "out")}
    statuses = set()
    for _ in range(40):
        data.write_text(broken(rng) if rng.random() < 0.4 else good)
        command = rng.choice(list(COMMANDS))
        needed = COMMANDS[command] if rng.random() < 0.8 else ()
        words = [command, *needed, *(rng.choice(pieces) for _ in range(rng.randint(0, 3)))]
        line = [places.get(word, word) for word in words]
        status = main(line)
        out, err = capsys.readouterr()
        assert status in (0, 1, 2), (words, err)
        assert "Traceback" not in out + err, words
        assert status == 0 or "error[M" in out + err or command == "diff", (words, err)
        statuses.add(status)
    assert {0, 2} <= statuses
