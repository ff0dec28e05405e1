"""FSDP2 and context parallelism over the same ranks: gradients are those of one process. Two processes, no GPU needed.

    python examples/train_fsdp_context_parallel.py [--world 2]

Every rank holds its rows of the packed sequence and its share of the parameters. FSDP averages gradients over the ranks,
so each rank scales the mean loss of its own rows by `plan.loss_weight(rank, labels)`: the average over the ranks is then
the mean over all labelled tokens of the whole sequence, whoever holds them.
"""

from __future__ import annotations

import argparse
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import maskc

HERE = Path(__file__).parent
LENGTHS = [3, 70, 1, 41, 98]
VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 50, 32, 4, 2, 2


class Block(nn.Module):
    """Attention and a small MLP, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, spec: maskc.BoundMask, context: dict[str, Any]) -> Tensor:
        mixed = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = mixed.split([HEADS, KV_HEADS, KV_HEADS], 2)
        x = x + self.out(maskc.run(spec, q, k, v, **context).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(max(LENGTHS), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, spec: maskc.BoundMask, context: dict[str, Any]) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, spec, context)
        return self.head(x[0])  # one packed sequence: [rows, vocabulary]


def new_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def batch() -> tuple[maskc.BoundMask, maskc.AttentionPlan, Tensor, Tensor]:
    """(mask, plan, tokens, labels) of the whole sequence; with `world` ranks every one makes the same."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    spec = maskc.compile(HERE / "doc_causal.mask").bind(doc=maskc.segments(lengths=LENGTHS))
    n = sum(LENGTHS)
    plan = maskc.plan(spec, world_size=world, nq=n, nk=n, chunk=16)
    tokens = torch.randint(0, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1))
    return spec, plan, tokens, plan.shift_labels(tokens)


def step(model: nn.Module, rank: int, group: Any) -> Tensor:
    """Forward and backward of this rank's rows. Returns its scaled loss."""
    spec, plan, tokens, labels = batch()
    mine, target = plan.shard(tokens, rank), plan.shard(labels, rank)
    context = {} if group is None else {"group": group, "plan": plan}
    positions = plan.positions(rank, per="doc")[None]
    logits = model(mine, positions, spec, context)
    own = (target != -100).sum().clamp(min=1)  # a rank may hold no labelled row
    mean = nn.functional.cross_entropy(logits, target[0], ignore_index=-100, reduction="sum") / own
    loss = mean * plan.loss_weight(rank, labels)
    loss.backward()
    return loss.detach()


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    loss = step(model, rank, dist.group.WORLD)
    dist.all_reduce(loss)
    gathered = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        report(world, loss / world, gathered)
    dist.destroy_process_group()


def report(world: int, loss: Tensor, gathered: dict[str, Tensor]) -> None:
    """Compare with one process that holds everything."""
    spec, plan, _, _ = batch()
    print(f"{world} ranks: " + ", ".join(f"{k} {v:.3g}" for k, v in maskc.metrics(plan).items() if v is not None))
    alone = new_model()
    tokens = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    labels = plan.shift_labels(tokens)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    logits = alone(tokens, positions, spec, {})
    whole = nn.functional.cross_entropy(logits, labels[0], ignore_index=-100)
    whole.backward()
    worst = max((gathered[name] - p.grad).abs().max().item() for name, p in alone.named_parameters())
    print(f"loss: difference from one process {abs(loss.item() - whole.item()):.1e}")
    print(f"gradients: largest difference from one process {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="number of processes")
    world = parser.parse_args().world
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(r, world, f"{folder}/rendezvous")) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
