"""What `benchmarks.train` and its ablation share: packed batches, how a step is timed, and what is kept of many."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from benchmarks.train_model import Attend, Decoder, Shape
from maskc.bench import wait

IGNORED = -100
"""Label of a token that has no next one in its document."""


@dataclass(frozen=True)
class Setting:
    """seqlen, batch: tokens of a step. drop: so many of the fastest and of the slowest of `steps` are left out."""

    device: torch.device
    dtype: torch.dtype
    seqlen: int
    batch: int
    steps: int
    drop: int


def documents(n: int, sparsity: float, seed: int) -> list[int]:
    """Lengths of documents cut at random, such that the causal document mask hides about this share of the n x n cells."""
    rng = random.Random(seed)
    best: list[int] = [n]
    for _ in range(2000):
        cuts = sorted(rng.sample(range(1, n), min(n - 1, max(0, round(rng.gauss(1 / (1 - sparsity) - 1, 1))))))
        lengths = [b - a for a, b in pairwise((0, *cuts, n))]
        if abs(hidden(lengths) - sparsity) < abs(hidden(best) - sparsity):
            best = lengths
        if abs(hidden(best) - sparsity) < 0.005:
            break
    return best


def hidden(lengths: Sequence[int]) -> float:
    """Share of cells that the causal document mask hides."""
    return 1 - sum(n * (n + 1) // 2 for n in lengths) / sum(lengths) ** 2


@dataclass(frozen=True)
class Batch:
    """tokens, labels [B, S] (-100 where a document ends), positions [S] inside documents, and the documents' lengths."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: list[int]


def batches(s: Setting, vocabulary: int, sparsity: float, seed: int) -> Iterator[Batch]:
    """New documents and random tokens in every batch."""
    generator = torch.Generator().manual_seed(seed)
    number = seed
    while True:
        yield packed(documents(s.seqlen, sparsity, number), s, vocabulary, generator)
        number += 1


def packed(lengths: list[int], s: Setting, vocabulary: int, generator: torch.Generator) -> Batch:
    """A batch of these documents, tokens drawn at random."""
    tokens = torch.randint(0, vocabulary, (s.batch, s.seqlen), generator=generator)
    labels = tokens.roll(-1, 1)
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels[:, ends] = IGNORED
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Batch(tokens.to(s.device), labels.to(s.device), positions.to(s.device), lengths)


def new_model(shape: Shape, s: Setting) -> tuple[Decoder, torch.optim.Optimizer]:
    """Equal for every call of one shape."""
    torch.manual_seed(0)
    with s.device:
        model = Decoder(shape).to(s.dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=s.device.type == "cuda")


def learn(model: Module, optimizer: torch.optim.Optimizer, batch: Batch, attend: Attend, weight: float = 1.0) -> Tensor:
    """One step of training: the loss before it, times `weight`, as are the gradients."""
    loss: Tensor = model(batch.tokens, batch.positions, batch.labels, attend) * weight
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---------------------------------------------------------------- time


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call on the wall clock, the device's work included."""
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - started


def trimmed(values: Sequence[float], drop: int) -> tuple[float, float]:
    """Mean and standard deviation without the `drop` least and greatest."""
    kept = sorted(values)[drop : len(values) - drop]
    return statistics.mean(kept), statistics.stdev(kept) if len(kept) > 1 else 0.0
