"""Attention beside the copies of its keys on one GPU, other ranks in pinned host memory (`maskc.runtime.overlap`).

"gated" and "copy-then-attend" must give the same bits, with NaN in place of keys that have not arrived; a peer that is
late delays the result, one that never comes is an error after which the rank works again.

    python -m tests.gpu.special_overlap ITERATIONS

runs random calls alone, for other settings of CUDA_DEVICE_MAX_CONNECTIONS.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

import maskc
from maskc.boundary import BoundaryVectors
from maskc.codegen.forward import forward_source, forward_spec, schedule_source, schedule_spec
from maskc.codegen.nvrtc import compile_cubin
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import plan
from maskc.runtime.transport import CudaQueues, KeyShape, Loopback, Pair
from tests.gpu.inputs import suite_mask

MASKS = ("01_full", "02_causal", "05_doc_full", "09_doc_prefix", "06_share_question", "07_global_window", "28_duo_heads")
DEVICE = "cuda"


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    """(name, check); a check returns "" or what is wrong."""
    cases: list[tuple[str, Callable[[], str]]] = []
    for i, name in enumerate(MASKS):
        for j, world in enumerate((2, 4)):
            dim, chunk, batch = (64, 128, 256)[(i + j) % 3], (256, 128, 96)[(i + 2 * j) % 3], 1 + (i + j) % 2
            cases.append((f"overlap/bits/{name}/{world}/{dim}/{chunk}/{batch}", partial(bits, name, world, dim, chunk, batch)))
    return [
        *cases,
        ("overlap/many chunks", partial(bits, "05_doc_full", 2, 128, 128, 1, 32_768)),
        ("overlap/late peer", late_peer),
        ("overlap/killed peer", killed_peer),
        ("overlap/stopped by the host", stopped),
        ("overlap/200 random calls", partial(iterations, 200)),
        *((f"overlap/connections/{n}", partial(connections, n)) for n in (1, 8, 32)),
    ]


@cache
def compile_all() -> None:
    """What the cases below need, side by side; one after another it would take most of their time."""
    forms = set()
    for name in MASKS:
        v = whole_mask(name, 1024)
        p = plan(v, world_size=2, chunk=128)
        local = localize(v, p.rows, p.rows.chunks_of(1), p.keys, overlap_plan(p, 1).columns, torch.device(DEVICE))
        forms.add(hopper.mask_form(local))
    specs = [forward_spec(form, dim, "bf16") for form in forms for dim in (64, 128, 256)]
    sources = [forward_source(replace(spec, gated=gated)) for spec in specs for gated in (False, True)]
    sources += [schedule_source(schedule_spec(s.form, s.head_dim)) for s in specs if s.packed]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_cubin, sources))


class Inputs(NamedTuple):
    """q and own keys of the rank on the GPU, keys of everybody on the host."""

    q: Tensor
    own_k: Tensor
    own_v: Tensor
    k: Tensor
    v: Tensor


class Pairing:
    """One rank twice, once per executor, over the same keys."""

    def __init__(self, v: BoundaryVectors, world: int, rank: int, dim: int, chunk: int, batch: int, timeout: float = 5.0) -> None:
        p = plan(v, world_size=world, chunk=chunk)
        self.heads, self.heads_kv, self.batch, self.dim = 2 * v.heads * 2, v.heads * 2, batch, dim
        self.layout, self.rank = p, rank
        self.plan = overlap_plan(p, rank)
        self.local = localize(v, p.rows, p.rows.chunks_of(rank), p.keys, self.plan.columns, torch.device(DEVICE))
        shape = KeyShape(batch, self.heads_kv, dim, dim, torch.bfloat16)
        self.ranks: dict[Executor, Overlapped] = {}
        self.links: dict[Executor, Loopback] = {}
        for executor in ("gated", "copy-then-attend"):
            link = Loopback(p.keys, rank, self.plan.sources, shape)
            self.links[executor] = link
            queues = CudaQueues(torch.device(DEVICE))
            self.ranks[executor] = Overlapped(self.plan, p.keys, shape, link, queues, torch.device(DEVICE), timeout=timeout)

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
                    half.copy_(self.layout.shard(whole, peer, of="keys").transpose(0, 1))

            self.links[executor].post(peer, epoch, fill)

    def forward(self, executor: Executor, given: Inputs) -> tuple[Tensor, Tensor]:
        scale = self.dim**-0.5
        return self.ranks[executor].forward(self.local, given.q, given.own_k, given.own_v, scale, executor)

    def poison(self, executor: Executor) -> None:
        """NaN wherever keys are going to arrive."""
        self.ranks[executor].keys.fill_(math.nan)
        self.ranks[executor].values.fill_(math.nan)
        torch.cuda.synchronize()

    def warm(self, seed: int = 0) -> None:
        """One call of each, so that nothing is compiled or loaded while something waits."""
        if DEVICE == "cuda":
            compile_all()
        given = self.keys(seed)
        for executor in self.ranks:
            self.post(executor, self.ranks[executor].epoch + 1, given)
            self.forward(executor, given)
            self.ranks[executor].finish()

    def both(self, seed: int) -> str:
        """One call of each executor with posted keys; "" when the results are the same finite bits."""
        given = self.keys(seed)
        results = []
        for executor, rank in self.ranks.items():
            self.poison(executor)
            self.post(executor, rank.epoch + 1, given)
            results.append(self.forward(executor, given))
            rank.finish()
        return different(*results)


def different(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> str:
    if not torch.equal(a[0], b[0]) or not torch.equal(a[1], b[1]):
        return f"not the same bits: out differs by {(a[0].float() - b[0].float()).abs().max().item()}"
    return "" if torch.isfinite(a[0]).all() else "NaN in the output"


def whole_mask(name: str, n: int) -> BoundaryVectors:
    made = suite_mask(name, n, n, random.Random(11))
    assert made is not None
    return maskc.compile(str(made[0])).bind(nq=n, nk=n, **made[1]).vectors(n, n, torch.device(DEVICE))


def bits(name: str, world: int, dim: int, chunk: int, batch: int, n: int = 4096) -> str:
    v = whole_mask(name, n)
    for rank in range(0, world, max(1, world - 1)):
        pairing = Pairing(v, world, rank, dim, chunk, batch if v.batch == 1 else v.batch)
        pairing.warm()
        for seed in range(3):
            if problem := pairing.both(seed):
                return f"rank {rank}, call {seed}: {problem}"
    return ""


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


def killed_peer() -> str:
    """The peer never comes: an error within the time, then the rank works again."""
    pairing = a_pairing(timeout=0.2)
    given = pairing.keys(1)
    started = time.monotonic()
    pairing.forward("gated", given)
    try:
        pairing.ranks["gated"].finish()
    except MaskcError as error:
        if "M721" not in str(error) or "rank 1" not in str(error):
            return str(error)
    else:
        return "no error"
    if time.monotonic() - started > 2.0:
        return f"the error took {time.monotonic() - started:.1f} s"
    return pairing.both(2)


def stopped() -> str:
    """Another thread stops the waits long before their time is over."""
    pairing = a_pairing(timeout=60.0)
    given = pairing.keys(1)
    threading.Timer(0.1, pairing.ranks["gated"].stop).start()
    started = time.monotonic()
    pairing.forward("gated", given)
    try:
        pairing.ranks["gated"].finish()
    except MaskcError as error:
        if "stopped" not in str(error):
            return str(error)
    else:
        return "no error"
    if time.monotonic() - started > 5.0:
        return f"the stop took {time.monotonic() - started:.1f} s"
    return pairing.both(2)


def iterations(count: int, seed: int = 0) -> str:
    """Random masks; calls in a row without a pause, peers that post from a thread of their own with random delays."""
    rng = random.Random(seed)
    done = 0
    while done < count:
        n = rng.choice([1024, 2048, 3000])
        world = rng.choice([2, 3, 4])
        pairing = Pairing(whole_mask(rng.choice(MASKS), n), world, rng.randrange(world), rng.choice([64, 128]), 128, 1)
        pairing.warm()
        calls = min(25, count - done)
        made = [pairing.keys(rng.randrange(1 << 30)) for _ in range(calls)]
        torch.cuda.synchronize()
        results = {executor: calls_in_a_row(pairing, executor, made, rng.random() * 1e-3) for executor in pairing.ranks}
        for i, (a, b) in enumerate(zip(*results.values(), strict=True)):
            if problem := different(a, b):
                return f"call {done + i}: {problem}"
        done += calls
    return ""


def calls_in_a_row(pairing: Pairing, executor: Executor, made: list[Inputs], delay: float) -> list[tuple[Tensor, Tensor]]:
    first = pairing.ranks[executor].epoch + 1
    failures: list[BaseException] = []

    def peers() -> None:
        try:
            for i, given in enumerate(made):
                time.sleep(delay * random.random())
                pairing.post(executor, first + i, given)
        except BaseException as error:
            failures.append(error)

    posting = threading.Thread(target=peers)
    posting.start()
    results = []
    for given in made:
        results.append(pairing.forward(executor, given))
        time.sleep(delay * random.random())
    pairing.ranks[executor].finish()
    posting.join()
    if failures:
        raise failures[0]
    return results


def connections(count: int) -> str:
    """Random calls in a process of its own with so many hardware queues."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
    command = [sys.executable, "-m", "tests.gpu.special_overlap", "40"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    return "" if ran.returncode == 0 else (ran.stdout + ran.stderr)[-400:]


if __name__ == "__main__":
    problem = iterations(int(sys.argv[1]))
    print(problem or "the same bits")
    sys.exit(bool(problem))
