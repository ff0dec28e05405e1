"""Attention beside the copies of its keys on one GPU, other ranks in pinned host memory (`maskc.runtime.overlap`).

All executors must give the same bits, forward and backward (there dQ too where it is deterministic), with NaN in place
of keys that have not arrived; a peer that is late delays the result, one that never comes is an error after which the
rank works again.

    python -m tests.gpu.special_overlap ITERATIONS [SECONDS]

runs random calls alone, for other settings of CUDA_DEVICE_MAX_CONNECTIONS and SEED, and tells how many were compared.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import maskc
from benchmarks.kernels import attention, compile_all
from maskc.boundary import BoundaryVectors
from maskc.codegen.exchange import exchange_source
from maskc.codegen.render import CudaSource
from maskc.codegen.spec import MaskForm
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import plan
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair, head_major
from tests.gpu.inputs import suite_mask

MASKS = ("01_full", "02_causal", "05_doc_full", "09_doc_prefix", "06_share_question", "07_global_window", "28_duo_heads")
DEVICE = "cuda"
EXECUTORS: tuple[Executor, ...] = ("gated", "copy-then-attend", "sm-copy")


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    """(name, check); a check returns "" or what is wrong."""
    cases: list[tuple[str, Callable[[], str]]] = []
    for i, name in enumerate(MASKS):
        for j, world in enumerate((2, 4)):
            dim, chunk, batch = (64, 128, 256)[(i + j) % 3], (256, 128, 96)[(i + 2 * j) % 3], 1 + (i + j) % 2
            cases.append((f"overlap/bits/{name}/{world}/{dim}/{chunk}/{batch}", partial(bits, name, world, dim, chunk, batch)))
    return [
        *cases,
        ("overlap/few tiles", partial(bits, "02_causal", 2, 128, 128, 1, 1024)),
        ("overlap/gradients/kept keys", kept_keys),
        ("overlap/gradients/killed peer", partial(killed_peer, backward=True)),
        ("overlap/gradients/never come", gradients_never_come),
        ("overlap/tiles that no row sees", partial(bits, "05_doc_full", 2, 128, 1024, 1)),
        ("overlap/many chunks", partial(bits, "05_doc_full", 2, 128, 128, 1, 32_768)),
        ("overlap/copy engines", engines),
        ("overlap/late peer", late_peer),
        ("overlap/killed peer", killed_peer),
        ("overlap/peer that comes after the error", partial(killed_peer, late=True)),
        ("overlap/stopped by the host", stopped),
        ("overlap/100 random calls", partial(iterations, 100)),
        *((f"overlap/connections/{n}", partial(connections, n)) for n in (1, 8, 32)),
    ]


def sources() -> Iterator[CudaSource]:
    """Of every rank's localized form, at each head dim: cases deal masks, ranks and head dims differently."""
    for name in MASKS:
        v = whole_mask(name, 1024, "cpu")
        p = plan(v, world_size=2, chunk=128)
        chosen = overlap_plan(p, 1)
        local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, chosen.columns, v.device)
        for dim in (64, 128, 256):
            yield from kernels(hopper.mask_form(local), dim)


def kernels(form: MaskForm, dim: int) -> list[CudaSource]:
    """Gated and not, both ways, and the exchange."""
    return [*attention(form, dim, deterministic=(False, True), gated=(False, True)), exchange_source()]


@cache
def compiled(form: MaskForm, dim: int) -> None:
    """Side by side where nobody has compiled ahead, so that no wait comes near its time."""
    compile_all(kernels(form, dim))


class Inputs(NamedTuple):
    """q and own keys of the rank on the GPU, keys of everybody on the host."""

    q: Tensor
    own_k: Tensor
    own_v: Tensor
    k: Tensor
    v: Tensor


class Calls(NamedTuple):
    """What a backward call gave: dQ, dK, dV, and what left for other ranks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    pushed: list[Tensor]


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
        self.links: dict[Executor, Loopback] = {}
        for executor in EXECUTORS:
            link = Loopback(p.keys, rank, self.plan.sources, shape, lends=self.plan.lends)
            link.near = True  # in host memory, but so the kernel adds what has come
            self.links[executor] = link
            queues = CudaQueues(torch.device(DEVICE))
            for reader, chunks in self.plan.lends:
                for chunk in chunks:
                    link.staged(reader, chunk)  # made here, not by the peers' thread and this one at once
            for chunk in (c for s in self.plan.pulls for c in s.chunks):
                link.pushed(chunk)
            given = (self.plan, p.keys, shape, link, queues, torch.device(DEVICE))
            self.ranks[executor] = Overlapped(*given, timeout=timeout, groups=groups)

    def keys(self, seed: int) -> Inputs:
        g = torch.Generator(DEVICE).manual_seed(seed)
        rows, n = self.layout.rows.local_length(self.rank), self.layout.keys.length
        made = ((rows, self.heads), (n, self.heads_kv), (n, self.heads_kv))
        q, k, v = (torch.randn(self.batch, s, h, self.dim, generator=g, device=DEVICE, dtype=torch.bfloat16) for s, h in made)
        own = [self.layout.shard(x, self.rank, of="keys").contiguous() for x in (k, v)]
        return Inputs(q, own[0], own[1], k.cpu(), v.cpu())

    def post(self, executor: Executor, epoch: int, given: Inputs) -> None:
        """What the other ranks do; the host alone does it, as nothing of theirs may wait for this rank's streams."""
        for peer in self.plan.sources:

            def fill(pair: Pair, peer: int = peer) -> None:
                for half, whole in zip(pair, (given.k, given.v), strict=True):
                    half.copy_(head_major(self.layout.shard(whole, peer, of="keys")))

            self.links[executor].post(peer, epoch, fill)

    def forward(self, executor: Executor, given: Inputs) -> tuple[Tensor, Tensor]:
        scale = self.dim**-0.5
        return self.ranks[executor].forward(self.local, given.q, given.own_k, given.own_v, scale, executor)

    def post_gradients(self, executor: Executor, epoch: int, seed: int, last: int = 0) -> None:
        """Random gradients of those that read this rank's keys; the same for every executor."""
        g = torch.Generator().manual_seed(seed)
        for reader in self.links[executor].lends:
            self.links[executor].post_gradients(reader, epoch, lambda chunk, pair: [t.normal_(generator=g) for t in pair], last)

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

    def pushed(self, executor: Executor) -> list[Tensor]:
        return [t.clone() for s in self.plan.pulls for t in self.links[executor].pushed(s.chunk)]

    def poison(self, executor: Executor) -> None:
        """NaN wherever keys are going to arrive."""
        self.ranks[executor].keys.fill_(math.nan)
        self.ranks[executor].values.fill_(math.nan)
        torch.cuda.synchronize()

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
            self.post_gradients(executor, epoch, seed, self.last[executor])
            grads = self.backward(executor, given, forward, deterministic=deterministic)
            rank.finish()
            for owner in self.plan.sources:
                self.links[executor].take(owner, epoch)
            self.last[executor] = epoch
            results.append(Calls(grads[0], grads[1], grads[2], self.pushed(executor)))
        return next((d for other in results[1:] if (d := different_gradients(results[0], other, deterministic))), "")


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


def bits(name: str, world: int, dim: int, chunk: int, batch: int, n: int = 4096) -> str:
    v = whole_mask(name, n)
    for rank in range(0, world, max(1, world - 1)):
        pairing = Pairing(v, world, rank, dim, chunk, batch if v.batch == 1 else v.batch)
        pairing.warm()
        for seed in range(3):
            if problem := pairing.both(seed) or pairing.both_ways(seed, deterministic=seed % 2 == 0):
                return f"rank {rank}, call {seed}: {problem}"
    return ""


def kept_keys() -> str:
    """The backward over the keys that the forward gathered: the same bits, and nothing is copied.

    Also where it needs own keys in the buffer, which the forward read in place.
    """
    pairing = a_pairing()
    given, rank = pairing.keys(3), pairing.ranks["gated"]
    results = []
    ways: tuple[tuple[bool, Executor], ...] = ((True, "gated"), (False, "gated"), (False, "copy-then-attend"))
    for gather, executor in ways:
        pairing.poison("gated")
        pairing.post("gated", rank.epoch + 1, given)
        forward = pairing.forward("gated", given)
        rank.finish()
        if gather:
            pairing.post("gated", rank.epoch + 1, given)
        pairing.post_gradients("gated", rank.epoch + 1, 3, pairing.last["gated"])
        grads = pairing.backward("gated", given, forward, deterministic=True, gather=gather, way=executor)
        rank.finish()
        pairing.last["gated"] = rank.epoch
        pairing.links["gated"].release(rank.epoch)
        results.append(Calls(grads[0], grads[1], grads[2], pairing.pushed("gated")))
    return next((d for other in results[1:] if (d := different_gradients(results[0], other, True))), "")


def engines() -> str:
    """By a profile: what brings keys and takes gradients away is no kernel, but for the sum over parts of a head's queries."""
    pairing = a_pairing()
    given, rank = pairing.keys(1), pairing.ranks["gated"]
    pairing.post("gated", rank.epoch + 1, given)
    out, lse = pairing.forward("gated", given)
    rank.finish()
    dout = torch.ones_like(given.q)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for epoch in (rank.epoch + 1, rank.epoch + 2):
            pairing.post("gated", epoch, given)
        pairing.post_gradients("gated", rank.epoch + 2, 1, pairing.last["gated"])
        pairing.forward("gated", given)
        keys = given.own_k, given.own_v
        rank.backward(pairing.local, given.q, *keys, out, lse, dout, pairing.dim**-0.5, "gated")
        rank.finish()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        return "skip: this profiler shows no kernels"
    copies = [n for n in names if n.startswith(("Memcpy", "Memset"))]
    known = ("attn_fwd", "attn_bwd", "fill", "spoil", "sum_gradients", "reduce_kernel", "kv_bounds", "row_")
    strange = sorted({n for n in names if n not in copies and not any(k in n for k in known)})
    if strange:
        return f"kernels beside attention: {strange}"
    forward, backward = (len(cut.pieces) for cut in (rank.forward_cut, rank.backward_cut))
    brought, left = (sum(way in n for n in copies) for way in ("HtoD", "DtoH"))
    told = f"{forward} and {backward} pieces, {brought} copies in, {left} out: {copies[:9]}"
    return "" if brought >= forward + backward and left >= 2 * backward // rank.backward_cut.together else told


def a_pairing(timeout: float = 5.0) -> Pairing:
    pairing = Pairing(whole_mask("01_full", 4096), 2, 0, 128, 256, 1, timeout)
    pairing.warm()
    return pairing


def late_peer() -> str:
    """The peer is ready 50 ms after the kernel was launched."""
    pairing = a_pairing()
    given = pairing.keys(1)
    pairing.poison("gated")
    epoch = pairing.ranks["gated"].epoch + 1
    late = threading.Timer(0.05, pairing.post, ("gated", epoch, given))
    late.start()
    got = pairing.forward("gated", given)
    pairing.ranks["gated"].finish()
    late.join()
    pairing.post("copy-then-attend", pairing.ranks["copy-then-attend"].epoch + 1, given)
    wanted = pairing.forward("copy-then-attend", given)
    pairing.ranks["copy-then-attend"].finish()
    return different(got, wanted)


def fails(rank: Overlapped, told: str, seconds: float) -> str:
    """Whether what is enqueued on a rank ends in M721, which tells this, in time; "" if it does."""
    started = time.monotonic()
    try:
        rank.finish()
    except MaskcError as error:
        if "M721" not in str(error) or told not in str(error):
            return str(error)
    else:
        return "no error"
    took = time.monotonic() - started
    return f"the error took {took:.1f} s" if took > seconds else ""


def killed_peer(backward: bool = False, late: bool = False) -> str:
    """The peer never comes, or comes after the error: NaN for a result, then the rank works again."""
    pairing = a_pairing(timeout=0.2)
    rank = pairing.ranks["gated"]
    if backward:
        pairing.both_ways(1, False)
    given = pairing.keys(1)
    zeros = torch.zeros_like(given.q), torch.zeros(given.q.shape[0], given.q.shape[2], given.q.shape[1], device=DEVICE)
    got = pairing.backward("gated", given, zeros)[1] if backward else pairing.forward("gated", given)[1]
    if problem := fails(rank, "rank 1", 2.0):
        return problem
    if not torch.isnan(got).all():
        return "a result that looks right"
    if late:
        pairing.post("gated", rank.epoch, given)
    return pairing.both(2)


def gradients_never_come() -> str:
    """The reader of this rank's keys sends no gradients: the wait of a stream, not of a kernel, is what the host ends."""
    pairing = a_pairing(timeout=0.2)
    rank = pairing.ranks["gated"]
    given = pairing.keys(1)
    pairing.post("gated", rank.epoch + 1, given)
    forward = pairing.forward("gated", given)
    rank.finish()
    pairing.post("gated", rank.epoch + 1, given)
    _, dk, dv = pairing.backward("gated", given, forward)
    if problem := fails(rank, "stopped", 2.0):
        return problem
    if not (torch.isnan(dk).all() and torch.isnan(dv).all()):
        return "a result that looks right"
    return pairing.both_ways(2, deterministic=True)


def stopped() -> str:
    """Another thread stops the waits long before their time is over."""
    pairing = a_pairing(timeout=60.0)
    rank = pairing.ranks["gated"]
    given = pairing.keys(1)
    threading.Timer(0.1, rank.stop).start()
    pairing.forward("gated", given)
    return fails(rank, "stopped", 5.0) or pairing.both(2)


def iterations(count: int) -> str:
    return random_calls(count, 0)[1]


IN_A_ROW = 17
"""Random calls of one plan."""


def random_calls(
    count: int, seed: int, seconds: float = math.inf, tell: Callable[[int], object] = lambda done: None
) -> tuple[int, str]:
    """(calls that were compared, what is wrong). Random masks; calls in a row without a pause, peers that post from a
    thread of their own with random delays. seconds: after which no more calls are begun. tell: of calls so far.
    """
    rng = random.Random(seed)
    done, until, warm = 0, time.monotonic() + seconds, set[MaskForm]()
    while done < count and time.monotonic() < until:
        world, calls, deterministic = rng.choice([2, 3, 4]), min(IN_A_ROW, count - done), rng.random() < 0.5
        v = whole_mask(rng.choice(MASKS), rng.choice([1024, 1536, 2000]), seed=rng.randrange(1 << 30))
        pairing = Pairing(v, world, rng.randrange(world), 128, rng.choice([128, 256, 384]), 1)
        if (form := hopper.mask_form(pairing.local)) not in warm:
            pairing.warm()
            warm.add(form)
        made = [pairing.keys(rng.randrange(1 << 30)) for _ in range(calls)]
        torch.cuda.synchronize()
        delays = [rng.random() * 1e-3 for _ in EXECUTORS]
        first, *others = (calls_in_a_row(pairing, e, made, d, deterministic) for e, d in zip(EXECUTORS, delays, strict=True))
        for other in others:
            for i, (a, b) in enumerate(zip(first, other, strict=True)):
                if problem := different(a[0], b[0]) or different_gradients(a[1], b[1], deterministic):
                    return done + i, f"call {done + i}: {problem}"
        done += calls
        tell(done)
    return done, ""


Both = tuple[tuple[Tensor, Tensor], Calls]


def calls_in_a_row(pairing: Pairing, executor: Executor, made: list[Inputs], delay: float, deterministic: bool) -> list[Both]:
    """Forward and backward of each; peers run in a thread of their own, which also adds up what was pushed to them."""
    first = pairing.ranks[executor].epoch + 1
    failures: list[BaseException] = []
    pushed: list[list[Tensor]] = []
    link = pairing.links[executor]

    def note(there: dict[int, list[Tensor]], owner: int) -> None:
        there |= {s.chunk: [t.clone() for t in link.pushed(s.chunk)] for s in pairing.plan.pulls if s.source == owner}

    def peers() -> None:
        try:
            for i, given in enumerate(made):
                forward, backward = first + 2 * i, first + 2 * i + 1
                time.sleep(delay * random.random())
                pairing.post(executor, forward, given)
                time.sleep(delay * random.random())
                pairing.post(executor, backward, given)
                pairing.post_gradients(executor, backward, i, pairing.last[executor])
                there: dict[int, list[Tensor]] = {}
                for owner in pairing.plan.sources:
                    link.take(owner, backward, partial(note, there, owner))
                pushed.append([t for s in pairing.plan.pulls for t in there[s.chunk]])
                pairing.last[executor] = backward
        except BaseException as error:
            failures.append(error)

    posting = threading.Thread(target=peers)
    posting.start()
    results = []
    for given in made:
        forward = pairing.forward(executor, given)
        results.append((forward, pairing.backward(executor, given, forward, deterministic=deterministic)))
        time.sleep(delay * random.random())
    pairing.ranks[executor].finish()
    posting.join()
    if failures:
        raise failures[0]
    return [(forward, Calls(*grads, there)) for (forward, grads), there in zip(results, pushed, strict=True)]


def connections(count: int) -> str:
    """Random calls in a process of its own with so many hardware queues."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
    command = [sys.executable, "-m", "tests.gpu.special_overlap", "20"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    return "" if ran.returncode == 0 else (ran.stdout + ran.stderr)[-400:]


def main(count: int, seconds: float) -> int:
    started = time.monotonic()

    def tell(calls: int) -> None:
        print(f"{calls} calls in {time.monotonic() - started:.1f} s", flush=True)

    done, problem = random_calls(count, int(os.environ.get("SEED", "0")), seconds, tell)
    print(f"{done} calls in {time.monotonic() - started:.1f} s: {problem or 'the same bits'}")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else math.inf))
