"""Mask files that somebody broke, or wrote to break the compiler: through the whole of `maskc check`, never a traceback."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from maskc.cli import main
from maskc.codes import explain_code
from tests.frontend.test_files import SUITE
from tests.frontend.test_mutations import mutate

ERROR = re.compile(r"^(?:error|warning)\[([MW]\d{3})\]: ", re.MULTILINE)


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    """(status, codes, everything printed) of `maskc check`; an internal error or an unexplained code fails here."""
    status = main(["check", str(path)])
    out, err = capsys.readouterr()
    text = out + err
    codes = ERROR.findall(text)
    assert "Traceback" not in text
    assert "M599" not in codes, text
    assert all(explain_code(code) for code in codes)
    assert (status != 0) == any(code[0] == "M" for code in codes), text
    return status, codes, text


@pytest.mark.parametrize("part", range(5))
def test_two_hundred_mutated_files(part: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parsed, lowered, proved and re-checked; what is proved is explained too."""
    rng = random.Random(part)
    refused = 0
    for i in range(40):
        source = SUITE[(part * 40 + i) % len(SUITE)]
        path = tmp_path / f"{i}.mask"
        path.write_text(mutate(source.read_text(), rng))
        status, _, text = checked(path, capsys)
        refused += status != 0
        if status == 0 and "proved" in text:
            names = re.findall(r": (\w+) is proved", text)
            assert [main(["explain", f"{path}:{name}"]) for name in names] == [0] * len(names)
            capsys.readouterr()
    assert 10 < refused < 40


def lets(first: str, step: str, last: str, count: int = 40) -> str:
    """A chain of lets, each of which names the one before it several times."""
    chain = "".join(f"let a{i + 1} = {step.format(a=f'a{i}', i=i)}\n" for i in range(count))
    return f"input n : int\nlet a0 = {first}\n{chain}mask m = {last.format(a=f'a{count}')}"


HOSTILE: dict[str, tuple[str | bytes, str | None]] = {  # name -> text, the code it ends with (None: proved)
    "nothing": ("", None),
    "a comment alone": ("# nothing here", None),
    "byte order mark": ("\ufeffmask m = k <= q\n", None),
    "lines of Windows": ("input doc : segments\r\nmask m = same(doc) and k <= q\r\n", None),
    "UTF-16": ("mask m = k <= q".encode("utf-16"), "M009"),
    "Latin-1": (b"mask m = k <= q  # caf\xe9", "M009"),
    "a NUL": ("mask m = k \0<= q", "M001"),
    "5000 brackets": ("mask m = " + "(" * 5000 + "k <= q" + ")" * 5000, "M007"),
    "5000 nots": ("mask m = " + "not " * 5000 + "k <= q", "M007"),
    "5000 signs": ("mask m = k <= " + "- " * 5000 + "q", "M007"),
    "3000 terms": ("mask m = k <= q" + " + 1" * 3000, "M007"),
    "400 indices": ("input a : int per key\nmask m = k <= " + "a[" * 400 + "k" + "]" * 400, "M007"),
    "3000 equal conditions": ("mask m = " + " and ".join(["k <= q"] * 3000), None),
    "300 alternatives": ("mask m = " + " or ".join(f"k == q + {i}" for i in range(300)), "M302"),
    "a million cases": ("mask m = " + " and ".join(f"(k <= q + {i} or k >= q + {2 * i})" for i in range(20)), "M302"),
    "a name of 100,000 letters": ("mask " + "a" * 100_000 + " = k <= q", None),
    "a number of 10,000 digits": ("mask m = k <= q + " + "9" * 10_000, "M112"),
    "numbers that double": (lets("n", "{a} + {a}", "{a} + k <= q"), "M125"),
    "conditions that double": (lets("k <= q and n >= 0", "{a} and {a}", "{a}"), "M125"),
    "choices that double": (lets("n", "(if n < {i} then {a} else {a} + 1)", "{a} + k <= q"), "M125"),
    "a let of itself": ("let a = a + 1\nmask m = k <= q + a", "M111"),
    "a macro of itself": ("let f(x) = f(x)\nmask m = k <= f(q)", "M111"),
    "a file that uses itself": ('use x from "file.mask"\nmask m = k <= q', "M118"),
    "a product of 60 inputs": ("input n : int\nmask m = k <= q + " + " * ".join(["n"] * 60), "M609"),
    "40 independent segmentations": (
        "".join(f"input s{i} : spans\n" for i in range(40)) + "mask m = k <= q" + "".join(f" and same(s{i})" for i in range(40)),
        "W301",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_files_written_to_break_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, code = HOSTILE[name]
    path = tmp_path / "file.mask"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    _, codes, shown = checked(path, capsys)
    assert codes[-1:] == ([] if code is None else [code])
    assert code is None or max(map(len, shown.splitlines())) < 500, "a message stays readable, however long the file's lines are"
