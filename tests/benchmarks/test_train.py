"""The training benchmark, small and on a CPU: what it times is right, what it cannot do it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import train, train_ablation, train_steps
from benchmarks.train_model import MLP, Experts, Shape

SMALL = (
    "--device cpu --dtype fp64 --seqlen 80 --steps 3 --drop 1 --layers 2 --width 32 --heads 4 --kv-heads 2 --head-dim 16"
    " --hidden 32 --vocabulary 50 --experts 4 --world 3"
)
SHAPE = Shape(1, 16, 2, 1, 8, 24, 50, experts=5, active=2)


def rows(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "train.json"
    assert train.main([*SMALL.split(), *arguments, "--out", str(out)]) == 0
    return json.loads(out.read_text())["ablation" if "--ablate" in arguments else "rows"]


def test_every_attention_trains_the_same_model(tmp_path: Path) -> None:
    """Equal seeds: after five steps of AdamW in fp64 the loss under maskc is that under a dense mask."""
    found = {(r["model"], r["attention"]): r for r in rows(tmp_path)}
    assert set(found) == {(m, a) for m in ("dense", "moe") for a in ("maskc", "flex", "sdpa")}
    for model in ("dense", "moe"):
        ours, dense, flex = (found[model, a] for a in ("maskc", "sdpa", "flex"))
        assert ours["last_loss"] == pytest.approx(dense["last_loss"], rel=1e-9)
        assert ours["first_loss"] == pytest.approx(dense["first_loss"], rel=1e-12)
        assert ours["last_loss"] != ours["first_loss"]
        assert flex["problem"] == "FlexAttention has no backward on a CPU"
        assert ours["tokens_per_s"] == pytest.approx(80 / ours["step_ms"] * 1e3)


def test_a_dense_mask_that_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DENSE_MASK_BYTES", 1 << 20)
    (row,) = rows(tmp_path, "--attention", "sdpa", "--model", "dense", "--seqlen", "1040")
    assert row["problem"] == "a dense mask of 1040 x 1040 is over 1 MiB"


def test_an_attention_that_runs_out_of_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(s: train_steps.Setting) -> Any:
        def of(batch: train_steps.Batch) -> Any:
            raise torch.OutOfMemoryError

        return of

    monkeypatch.setitem(train.ATTENTION, "sdpa", hungry)
    ours, dense = rows(tmp_path, "--attention", "maskc", "sdpa", "--model", "dense")
    assert dense["problem"] == "out of memory"
    assert ours["steps"] == 3


def test_both_tables_stand_in_one_file(tmp_path: Path) -> None:
    """As long as device and sources are the same."""
    only = ("--model", "dense", "--attention", "maskc")
    rows(tmp_path, *only)
    rows(tmp_path, "--ablate", "--model", "dense")
    found = json.loads((tmp_path / "train.json").read_text())
    assert len(found["rows"]) == 1
    assert len(found["ablation"]) == len(train_ablation.ROWS) * len(train_ablation.SPARSITIES)
    (tmp_path / "train.json").write_text(json.dumps({**found, "digest": "of other sources"}))
    rows(tmp_path, *only)
    assert "ablation" not in json.loads((tmp_path / "train.json").read_text())


def test_the_ablation_names_what_it_does_not_run(tmp_path: Path) -> None:
    found = rows(tmp_path, "--ablate", "--model", "dense")
    assert [r["row"] for r in found] == [name for name, _ in train_ablation.ROWS] * len(train_ablation.SPARSITIES)
    assert all(r["simulated"] for r in found)
    ran = [r for r in found if "problem" not in r]
    assert {r["row"] for r in ran} == {"dual chunk, plain gather", "+ HCC-IPO"}
    assert all("not run" in r["problem"] for r in found if r not in ran)
    for plain, balanced in zip(ran[::2], ran[1::2], strict=True):
        assert balanced["imbalance"] <= plain["imbalance"]


@pytest.mark.parametrize("arguments", [["--gpus", "2"], ["--steps", "20", "--drop", "10"]])
def test_what_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main([*SMALL.split(), *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("sparsity", train_ablation.SPARSITIES)
def test_documents_hide_what_they_should(sparsity: float) -> None:
    for seed in range(3):
        lengths = train_steps.documents(8192, sparsity, seed)
        assert sum(lengths) == 8192
        assert min(lengths) >= 1
        assert train_steps.hidden(lengths) == pytest.approx(sparsity, abs=0.005)
    assert train_steps.hidden([2, 1]) == pytest.approx(1 - 4 / 9)


def test_batches_stop_labels_at_document_ends() -> None:
    s = train_steps.Setting(torch.device("cpu"), torch.float64, 40, 2, 1, 0)
    batch = next(train_steps.batches(s, 50, 0.8, seed=3))
    ends = torch.tensor(batch.lengths).cumsum(0) - 1
    assert (batch.labels == -100).nonzero()[:, 1].unique().tolist() == ends.tolist()
    inside = [i for i in range(39) if i not in ends.tolist()]
    assert torch.equal(batch.labels[:, inside], batch.tokens[:, [i + 1 for i in inside]])
    assert batch.positions.tolist() == [i for n in batch.lengths for i in range(n)]


def test_experts_are_a_weighted_sum_token_by_token() -> None:
    torch.manual_seed(0)
    mixture = Experts(SHAPE).double()
    x = torch.randn(2, 7, SHAPE.width, dtype=torch.float64)
    got = mixture(x)
    for token, out in zip(x.flatten(0, 1), got.flatten(0, 1), strict=True):
        scores, chosen = mixture.router(token).topk(2)
        experts: list[MLP] = [mixture.experts[int(i)] for i in chosen]  # type: ignore[misc]
        want = sum(w * e(token) for w, e in zip(scores.softmax(0), experts, strict=True))
        torch.testing.assert_close(out, want)


def test_trimming() -> None:
    assert train_steps.trimmed([9.0, 1.0, 2.0, 3.0, 100.0], 1) == pytest.approx(
        (14 / 3, torch.tensor([2.0, 3.0, 9.0]).std().item())
    )
