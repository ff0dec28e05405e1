"""The ways of `benchmarks.overlap_gpus`: one rank's forward and backward of a cell, ours, over NCCL, and torch's own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.masks import MaskCase
from benchmarks.overlap_bounds import Needs, needs_of
from benchmarks.overlap_cells import HEAD_DIM
from benchmarks.overlap_rank import give_keys, send_gradients
from maskc.binding.bound import BoundMask
from maskc.runtime import context_parallel, executor, gated, ops
from maskc.runtime.comm import Peer
from maskc.runtime.exchange import Added
from maskc.runtime.localize import localize
from maskc.runtime.overlap_grads import Told
from maskc.runtime.overlap_kernels import backward_block, forward_block
from maskc.runtime.plan import AttentionPlan
from maskc.runtime.plan import plan as make_plan

ON_GPUS = torch.cuda.is_available()
WHOLE_TILES = 384
"""Multiples are whole tiles of the kernels, of rows and of keys."""


def exit_codes(processes: Sequence[subprocess.Popen[Any]], until: float) -> list[int]:
    """How processes ended, in order; those that outlive `until` (time.time()) are killed, -1."""
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, until - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(-1)
    return codes


@dataclass(frozen=True)
class Cell:
    """rows: per GPU. chunks: balanced by chunks of 3/16 of them, by which more keys travel than by what `maskc.plan` chooses."""

    mask: str
    rows: int
    heads: int
    heads_kv: int
    batch: int = 1
    chunks: bool = False

    def __str__(self) -> str:
        size = f"{self.mask:18} {self.rows:6} rows a GPU, {self.heads} on {self.heads_kv:2} heads, batch {self.batch}"
        return size + (", in chunks" if self.chunks else "")


class Run(NamedTuple):
    """forward() enqueues and returns (out, lse), which backward(out, lse) is given; the rest is enqueued alone for E."""

    forward: Callable[[], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor], Any]


@dataclass
class Rank:
    """One process and the tensors of its cell; rows beyond what a plan deals to it are not used."""

    peer: Peer
    device: torch.device
    cell: Cell
    case: MaskCase
    spec: BoundMask
    made: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.cell.rows * self.peer.world

    def plan(self, order: str, prune: bool = True) -> AttentionPlan:
        """As `maskc.plan` makes it, "zigzag" being the dual-chunk assignment; but "balanced" of cells in chunks."""
        sizes = {"heads": self.cell.heads, "heads_kv": self.cell.heads_kv, "head_dim": HEAD_DIM}
        chunk = self.cell.rows * 3 // 16 // WHOLE_TILES * WHOLE_TILES if self.cell.chunks and order == "balanced" else 0
        made = partial(make_plan, self.spec, world_size=self.peer.world, order=order, prune=prune, **sizes)  # type: ignore[arg-type]
        return made(chunk=chunk or None)

    def tensors(self, p: AttentionPlan) -> list[Tensor]:
        """q, k, v and the gradient of out, the same for all ways that use a plan: memory grows slowly."""
        if p.digest not in self.made:
            self.made[p.digest] = self._tensors(p)
        return self.made[p.digest]

    def _tensors(self, p: AttentionPlan) -> list[Tensor]:
        g = torch.Generator(self.device).manual_seed(self.peer.rank)
        rows, keys = (axis.local_length(self.peer.rank) for axis in (p.rows, p.keys))
        heads, heads_kv = self.cell.heads, self.cell.heads_kv
        shapes = (rows, heads), (keys, heads_kv), (keys, heads_kv), (rows, heads)
        dtype = torch.bfloat16 if ON_GPUS else torch.float32
        return [torch.randn(self.cell.batch, n, h, HEAD_DIM, generator=g, device=self.device, dtype=dtype) for n, h in shapes]


def exchanged(rank: Rank, p: AttentionPlan, strategy: str, keep: bool = False) -> Run:
    """A strategy of `maskc.run`, below its checks and autograd. keep: the backward may use the keys of the forward."""
    q, k, v, dout = rank.tensors(p)
    p = replace(p, keep_keys=keep)
    call = context_parallel.agreed_call(rank.spec, q, k, v, rank.peer, p, strategy, None, False, "auto", True)
    return Run(
        lambda: executor.forward(call, q, k, v),
        lambda out, lse: executor.backward(call, q, k, v, out, lse, dout, None),
    )


class Alone(NamedTuple):
    """The gated kernels with every chunk there, the copies of keys and gradients without kernels, and what needs what.

    Gradients that nobody else has a part in are no communication where the kernel leaves them whole. summed: bytes that the sum
    of the others reads and writes.
    """

    attention: Run
    communication: Run
    needs: dict[str, Needs]
    summed: int


def alone(rank: Rank, p: AttentionPlan) -> Alone:
    """Parts of the gated step."""
    q, k, v, dout = rank.tensors(p)
    call = context_parallel.agreed_call(rank.spec, q, k, v, rank.peer, p, "gated", None, False, "auto", True)
    over, local = gated.rank_of(call, q, k, v), gated.local_mask(call, q, k)
    own_forward = over.in_place(k, v, forward_block(local, q))
    own_backward = over.in_place(k, v, backward_block(local, q, False))
    over.settle(k, v)  # for kernels that read own keys in the buffer
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    whole = over.whole(local, q, own_backward, (dk, dv), False, alone=True)
    unshared = None
    if whole is not None and own_backward is not None:
        tiles = over.sums.lent(own_backward.block, own_backward.block_kv, lambda reader, chunk: Told(0, 0, 1))
        nobody = torch.tensor([int(others == []) for others in tiles], dtype=torch.int32, device=rank.device)
        words = nobody.repeat(rank.cell.batch * rank.cell.heads_kv, 1)
        unshared = Added(words, 1, own_backward.block, own_backward.block_kv)
    made: list[Any] = []

    def backward(out: Tensor, lse: Tensor) -> None:
        made[:] = [
            over.attend_backward(local, q, out, lse, dout, call.scale, gated=True, there=True, own=own_backward, whole=whole)
        ]

    def keys() -> tuple[Tensor, Tensor]:
        give_keys(over, over.forward_cut, (k, v))
        over.queues.follow("compute", "copy")
        return q, q

    def both(out: Tensor, lse: Tensor) -> None:
        give_keys(over, over.backward_cut, (k, v))
        send_gradients(over, made[0])
        over.queues.follow("compute", "copy")
        over.add_up(made[0], (dk, dv), unshared)

    attention = Run(lambda: over.attend(local, q, call.scale, gated=True, there=True, own=own_forward), backward)
    needs = {d: needs_of(over, local, q, d) for d in ("forward", "backward")}
    shared = (a for a in over.sums.addends() if a.parts or unshared is None)
    adds = ((a.rows * a.dim, (a.own is not None) + len(a.parts)) for a in shared)
    return Alone(attention, Run(keys, both), needs, sum(n * (4 * parts + k.element_size()) for n, parts in adds))


def gathered(rank: Rank, p: AttentionPlan, exchange: bool = True) -> Run:
    """Everything by NCCL's all-gather in the ranks' order, one kernel, NCCL's reduce-scatter of bf16 gradients."""
    q, k, v, dout = rank.tensors(p)
    world, group = rank.peer.world, rank.peer.group
    columns = tuple(c for r in range(world) for c in p.keys.chunks_of(r))
    vectors = rank.spec.vectors(rank.length, rank.length, rank.device)
    local = localize(vectors, p.rows, p.rows.chunks_of(rank.peer.rank), p.keys, columns, rank.device)
    tables = ops.backend_module("hopper").schedule(local, HEAD_DIM) if ON_GPUS else ()
    own = [t.transpose(0, 1).contiguous() for t in (k, v)]  # rows of a rank are one piece
    whole = [t.new_empty(world * t.shape[0], *t.shape[1:]) for t in own]
    keys, values = (t.transpose(0, 1) for t in whole)
    scale = HEAD_DIM**-0.5

    def gather() -> None:
        for into, mine in zip(whole, own, strict=True):
            dist.all_gather_into_tensor(into, mine, group=group)

    gather()  # the kernel alone works on the same keys: on others it draws another power, and runs at another clock

    def forward() -> tuple[Tensor, Tensor]:
        if exchange:
            gather()
        return ops.forward(local, q, keys, values, scale, schedule=tables)

    def backward(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        if exchange:
            gather()
        dq, *grads = ops.backward(local, q, keys, values, out, lse, dout, None, scale, schedule=tables)
        if not exchange:
            return dq, *grads
        sums = [torch.empty_like(t) for t in own]
        for total, part in zip(sums, grads, strict=True):
            dist.reduce_scatter_tensor(total, part.transpose(0, 1).contiguous(), group=group)
        return dq, *(t.transpose(0, 1) for t in sums)

    return Run(forward, backward)


def torch_context_parallel(rank: Rank) -> Run:
    """FlexAttention as `torch.distributed.tensor.experimental` spreads it over ranks."""
    from torch._functorch import config as functorch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _context_parallel as cp
    from torch.nn.attention.flex_attention import flex_attention

    from benchmarks.peers import mask_mod

    mesh = init_device_mesh(rank.device.type, (rank.peer.world,))
    mod = mask_mod(rank.case, rank.device)
    balancer = cp._HeadTailLoadBalancer(rank.length, rank.peer.world, rank.device)
    make = getattr(cp._attention, "_create_cp_block_mask", None) or cp._attention.create_cp_block_mask
    with torch.compiler.set_stance("force_eager"):  # compiled, it takes a minute
        made = make(mod, 1, 1, rank.length, rank.length, mesh, load_balancer=balancer)
    attend = torch.compile(flex_attention, dynamic=False)
    g = torch.Generator(rank.device).manual_seed(rank.peer.rank)
    batch, heads, heads_kv = rank.cell.batch, rank.cell.heads, rank.cell.heads_kv
    q, k, v, dout = (
        torch.randn(batch, h, rank.cell.rows, HEAD_DIM, generator=g, device=rank.device, dtype=torch.bfloat16)
        for h in (heads, heads_kv, heads_kv, heads)
    )
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def forward() -> tuple[Tensor, Tensor]:
        keys, values = cp.flex_cp_allgather(k, v, 2, mesh.get_group().group_name)
        out = attend(q, keys, values, block_mask=made, enable_gqa=heads != heads_kv)
        return out, out

    functorch.donated_buffer = False  # else its graph cannot be kept
    return Run(forward, lambda out, lse: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
