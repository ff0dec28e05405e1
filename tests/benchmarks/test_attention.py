"""The kernel benchmark without a GPU: who measures what, what stays in the file, workers that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention
from benchmarks.attention import Cell, Results, deal

FAKE = """#!{python}
import json, sys
cells = sys.argv[sys.argv.index("--cells") + 1 :]
if any(c.startswith("document") for c in cells):
    sys.exit("no such mask")
print("ready", *cells, flush=True)
for line in sys.stdin:
    mask, seqlen, dim = line.strip().split(",")
    if mask == "qk_sparse":
        sys.exit("lost the GPU")
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


@pytest.mark.parametrize("other", ["digest", "device"])
def test_rows_of_other_kernels_or_of_another_gpu_go(tmp_path: Path, other: str) -> None:
    path = tmp_path / "attention.json"
    Results(path).add(_reply())
    path.write_text(json.dumps({**json.loads(path.read_text()), other: "another"}))
    Results(path).add(_reply(mask="causal"))
    assert [r["mask"] for r in json.loads(path.read_text())["rows"]] == ["causal"]


def test_workers_that_fail_cost_their_own_cells_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    masks = ["full", "causal", "document", "qk_sparse"]
    out = tmp_path / "attention.json"
    words = ["attention", "--seqlens", "64", "--gpus", "0", "1", "--timeout", "30", "--out", str(out), "--masks", *masks]
    monkeypatch.setattr(sys, "argv", words)
    assert attention.main() == 0
    said = capsys.readouterr().out
    assert {r["mask"] for r in json.loads(out.read_text())["rows"]} == {"full", "causal"}
    assert "document,64,128: failed while compiling: no such mask" in said
    assert "qk_sparse,64,128: failed while timing: lost the GPU" in said
