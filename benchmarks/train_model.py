"""The models of `benchmarks.train`: a small decoder, and the same with a mixture of experts in the place of its MLPs.

Nothing here knows which attention runs: `attend` of a batch is a function of q [B, S, Hq, D], k and v [B, S, Hk, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """experts = 0: a dense MLP. width of the residual stream; hidden: of an MLP or of one expert."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    experts: int = 0
    active: int = 2


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.qkv = nn.Linear(s.width, (s.heads + 2 * s.kv_heads) * s.head_dim, bias=False)
        self.out = nn.Linear(s.heads * s.head_dim, s.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        s = self.shape
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.head_dim)).split([s.heads, s.kv_heads, s.kv_heads], 2)
        return self.out(attend(rotated(q, turn), rotated(k, turn), v).flatten(2))


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [S, 1, D / 2] of rotary embeddings for positions [S]."""
    rates = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.double()[:, None, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), (a, b) = turn, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class MLP(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(s.width, 2 * s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Experts(nn.Module):
    """Each token goes to its `active` best experts, weighted by the softmax over those; no token is dropped.

    up [experts, width, 2 hidden], down [experts, hidden, width]: gated like `MLP`. Nothing waits for the device.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.active = s.active
        self.router = nn.Linear(s.width, s.experts, bias=False)
        self.up = nn.Parameter(torch.empty(s.experts, s.width, 2 * s.hidden))
        self.down = nn.Parameter(torch.empty(s.experts, s.hidden, s.width))
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)  # as in nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(self.active, -1)
        experts, order = chosen.flatten().sort(stable=True)
        rows = order // self.active
        place, ends = padded(experts, len(self.up))
        dealt = tokens.new_zeros(len(rows) + ALIGN * len(self.up), tokens.shape[1]).index_copy(0, place, tokens[rows])
        gate, value = grouped(dealt, self.up, ends).chunk(2, -1)
        out = grouped(F.silu(gate) * value, self.down, ends)[place] * scores.softmax(-1).flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, rows, out).view_as(x)


ALIGN = 16
"""Rows of a group of `grouped` come in multiples of this."""


def padded(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the rows of ascending groups stand when each of `count` groups is filled up to `ALIGN`, and where groups then end."""
    ends = torch.searchsorted(groups, torch.arange(count, device=groups.device), right=True)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    filled = ((sizes + ALIGN - 1) // ALIGN * ALIGN).cumsum(0)
    moved = filled.roll(1).index_fill(0, filled.new_zeros(1), 0) - (ends - sizes)
    return torch.arange(len(groups), device=groups.device) + moved[groups], filled.int()


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows of x times the matrix of their group: up to ends[0] times weights[0] and so on. Rows after the last: anything."""
    if x.device.type == "cuda":
        return F.grouped_mm(x, weights, offs=ends)
    sizes = [*ends.diff(prepend=ends.new_zeros(1)).tolist(), len(x) - int(ends[-1])]
    *parts, rest = x.split(sizes)
    return torch.cat([*(part @ weight for part, weight in zip(parts, weights, strict=True)), rest @ weights[0]])


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.attention = Attention(s)
        self.mlp: nn.Module = Experts(s) if s.experts else MLP(s)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attention(self.before(x), turn, attend)
        return x + self.mlp(self.after(x))


class Decoder(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.tokens = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor, attend: Attend) -> Tensor:
        """Mean loss over the labels that are not -100. tokens and labels [B, S], positions [S]."""
        x = self.tokens(tokens)
        turn = rotation(positions, self.shape.head_dim, x.dtype)
        for block in self.blocks:
            x = block(x, turn, attend)
        logits = self.head(self.norm(x))
        return F.cross_entropy(
            logits.flatten(0, 1).float() if x.dtype != torch.float64 else logits.flatten(0, 1), labels.flatten()
        )
