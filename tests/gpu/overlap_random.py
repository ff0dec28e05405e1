"""Random calls of overlapped attention: masks, plans, delays of the host and of the other ranks (`tests.gpu.overlap_pairing`).

    python -m tests.gpu.overlap_random CALLS [SECONDS]

All executors must give the same bits, forward and backward. For a number of hardware queues set CUDA_DEVICE_MAX_CONNECTIONS,
for other calls SEED. Several such processes may share a GPU. Says how many calls were compared.
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from maskc.codegen.spec import MaskForm
from maskc.runtime import hopper
from maskc.runtime.overlap import Executor
from tests.gpu.overlap_pairing import EXECUTORS, MASKS, Calls, Inputs, Pairing, different, different_gradients, whole_mask

IN_A_ROW = 17
"""Random calls of one plan."""
LENGTHS, CHUNKS = (1024, 1536, 2000), (128, 256, 384)
LONGEST = 1e-3
"""Seconds that a rank may be late."""
Both = tuple[tuple[Tensor, Tensor], Calls]


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
        v = whole_mask(rng.choice(MASKS), rng.choice(LENGTHS), seed=rng.randrange(1 << 30))
        pairing = Pairing(v, world, rng.randrange(world), 128, rng.choice(CHUNKS), 1)
        if (form := hopper.mask_form(pairing.local)) not in warm:
            pairing.warm()
            warm.add(form)
        made = [pairing.keys(rng.randrange(1 << 30)) for _ in range(calls)]
        torch.cuda.synchronize()
        delays = [rng.random() * LONGEST for _ in EXECUTORS]
        first, *others = (calls_in_a_row(pairing, e, made, d, deterministic) for e, d in zip(EXECUTORS, delays, strict=True))
        for other in others:
            for i, (a, b) in enumerate(zip(first, other, strict=True)):
                if problem := different(a[0], b[0]) or different_gradients(a[1], b[1], deterministic):
                    return done + i, f"call {done + i}: {problem}"
        done += calls
        tell(done)
    return done, ""


def calls_in_a_row(pairing: Pairing, executor: Executor, made: list[Inputs], delay: float, deterministic: bool) -> list[Both]:
    """Forward and backward of each, NaN before each in place of keys; peers run in a thread of their own, which also adds up
    what was pushed to them.
    """
    first = pairing.ranks[executor].epoch + 1
    failures: list[BaseException] = []
    pushed: list[dict[int, list[Tensor]]] = []
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
                pairing.post_gradients(executor, backward, given)
                there: dict[int, list[Tensor]] = {}
                for owner in pairing.plan.sources:
                    link.take(owner, backward, partial(note, there, owner))
                pushed.append(there)
                pairing.last[executor] = backward
        except BaseException as error:
            failures.append(error)

    posting = threading.Thread(target=peers)
    posting.start()
    results = []
    for given in made:
        pairing.poison(executor)
        forward = pairing.forward(executor, given)
        pairing.poison(executor)
        results.append((forward, pairing.backward(executor, given, forward, deterministic=deterministic)))
        time.sleep(delay * random.random())
    pairing.ranks[executor].finish()
    posting.join()
    if failures:
        raise failures[0]
    return [  # compared on the GPU, which is much faster
        (forward, Calls(*grads, [t for s in pairing.plan.pulls for t in pairing.rows_of(executor, s, there[s.chunk])]))
        for (forward, grads), there in zip(results, pushed, strict=True)
    ]


def main(count: int, seconds: float) -> int:
    torch.set_num_threads(1)  # several processes share the cores
    started = time.monotonic()

    def tell(calls: int) -> None:
        print(f"{calls} calls in {time.monotonic() - started:.1f} s", flush=True)

    done, problem = random_calls(count, int(os.environ.get("SEED", "0")), seconds, tell)
    print(f"{done} calls in {time.monotonic() - started:.1f} s: {problem or 'the same bits'}")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else math.inf))
