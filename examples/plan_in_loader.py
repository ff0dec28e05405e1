"""Plans made one step ahead, in the workers of a data loader: the training process only unpickles them.

    python examples/plan_in_loader.py

The collate function packs documents, binds the mask, and plans. Nothing here needs a process group: every rank's loader
makes the same plan from the same documents, and `maskc.run` compares their digests at first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import maskc

HERE = Path(__file__).parent
WORLD = 4


class Documents(Dataset[torch.Tensor]):
    """Token sequences of uneven length."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(index)
        return torch.randint(0, 1000, (int(torch.randint(5, 400, (), generator=g)),), generator=g)


@dataclass
class Batch:
    """What one rank needs of a packed sequence."""

    spec: maskc.BoundMask
    plan: maskc.AttentionPlan
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_weight: float


class Collate:
    """Documents -> the batch of one rank. Runs in the loader's workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.mask = maskc.compile(HERE / "doc_causal.mask")

    def __call__(self, documents: list[torch.Tensor]) -> Batch:
        tokens = torch.cat(documents)[None]
        n = tokens.shape[1]
        spec = self.mask.bind(doc=maskc.segments(lengths=[len(d) for d in documents]), nq=n, nk=n)
        plan = maskc.plan(spec, world_size=WORLD, chunk=64)
        labels = plan.shift_labels(tokens)  # -100 where a document ends
        return Batch(
            spec=spec,
            plan=plan,
            tokens=plan.shard(tokens, self.rank),
            labels=plan.shard(labels, self.rank),
            positions=plan.positions(self.rank, per="doc"),
            loss_weight=plan.loss_weight(self.rank, labels),
        )


def main() -> None:
    rank = 0
    loader = DataLoader(Documents(), batch_size=8, collate_fn=Collate(rank), num_workers=2, prefetch_factor=1)
    for step, batch in enumerate(loader):
        print(
            f"step {step}: {batch.plan.rows.length} rows, {batch.tokens.shape[1]} of them on rank {rank}, "
            f"imbalance {batch.plan.imbalance:.3f}, loss weight {batch.loss_weight:.3f}"
        )


if __name__ == "__main__":
    main()
