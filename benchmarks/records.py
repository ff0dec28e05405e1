"""The files that benchmarks write, as tables of the documentation read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMANDS = {
    "balance_masks": "python -m benchmarks.balance",
    "gpu_tests": "python -m tests.gpu",
    "overlap_gpus": "python -m benchmarks.overlap --gpus 2",
    "ablation": "python -m benchmarks.train --ablate",
    "train_gpus": "python -m benchmarks.train --gpus 2 --ablate",
}
"""What makes a file or a part of one, where it is not `python -m benchmarks.NAME`."""

RATIOS = ((0.0, 0.2), (0.2, 0.5), (0.5, 1.0), (1.0, float("inf")))
"""Classes of the time of copies over that of attention."""

Row = dict[str, Any]


class NoData(Exception):
    """A figure has no data; the text says what makes them."""

    def __init__(self, name: str, what: str = "") -> None:
        command = COMMANDS.get(name, f"python -m benchmarks.{name}")
        super().__init__(f"**Not measured yet**{f': {what}' if what else ''} (`{command}`).")


@cache
def results(name: str) -> dict[str, Any]:
    """The contents of NAME.json. Raises NoData where there is none."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise NoData(name)
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def rows_of(name: str, *needed: str, key: str = "rows") -> list[Row]:
    """The rows of a file that have all these values. Raises NoData where there is none."""
    found = [r for r in results(name).get(key, []) if all(r.get(n) is not None for n in needed)]
    if not found:
        raise NoData(key if key in COMMANDS else name)
    return found


def standard(r: Row) -> bool:
    """Whether a row of attention.json is a cell of the twelve masks' benchmark: head dim 128, 32 heads, 131072 tokens a call."""
    return bool(r["head_dim"] == 128 and r["heads"] == r["kv_heads"] == 32 and r["batch"] * r["seqlen"] == 131072)


def both(r: Row) -> float:
    """Milliseconds forward and backward of a row of attention.json."""
    return float(r["fwd_ms"] + r["bwd_ms"])


def tflops(r: Row) -> tuple[float, float, float]:
    """TFLOP/s of a row of attention.json by exact density: forward, backward, both."""
    flop = 4 * r["batch"] * r["heads"] * r["seqlen"] ** 2 * r["head_dim"] * r["density"] / 1e9
    return flop / r["fwd_ms"], 2.5 * flop / r["bwd_ms"], 3.5 * flop / both(r)


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def gmean(values: Iterable[float]) -> float:
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))


def length(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def spread(values: Iterable[float]) -> str:
    """Geometric mean, least and greatest."""
    found = list(values)
    return f"{gmean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def origin(name: str) -> str:
    """Where a file was recorded: device, versions, digests of the kernel sources."""
    data = results(name)
    parts = [str(data["device"])] if "device" in data else []
    versions = {"driver": "driver", "nccl": "NCCL", "torch": "torch", "nvrtc": "NVRTC"}
    parts += [f"{label} {data[key]}" for key, label in versions.items() if data.get(key) is not None]
    if "digest" in data:
        parts.append(f"kernel sources `{data['digest'][:16]}`")
    if "gated_digest" in data:
        parts.append(f"gated ones `{data['gated_digest'][:16]}`")
    return ", ".join(parts)
