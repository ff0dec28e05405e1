"""The harness of the scaling benchmark without a GPU: which cells it runs, its rows, its file when time is up."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import (
    ALONE,
    FOLDED,
    MASKS,
    SHORT,
    WAYS,
    WORLDS,
    Bench,
    Cell,
    Job,
    Shape,
    Times,
    cell_rows,
    cells,
    counted,
    fits,
    line,
    read,
    summary,
    write,
)
from maskc.binding.bound import BoundMask
from maskc.boundary import BoundaryVectors
from maskc.runtime import ops


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "ROWS", 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_shape_of_the_paper_is_among_the_cells() -> None:
    made = list(cells(Namespace(masks=MASKS, worlds=WORLDS, heads=None, heads_kv=1, head_dim=128)))
    assert [(c.world, c.mask) for c in made] == [(w, m) for w in WORLDS for m in MASKS]
    assert all(c.shape == Shape(32 // c.world, 64, 1, 128) for c in made if c.mask != "causal")
    assert [c.shape.heads for c in made if c.mask == "causal"] == [16, 16, 32, 32]


def test_rows_of_the_model() -> None:
    rows = cell_rows(Cell("causal_document", 4, Shape(8, 2, 1, 128)), WAYS, 3, None)
    assert [r["way"] for r in rows] == list(WAYS)
    peaks = {r["way"]: r["forward_peak_over_mean"] for r in rows}
    assert peaks["default"] == min(peaks.values()) >= 1
    assert all(r["forward_peak_over_mean"] == pytest.approx(r["predicted_peak_over_mean"]) for r in rows)
    assert all(not r["measured"] and "forward_rate_against_one" not in r for r in rows)
    assert all(line(r) for r in rows)
    assert summary(rows).splitlines()[1].split()[:2] == ["causal_docum", "4"]


def test_rows_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of ranks is the time of the whole mask over the sum of theirs; uneven ways take part in one round."""
    asked: dict[str, int] = {}

    class Bench:
        def __init__(self, shape: Shape, length: int, device: torch.device) -> None:
            assert length == 4096

        def run(self, jobs: dict[str, Job], rounds: int) -> dict[str, Times]:
            asked.update({label: job.rounds for label, job in jobs.items()})
            assert jobs[SHORT].batch == 2
            return {label: Times(8.0, 16.0) if label == ALONE else Times(2.0, 5.0) for label in jobs}

    monkeypatch.setattr(scaling, "Bench", Bench)
    bound = BoundMask.vectors
    monkeypatch.setattr(BoundMask, "vectors", lambda self, nq=None, nk=None, device=None: bound(self, nq, nk))
    rows = cell_rows(Cell("causal_document", 4, Shape(8, 2, 1, 128)), ("contiguous", "default"), 3, torch.device("cpu"))
    assert asked[ALONE] == asked["default 3"] == 3
    assert (asked["contiguous 0"], asked[FOLDED]) == (1, 2)
    for r in rows:
        assert (r["forward_rate_against_one"], r["backward_rate_against_one"]) == (1.0, 0.8)
        assert (r["forward_rate_folded"], r["forward_rate_short"]) == (4.0, 1.0)
        assert r["forward_peak_over_mean"] == 1.0
        assert r["ranks_ms"] == [[2000.0, 5000.0]] * 4


def test_forwards_and_backwards_have_rounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job as often as it is wanted, backwards with the sizes and lse of their own forward, behind calls of their kind."""
    clock, calls = [0.0], list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    def timed(name: str, seconds: float) -> Any:
        real = getattr(ops, name)

        def run(v: BoundaryVectors, *args: Any, **more: Any) -> Any:
            clock[0] += seconds * v.nq / 1024
            calls.append(f"{name} {v.nq}")
            return real(v, *args, **more)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(scaling.hopper, "schedule", lambda v, head_dim: None)
    monkeypatch.setattr(ops, "forward", timed("forward", 0.25))
    monkeypatch.setattr(ops, "backward", timed("backward", 0.5))
    whole, rank = (BoundaryVectors(n, 1024, 1, 1, n == 1024) for n in (1024, 128))
    jobs = {ALONE: Job(whole, 2), SHORT: Job(whole, 2, 1), "rank": Job(rank, 1)}
    times = Bench(Shape(2, 2, 1, 16), 1024, torch.device("cpu")).run(jobs, 2)
    assert times == {ALONE: Times(0.25, 0.5), SHORT: Times(0.25, 0.5), "rank": Times(0.25 / 8, 0.5 / 8)}
    assert calls.count("forward 1024") == calls.count("backward 1024") == 1 + 2 * 2
    kinds = [call.split()[0] for call in calls]
    assert [kind for kind, _ in groupby(kinds)] == ["forward", "backward"] * 3


def test_tiles_are_counted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zigzag on 4 ranks, in whole tiles: a rank reads all keys up to its second piece, so 5 to 8 of 8 pieces."""
    out = tmp_path / "scaling.json"
    rows = cell_rows(Cell("causal", 4, Shape(8, 2, 1, 128)), WAYS, 3, None)
    write(out, {"device": "none"}, rows)
    monkeypatch.setattr(sys, "argv", ["scaling", "--tiles", "--out", str(out)])
    scaling.main()
    counted = {r["way"]: r for r in json.loads(out.read_text())["rows"] if "ranks_tiles" in r}
    assert set(counted) == {"default"}
    row = counted["default"]
    assert [row[f"{kind}_tiles_over_one"] for kind in ("forward", "backward", "key")] == [1, 1, (5 + 6 + 7 + 8) / 8]
    assert [keys for *_, keys in row["ranks_tiles"]] == [32, 28, 24, 20]


def test_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    options = ["--worlds", "4", "8", "--masks", "causal", "--ways", "default", "--seconds", "-1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["scaling", *options])
    scaling.main()
    data = json.loads(out.read_text())
    assert data["rows"] == []
    assert [(c["mask"], c["world"]) for c in data["not_run"]] == [("causal", 4), ("causal", 8)]
    assert "no time left for causal P=4, causal P=8" in capsys.readouterr().out


def test_costs_are_fitted_over_all_masks() -> None:
    """Times that are made of tiles give the costs of those tiles; uneven ways and the model's rows are left out."""
    cases = [Cell(mask, 4, Shape(8, h, 1, 128)) for h, mask in ((2, "causal_document"), (3, "sliding_window"), (5, "causal"))]
    rows = []
    for cell in cases:
        tiles = counted(cell)["ranks_tiles"]
        scale = cell.shape.batch * cell.shape.heads
        forward = [0.02 + 1e-3 * scale * (1.1 * p + u + 0.5 * n + 0.3 * k) for p, u, n, k in tiles]
        timed = {"measured": True, "batch": 8, "heads": cell.shape.heads, "ranks_ms": [[t, 2.5 * t] for t in forward]}
        rows += [timed | {"ranks_tiles": tiles}, timed | {"ranks_ms": [[1.0, 1.0]] * 4}]
    assert fits(rows[:2]) == {}
    for fit in fits(rows).values():
        assert [fit[name] for name in ("partial", "row", "keys")] == pytest.approx([1.1, 0.5, 0.3])
        assert fit["deviation"] == pytest.approx(0, abs=1e-9)
        assert fit["samples"] == 12
    assert fits(rows)["backward"]["call_s"] == pytest.approx(5e-5)


def test_the_file_is_json_with_a_line_a_row(tmp_path: Path) -> None:
    rows = cell_rows(Cell("causal", 4, Shape(8, 2, 1, 128)), WAYS, 3, None)
    write(tmp_path / "scaling.json", {"device": "none", "not_run": []}, rows)
    text = (tmp_path / "scaling.json").read_text()
    assert json.loads(text) == {"device": "none", "not_run": [], "fit": {}, "rows": rows}
    assert read(tmp_path / "scaling.json") == ({"device": "none", "not_run": []}, rows)
    assert text.count("\n") < 20
