"""From a mask file to exact attention on a packed batch: what `make demo` runs. Needs no GPU.

python examples/demo.py
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import maskc
from maskc.explain import explain
from maskc.inputs import bind_file

HERE = Path(__file__).parent
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SAMPLE = 64


def main() -> None:
    mask = maskc.compile(HERE / "doc_prefix.mask")
    spec = bind_file(mask, HERE / "packed_8k.json")
    print(explain(mask, spec).render())

    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    n = spec.nq
    q = torch.randn(1, n, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    k = torch.randn(1, n, KV_HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    v = torch.randn(1, n, KV_HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(q)

    begin = time.perf_counter()
    out, lse = maskc.run(spec.to(device), q, k, v, return_lse=True)
    forward = time.perf_counter() - begin
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    both = time.perf_counter() - begin

    name = str(dtype).removeprefix("torch.")
    print(f"\nmaskc.run on {device}: {n} tokens, {HEADS} heads over {KV_HEADS} kv heads of {HEAD_DIM}, {name}")
    print(f"    forward {forward:.2f} s, backward {both - forward:.2f} s (first call included)")
    print(f"\nlargest error against dense fp64 attention, {SAMPLE} sampled rows and {SAMPLE} sampled keys of every head")
    for name, (got, want) in compare(q, k, v, grad, (out, lse, dq, dk, dv)).items():
        print(f"    {name:<4} {float((got.double() - want).abs().max()):.1e}   (values up to {float(want.abs().max()):.1f})")


def compare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, got: tuple[torch.Tensor, ...]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sampled rows of out, lse, dQ and sampled keys of dK, dV: (maskc's, dense fp64's)."""
    out, lse, dq, dk, dv = (t.detach().cpu() for t in got)
    q, k, v, grad = (t.detach().cpu().double() for t in (q, k, v, grad))
    n, ratio, scale = q.shape[1], HEADS // KV_HEADS, HEAD_DIM**-0.5
    rows, keys = (torch.randperm(n)[:SAMPLE].sort().values for _ in range(2))
    want: dict[str, list[torch.Tensor]] = {name: [] for name in ("out", "lse", "dQ", "dK", "dV")}
    visible = written_out(n)
    for h in range(HEADS):
        qh, kh, vh, gh = q[0, :, h], k[0, :, h // ratio], v[0, :, h // ratio], grad[0, :, h]
        delta, logsum = torch.empty(n, dtype=torch.double), torch.empty(n, dtype=torch.double)
        for block in torch.arange(n).split(1024):  # of every row, for the gradients of keys sum over all rows
            p, logsum[block] = probabilities(qh[block] @ kh.T * scale, visible[block])
            delta[block] = ((p @ vh) * gh[block]).sum(1)
        p, _ = probabilities(qh[rows] @ kh.T * scale, visible[rows])
        want["out"].append(p @ vh)
        want["lse"].append(logsum[rows])
        want["dQ"].append(p * (gh[rows] @ vh.T - delta[rows, None]) @ kh * scale)
        p = torch.exp(qh @ kh[keys].T * scale - logsum[:, None]) * visible[:, keys]
        want["dV"].append(p.T @ gh)
        want["dK"].append((p * (gh @ vh[keys].T - delta[:, None])).T @ qh * scale)
    return {
        "out": (out[0, rows].transpose(0, 1), torch.stack(want["out"])),
        "lse": (lse[0][:, rows], torch.stack(want["lse"])),
        "dQ": (dq[0, rows].transpose(0, 1), torch.stack(want["dQ"])),
        "dK": (dk[0, keys].transpose(0, 1), torch.stack(want["dK"]).unflatten(0, (KV_HEADS, ratio)).sum(1)),
        "dV": (dv[0, keys].transpose(0, 1), torch.stack(want["dV"]).unflatten(0, (KV_HEADS, ratio)).sum(1)),
    }


def probabilities(scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax over the visible keys, log-sum-exp); every row of this mask sees itself."""
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(1), scores.logsumexp(1)


def written_out(n: int) -> torch.Tensor:
    """The mask element by element, from the JSON alone: bool [n, n], True where row q sees key k."""
    inputs = json.loads((HERE / "packed_8k.json").read_text())["inputs"]
    lengths, prefixes = torch.tensor(inputs["doc"]["segments"]["lengths"]), torch.tensor(inputs["prefix"])
    doc = torch.arange(len(lengths)).repeat_interleave(lengths)
    offset = torch.arange(n) - (lengths.cumsum(0) - lengths)[doc]
    token = torch.arange(n)
    return (doc[:, None] == doc) & ((token <= token[:, None]) | (offset < prefixes[doc]))


if __name__ == "__main__":
    main()
