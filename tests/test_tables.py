"""Figures in the documentation are those of benchmarks/results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import glance, records, tables, tables_kernels
from tests.report.test_benchmarks import results

RECORDS = sorted(records.RESULTS.glob("*.json"))


def _rows(part: object) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(row, dict) for row in part)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: p.name)
def test_figures_of(page: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        page.write_text(tables.fill(text), encoding="utf-8")
    else:
        assert tables.fill(text) == text, f"{page.name} shows other figures: python -m benchmarks.tables"


def test_the_picture_of_the_readme(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        glance.FILE.write_text(glance.glance(), encoding="utf-8")
    assert glance.FILE.read_text(encoding="utf-8") == glance.glance(), "docs/glance.svg is stale: python -m benchmarks.tables"


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: p.name)
def test_every_mark_is_a_place(page: Path) -> None:
    """A misspelt or unclosed mark would stay as it is for ever."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"<!--.*?-->", tables.PLACE.sub("", text))


def test_filling_replaces_what_stood_between_the_marks() -> None:
    line = tables.fill("a <!--passed-->9 of 9<!--/--> b")
    assert line == f"a <!--passed-->{tables_kernels.passed()}<!--/--> b"
    assert tables.fill(line) == line
    lines = tables.fill("<!--conformance-->\nold\n<!--/-->\n")
    assert "old" not in lines
    assert lines.count("\n| ") == tables_kernels.conformance().count("\n| ") + 1
    assert tables.fill(lines) == lines


@pytest.fixture
def records_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of benchmarks/results."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    records.results.cache_clear()
    yield tmp_path
    records.results.cache_clear()


PLACES = sorted(
    {m.group(0) for page in tables.pages() for m in tables.PLACE.finditer(page.read_text(encoding="utf-8")) if m.group(2) is None}
    | {
        f"<!--{name}:{argument}-->\n<!--/-->"
        for name, argument in (
            ("kernels", "8192"),
            ("origin", "train"),
            ("gain_at", "256"),
            ("hidden", "forward"),
            ("hidden_gpus", "forward"),
            ("ablated", "full"),
            ("link_costs", "full link"),
        )
    }
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[4:].partition("--")[0])
def test_a_figure_without_data_says_so(records_in: Path, place: str) -> None:
    assert "measured yet" in tables.fill(place)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("by_length", "| flex | 1.60 (1.50 to 1.70), 3 | 1.80 (1.70 to 1.90), 3 | 1.70 (1.50 to 1.90), 6 |"),
        (
            "headline",
            "1.60 / 1.80 times as fast as FlexAttention at 8K / 32K tokens** (forward and backward, geometric mean of 3 masks)",
        ),
        ("kernels:8192", "**1.598**"),
        ("kernels:8192", "| causal | 0.500 (0.508) | 4.00 / 10.00 | 6.00 / 15.00 |"),
        ("head_dims", "| 256 | geometric mean |  |  |  |  | **0.799** |  |"),
        ("gain_at:256", "0.80 (0.75 to 0.85) on 3 masks"),
        ("marks", "| gain over FlexAttention, 8K, geometric mean | 1.45 | 1.60 | 1.598 (3 masks) | **no** |"),
        ("marks", "| head dim 256, gain over FlexAttention, 8K | 1.00 | 1.40 | 0.799 (3 masks) | **no** |"),
        ("marks", "| random eviction, 8K, TFLOP/s both | 385 to 424 | 450 | not in the record |  |"),
        ("misses", "| gain over FlexAttention, 8K, geometric mean | 1.598 (3 masks) | 1.60 | **not explained yet** |"),
        ("misses", "| causal, backward, 8 heads, over 512 heads | 0.459 | 0.900 |"),
        ("gain_all:greatest", "1.90"),
        ("schedulers", "| forward | lpt | 428 (46%) | 932 (100%) |"),
        ("waits", "| causal | 12.5% |  |"),
        ("new_mask", "| 8K | 0.12 to 0.12 (3) | 0.12 to 0.12 (3) |"),
        ("syncs", "0 / 1"),
        ("scaling", "| causal, P = 4 | 452 / 450 (1.02 / 1.02) | 496 / 450 (1.02 / 1.02) |"),
        ("scaling_rates", "| causal | 0.98 / 0.98 |"),
        ("overlap", "| forward | 0.5 to 1 | gated | 1 | 0.91 (0.91 to 0.91) | 0.91 (0.91 to 0.91) | 1.54 (1.54 to 1.54) |"),
        ("one_gpu_cells", "| causal, 64K, 32 on 8 heads, P = 8 | backward | 4.00 / 2.40 / 4.22 | 0.60 | E 0.91 | 0.97 |  |"),
        ("one_gpu_bars", "| E forward, ratio 0.5 to 1: 0.90 | 1 of 1 |"),
        ("one_gpu_bars", "| gate, all flags set: below 0.5% | 6 of 6 |"),
        ("model", "| forward | gated | 0.5 to 1 | 1 | 0.80 (0.80 to 0.80) |"),
        ("overlap_gpus", "| causal, 16K, 32 on 8 heads, 2 GPUs | 3.25 (0.97 / –) | not run |"),
        ("gpus_gain", "1.2"),
        ("gpus_cells", "1"),
        ("gpus_hidden:forward", "0.97"),
        ("gpus_exposed:forward", "250"),
        ("gpus_copies", "0.33"),
        ("gpus_missed:share of what two losses allow, step", "causal (0.900); causal (0.949, level)"),
        ("gpus_missed:E forward", "none"),
        ("torch_gpus", "| causal, 16K, 32 on 8 heads | 7.00 |  | 3.25 |"),
        ("torch_time:gated", "2.2"),
        ("copying", "| gated | none |"),
        ("copying", "| ring | nccl 24, sum_gradients 132 |"),
        (
            "gpus_bars",
            "| step 1 of 3 (2 level), forward 0 of 0, backward 0 of 0; median of steps 0.95 |",
        ),
        ("overlap_bars", "| causal | 0.97 (0.80, 7 us) | – (0.01, 20 us) | 1.20 | 0.96, level |"),
        ("gpus_bars", "| E forward 0.90, copies 0.5 to 1 of attention | 1 of 1: 0.97 |"),
        ("link_power", "| causal, 32768 rows a GPU, 32 on 8 heads | 32 KB every 0.2 ms | 103.0 | +3.0% | 1500 |  |"),
        ("link_costs:32 KB every 0.2 ms", "3.0 %"),
        ("routing", "| causal, 16K, 8 key heads | hierarchical | yes | 50 | 4.00 | 16.0 |"),
        ("routed:causal,flat,pruned", "5.0"),
        ("arcs", "| document | 4,096 → 1,024 (1.001 → 1.002) | no arcs |"),
        ("arc_rows:document,2", "1,024 instead of 4,096"),
        ("arc_imbalance:document,2", "1.002"),
        ("gate", "0.25 % (0.25 to 0.25 %)"),
        ("training", "| dense, 8K | flex | 60.0 ± 0.5 | 163,840 | 4.2 / 10.8 | 30% | 1.20 |"),
        ("training", "| dense, 8K | sdpa | out of memory |"),
        ("ablation", "| dual chunk, plain gather | 60.0 ± 0.2 ms (500,000/s, -33.3%) |"),
        ("ablation_size", "64K tokens cut over 8 ranks in 2 nodes"),
        ("training_gpus", "| dense, 32K over 2 GPUs | full | 64.0 ± 0.5 | 512,000 | +25.0% |"),
        ("ablated:dual chunk, plain gather", "−33.3 %"),
        ("hidden:forward", "0.91 (0.91 to 0.91)"),
        ("hidden_gpus:forward", "0.97 (0.97 to 0.97)"),
        ("scaled", "causal, causal_document, sliding_window; P = 4, 8, 16"),
        ("origin:train", "a GPU"),
    ],
)
def test_figures_of_small_records(records_in: Path, name: str, told: str) -> None:
    for file, data in results().items():
        (records_in / file).write_text(json.dumps(data))
    text = tables.fill(f"<!--{name}-->\n<!--/-->")
    assert "measured yet" not in text
    assert told in text


def test_what_is_told_of_the_records_is_so() -> None:
    """The words beside the figures: kernels and conformance of one digest, overlap of the same gated one, every case run."""
    attention, overlap, tests = (records.results(name) for name in ("attention", "overlap", "gpu_tests"))
    two_gpus = records.results("overlap_gpus")
    assert attention["digest"] == two_gpus["digest"] == tests["digest"]
    assert overlap["gated_digest"] == two_gpus["gated_digest"] == tests["gated_digest"]
    assert sum(bool(c["problem"]) for c in tests["cases"]) == tests["failed"]
    assert tests.get("not_run", 0) == 0


PARTS = [(path, name) for path in RECORDS for name, part in json.loads(path.read_text()).items() if _rows(part)]


@pytest.mark.parametrize(("record", "part"), PARTS, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_rows_of_a_record_are_alike(record: Path, part: str) -> None:
    """A name means one type in all of them (or nothing is known: None), and numbers are finite; no row is there twice."""
    rows = json.loads(record.read_text(encoding="utf-8"))[part]
    kinds: dict[str, set[type]] = {}
    for name, value in ((n, v) for row in rows for n, v in row.items() if v is not None):
        kinds.setdefault(name, set()).add(float if type(value) is int else type(value))
        assert not isinstance(value, float) or math.isfinite(value), f"{name} = {value}"
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}
    shared = set.intersection(*map(set, rows))
    assert len(shared) >= 3, "rows of one kind"
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)


@pytest.mark.parametrize(("record", "part"), PARTS, ids=lambda x: x if isinstance(x, str) else x.stem)
def test_times_and_rates_are_positive(record: Path, part: str) -> None:
    """Where nothing is exchanged, copied or waited for, that takes no time."""
    for row in json.loads(record.read_text(encoding="utf-8"))[part]:
        for name, value in row.items():
            measured = re.search(r"(^|_)(ms|tflops|per_s)($|_)", name) and isinstance(value, int | float)
            if measured and not re.search(r"exchange|comm|keys|sends|sum|own|std|received|host|tables", name):
                assert value > 0, f"{name} in {row}"
            elif measured:
                assert value >= 0, f"{name} in {row}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.name)
def test_a_record_says_what_it_was_measured_on(record: Path) -> None:
    data = json.loads(record.read_text(encoding="utf-8"))
    for name in ("digest", "gated_digest"):
        assert re.fullmatch("[0-9a-f]{64}", data.get(name, "0" * 64))
    if not record.stem.startswith("balance"):  # plain integers, the same on any machine
        assert "H200" in data["device"]
        assert "digest" in data or record.stem == "peers", "which kernels"


def test_every_command_is_in_the_list() -> None:
    """benchmarks/README.md names every module that is run by hand, and every file of results."""
    page = (records.ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    modules = {p.stem for p in (records.ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    assert set(re.findall(r"`benchmarks\.(\w+)", page)) == modules - {"attention_cell"}
    assert set(re.findall(r"`(\w+\.json)`", page)) >= {p.name for p in RECORDS}
