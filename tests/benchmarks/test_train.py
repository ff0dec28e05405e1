"""The training benchmark, small and on a CPU: what it times is right, what it cannot do it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import maskc
from benchmarks import train, train_ablation, train_gpus, train_link, train_steps
from benchmarks.train_model import Experts, Shape, grouped, padded
from maskc.runtime.overlap_grads import Gradients, result_rows
from maskc.runtime.transport import KeyShape, head_major

SMALL = (
    "--device cpu --dtype fp64 --seqlen 80 --steps 3 --drop 1 --layers 2 --width 32 --heads 4 --kv-heads 2 --head-dim 16"
    " --hidden 32 --expert-hidden 16 --vocabulary 50 --experts 4 --world 3"
)
SHAPE = Shape(1, 16, 2, 1, 8, 24, 50, experts=5, active=2)


def rows(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "train.json"
    assert train.main([*SMALL.split(), *arguments, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    return next(found[key] for key in ("ablation", "rows") if key in found)


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


def test_a_peer_that_fails_costs_its_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(s: train_steps.Setting) -> Any:
        return lambda batch: 1 // 0

    monkeypatch.setitem(train.ATTENTION, "flex", broken)
    ours, flex = rows(tmp_path, "--attention", "maskc", "flex", "--model", "dense")
    assert flex["problem"] == "ZeroDivisionError: integer division or modulo by zero"
    assert ours["steps"] == 3
    monkeypatch.setitem(train.ATTENTION, "maskc", broken)
    with pytest.raises(ZeroDivisionError):
        rows(tmp_path, "--attention", "maskc", "--model", "dense")


def test_both_tables_stand_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as device and sources are the same."""
    monkeypatch.setattr(train_ablation, "ROWS", train_ablation.ROWS[:1])
    only = ("--model", "dense", "--attention", "maskc")
    rows(tmp_path, *only)
    rows(tmp_path, "--ablate", "--layers", "1")
    found = json.loads((tmp_path / "train.json").read_text())
    assert len(found["rows"]) == 1
    assert len(found["ablation"]) == len(train_ablation.ROWS) * len(train_ablation.SPARSITIES)
    (tmp_path / "train.json").write_text(json.dumps({**found, "digest": "of other sources"}))
    rows(tmp_path, *only)
    assert "ablation" not in json.loads((tmp_path / "train.json").read_text())


def test_the_ablation_has_six_rows_for_every_set_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_ablation, "PACKS", 1)
    found = rows(tmp_path, "--ablate", "--world", "4", "--layers", "1")
    names = [v.name for v in train_ablation.ROWS]
    assert [(r["sparsity"], r["row"]) for r in found] == [(s, n) for s in train_ablation.SPARSITIES for n in names]
    assert all(r["simulated"] and "problem" not in r and r["steps"] == 3 for r in found)
    for sparsity in train_ablation.SPARSITIES:
        of = {r["row"]: r for r in found if r["sparsity"] == sparsity}
        assert of["full"]["imbalance"] <= of["+ overlap"]["imbalance"]
        assert of["full"]["received_mb"] <= of["+ HCC-IPO + overlap, pruning off"]["received_mb"]


def test_an_ablation_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are there stay as they are, one with fewer steps is taken anew in its place."""
    arguments = ("--ablate", "--world", "4", "--layers", "1", "--resume")
    with pytest.raises(FileNotFoundError):
        rows(tmp_path, *arguments, "--seconds", "0")
    with monkeypatch.context() as patch:
        patch.setattr(train_ablation, "ROWS", train_ablation.ROWS[:3])
        first = rows(tmp_path, *arguments, "--sparsity", str(train_ablation.SPARSITIES[0]))
    out = tmp_path / "train.json"
    found = json.loads(out.read_text())
    found["ablation"][1]["steps"] = 2
    out.write_text(json.dumps(found))
    every = rows(tmp_path, *arguments)
    names = [v.name for v in train_ablation.ROWS]
    assert [(r["sparsity"], r["row"]) for r in every] == [(s, n) for s in train_ablation.SPARSITIES for n in names]
    assert [r == f for r, f in zip(every, first, strict=False)] == [True, False, True]
    assert every == rows(tmp_path, *arguments)
    assert [r["steps"] for r in rows(tmp_path, *arguments, "--steps", "4")] == [4] * len(every)


def test_attentions_are_not_timed_twice(tmp_path: Path) -> None:
    only = ("--model", "dense", "--attention", "maskc", "sdpa")
    first = rows(tmp_path, *only)
    assert rows(tmp_path, *only, "--resume") == first
    assert rows(tmp_path, *only) != first


def _ablated(variant: train_ablation.Variant) -> tuple[maskc.BoundMask, Any, train_link.Memory, Shape, train_steps.Setting]:
    s = train_steps.Setting(torch.device("cpu"), torch.float64, 96, 1, 3, 0)
    shape = Shape(1, 16, 2, 1, 8, 24, 50)
    memory = train_link.Memory(96, KeyShape(1, 1, 8, 8, torch.float64), s.device)
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[50, 13, 33]), nq=96, nk=96)
    return spec, variant.plan(spec, shape, 4, 96), memory, shape, s


@pytest.mark.parametrize("variant", train_ablation.ROWS, ids=lambda v: v.name)
def test_a_simulated_rank_attends_to_the_keys_of_the_others(variant: train_ablation.Variant) -> None:
    """Rows and gradients of a rank are those of dense attention with the memory as the keys of all others."""
    spec, p, memory, shape, s = _ablated(variant)
    for r in range(4):
        rank = train_ablation.Rank(spec, p, r, variant.executor, memory, shape, s)
        mine = torch.cat([torch.arange(*p.rows.range_of(c)) for c in p.rows.chunks_of(r)])
        q, k, v, dout = (torch.randn(1, len(mine), h, 8, dtype=torch.float64) for h in (2, 1, 1, 2))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        rank.attend(*leaves)  # from the second time on, only parts of chunks are copied
        out = rank.attend(*leaves)
        place = torch.cat([train_link.starts(p.keys)[c] + torch.arange(p.keys.size_of(c)) for c in range(p.keys.chunk_count)])
        keys, values = (head_major(t)[:, place].index_copy(1, mine, x) for t, x in zip(memory.keys, (k, v), strict=True))
        want = dense(spec.vectors(96, 96).masked()[:, :, mine], q, keys, values)
        torch.testing.assert_close(out, want)
        got, exact = (torch.autograd.grad(x, leaves, dout) for x in (out, want))
        torch.testing.assert_close(got[0], exact[0])
        for mine_too, alone, came in zip(got[1:], exact[1:], (t.transpose(1, 2)[:, place] for t in memory.came), strict=True):
            others = torch.zeros_like(alone)
            for _, chunks in rank.over.plan.lends:
                others += _placed(came, torch.cat([torch.arange(*p.keys.range_of(c)) for c in chunks]), mine)
            torch.testing.assert_close(mine_too, alone + others)


def _placed(came: torch.Tensor, at: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """What one reader sent of the positions `at`, zero elsewhere, on the rows `mine`."""
    return torch.zeros_like(came).index_copy(1, at, came[:, at])[:, mine]


def dense(masked: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(masked, -torch.inf).softmax(-1), v)


def test_routing_over_nodes_lets_a_chunk_in_once() -> None:
    """What crosses: with routing every chunk once for the ranks of a node together, without it once for each that needs it."""
    full, flat = (next(v for v in train_ablation.ROWS if v.name.endswith(end)) for end in ("full", "nodes off"))
    for p, once in ((_ablated(full)[1], True), (_ablated(flat)[1], False)):
        for node in ((0, 1), (2, 3)):
            parts = [train_link.part_of(p, r) for r in node]
            crossing = sorted(c for part in parts for c in (*part.across, *part.carried))
            wanted = [c for r in node for c in p.needed(r) if p.keys.owner[c] not in node]
            assert crossing == sorted(set(wanted) if once else wanted)
            assert all(x.source == p.keys.owner[x.chunk] for part in parts for x in part.plan.slots)


def test_the_link_is_faster_inside_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, p, memory, shape, s = _ablated(train_ablation.ROWS[-1])
    copied: list[int] = []
    monkeypatch.setattr(train_link, "copy", lambda into, source: copied.append(into.numel()))
    rank = train_ablation.Rank(spec, p, 3, "gated", memory, shape, s)
    part = train_link.part_of(p, 3)
    rows = {x.chunk: p.keys.size_of(x.chunk) for x in part.plan.pulls}
    carried = sum(p.keys.size_of(c) for c in part.carried)
    fast = {c: n if c in part.across else -(-n // train_ablation.INSIDE) for c, n in rows.items()}
    assert 0 < sum(fast.values()) < sum(rows.values())
    forward = rank.over.forward_cut
    for expected in (rows, fast, fast):
        copied.clear()
        for piece in forward.pieces:
            rank.over.pull(forward, piece, 0)
        assert sum(copied) == 2 * 8 * (sum(expected.values()) + carried)
    copied.clear()
    grads = Gradients(torch.empty(0), *(torch.zeros(1, 1, 1, result_rows(part.plan).rows, 8) for _ in range(2)))
    for departure in rank.over.departures:
        rank.over.push(departure.pieces, grads)
    assert sum(copied) == 2 * 8 * (sum(fast.values()) + carried)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpus", "2", "--ablate", "--sparsity", "0.7", "0.8"],
        ["--steps", "20", "--drop", "10"],
        ["--batch", "2", "--ablate"],
        ["--sparsity", "0.7", "0.8"],
    ],
)
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
        gated = [(token @ mixture.up[i]).chunk(2) for i in chosen]
        want = sum(
            w * (torch.nn.functional.silu(g) * v) @ mixture.down[i]
            for w, i, (g, v) in zip(scores.softmax(0), chosen, gated, strict=True)
        )
        torch.testing.assert_close(out, want)


def test_groups_are_filled_up() -> None:
    place, ends = padded(torch.tensor([0] * 3 + [2] * 17), 4)
    assert place.tolist() == [0, 1, 2, *range(16, 33)]
    assert ends.tolist() == [16, 16, 48, 48]
    x, weights = torch.randn(50, 8), torch.randn(4, 8, 16)
    got = grouped(x, weights, ends)[:48]
    torch.testing.assert_close(got, torch.cat([x[:16] @ weights[0], x[16:48] @ weights[2]]))
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("torch 2.9 has none to compare with")
    torch.testing.assert_close(torch.nn.functional.grouped_mm(x, weights, offs=ends)[:48], got)


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    """A sequence over two processes, in every way of the table: losses before and after three steps of AdamW in fp64.

    --ablate lists them all; without it the first and the last are kept.
    """
    (alone,) = rows(tmp_path, "--attention", "maskc", "--model", "dense")
    found = rows(tmp_path, "--gpus", "2", "--ablate")
    assert [r["row"] for r in found] == [w.name for w in train_gpus.WAYS]
    for r in found:
        assert "problem" not in r
        assert r["first_loss"] == pytest.approx(alone["first_loss"], rel=1e-9)
        assert r["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-9)
    out = tmp_path / "train.json"
    record = json.loads(out.read_text())
    assert record["gpus"] == 2
    assert {"device", "driver", "nccl", "torch", "digest", "gated_digest"} < set(record)
    out.write_text(json.dumps({**record, "rows": found[1:]}))
    again = rows(tmp_path, "--gpus", "2", "--resume")
    assert again[:-1] == found[1:]
    assert again[-1]["row"] == found[0]["row"]


def test_trimming() -> None:
    assert train_steps.trimmed([9.0, 1.0, 2.0, 3.0, 100.0], 1) == pytest.approx(
        (14 / 3, torch.tensor([2.0, 3.0, 9.0]).std().item())
    )
