"""The page as a file: well-formed, alone, and true to the library."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from maskc.cli import main
from maskc.frontend.load import std_names
from maskc.pictures import visible_pairs
from maskc.report.cases import Subject
from maskc.report.encode import ranks
from maskc.report.gallery import EXAMPLES
from maskc.report.page import as_json
from maskc.report.plans import pair_work
from maskc.runtime.plan import plan
from maskc.tiles import TileClass, classify

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "br", "input", "hr", "img"}
EXAMPLE = [str(ROOT / "examples" / "doc_prefix.mask"), "--inputs", str(ROOT / "examples" / "doc_prefix_16.json")]


class Outline(HTMLParser):
    """Checks that elements nest and that no id appears twice; collects what could be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "srcset", "data", "poster") or (name == "href" and not (value or "").startswith("#")):
                self.fetched.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    assert text.startswith("<!doctype html>")
    parser = Outline()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert len(set(parser.ids)) == len(parser.ids)
    return parser


def check_alone(text: str) -> None:
    """Nothing on the page is fetched, by an element, a style or a script."""
    assert outline(text).fetched == []
    for style in re.findall(r"<style>(.*?)</style>", text, re.S):
        assert not re.search(r"url\(|@import", style)
    for script in re.findall(r"<script>(.*?)</script>", text, re.S):
        assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|importScripts|import)\b\s*\(", script)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "out.html"
    assert main(["explain", *EXAMPLE, "--html", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def test_page_stands_alone(page: str) -> None:
    check_alone(page)
    assert len(page.encode()) < 2_000_000


def test_page_holds_the_users_mask_and_the_standard_set(page: str) -> None:
    cases = data_of(page)["cases"]
    assert [(c["group"], c["name"]) for c in cases] == [("yours", "doc_prefix"), *(("standard", n) for n in EXAMPLES)]
    assert cases[0]["plan"] is not None
    assert all(c["plan"] is None and c["comm"] is None for c in cases[1:])
    assert {name.partition(":")[0] for name in EXAMPLES} == set(std_names())


def test_every_mask_of_a_file_is_shown(tmp_path: Path) -> None:
    """Their data may come through a pipe, which can be read once."""
    file, inputs, out = tmp_path / "two.mask", tmp_path / "in.json", tmp_path / "out.html"
    file.write_text("input w : int\nmask near = k <= q < k + w\nmask far = k + w <= q\n")
    inputs.write_text('{"nq": 20, "nk": 20, "inputs": {"w": 5}}')
    pipe, end = os.pipe()
    os.write(end, inputs.read_bytes())
    os.close(end)
    assert main(["explain", str(file), "--inputs", f"/dev/fd/{pipe}", "--html", str(out)]) == 0
    os.close(pipe)
    names = [c["name"] for c in data_of(out.read_text())["cases"] if c["group"] == "yours"]
    assert names == ["near", "far"]
    assert main(["explain", f"{file}:far", "--inputs", str(inputs), "--html", str(out)]) == 0
    assert data_of(out.read_text())["cases"][0]["name"] == "far"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "x.html"], "needs a mask to show"),
        (["--gallery"], "--gallery goes with --html"),
        ([EXAMPLE[0], "--html", "x.html"], "needs data: doc, prefix"),
        ([*EXAMPLE, "--html", "no/such/folder/x.html"], "cannot write"),
    ],
)
def test_misuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_text_of_a_mask_cannot_end_the_script() -> None:
    held = as_json({"source": "# </script><script>alert(1)</script> <!-- "})
    assert "<" not in held
    assert json.loads(held)["source"].startswith("# </script>")


def test_counts_are_the_librarys(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    for name, s in subjects.items():
        v, c = s.bound.vectors(), cases[name]
        assert c["visible"] == visible_pairs(v) == int((~v.masked()).sum())
        for size, counts in c["tiles"].items():
            rows, keys = map(int, size.split("x"))
            classes = classify(v, rows, keys)
            assert counts == [int((classes == x).sum()) for x in TileClass]


def test_plans_are_the_librarys(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    for name in ("causal", "doc_prefix", "global_window", "cross_pairs"):
        s, c = subjects[name], cases[name]
        assert s.scaled is not None
        v = s.scaled.vectors()
        assert c["plan"]["nq"] == v.nq
        for choice, option in c["plan"]["options"].items():
            world = int(choice.split(",")[0])
            p = plan(v, world_size=world, chunk=option["chunk"])
            assert option["loads"] == list(p.parts[0].workloads)
            assert (option["lower"], option["proven"]) == (p.lower_bound, p.proven_bound)
            ways = {name: way["owner"] for name, way in option["ways"].items()}
            assert ranks(p.rows.owner) in [ways.get(n) for n in ("stage 1", "contiguous", "dual chunk")]
            if "stage 3" in ways:
                chosen = plan(v, world_size=world, nodes=2, chunk=option["chunk"])
                assert ranks(chosen.rows.owner) in [ways.get(n) for n in ("stage 3", "node first", "contiguous", "dual chunk")]


def test_ways_are_what_they_are_called(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    s = subjects["doc_prefix"]
    assert s.scaled is not None
    v = s.scaled.vectors()
    for choice, option in cases["doc_prefix"]["plan"]["options"].items():
        world = int(choice.split(",")[0])
        for way, order in (("contiguous", "contiguous"), ("dual chunk", "zigzag")):
            p = plan(v, world_size=world, chunk=option["chunk"], order=order)  # type: ignore[arg-type]
            assert option["ways"][way]["owner"] == ranks(p.rows.owner), (choice, way)


def test_pair_work_adds_up_to_the_workloads(subjects: dict[str, Subject]) -> None:
    for name in ("causal", "doc_prefix", "cross_pairs"):
        s = subjects[name]
        assert s.scaled is not None
        v = s.scaled.vectors()
        p = plan(v, world_size=8, nodes=2, chunk=16)
        work = pair_work(v, p.rows, p.keys)
        assert work.sum(1).tolist() == list(p.parts[0].workloads)
        needed = [[bool(bits >> j & 1) for j in range(p.keys.chunk_count)] for bits in p.parts[0].need]
        assert (work > 0).tolist() == needed


def test_words_are_those_of_explain(subjects: dict[str, Subject], cases: dict[str, Any]) -> None:
    from maskc.explain import explain

    for name, s in subjects.items():
        told = explain(s.bound.compiled)
        assert cases[name]["rows"] == list(told.rows)
        assert cases[name]["words"] == dict(told.vectors)
