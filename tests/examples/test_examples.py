"""The examples run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import maskc
from examples import demo
from maskc.inputs import bind_file

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILY = (
    "full",
    "causal",
    "sliding_window",
    "doc_causal",
    "doc_full",
    "share_question",
    "global_window",
    "causal_blockwise",
    "doc_prefix",
    "prefix_lm",
    "qk_sparse",
    "random_eviction",
)


def test_the_family_is_complete() -> None:
    assert sorted(p.stem for p in EXAMPLES.glob("*.mask")) == sorted(FAMILY)


@pytest.mark.parametrize("name", FAMILY)
def test_mask_is_proved_and_its_claims_hold(name: str) -> None:
    mask = maskc.compile(EXAMPLES / f"{name}.mask")
    assert mask.name == name
    assert mask.program is not None
    assert all(c.status == "proved" for c in mask.checks)
    assert not mask.warnings


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda p: p.name)
def test_inputs_bind(path: Path) -> None:
    spec = bind_file(maskc.compile(EXAMPLES / "doc_prefix.mask"), path)
    assert spec.vectors().nq == spec.vectors().nk


def test_demo_is_exact_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that the demo prints in fp32, made in fp64, where only a wrong mask or formula is left to see."""
    monkeypatch.setattr(demo, "HEADS", 2)
    monkeypatch.setattr(demo, "KV_HEADS", 1)
    spec = bind_file(maskc.compile(EXAMPLES / "doc_prefix.mask"), EXAMPLES / "packed_8k.json")
    torch.manual_seed(1)
    qkv = demo.random_inputs(8192, "cpu", torch.float64)
    grad = torch.randn_like(qkv[0])
    out, lse = maskc.run(spec, *qkv, return_lse=True)
    found = demo.compare(qkv, grad, (out, lse, *torch.autograd.grad(out, qkv, grad)))
    assert set(found) == {"out", "lse", "dQ", "dK", "dV"}
    for name, (got, want) in found.items():
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_run_one_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run_one_gpu.py", "--tokens", "257", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"])
    runpy.run_path(str(EXAMPLES / "run_one_gpu.py"), run_name="__main__")
    assert capsys.readouterr().out.count("loss") == 2
