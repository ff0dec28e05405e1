"""The kernel benchmark without a GPU: who measures what, what stays in the file, workers that fail."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import maskc
from benchmarks import attention, peers
from benchmarks.attention import Cell, Results, deal
from benchmarks.attention_cell import OutOfTimeError, _limit
from benchmarks.masks import NAMES, mask_case
from benchmarks.peers import mask_mod
from maskc.convert import to_dense

FAKE = """#!{python}
import json, sys
cells = sys.argv[sys.argv.index("--cells") + 1 :]
for cell in cells:
    print("compiling", cell, flush=True)
    if cell.startswith("document"):
        sys.exit("no such mask")
print("ready", *cells, flush=True)
for line in sys.stdin:
    mask, seqlen, dim = line.strip().split(",")
    if mask == "qk_sparse":
        sys.exit("lost the GPU")
    if mask == "causal":
        print(json.dumps(dict(failed="out of memory")), flush=True)
        continue
    row = dict(peer="maskc", mask=mask, seqlen=int(seqlen), batch=1, heads=1, kv_heads=1, head_dim=int(dim), density=0.5)
    print(json.dumps(dict(info=dict(device="none"), rows=[dict(row, fwd_ms=1.0, bwd_ms=2.0)])), flush=True)
"""


def test_every_cell_is_dealt_once_and_the_shares_take_as_long() -> None:
    cells = [Cell(mask, n) for mask in attention.NAMES for n in (4096, 8192, 131072)]
    shares = deal(cells, 4)
    assert sorted(map(str, (c for share in shares for c in share))) == sorted(map(str, cells))
    costs = [sum(c.cost for c in share) for share in shares]
    assert max(costs) < 1.1 * min(costs)
    assert all(share == sorted(share, key=cells.index) for share in shares)
    assert len(deal(cells[:3], 10)) == 3


def _reply(**more: Any) -> dict[str, Any]:
    row = {"peer": "maskc", "mask": "full", "seqlen": 64, "batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 128}
    return {"info": {"device": "x"}, "rows": [{**row, "fwd_ms": 1.0, **more}]}


def test_a_file_of_the_same_kernels_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    Results(path).add(_reply())
    Results(path).add(_reply(mask="causal"))
    Results(path).add(_reply(fwd_ms=3.0))
    found = json.loads(path.read_text())
    assert [(r["mask"], r["fwd_ms"]) for r in found["rows"]] == [("causal", 1.0), ("full", 3.0)]


def test_cells_that_a_file_has_of_the_same_kernels_are_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    Results(path).add(_reply())
    cells = [Cell("full", 64), Cell("full", 128), Cell("causal", 64), Cell("full", 64, 256)]
    assert Results(path).missing(cells) == cells[1:]
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "another"}))
    assert Results(path).missing(cells) == cells


@pytest.mark.parametrize("other", ["digest", "device"])
def test_rows_of_other_kernels_or_of_another_gpu_go(tmp_path: Path, other: str) -> None:
    path = tmp_path / "attention.json"
    Results(path).add(_reply())
    path.write_text(json.dumps({**json.loads(path.read_text()), other: "another"}))
    Results(path).add(_reply(mask="causal"))
    assert [r["mask"] for r in json.loads(path.read_text())["rows"]] == ["causal"]


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_cell_that_fails_costs_itself_only(
    parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    masks = ["full", "causal", "document", "sliding_window", "qk_sparse", "share_question"]
    out = tmp_path / "attention.json"
    words = ["attention", "--seqlens", "64", "--gpus", "0", "1", "--timeout", "30", "--out", str(out), "--masks", *masks]
    monkeypatch.setattr(sys, "argv", [*words, "--parallel", str(parallel)])
    assert attention.main() == 0
    said = capsys.readouterr().out
    assert {r["mask"] for r in json.loads(out.read_text())["rows"]} == {"full", "sliding_window", "share_question"}
    assert "document,64,128: failed while compiling: no such mask (exit 1)" in said
    assert "qk_sparse,64,128: failed while timing: lost the GPU (exit 1)" in said
    assert "causal,64,128: failed while timing: out of memory" in said


def test_a_worker_out_of_time_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nimport time\nprint('compiling full,64,128', flush=True)\ntime.sleep(60)\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(attention, "GRACE", 0.0)
    assert attention.compiling_worker(0, [Cell("full", 64)], [], 0.5) is None
    assert capsys.readouterr().out == "full,64,128: failed while compiling: (no answer in time)\n"


def test_a_time_limit_ends_what_catches_exceptions() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(10)
            except Exception:  # as compilers do
                continue

    with pytest.raises(OutOfTimeError), _limit(0.05):
        stubborn()


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_flex_are_those_of_the_mask_files(name: str) -> None:
    """The function that FlexAttention gets, cell by cell, against the boundary vectors."""
    case = mask_case(name, 512, heads=2)
    wanted = to_dense(maskc.compile(case.mask).bind(nq=512, nk=512, **case.inputs))
    mod = mask_mod(case, torch.device("cpu"))
    if mod is None:
        assert wanted.all()
        return
    assert torch.equal(create_mask(mod, 1, wanted.shape[1], 512, 512, device="cpu"), wanted)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_block_masks_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of three rows of blocks at a time, the last time of fewer, and by head."""
    monkeypatch.setattr(peers, "CELLS_AT_ONCE", 3 * 128 * 1024)
    case = mask_case(name, 1024, heads=3)
    mod = mask_mod(case, torch.device("cpu"))
    assert mod is not None
    heads = 3 if name == "random_eviction" else 1
    found = peers.block_mask(mod, heads, 1024, torch.device("cpu"))
    wanted = create_block_mask(mod, None, heads, 1024, 1024, device="cpu", BLOCK_SIZE=128)
    assert found.shape == wanted.shape
    for mine, theirs in zip(found.as_tuple(flatten=True), wanted.as_tuple(flatten=True), strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
