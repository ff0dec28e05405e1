"""What a user starts on a GPU besides `maskc.run`: a folder of built kernels, `maskc bench`, `maskc fuzz`.

`python -m tests.gpu.special_tools [NAME ...]` runs all three, or those that a NAME is part of; the last two compile for so long
that the conformance run leaves them out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import maskc
from maskc.codegen.render import CudaSource
from tests.gpu import warm

ROOT = Path(__file__).parents[2]

LOADED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("cuda.bindings.nvrtc", "lark", "sympy"):
            raise ImportError(f"{name} is not to be used here")

sys.meta_path.insert(0, Blocked())
import torch
import maskc
from tests.gpu.special_flex import _dense, _results

mask = maskc.load(sys.argv[1])
spec = mask.bind(doc=maskc.segments(lengths=[300, 1, 120]), prefix=[20, 0, 120])
n = 421
torch.manual_seed(0)
q, k, v = (torch.randn(1, n, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
dout, dlse = torch.randn_like(q), torch.randn(1, 4, n, device="cuda")
got = _results(lambda *x: maskc.run(spec, *x, return_lse=True), (q, k, v), dout, dlse)
hidden = spec.vectors(n, n, "cuda").masked()
exact, naive = (
    _results(lambda *x: _dense(hidden, 64**-0.5, *x), [x.detach().to(t).requires_grad_() for x in (q, k, v)], dout, dlse)
    for t in (torch.float64, torch.bfloat16)
)
for part, x, y, z in zip(("out", "lse", "dq", "dk", "dv"), got, exact, naive, strict=True):
    error, allowed = ((t.double() - y).abs().max().item() for t in (x, z))
    assert error <= 2 * allowed + 1e-3 * y.abs().max().item(), f"{part}: error {error:.2e}, dense bf16 has {allowed:.2e}"
"""


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    return [("tools/a loaded folder", loaded)]


def sources() -> Iterator[CudaSource]:
    yield from warm.built(maskc.compile(str(ROOT / "examples/doc_prefix.mask")), 64)


def loaded() -> str:
    """`maskc compile -o`, then `maskc.load` in a process that cannot compile: results against dense attention."""
    with tempfile.TemporaryDirectory() as folder:
        built = _ran("-m", "maskc", "compile", "examples/doc_prefix.mask", "-o", folder, "--head-dim", "64")
        return built.stderr if built.returncode else _problem(_ran("-c", LOADED, folder))


def bench() -> str:
    """Both agree, every figure is there."""
    arguments = ("--inputs", "examples/packed_8k.json", "--heads", "8", "--kv-heads", "2", "--json")
    done = _ran("-m", "maskc", "bench", "std:doc_prefix", *arguments, seconds=150)  # FlexAttention compiles for a minute
    if done.returncode:
        return _problem(done)
    report = json.loads(done.stdout)
    sides = report["maskc"], report["flex"]
    missing = [name for side in sides for name in ("first_step", "mask", "forward", "backward") if not side[name]]
    return f"without {missing}" if missing else "" if report["backend"] == "hopper" else f"ran on {report['backend']}"


def fuzz() -> str:
    """Every way to run, the generated kernels among them."""
    done = _ran("-m", "maskc", "fuzz", "examples/doc_prefix.mask", "--cases", "4", "--largest", "300")
    return _problem(done) or ("" if " gpu 4" in done.stdout else done.stdout)


def _ran(*arguments: str, seconds: float = 80) -> subprocess.CompletedProcess[str]:
    """Triton compiles in the process itself: starting helpers takes longer than what little there is to compile."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env=environment)


def main() -> int:
    """All side by side: each spends most of its time on importing and compiling, in processes of its own."""
    cases = (*special_cases(), ("tools/maskc bench", bench), ("tools/maskc fuzz", fuzz))
    started, bad = time.monotonic(), 0
    names = sys.argv[1:]
    with ThreadPoolExecutor() as pool:
        running = {pool.submit(_caught, case): name for name, case in cases if not names or any(n in name for n in names)}
        for done in as_completed(running):
            bad += bool(done.result())
            print(f"{running[done]}: {done.result() or 'right'} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if bad else 0


def _caught(case: Callable[[], str]) -> str:
    try:
        return case()
    except subprocess.TimeoutExpired as e:
        return f"not done after {e.timeout:.0f} s"


def _problem(done: subprocess.CompletedProcess[str]) -> str:
    return f"status {done.returncode}: {done.stderr.strip()[-280:]}" if done.returncode else ""


if __name__ == "__main__":
    raise SystemExit(main())
