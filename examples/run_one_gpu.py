"""One attention layer on packed documents, on whatever this machine has: a GPU in bf16, else the CPU in fp32.

    python examples/run_one_gpu.py [--tokens 2048] [--heads 8] [--kv-heads 2] [--head-dim 64]

Shows the three calls a training step needs: `maskc.compile` once, `bind` for each batch, `maskc.run` in each layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import maskc


def main() -> None:
    parser = argparse.ArgumentParser(description="One attention layer on packed documents.")
    for name, default in (("tokens", 2048), ("heads", 8), ("kv-heads", 2), ("head-dim", 64), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    mask = maskc.compile(Path(__file__).parent / "doc_causal.mask")  # once: parsed, lowered, proved

    torch.manual_seed(0)
    width = a.heads * a.head_dim
    project = torch.nn.Linear(width, width + 2 * a.kv_heads * a.head_dim, device=device, dtype=dtype)
    optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
    for step in range(a.steps):
        lengths = packed(a.tokens)
        spec = mask.bind(doc=maskc.segments(lengths=lengths))  # once a batch; every layer uses it
        x = torch.randn(1, a.tokens, width, device=device, dtype=dtype)
        q, k, v = project(x).split([width, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim], dim=-1)
        out = maskc.run(spec, *(t.unflatten(-1, (-1, a.head_dim)) for t in (q, k, v)))  # [1, tokens, heads, head_dim]
        loss = (out.flatten(2) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {len(lengths)} documents, loss {loss.item():.4f} ({device}, {str(dtype).removeprefix('torch.')})")


def packed(tokens: int) -> list[int]:
    """Random document lengths that fill a sequence."""
    cuts = torch.randperm(tokens - 1)[:3].add(1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


if __name__ == "__main__":
    main()
