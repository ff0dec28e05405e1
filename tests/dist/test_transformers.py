"""A Transformers model whose layers attend over the ranks of a group: loss and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import maskc
from tests.dist.pool import Pool

pytest.importorskip("transformers")


def _shares(rank: int, group: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's part of the summed loss, and its gradients."""
    from examples.finetune_packed import documents, small_model
    from maskc.integrations.transformers import Attend, register

    register()
    model, docs = small_model(), documents()
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=[len(d) for d in docs]))
    tokens = torch.cat(docs)[None]
    plan = maskc.plan(spec, group=group, nq=tokens.shape[1], nk=tokens.shape[1], chunk=4)
    logits = model(
        plan.shard(tokens, rank),
        position_ids=plan.positions(rank, per="doc")[None],
        maskc=Attend(spec, group, plan),
        use_cache=False,
    ).logits[0]
    labels = plan.shard(plan.shift_labels(tokens), rank)[0]
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_ranks_add_up_to_one_process(ranks: Pool) -> None:
    from examples.finetune_packed import documents, packed_loss, small_model
    from maskc.integrations.transformers import register

    register()
    model = small_model()
    loss = packed_loss(model, documents())
    loss.backward()
    shares = ranks.run(2, _shares)
    torch.testing.assert_close(sum(part for part, _ in shares), loss.detach(), rtol=1e-12, atol=1e-12)
    for name, p in model.named_parameters():
        total = sum(grads[name] for _, grads in shares)
        torch.testing.assert_close(total, p.grad, rtol=1e-9, atol=1e-11)
