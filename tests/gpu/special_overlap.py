"""Attention beside the copies of its keys on one GPU, other ranks in pinned host memory (`maskc.runtime.overlap`).

All executors must give the same bits, forward and backward (there dQ too where it is deterministic), with NaN in place
of keys that have not arrived; a peer that is late delays the result, one that never comes is an error after which the
rank works again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from maskc.codegen.render import CudaSource
from maskc.diagnostics import MaskcError
from maskc.runtime import hopper
from maskc.runtime.localize import localize
from maskc.runtime.overlap import Executor, Overlapped
from maskc.runtime.overlap_plan import overlap_plan
from maskc.runtime.plan import plan
from tests.gpu.overlap_pairing import MASKS, Calls, Pairing, different, different_gradients, kernels, whole_mask
from tests.gpu.overlap_random import random_calls


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
        ("overlap/100 random calls", hundred),
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
        pairing.post_gradients("gated", rank.epoch + 1, given, executor)
        grads = pairing.backward("gated", given, forward, deterministic=True, gather=gather, way=executor)
        rank.finish()
        pairing.last["gated"] = rank.epoch
        pairing.links["gated"].release(rank.epoch)
        results.append(Calls(grads[0], grads[1], grads[2], pairing.pushed("gated", executor)))
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
        pairing.post_gradients("gated", rank.epoch + 2, given)
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
    return "" if brought >= forward + backward and left >= 2 * len(rank.departures) else told


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
    batch, rows, heads, _ = given.q.shape
    zeros = torch.zeros_like(given.q), given.q.new_zeros(batch, heads, rows, dtype=torch.float32)
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


def hundred() -> str:
    return random_calls(100, 0)[1]


def connections(count: int) -> str:
    """Random calls in a process of its own with so many hardware queues."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
    command = [sys.executable, "-m", "tests.gpu.overlap_random", "20"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    return "" if ran.returncode == 0 else (ran.stdout + ran.stderr)[-400:]
