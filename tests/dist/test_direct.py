"""Keys given between ranks, over shared memory: every executor, plans that change from call to call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from maskc.runtime import comm, context_parallel, overlap_kernels, overlap_pieces
from maskc.runtime.schedule import DIRECT
from tests.dist.cases import FORMS, Case, attend, tensors, vectors, verify
from tests.dist.pool import Pool
from tests.dist.test_exact import sample


def direct(seed: int) -> Case:
    case = sample(seed)
    r = random.Random(seed)
    switches = {k: v for k, v in case.switches.items() if k not in ("hierarchical", "nodes")}
    return replace(case, strategy=r.choice(DIRECT), switches=switches)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_sampled(ranks: Pool, first: int) -> None:
    """One group after another with other sizes, readers and owners: the words and regions of a link serve them all."""
    for seed in range(first, first + 20):
        case = direct(seed)
        verify(case, vectors(case), ranks.run(case.world, attend, case, vectors(case)))


@pytest.mark.dist
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_sampled_widely(ranks: Pool, first: int) -> None:
    for seed in range(first, first + 100):
        case = direct(seed)
        verify(case, vectors(case), ranks.run(case.world, attend, case, vectors(case)))


def several_calls(rank: int, group: Any, cases: list[Case]) -> list[dict[str, Any]]:
    return [attend(rank, group, case, vectors(case)) for case in cases]


def test_layers_follow_each_other_without_a_word_between_them(ranks: Pool) -> None:
    cases = [Case(3, 40, seed, FORMS[1 + seed % 3], strategy="gated", chunk=4, heads=(4, 2, 1)) for seed in range(8)]
    results = ranks.run(3, several_calls, cases)
    for i, case in enumerate(cases):
        verify(case, vectors(case), [r[i] for r in results])


def in_small_pieces(rank: int, group: Any, cases: list[Case]) -> tuple[list[dict[str, Any]], int]:
    """As on a slow link: copies of a few bytes, so of every group of heads by itself. Also the most groups of a call."""
    groups = [1]

    def chosen(*of: Any) -> Any:
        made = overlap_pieces.choose_given(*of)
        groups.extend(g for g, _ in made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_pieces, "PIECE_SECONDS", 1e-12)
        patch.setattr(overlap_pieces, "BACKWARD_PIECE_SECONDS", 2e-10)
        patch.setattr(overlap_pieces, "LINE_BYTES", 1)
        patch.setattr(overlap_kernels, "choose_given", chosen)
        return several_calls(rank, group, cases), max(groups)


@pytest.mark.parametrize("strategy", DIRECT)
def test_heads_come_in_groups_that_owner_and_reader_cut_alike(ranks: Pool, strategy: str) -> None:
    cases = [
        Case(
            3, 48 + seed, seed, FORMS[seed % 4], strategy=strategy, chunk=5, order=order, heads=(8, 4, 1), batch=(1 + seed % 2, 1)
        )
        for seed, order in enumerate(("zigzag", "contiguous", "balanced"))
    ]
    results = ranks.run(3, in_small_pieces, cases)
    assert all(most == 4 for _, most in results), "a head a piece"
    for i, case in enumerate(cases):
        verify(case, vectors(case), [r[i] for r, _ in results])


def keys_moved(rank: int, group: Any, case: Case) -> tuple[list[int], list[torch.Tensor]]:
    """(bytes of keys that each of seven calls takes, gradients): a layer; two whose backwards come in reverse, one twice."""
    v = vectors(case)
    p = case.plan(v)
    moved: list[int] = []
    layers = [
        [p.shard(t, rank, of=of) for t, of in zip(tensors(replace(case, seed=s))[:3], ("rows", "keys", "keys"), strict=True)]
        for s in range(3)
    ]
    inputs = [[t.clone().requires_grad_() for t in layer] for layer in layers]

    def counted(call: Any) -> Any:
        with comm.count_traffic() as ledger:
            result = call()
        moved.append(sum(n for (kind, _), n in ledger.sent.items() if kind == "kv"))
        return result

    def forward(layer: int) -> torch.Tensor:
        out: torch.Tensor = counted(lambda: context_parallel.run(v, *inputs[layer], group, plan=p, strategy=case.strategy))
        return out

    def backward(out: torch.Tensor) -> None:
        counted(lambda: out.square().sum().backward(retain_graph=True))

    backward(forward(0))
    outs = [forward(1), forward(2)]
    for i in (1, 0, 0):
        backward(outs[i])
    return moved, [t.grad for layer in inputs for t in layer if t.grad is not None]


@pytest.mark.parametrize("strategy", DIRECT)
def test_keys_are_kept_for_a_backward_that_follows_their_forward(ranks: Pool, strategy: str) -> None:
    """Also on ranks without rows: three chunks for four ranks."""
    case = Case(4, 24, 3, strategy=strategy, chunk=8, order="contiguous")
    kept, again = (
        ranks.run(4, keys_moved, replace(case, switches={"keep_keys": keep, "prune": False})) for keep in (True, False)
    )
    assert any(moved[0] for moved, _ in kept)
    for (few, grads), (many, others) in zip(kept, again, strict=True):
        assert many == [many[0]] * 7
        assert few == [many[0], 0, many[0], many[0], 0, many[0], 0]
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
