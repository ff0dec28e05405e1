"""Fine-tune a small Llama-style model on packed documents through Hugging Face Transformers, and compare with unpacked.

    pip install -e ".[hf]"
    python examples/finetune_packed.py

Documents are packed into one sequence, so no token is spent on padding; the mask keeps them apart, positions restart,
and labels end with each document. Loss and gradients are those of the documents one by one.
"""

from __future__ import annotations

from pathlib import Path

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as e:
    raise SystemExit('this example needs Transformers: pip install -e ".[hf]"') from e

import maskc
from maskc.integrations.transformers import register

HERE = Path(__file__).parent
LENGTHS = [9, 1, 23, 14]


def small_model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attention_dropout=0.0,
        attn_implementation="maskc",
    )
    return LlamaForCausalLM(config).to(dtype)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator) for n in LENGTHS]


def packed_loss(model: LlamaForCausalLM, docs: list[torch.Tensor]) -> torch.Tensor:
    """The sum over tokens, of all documents in one row."""
    lengths = [len(d) for d in docs]
    spec = maskc.compile(HERE / "doc_causal.mask").bind(doc=maskc.segments(lengths=lengths))
    tokens = torch.cat(docs)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = torch.cat([torch.cat([d[1:], torch.tensor([-100])]) for d in docs])
    logits = model(tokens, position_ids=positions, maskc=spec, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def unpacked_loss(model: LlamaForCausalLM, docs: list[torch.Tensor]) -> torch.Tensor:
    """The same, one document at a time."""
    total = torch.zeros((), dtype=model.dtype)
    for doc in docs:
        spec = maskc.compile("std:causal").bind()
        logits = model(doc[None], maskc=spec, use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], doc[1:], reduction="sum")
    return total


def main() -> None:
    register()
    model, docs = small_model(), documents()
    tokens = sum(n - 1 for n in LENGTHS)

    packed_loss(model, docs).backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    unpacked_loss(model, docs).backward()
    worst = max((packed[name] - p.grad).abs().max().item() for name, p in model.named_parameters())
    print(f"largest difference of a gradient, packed from unpacked: {worst:.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        loss = packed_loss(model, docs) / tokens
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
