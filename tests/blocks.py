"""Code blocks of the documentation: found, laid out in a folder, and run.

```mask      is proved; a first line `# NAME.mask` also writes it to that file, for the blocks after it
```mask refused   is a mask that must be refused
```python    runs, all blocks of a page in one namespace; `python needs transformers` where that is installed
```console   `$ maskc ...` and `$ python ...` run in that folder; what is shown below a command must be what it prints
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from maskc.diagnostics import MaskcError
from maskc.frontend import parse_text
from maskc.targets import compile_fn

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SELF_RUN = ("make ",)  # commands that another test runs


@dataclass(frozen=True, slots=True)
class Block:
    """`info` is what stands behind the fence."""

    page: Path
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[1].strip(), m[2]) for m in FENCE.finditer(text)]


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """(command, what it is shown to print) of a console block."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


class Folder:
    """Where the blocks of one page run: the examples, and the files that the page itself shows."""

    def __init__(self, path: Path, *, update: bool = False) -> None:
        self.path = path
        self.update = update
        self.namespace: dict[str, object] = {"__name__": "__page__"}
        shutil.copytree(ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, block: Block) -> None:
        match block.info:
            case "mask" | "mask refused":
                self._mask(block)
            case "python needs transformers" if find_spec("transformers") is None:
                pass
            case "python" | "python needs transformers":
                with pytest.MonkeyPatch.context() as patch:
                    patch.chdir(self.path)
                    exec(compile(block.text, str(block), "exec"), self.namespace)
            case "console":
                self._console(block)
            case "" | "json" | "text":
                pass
            case _:
                raise AssertionError(f"{block}: no rule for a block of {block.info!r}")

    def _console(self, block: Block) -> None:
        now = "".join(f"$ {c}\n{shown if c.startswith(SELF_RUN) else self.output(c)}" for c, shown in commands(block))
        if self.update:
            page = block.page.read_text(encoding="utf-8")
            block.page.write_text(page.replace(f"```console\n{block.text}```", f"```console\n{now}```", 1), encoding="utf-8")
        else:
            assert now == block.text, f"{block} shows something else; if the page is stale: pytest --update-golden"

    def output(self, command: str) -> str:
        """What a command prints, errors included."""
        program, *arguments = command.split()
        assert program in ("maskc", "python"), f"$ {command}: only maskc and python are run"
        module = ["-m", "maskc"] if program == "maskc" else []
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        call = [sys.executable, *module, *arguments]
        done = subprocess.run(call, cwd=self.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout

    def _mask(self, block: Block) -> None:
        if named := re.match(r"# (\w+\.mask)\n", block.text):
            (self.path / named[1]).write_text(block.text[named.end() :], encoding="utf-8")
        if block.info == "mask refused":
            with pytest.raises(MaskcError):
                _prove(block)
        else:
            _prove(block)


def _prove(block: Block) -> None:
    file = parse_text(block.text, str(block))
    for fn in file.masks:
        compile_fn(fn)
