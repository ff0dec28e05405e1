"""The page of the measurements: figures equal what the files say, and say so where there are none."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from benchmarks.charts import axis, number
from benchmarks.figures import gains, gmean
from benchmarks.report import FIGURES, RESULTS, main, page
from tests.report.test_page import check_alone

MASKS = ("causal", "causal_document", "sliding_window")


def attention() -> dict[str, Any]:
    rows = []
    for n, seqlen in enumerate((8192, 32768)):
        for m, mask in enumerate(MASKS):
            for peer, factor in (("maskc", 1.0), ("flex", 1.5 + 0.1 * m + 0.2 * n), ("cudnn", 1.1)):
                if peer == "cudnn" and mask != "causal":
                    continue
                shape = {"seqlen": seqlen, "batch": 131072 // seqlen, "heads": 32, "kv_heads": 32, "head_dim": 128}
                times = {"density": 0.5, "fwd_ms": 4.0 * factor, "bwd_ms": 10.0 * factor, "first_step_s": 3.0}
                times |= {"fwd_spread": 0.01, "bwd_spread": 0.02}
                rows.append({"peer": peer, "mask": mask, **shape, **times})
                if n == 0 and peer != "cudnn":  # twice the time for us, as much for them
                    wide = {"head_dim": 256, "fwd_ms": 8.0, "bwd_ms": 20.0} if peer == "maskc" else {"head_dim": 256}
                    rows.append({"peer": peer, "mask": mask, **shape, **times, **wide})
    return {"device": "a GPU", "torch": "2.11", "nvrtc": "13.0", "digest": "abc", "rows": rows}


def gpu_bars() -> list[dict[str, Any]]:
    found = [
        ("E forward", 0.97, True, {"ratio": 0.8, "exposed_us": 7.0}),
        ("E backward", -2.1, None, {"ratio": 0.01, "exposed_us": 20.0}),
        ("speed-up over dual chunk with all-gather, step", 1.2, True, {}),
        ("share of what two losses allow, step", 0.9, False, {"level": False}),
        ("share of what two losses allow, step", 0.949, False, {"level": True}),
        ("share of what two losses allow, step", 0.96, True, {"level": True}),
        ("speed-up where 1.72 is allowed, step", 1.6, True, {}),
        ("hidden over attention, forward", 0.9, None, {}),
    ]
    row = {"cell": "causal", "exposed_us": None}
    return [{**row, "what": what, "value": value, "holds": holds, **more} for what, value, holds, more in found]


def results() -> dict[str, dict[str, Any]]:
    """Small files of every kind that a benchmark writes."""
    even = {
        f"{direction}_{what}": x
        for direction in ("forward", "backward")
        for what, x in (("peak_over_mean", 1.02), ("rate_against_one", 0.98))
    }
    scaling = [
        {
            **even,
            "mask": mask,
            "world": world,
            "way": way,
            "measured": True,
            "forward_tflops_per_gpu": 500.0 - world * f,
            "backward_tflops_per_gpu": 450.0,
        }
        for mask in MASKS
        for world in (4, 8, 16)
        for way, f in (("contiguous", 12.0), ("default", 1.0))
    ]
    overlap = [
        {
            "mask": m,
            "seqlen": 65536,
            "heads": 32,
            "kv_heads": 8,
            "world": 8,
            "link": 1,
            "direction": d,
            "executor": x,
            "t_attention_ms": 4.0,
            "t_comm_ms": 2.4 if m == "causal" else 6.0,
            "t_overlap_ms": 4 + 2.4 * (1 - e),
            "t_model_ms": (4 + 2.4 * (1 - e)) / 0.8,
            "e": e,
            "e_low": None if e < 0 else e - 0.05,
            "e_high": None if e < 0 else e + 0.02,
            "hidden": e,
            "gate_overhead": 0.0025,
            "e_possible": 0.97,
            "hidden_possible": 0.98,
            "against_copy_first": 0.65,
        }
        for m in MASKS
        for d in ("forward", "backward")
        for x, e in (("gated", 0.91), ("copy-then-attend", -0.04))
    ]
    schedulers = [
        {"direction": d, "scheduler": s, "default": s == "lpt", "mask": m, "batch_heads": h, "ms": 1.0, "tflops": t + h}
        for d in ("fwd", "bwd")
        for s, t in (("static", 380.0), ("lpt", 420.0))
        for m in MASKS
        for h in (8, 512)
    ]
    peaks = [
        {"mask": m, "world": 8, "nodes": 1, "way": w, "imbalance_mean": x, "imbalance_max": x + 0.1}
        for m in MASKS
        for w, x in (("contiguous", 1.9), ("HCC-IPO", 1.01))
    ]
    balance = {"config": [64, 16, 4, 1000], "generator": "uniform", "method": "LPT", "instances": 200, "above_lb": 1.0}
    balance |= {"above_optimum": 1.0, "gap_mean": 3.157, "gap_max": 7.5, "ms_median": 0.08}
    return {
        "attention.json": attention(),
        "scheduler.json": {"device": "a GPU", "rows": schedulers},
        "scaling.json": {"device": "a GPU", "fit": {"forward": {"partial": 1.1, "row": 0.5, "deviation": 0.01}}, "rows": scaling},
        "overlap.json": {"device": "a GPU", "digest": "abc", "rows": overlap},
        "balance_masks.json": {"balance": peaks, "pruned": [{"mask": "causal", "world": 4, "pruned": 0.375}], "arcs": arcs()},
        "balance.json": {"rows": [balance]},
        "peers.json": {
            "note": "alone",
            "rows": [{"peer": "x", "mask": "full", "seqlen": 8192, "fwd_tflops": 475, "bwd_tflops": 405}],
        },
        "trace.json": {"shares": {"causal": {"KV Loader": {"waits": 0.125}}, "full": {"MMA Consumer": {"works": 0.9}}}},
        "train.json": {"device": "a GPU", "rows": training(), "ablation": ablation()},
        "train_gpus.json": {"device": "2 GPUs", "rows": over_gpus()},
        "new_mask.json": {"device": "a GPU", "rows": new_masks()},
        "overlap_gpus.json": {"device": "2 GPUs", "rows": between_gpus(), "bars": gpu_bars(), "copying_ctas": COPYING},
        "overlap_nodes.json": {"device": "a GPU", "rows": nodes()},
        "link_power.json": {"device": "2 GPUs", "rows": beside_links()},
        "gpu_tests.json": {
            "cases": [{"name": "fwd/a", "problem": "", "seconds": 1}, {"name": "bwd/b", "problem": "off <by> 1", "seconds": 1}]
        },
    }


def arcs() -> list[dict[str, Any]]:
    figures = {
        "received_most_chunks": 4096.0,
        "imbalance_chunks": 1.001,
        "received_most_default": 1024.4,
        "imbalance_default": 1.002,
    }
    return [{"mask": "document", "world": w, "packs": 5, "arcs": n, **figures} for w, n in ((2, 5), (16, 0))]


def training() -> list[dict[str, Any]]:
    ours = {"step_ms": 50.0, "step_std_ms": 0.5, "tokens_per_s": 163840.0, "attention_share": 0.3}
    ours |= {"attention_forward_ms": 4.25, "attention_backward_ms": 10.75}
    rows = [{"attention": "maskc", **ours}, {"attention": "flex", **ours, "step_ms": 60.0}]
    return [{"model": "dense", "seqlen": 8192, **r} for r in (*rows, {"attention": "sdpa", "problem": "out of memory"})]


def ablation() -> list[dict[str, Any]]:
    steps = {"steps": 70, "step_std_ms": 0.25, "tokens_per_s": 1e6, "seqlen": 65536, "ranks": 8, "nodes": 2}
    return [
        {"model": "dense", "row": row, "sparsity": s, "step_ms": ms, **steps, "tokens_per_s": 3e7 / ms}
        for s in (0.7, 0.86)
        for row, ms in (("dual chunk, plain gather", 60.0), ("full", 40.0))
    ]


def over_gpus() -> list[dict[str, Any]]:
    cell = {"model": "dense", "seqlen": 32768, "gpus": 2, "step_std_ms": 0.5}
    rows = [("+ HCC-IPO", 80.0), ("full", 64.0)]
    return [{**cell, "row": row, "step_ms": ms, "tokens_per_s": 32768e3 / ms} for row, ms in rows]


def new_masks() -> list[dict[str, Any]]:
    ours = {f"{what}_{on}_ms": 0.125 for what in ("tables", "step", "checked") for on in ("gpu", "host")}
    ours |= {"peer": "maskc", "step_syncs": 0, "checked_syncs": 1}
    flex = {"peer": "flex", "mask": "causal", "seqlen": 8192, "step_gpu_ms": 0.25, "step_host_ms": 0.5, "step_syncs": 0}
    return [*({"mask": m, "seqlen": n, **ours} for m in MASKS for n in (8192, 32768)), flex]


COPYING = {"gated": {}, "ring": {"nccl": 24, "sum_gradients": 132}}


def between_gpus() -> list[dict[str, Any]]:
    cell = {"mask": "causal", "seqlen": 16384, "heads": 32, "kv_heads": 8, "batch": 1, "world": 2}
    cell |= {"attention_forward_ms": 0.75, "comm_forward_ms": 0.25}
    gated = {"way": "gated", "step_ms": 3.25, "forward_ms": 1.0, "backward_ms": 2.25, "e_forward": 0.97, "e_backward": None}
    others = {"ring": {"step_ms": None, "why": "too slow"}, "torch context parallel": {"step_ms": 7.0}}
    return [{**cell, **gated}, *({**cell, "way": way, **row} for way, row in others.items())]


def nodes() -> list[dict[str, Any]]:
    return [
        {"mask": "causal", "seqlen": 16384, "kv_heads": 8, "routing": r, "prune": True, "link_gb_s": 50, "step_ms": ms}
        | {"bytes_across": 1 << 24}
        for r, ms in (("flat", 5.0), ("hierarchical", 4.0))
    ]


def beside_links() -> list[dict[str, Any]]:
    cell = {"mask": "causal", "rows_per_device": 32768, "heads": 32, "kv_heads": 8}
    here = {"mhz": 1500.0, "asleep": None}
    kinds = (("none", 100.0), ("32 KB every 0.2 ms", 103.0))
    return [
        {
            **cell,
            "name": name,
            "round": 0,
            "ranks": [{"ms": ms - 2, "joules": 60.0} | here, {"ms": ms + 2, "joules": 62.0} | here],
        }
        for name, ms in kinds
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in results().items():
        (tmp_path / name).write_text(json.dumps(data))
    return tmp_path


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", html))


def test_page_stands_alone_and_draws_every_figure(folder: Path) -> None:
    html = page(folder)
    check_alone(html)
    assert "No data" not in html
    assert html.count("<section ") == len(FIGURES) + 1
    assert html.count("<details>") == 1
    assert "<by>" not in html


def test_without_results_every_figure_says_so(tmp_path: Path) -> None:
    html = page(tmp_path)
    check_alone(html)
    assert html.count("No data: ") == len(FIGURES)
    for figure in FIGURES:
        assert f"{figure.file} is not there" in html
        assert f"<code>{figure.command}</code>" in html


@pytest.mark.parametrize("name", sorted(results()))
def test_a_file_without_rows_is_no_data(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    assert page(folder).count("No data: ") == sum(f.file == name for f in FIGURES)


def test_one_table_of_training_alone(folder: Path) -> None:
    (folder / "train.json").write_text(json.dumps({"rows": training()}))
    assert page(folder).count("No data: ") == 1


def test_gains_are_times_over_times(folder: Path) -> None:
    found = gains(attention())
    assert set(found) == {"flex", "cudnn"}
    assert found["flex"][32768, "sliding_window"] == pytest.approx(1.9)
    assert found["cudnn"] == {(8192, "causal"): pytest.approx(1.1), (32768, "causal"): pytest.approx(1.1)}
    told = text_of(page(folder))
    every = list(found["flex"].values())
    assert f"flex: {number(gmean(every))} times faster ({number(min(every))} to {number(max(every))})" in told
    assert f"over flex, 8K: {number(gmean([1.5, 1.6, 1.7]))} times faster" in told


def test_numbers_of_other_figures(folder: Path) -> None:
    told = text_of(page(folder))
    rate = 4 * 16 * 32 * 8192**2 * 128 * 0.5 / 4.0 / 1e9
    assert f"{rate:.0f} / {2.5 * rate / 2.5:.0f}" in told
    assert "contiguous, P = 8: 404 TFLOP/s per GPU" in told
    assert "copies / attention 0.5 to 1, gated: 0.910 E" in told
    assert "copies / attention over 1, copy-then-attend: -0.0400 E" in told
    assert "causal 16K Hk=8, gated: 3.25 ms" in told
    assert "too slow" in told
    assert "dense, 8K, flex: 60.0 ms a step" in told
    assert "86% hidden, full: 40.0 ms a step" in told
    assert "dense, 32K over 2 GPUs, full: 64.0 ms a step" in told
    assert "0.125 – 0.125" in told
    assert "causal, HCC-IPO: 1.01 peak / average" in told
    assert f"8 heads in all, static: {number(388 / 428)} of the best scheduler" in told
    assert "38%" in told
    assert "475 / 405" in told
    assert "12.5%" in told
    assert "3.157 %" in told
    assert "off <by> 1" in told


def test_results_of_this_repository_can_be_drawn(tmp_path: Path) -> None:
    check_alone(page(RESULTS))


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / "overlap.json").write_text("{")
    with pytest.raises(SystemExit, match=r"overlap\.json: not JSON"):
        page(folder)


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--results", str(folder), "--out", str(folder / "page.html")])
    assert main() == 0
    assert "page.html" in capsys.readouterr().out
    assert (folder / "page.html").read_text() == page(folder)


def test_axis_covers_what_it_shows() -> None:
    for low, high in ((0, 1), (0, 1.7), (-0.3, 0.95), (1, 1.0001), (0, 650), (2, 2)):
        ticks = axis(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert 2 <= len(ticks) <= 10
