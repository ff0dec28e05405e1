"""A pool of Gloo ranks that runs many cases: processes start once, groups of fewer ranks are subgroups."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 60.0
"""Seconds for one case on the slowest machine; the groups themselves give up after half of that."""


def _serve(rank: int, size: int, sizes: tuple[int, ...], path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT / 2)
    )
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    while (job := pipe.recv()) is not None:
        function, world, args = job
        try:
            pipe.send((True, function(rank, groups[world], *args)))
        except BaseException as e:
            pipe.send((False, (e, traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    """Up to `size` ranks; `run` calls a module-level function as f(rank, group, *args) on the first `world` of them."""

    def __init__(self, sizes: tuple[int, ...] = (2, 3, 4, 5, 8)) -> None:
        self.size = max(sizes)
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "maskc.runtime.context_parallel", "maskc.binding.bound"])
        self.path = tempfile.mktemp(prefix="maskc-pool-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, sizes, self.path, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank. Raises what the first failing rank raised, with its traceback as a note."""
        results = self.outcomes(world, function, *args)
        for rank, (ok, value) in enumerate(results):
            if not ok:
                value[0].add_note(f"on rank {rank}:\n{value[1]}")
                raise value[0]
        return [value for _, value in results]

    def outcomes(self, world: int, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, (exception, traceback)) by rank."""
        for pipe in self.pipes[:world]:
            pipe.send((function, world, args))
        out = []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not wait([pipe], TIMEOUT):
                raise TimeoutError(f"rank {rank} of {world} did not answer {function.__name__}{args} in {TIMEOUT} s")
            out.append(pipe.recv())
        return out

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        if os.path.exists(self.path):
            os.unlink(self.path)
