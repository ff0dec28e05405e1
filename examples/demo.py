"""From a mask file to exact attention on a packed batch: what `make demo` runs.

    python examples/demo.py

Compiles a mask, says what it means, runs it forward and backward on whatever this machine has, and compares a sample with
dense fp64 attention under the mask written out by hand.
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
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 4, 2, 64
SAMPLE = 64


def main() -> None:
    mask = maskc.compile(HERE / "doc_prefix.mask")
    spec = bind_file(mask, HERE / "packed_8k.json")
    print(explain(mask, spec).render())

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    qkv = random_inputs(TOKENS, device, dtype)
    grad = torch.randn_like(qkv[0])
    begin = time.perf_counter()
    out, lse = maskc.run(spec, *qkv, return_lse=True)
    forward = time.perf_counter() - begin
    gradients = torch.autograd.grad(out, qkv, grad)
    backward = time.perf_counter() - begin - forward

    shape = f"{TOKENS} tokens, {HEADS} heads over {KV_HEADS} key heads of {HEAD_DIM}"
    print(f"\nmaskc.run on {device}: {shape}, {str(dtype).removeprefix('torch.')}")
    print(f"    forward {forward:.2f} s, backward {backward:.2f} s")
    print(f"\nlargest error against dense fp64 attention, {SAMPLE} rows and {SAMPLE} keys of every head")
    for name, (got, want) in compare(qkv, grad, (out, lse, *gradients)).items():
        print(f"    {name:<4} {float((got.double() - want).abs().max()):.1e}  (values up to {float(want.abs().max()):.1f})")


def random_inputs(tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v of one packed sequence: [1, tokens, heads, head dim]."""
    return tuple(
        torch.randn(1, tokens, heads, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def compare(
    qkv: tuple[torch.Tensor, ...], grad: torch.Tensor, got: tuple[torch.Tensor, ...]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sampled rows of out, lse, dQ and sampled keys of dK, dV: (maskc's, dense fp64's)."""
    out, lse, dq, dk, dv = (t.detach().cpu() for t in got)
    q, k, v, grad = (t.detach().cpu().double() for t in (*qkv, grad))
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
