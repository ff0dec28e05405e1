"""Peers that disagree, die or stall: an error on every survivor, in time. Each group lives in processes of its own."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import maskc
from maskc.diagnostics import MaskcError
from maskc.runtime.plan import plan
from tests.dist.cases import Case, tensors

GROUP_TIMEOUT = 3.0
HARD_LIMIT = 45.0
"""Seconds until a rank counts as hanging: many times what any of these faults takes, for the machine may be busy."""
DOC = "input doc : segments\nmask doc_causal = same(doc) and k <= q"
Fault = Callable[[int, Any], None]


def _child(fault: Fault, rank: int, world: int, path: str, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT)
    )
    waited: list[float] = []
    _note_waits(waited)
    try:
        fault(rank, dist.group.WORLD)
        pipe.send((None, "", sum(waited)))
    except MaskcError as e:
        pipe.send((e.code, str(e), sum(waited)))
    except BaseException:
        pipe.send(("other", traceback.format_exc(), sum(waited)))
    os._exit(0)  # a group whose peer is gone does not close cleanly


def _note_waits(waited: list[float]) -> None:
    """For how long words were waited for in vain: what was allowed, which is the same on a busy machine."""
    from maskc.runtime.transport import HostQueues

    wait = HostQueues.wait

    def noted(self: HostQueues, *given: Any) -> None:
        try:
            wait(self, *given)
        except MaskcError:
            waited.append(self.seconds)
            raise

    HostQueues.wait = noted  # type: ignore[method-assign]


def outcomes(fault: Fault, watched: tuple[int, ...] = (0, 1), world: int = 2) -> list[tuple[str | None, str, float] | None]:
    """(code or None, message, seconds of waiting for words in vain) of the watched ranks; None for one that died.

    Fails when one runs into the hard limit.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "maskc.runtime.context_parallel", "maskc.binding.bound"])
    path = tempfile.mktemp(prefix="maskc-fault-")
    pipes, children = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(fault, rank, world, path, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    deadline = time.monotonic() + HARD_LIMIT
    results: list[tuple[str | None, str, float] | None] = []
    try:
        for rank in watched:
            pipe = pipes[rank]
            assert wait([pipe], max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(None)
    finally:
        for child in children:
            child.kill()
            child.join()
        if os.path.exists(path):
            os.unlink(path)
    return results


def call(rank: int, group: Any, lengths: list[int], n: int | None = None, seed: int = 0, **more: Any) -> torch.Tensor:
    total = n or sum(lengths)
    spec = maskc.compile_text(DOC).bind(doc=maskc.segments(lengths=lengths), nq=total, nk=total)
    p = plan(spec, group=group, chunk=4, order=more.pop("order", "balanced"))
    q, k, v, _, _ = tensors(Case(2, total, seed, heads=more.pop("heads", (2, 2, 1))))
    q, k, v = (p.shard(t, rank).clone().requires_grad_() for t in (q, k, v))
    out = maskc.run(spec, q, k, v, group, plan=p, **more)
    assert isinstance(out, torch.Tensor)
    return out


# ---------------------------------------------------------------- disagreement


def other_documents(rank: int, group: Any) -> None:
    call(rank, group, [17, 23] if rank == 0 else [18, 22])


def other_length(rank: int, group: Any) -> None:
    call(rank, group, [17, 23] if rank == 0 else [17, 27])


def other_strategy(rank: int, group: Any) -> None:
    call(rank, group, [17, 23], strategy="ring" if rank == 0 else "all-gather")


def other_order(rank: int, group: Any) -> None:
    call(rank, group, [17, 23], order="zigzag" if rank == 0 else "contiguous")


def other_heads(rank: int, group: Any) -> None:
    call(rank, group, [17, 23], heads=(2, 2, 1) if rank == 0 else (2, 1, 1))


def other_scale(rank: int, group: Any) -> None:
    call(rank, group, [17, 23], scale=0.5 if rank == 0 else 0.25)


def other_code(rank: int, group: Any) -> None:
    if rank == 0:
        maskc.__version__ = "0.0.0"  # each rank is a process of its own
    call(rank, group, [17, 23])


def other_dtype(rank: int, group: Any) -> None:
    spec = maskc.compile("std:causal").bind(nq=16, nk=16)
    p = plan(spec, group=group, chunk=4)
    q, k, v, _, _ = (t.to(torch.float32 if rank == 0 else torch.float64) for t in tensors(Case(2, 16, 0)))
    maskc.run(spec, *(p.shard(t, rank) for t in (q, k, v)), group, plan=p)


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (other_documents, "the mask or its data"),
        (other_length, "the number of rows"),
        (other_strategy, "the strategy"),
        (other_order, "the assignment of chunks"),
        (other_heads, "the key heads"),
        (other_scale, "the scale"),
        (other_code, "the version of maskc"),
        (other_dtype, "the dtype"),
    ],
)
def test_every_rank_names_the_field_that_differs(fault: Fault, field: str) -> None:
    for result in outcomes(fault):
        assert result is not None
        code, message, seconds = result
        assert code == "M708", message
        assert field in message
        assert "rank 0" in message
        assert "rank 1" in message
        assert not seconds


def one_refuses(rank: int, group: Any) -> None:
    spec = maskc.compile("std:causal").bind(nq=16, nk=16)
    p = plan(spec, group=group, chunk=4)
    q, k, v, _, _ = tensors(Case(2, 16, 0))
    rows = p.shard(q, rank)[:, : 8 - rank]
    maskc.run(spec, rows, p.shard(k, rank), p.shard(v, rank), group, plan=p)


def test_a_rank_that_refuses_takes_the_others_along() -> None:
    zero, one = outcomes(one_refuses)
    assert zero is not None
    assert one is not None
    assert one[0] == "M710"
    assert "q has 7 rows; in this plan rank 1 holds 8 of 16" in one[1]
    assert zero[0] == "M708"
    assert "rank 1 refused" in zero[1]
    assert not zero[2] + one[2]


def no_tensor(rank: int, group: Any) -> None:
    spec = maskc.compile("std:causal").bind(nq=16, nk=16)
    x = torch.zeros(1, 8, 1, 4)
    maskc.run(spec, x if rank == 0 else None, x, x, group)


def no_tensor_and_no_size(rank: int, group: Any) -> None:
    x = torch.zeros(1, 8, 1, 4)
    maskc.run(maskc.compile("std:causal").bind(), x if rank == 0 else None, x, x, group)


def no_plan(rank: int, group: Any) -> None:
    spec = maskc.compile("std:causal").bind(nq=16, nk=16)
    x = torch.zeros(1, 8, 1, 4)
    maskc.run(spec, x, x, x, group, plan=None if rank == 0 else "balanced")


@pytest.mark.parametrize("fault", [no_tensor, no_tensor_and_no_size, no_plan])
def test_what_is_no_tensor_or_plan_is_refused_on_all_ranks(fault: Fault) -> None:
    zero, one = outcomes(fault)
    assert zero is not None
    assert one is not None
    assert (zero[0], one[0]) == ("M708", "M511"), (zero[1], one[1])
    assert not zero[2] + one[2]


def one_moves_on(rank: int, group: Any) -> None:
    """Both used the first batch; then one rank repeats it while the other brings the next: no check is left to catch it."""
    call(rank, group, [17, 23])
    call(rank, group, [17, 23] if rank == 0 else [10, 30])


def test_a_batch_out_of_step_ends_in_an_error() -> None:
    for result in outcomes(one_moves_on):
        assert result is not None
        assert result[0] in ("M708", "M709"), result[1]


def other_world(rank: int, group: Any) -> None:
    spec = maskc.compile("std:causal").bind(nq=16, nk=16)
    p = plan(spec, world_size=4, chunk=4)
    q, k, v, _, _ = tensors(Case(2, 16, 0))
    maskc.run(spec, p.shard(q, rank), p.shard(k, rank), p.shard(v, rank), group, plan=p)


def test_a_plan_for_other_ranks_is_refused() -> None:
    assert [r and r[0] for r in outcomes(other_world)] == ["M707", "M707"]


# ---------------------------------------------------------------- death and delay


def dies_before(rank: int, group: Any) -> None:
    if rank == 1:
        os._exit(1)
    call(rank, group, [17, 23])


def dies_between(rank: int, group: Any) -> None:
    out = call(rank, group, [17, 23])
    if rank == 1:
        os._exit(1)
    out.sum().backward()


def stalls(rank: int, group: Any) -> None:
    if rank == 1:
        time.sleep(3 * GROUP_TIMEOUT)
    call(rank, group, [17, 23])


def stalls_in_the_backward(rank: int, group: Any) -> None:
    out = call(rank, group, [17, 23], strategy="ring")
    if rank == 1:
        time.sleep(3 * GROUP_TIMEOUT)
    out.sum().backward()


@pytest.mark.parametrize("fault", [dies_before, dies_between, stalls, stalls_in_the_backward])
def test_survivors_get_an_error_in_time(fault: Fault) -> None:
    for result in outcomes(fault, (0, 2), world=3):
        assert result is not None
        assert result[0] == "M709", result[1]


def late(rank: int, group: Any) -> None:
    if rank == 1:
        time.sleep(1.0)
    call(rank, group, [17, 23]).sum().backward()


def test_a_late_rank_is_waited_for() -> None:
    assert [r and r[0] for r in outcomes(late)] == [None, None]


def works_again(rank: int, group: Any) -> None:
    """After an error before anything was sent, the same processes and group go on."""
    with pytest.raises(MaskcError, match="M708"):
        call(rank, group, [17, 23] if rank == 0 else [18, 22])
    call(rank, group, [17, 23]).sum().backward()


def test_a_disagreement_does_not_spoil_the_group() -> None:
    assert [r and r[0] for r in outcomes(works_again)] == [None, None]


def alternating(rank: int, group: Any) -> None:
    """Three masks in turn, with plans made anew each time: ranks never need each other to plan."""
    for turn in range(9):
        call(rank, group, ([17, 23], [40], [3, 30, 7])[turn % 3], seed=turn).sum().backward()


def test_alternating_masks() -> None:
    assert [r and r[0] for r in outcomes(alternating)] == [None, None]


# ---------------------------------------------------------------- keys given into each other's memory


def dies_before_it_is_read(rank: int, group: Any) -> None:
    """Rank 1 takes part in the first call, and is gone in the second."""
    call(rank, group, [17, 23], strategy="gated").sum().backward()
    if rank == 1:
        os._exit(1)
    call(rank, group, [17, 23], strategy="gated").sum().backward()


def dies_in_between(rank: int, group: Any) -> None:
    out = call(rank, group, [17, 23], strategy="gated")
    if rank == 1:
        os._exit(1)
    out.sum().backward()


@pytest.mark.parametrize("fault", [dies_before_it_is_read, dies_in_between])
def test_a_lost_rank_whose_memory_is_read(fault: Fault) -> None:
    for result in outcomes(fault, (0, 2), world=3):
        assert result is not None
        assert result[0] == "M721", result[1]
        assert result[2] <= GROUP_TIMEOUT, "the first wait in vain is the last"


def too_late(rank: int, group: Any) -> None:
    """Rank 0 gives up on rank 1, which learns of it; then both go on with each other."""
    out = call(rank, group, [17, 23], strategy="gated")
    if rank == 1:
        time.sleep(1.5 * GROUP_TIMEOUT)
    with pytest.raises(MaskcError, match="M721"):
        out.sum().backward()
    for seed in range(2):
        call(rank, group, [17, 23], seed=seed, strategy="gated").sum().backward()


def test_ranks_that_gave_up_on_each_other_run_again() -> None:
    assert [r and r[:2] for r in outcomes(too_late)] == [(None, "")] * 2


def breaks_off(rank: int, group: Any) -> None:
    """An error of rank 1 between its first and its last word of a call ends the link for both."""
    from maskc.runtime.overlap import Overlapped

    call(rank, group, [17, 23], strategy="gated")
    attend = Overlapped.attend
    if rank == 1:
        Overlapped.attend = lambda *a, **k: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(ZeroDivisionError):
            call(rank, group, [17, 23], strategy="gated")
        Overlapped.attend = attend  # type: ignore[method-assign]
        with pytest.raises(MaskcError, match="M721"):
            call(rank, group, [17, 23], strategy="gated")
    else:
        call(rank, group, [17, 23], strategy="gated")
        time.sleep(1.0)
        with pytest.raises(MaskcError, match="M721"):
            call(rank, group, [17, 23], strategy="gated")
    call(rank, group, [17, 23], strategy="gated").sum().backward()


def test_a_call_that_breaks_off_breaks_the_link() -> None:
    assert [r and r[:2] for r in outcomes(breaks_off)] == [(None, "")] * 2


def refuses_before_the_first_word(rank: int, group: Any) -> None:
    """What is refused before anything is said leaves the link as it is."""
    from maskc.runtime import gated

    call(rank, group, [17, 23], strategy="gated")
    rank_of = gated.rank_of
    gated.rank_of = lambda *a: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        call(rank, group, [17, 23], strategy="gated")
    gated.rank_of = rank_of
    call(rank, group, [17, 23], strategy="gated").sum().backward()


def test_what_is_refused_before_the_first_word_breaks_nothing() -> None:
    assert [r and r[:2] for r in outcomes(refuses_before_the_first_word)] == [(None, "")] * 2


def no_memory_between(rank: int, group: Any) -> None:
    """One rank does not see the memory of the other: "auto" would go without, a strategy by name is refused."""
    from maskc.runtime import link

    if rank == 1:
        link._shared_path = lambda token: Path("/nowhere") / "maskc"
    call(rank, group, [17, 23], strategy="gated")


def test_a_host_of_its_own_is_noticed_by_all() -> None:
    zero, one = outcomes(no_memory_between)
    assert zero is not None
    assert one is not None
    assert (zero[0], one[0]) == ("M723", "M723"), (zero[1], one[1])
    assert "does not share a host with rank 0" in one[1]
