"""One rank of overlapped attention once per executor over the same keys, other ranks in pinned host memory; used by
`tests.gpu.special_overlap` and `tests.gpu.overlap_random`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import maskc
from benchmarks.kernels import attention, compile_all
from benchmarks.octets import from_octets, to_octets
from maskc.boundary import BoundaryVectors
from maskc.codegen.exchange import exchange_source
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import GATE_SLOTS, MaskForm
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.merge import accumulator
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.overlap_plan import Slot, overlap_plan
from maskc.runtime.plan import plan
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair, head_major
from tests.gpu.inputs import suite_mask

MASKS = ("01_full", "02_causal", "05_doc_full", "09_doc_prefix", "06_share_question", "07_global_window", "28_duo_heads")
DEVICE = "cuda"
EXECUTORS: tuple[Executor, ...] = ("gated", "copy-then-attend", "sm-copy")


def kernels(form: MaskForm, dim: int) -> list[CudaSource]:
    """Gated and not, both ways, and the exchange."""
    return [*attention(form, dim, deterministic=(False, True), gated=(False, True)), exchange_source()]


@cache
def compiled(form: MaskForm, dim: int) -> None:
    """Side by side where nobody has compiled ahead, so that no wait comes near its time."""
    compile_all(kernels(form, dim))


class Inputs(NamedTuple):
    """q and own keys of the rank on the GPU; on the host what others have: keys, head-major and by rank, and gradients of the
    rank's own keys by (reader, chunk).
    """

    q: Tensor
    own_k: Tensor
    own_v: Tensor
    theirs: dict[int, Pair]
    gradients: dict[tuple[int, int], Pair]


class Calls(NamedTuple):
    """What a backward call gave: dQ, dK, dV, and what left for other ranks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    pushed: list[Tensor]


class Near(Loopback):
    """Other ranks in host memory, which kernels of this one reach as they reach that of other GPUs.

    words: per pair of ranks, of which this one is one, those that tell of pieces of gradients.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        pairs = [(self.rank, r) for r in self.lends] + [(r, self.rank) for r in self._halves]
        made = {pair: torch.zeros(GATE_SLOTS, dtype=torch.int32) for pair in pairs}
        self.words = {pair: t.pin_memory() if self.pinned else t for pair, t in made.items()}

    @property
    def takes(self) -> Near:  # type: ignore[override]
        return self

    def place(self, owner: int, chunk: int) -> Pair:
        return self.pushed(chunk)

    def told(self, owner: int, reader: int) -> Tensor:
        return self.words[owner, reader]


class Pairing:
    """One rank several times, once per executor, over the same keys."""

    def __init__(self, v: BoundaryVectors, world: int, rank: int, dim: int, chunk: int, batch: int, timeout: float = 5.0) -> None:
        p = plan(v, world_size=world, chunk=chunk)
        self.heads, self.heads_kv, self.batch, self.dim = 2 * v.heads * 2, v.heads * 2, batch, dim
        self.layout, self.rank = p, rank
        self.plan = overlap_plan(p, rank)
        self.local = localize(v, p.rows, p.rows.chunks_of(rank), p.keys, self.plan.columns, torch.device(DEVICE))
        shape = KeyShape(batch, self.heads_kv, dim, dim, torch.bfloat16)
        groups = self.heads_kv // (1, 2)[(chunk + rank) // 32 % 2]
        self.ranks: dict[Executor, Overlapped] = {}
        self.last: dict[Executor, int] = dict.fromkeys(EXECUTORS, 0)  # the last backward call
        self.links: dict[Executor, Near] = {}
        readers = {r: overlap_plan(p, r) for r, _ in self.plan.lends}
        for executor in EXECUTORS:
            link = Near(p.keys, rank, self.plan.sources, shape, lends=self.plan.lends)
            self.links[executor] = link
            queues = CudaQueues(torch.device(DEVICE))
            for reader, chunks in self.plan.lends:
                for chunk in chunks:
                    link.staged(reader, chunk)  # made here, not by the peers' thread and this one at once
            for chunk in (c for s in self.plan.pulls for c in s.chunks):
                link.pushed(chunk)
            given = (self.plan, p.keys, shape, link, queues, torch.device(DEVICE))
            self.ranks[executor] = Overlapped(*given, readers=readers, timeout=timeout, groups=groups)

    def keys(self, seed: int) -> Inputs:
        g = torch.Generator(DEVICE).manual_seed(seed)
        rows, n = self.layout.rows.local_length(self.rank), self.layout.keys.length
        made = ((rows, self.heads), (n, self.heads_kv), (n, self.heads_kv))
        q, k, v = (torch.randn(self.batch, s, h, self.dim, generator=g, device=DEVICE, dtype=torch.bfloat16) for s, h in made)
        own_k, own_v = self.shards(k, v, self.rank)
        theirs = {peer: self.on_host(*map(head_major, self.shards(k, v, peer))) for peer in self.plan.sources}
        gradients = {}
        for reader, chunks in self.plan.lends:
            for chunk in chunks:
                shape = self.batch, self.heads_kv, self.layout.keys.size_of(chunk), self.dim
                dk, dv = torch.randn(2, *shape, generator=g, device=DEVICE, dtype=accumulator(q.dtype))
                gradients[reader, chunk] = self.on_host(dk, dv)
        return Inputs(q, own_k, own_v, theirs, gradients)

    def shards(self, k: Tensor, v: Tensor, rank: int) -> Pair:
        k, v = (self.layout.shard(x, rank, of="keys").contiguous() for x in (k, v))
        return k, v

    def on_host(self, k: Tensor, v: Tensor) -> Pair:
        return k.contiguous().cpu(), v.contiguous().cpu()

    def post(self, executor: Executor, epoch: int, given: Inputs) -> None:
        """What the other ranks do; the host alone does it, as nothing of theirs may wait for this rank's streams."""
        for peer in self.plan.sources:

            def fill(pair: Pair, peer: int = peer) -> None:
                for half, whole in zip(pair, given.theirs[peer], strict=True):
                    half.copy_(whole)

            self.links[executor].post(peer, epoch, fill)

    def forward(self, executor: Executor, given: Inputs) -> tuple[Tensor, Tensor]:
        scale = self.dim**-0.5
        return self.ranks[executor].forward(self.local, given.q, given.own_k, given.own_v, scale, executor)

    def post_gradients(self, executor: Executor, epoch: int, given: Inputs, way: Executor | None = None) -> None:
        """Gradients of those that read this rank's keys; the same for every executor, told of where kernels give them.

        way: as in `backward`.
        """
        link, octets = self.links[executor], in_octets(way or executor)
        for reader, chunks in link.lends.items():

            def fill(chunk: int, pair: Pair, reader: int = reader, last: int = chunks[-1]) -> None:
                for here, theirs in zip(pair, given.gradients[reader, chunk], strict=True):
                    whole = pad(theirs, (0, 0, 0, here.shape[2] - theirs.shape[2]))
                    here.copy_(to_octets(whole) if octets else whole)
                if chunk == last:
                    link.told(self.rank, reader).fill_(epoch)

            link.post_gradients(reader, epoch, fill, self.last[executor])

    def backward(
        self,
        executor: Executor,
        given: Inputs,
        result: tuple[Tensor, Tensor],
        deterministic: bool = False,
        gather: bool = True,
        way: Executor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """On the rank of an executor, its own way if no other is told."""
        dout = torch.cos(7 * given.q.float()).to(given.q.dtype)
        dlse = torch.sin(result[1].nan_to_num(0, 0, 0))
        keys = given.own_k, given.own_v
        run = self.ranks[executor].backward
        options: dict[str, Any] = {"dlse": dlse, "deterministic": deterministic, "gather": gather}
        return run(self.local, given.q, *keys, *result, dout, self.dim**-0.5, way or executor, **options)

    def pushed(self, executor: Executor, way: Executor | None = None) -> list[Tensor]:
        """On the GPU, where they are compared."""
        return [t for s in self.plan.pulls for t in self.rows_of(way or executor, s, self.links[executor].pushed(s.chunk))]

    def rows_of(self, executor: Executor, slot: Slot, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of a chunk as an executor leaves them, row by row, on the GPU in memory of their own."""
        octets = in_octets(executor)
        there = (t.to(DEVICE, copy=True) for t in gradients)
        return [(from_octets(t) if octets else t)[:, :, : slot.rows] for t in there]

    def poison(self, executor: Executor) -> None:
        """NaN wherever keys are going to arrive, once what is enqueued has read what lies there and before the next copies."""
        self.ranks[executor].keys.fill_(math.nan)
        self.ranks[executor].values.fill_(math.nan)

    def warm(self, seed: int = 0) -> None:
        """One call of each, so that nothing is compiled or loaded while something waits."""
        if DEVICE == "cuda":
            compiled(hopper.mask_form(self.local), self.dim)
        self.both(seed)
        for deterministic in (False, True):
            self.both_ways(seed, deterministic)

    def both(self, seed: int) -> str:
        """One call of each executor with posted keys; "" when the results are the same finite bits."""
        given = self.keys(seed)
        results = []
        for executor, rank in self.ranks.items():
            self.poison(executor)
            self.post(executor, rank.epoch + 1, given)
            results.append(self.forward(executor, given))
            rank.finish()
        return first_difference(results)

    def both_ways(self, seed: int, deterministic: bool) -> str:
        """Forward and backward of each executor."""
        given, results = self.keys(seed), []
        for executor, rank in self.ranks.items():
            self.post(executor, rank.epoch + 1, given)
            forward = self.forward(executor, given)
            rank.finish()
            self.poison(executor)
            epoch = rank.epoch + 1
            self.post(executor, epoch, given)
            self.post_gradients(executor, epoch, given)
            grads = self.backward(executor, given, forward, deterministic=deterministic)
            rank.finish()
            for owner in self.plan.sources:
                self.links[executor].take(owner, epoch)
            self.last[executor] = epoch
            results.append(Calls(grads[0], grads[1], grads[2], self.pushed(executor)))
        return next((d for other in results[1:] if (d := different_gradients(results[0], other, deterministic))), "")


def in_octets(executor: Executor) -> bool:
    """How an executor lays out gradients."""
    return DEVICE == "cuda" and executor != "copy-then-attend"


def first_difference(results: list[tuple[Tensor, Tensor]]) -> str:
    return next((d for other in results[1:] if (d := different(results[0], other))), "")


def different(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> str:
    if not torch.equal(a[0], b[0]) or not torch.equal(a[1], b[1]):
        return f"not the same bits: out differs by {(a[0].float() - b[0].float()).abs().max().item()}"
    return "" if torch.isfinite(a[0]).all() else "NaN in the output"


def different_gradients(a: Calls, b: Calls, deterministic: bool) -> str:
    for name in ("dk", "dv"):
        x, y = getattr(a, name), getattr(b, name)
        if not torch.equal(x, y):
            return f"{name} differs by {(x.float() - y.float()).abs().max().item()}"
    for x, y in zip(a.pushed, b.pushed, strict=True):
        if not torch.equal(x, y):
            return f"what leaves differs by {(x - y).abs().max().item()}"
    if deterministic and not torch.equal(a.dq, b.dq):
        return f"dq differs by {(a.dq.float() - b.dq.float()).abs().max().item()}"
    # In another order of additions a sum may round to the neighbouring number, of its own size or of its largest addend.
    step = torch.finfo(a.dq.dtype).eps
    largest = a.dq.float().abs().max().item() if a.dq.numel() else 0.0  # a rank may have no rows
    if a.dq.numel() and not torch.allclose(a.dq.float(), b.dq.float(), rtol=step, atol=step * largest):
        return f"dq differs by {(a.dq.float() - b.dq.float()).abs().max().item()}"
    return "" if all(torch.isfinite(t).all() for t in (a.dq, a.dk, a.dv, *a.pushed)) else "NaN in the gradients"


@cache
def _compiled_mask(path: str) -> maskc.CompiledMask:
    return maskc.compile(path)


def whole_mask(name: str, n: int, device: str | None = None, seed: int = 11) -> BoundaryVectors:
    made = suite_mask(name, n, n, random.Random(seed))
    assert made is not None
    return _compiled_mask(str(made[0])).bind(nq=n, nk=n, **made[1]).vectors(n, n, torch.device(device or DEVICE))
