"""`maskc.metrics`: the figures of a plan, against what the schedule of the plan really moves."""

from __future__ import annotations

import json

import pytest

import maskc
from maskc.runtime.plan import AttentionPlan


def _plan(prune: bool = True, **sizes: int) -> AttentionPlan:
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[300, 100, 200, 424]))
    return maskc.plan(spec, world_size=4, nq=1024, nk=1024, chunk=32, prune=prune, **sizes)


@pytest.mark.parametrize("prune", [True, False])
def test_figures_are_those_of_the_plan(prune: bool) -> None:
    plan = _plan(prune, heads=8, heads_kv=2, head_dim=64)
    found = maskc.metrics(plan, batch=3)
    moves = list(plan.schedule("all-gather").moves())
    received = [sum(plan.keys.size_of(m.chunk) for m in moves if m.dst == r) for r in range(4)]
    assert found["bytes_received"] == max(received) * 3 * 2 * 2 * 64 * 2
    assert found["imbalance"] == plan.imbalance
    assert found["optimal"] == plan.optimal
    everything = sum(plan.keys.length - plan.keys.local_length(r) for r in range(4))
    assert found["pruned_share"] == pytest.approx(1 - sum(received) / everything)
    assert found["exposed_ms"] == found["communication_ms"]
    assert maskc.metrics(plan, strategy="ring")["exposed_ms"] is None
    json.dumps(found)


def test_bytes_need_the_sizes_of_the_model() -> None:
    found = maskc.metrics(_plan())
    assert found["bytes_received"] is None
    assert found["rows_received"] > 0


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(maskc.MaskcError, match="M511"):
        maskc.metrics(None)  # type: ignore[arg-type]
    with pytest.raises(maskc.MaskcError, match="M713"):
        maskc.metrics(_plan(), strategy="rings")


def test_moves_are_those_of_a_strategy_by_name() -> None:
    with pytest.raises(maskc.MaskcError, match="'auto'") as caught:
        _plan(heads=8, heads_kv=2, head_dim=64).traffic("auto")
    assert caught.value.diagnostics[0].help == "one of all-gather, staged, ring, gated, copy-then-attend, sm-copy"
