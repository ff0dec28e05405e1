"""Bars between GPUs, on a cell whose numbers are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overlap_bars import CHUNKED, as_rows, bars

CELL = {"mask": "causal_document", "rows_per_device": 16384, "heads": 32, "kv_heads": 32, "batch": 1}


def rows(**gated: float | None) -> list[dict[str, Any]]:
    """Copies take 0.8 of attention forward, 1.5 of it backward. Dual chunk takes 2 and 6 ms, its attention 0.9 and 2.7."""
    forward = {"attention_forward_ms": 1.0, "comm_forward_ms": 0.8, "forward_ms": 1.04, "e_forward": 0.95}
    backward = {"attention_backward_ms": 3.0, "comm_backward_ms": 4.5, "backward_ms": 5.0, "e_backward": 1 - 2.0 / 4.5}
    dual = {"forward_ms": 2.0, "backward_ms": 6.0, "attention_forward_mean_ms": 0.9, "attention_backward_mean_ms": 2.7}
    made = [{**CELL, "way": "gated", **forward, **backward, **gated}, {**CELL, "way": "dual-chunk gather", **dual}]
    return [{**r, "step_ms": r["forward_ms"] + r["backward_ms"]} for r in made]  # type: ignore[operator]


def test_every_bar_of_a_cell() -> None:
    found = {bar.what: bar for bar in bars([*rows(), {**CELL, "way": "ring", "why": "it failed"}])}
    assert found["E forward"].holds
    assert (found["E forward"].wanted, found["E forward"].ratio) == (0.9, 0.8)
    assert found["E forward"].exposed_us == pytest.approx(40)
    assert found["E backward"].holds is None, "told where copies take longer than attention"
    assert found["hidden over attention, backward"].value == pytest.approx((3 + 4.5 - 5) / 3)
    assert found["speed-up over dual chunk with all-gather, step"].value == pytest.approx(8 / 6.04)
    allowed = 6.0 / 2.7
    assert found["share of what two losses allow, backward"].value == pytest.approx(6 / 5 / allowed)
    assert found["share of what two losses allow, backward"].holds is False
    assert found[f"speed-up where {allowed:.2f} is allowed, backward"].holds is False
    assert found["speed-up where 2.22 is allowed, forward"].holds


def test_of_a_plan_in_chunks_only_what_is_hidden_counts() -> None:
    found = bars([{**rows()[0], "way": CHUNKED}])
    assert [bar.what for bar in found] == ["E forward", "E backward", "hidden over attention, backward"]
    assert {bar.cell for bar in found} == {"causal_document, 16384 rows a GPU, 32 on 32 heads, in chunks"}
    assert len(bars([*rows(), {**rows()[0], "way": CHUNKED}])) == len(bars(rows())) + 3


def test_nothing_is_asked_of_what_was_not_measured() -> None:
    without = [r for r in rows(e_forward=None, e_backward=None) if r["way"] == "gated"]
    assert as_rows(without) == []


def test_a_bar_says_by_how_much() -> None:
    first = bars(rows(forward_ms=1.4, e_forward=0.5))[0]
    assert str(first).startswith("BELOW causal_document, 16384 rows a GPU, 32 on 32 heads: E forward 0.500 of 0.900")
    assert "exposed 400 us" in str(first)


def test_what_rounds_say_themselves_counts_and_what_they_do_not_tell_is_level() -> None:
    """Medians of all rounds say 8 / 6.04 and 3.6 / 6.04 of dual chunk's step."""
    firm = {"faster_step": (0.99, 0.985, 0.995), "share_step": (0.97, 0.955, 0.98), "e_forward_interval": (0.92, 0.97)}
    open_ = {"faster_forward": (0.998, 0.99, 1.004), "share_forward": (0.952, 0.94, 0.96)}
    ours, dual = rows()
    found = {bar.what: bar for bar in bars([{**ours, **firm, **open_}, dual])}
    above, share = "speed-up over dual chunk with all-gather", "share of what two losses allow"
    assert [(found[f"{above}, {d}"].value, found[f"{above}, {d}"].level) for d in ("step", "forward")] == [
        (0.99, False),
        (0.998, True),
    ]
    assert not found[f"{above}, step"].holds
    assert not found[f"{above}, forward"].holds, "its value is below, level or not"
    assert found[f"{share}, forward"].holds
    assert found[f"{share}, forward"].level
    assert not found[f"{share}, step"].level
    assert not found["E forward"].level
    assert str(found[f"{above}, forward"]).startswith("level ")
    assert str(found[f"{above}, forward"]).endswith("0.998 of 1.000, 0.990 to 1.004")
    assert found[f"{above}, backward"].low is None
    edge = bars([{**ours, "faster_step": (1.1, 1.0, 1.2), "beyond_forward_ms": (0.03, 0.02, 0.05)}, dual])
    assert next(bar for bar in edge if bar.what == f"{above}, step").level, "just at the bar"
    assert next(bar for bar in edge if bar.what == "E forward").exposed_us == pytest.approx(30)


def test_a_cell_whose_hosts_were_late_in_every_round_is_not_judged() -> None:
    ours, dual = rows()
    assert bars([{**ours, "late": True}, dual]) == []
    assert {bar.what for bar in bars([ours, {**dual, "late": True}])} == {
        "E forward",
        "E backward",
        "hidden over attention, backward",
    }
