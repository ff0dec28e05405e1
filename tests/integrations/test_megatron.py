"""The core attention in Megatron's shape: layouts, implied masks, what is refused. Megatron itself is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskc
from maskc.diagnostics import MaskcError
from maskc.integrations import megatron
from maskc.integrations.attend import Attend
from maskc.integrations.megatron import CoreAttention


class AttnMaskType(Enum):
    """The names that Megatron has."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4


@dataclass
class PackedSeqParams:
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor


CONFIG = SimpleNamespace(attention_dropout=0.0, deterministic_mode=True)


def _tensors(n: int = 24, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(n, batch, h, 8, dtype=dtype) for h in (4, 2, 2))


def test_layout_and_scale() -> None:
    q, k, v = _tensors()
    core = CoreAttention(CONFIG, 1, AttnMaskType.causal, softmax_scale=0.2)
    out = core(q, k, v, None)
    wanted = maskc.run("std:causal", *(x.transpose(0, 1) for x in (q, k, v)), scale=0.2)
    assert out.shape == (24, 2, 32)
    torch.testing.assert_close(out, wanted.transpose(0, 1).flatten(2))
    full = core(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    wanted = maskc.run("std:full", *(x.transpose(0, 1) for x in (q, k, v)), scale=0.2)
    torch.testing.assert_close(full, wanted.transpose(0, 1).flatten(2))


def test_packed_documents_by_their_offsets() -> None:
    q, k, v = (x[:, 0] for x in _tensors())
    cu = torch.tensor([0, 5, 20, 24], dtype=torch.int32)
    core = CoreAttention(CONFIG, 1, AttnMaskType.padding_causal)
    out = core(q, k, v, None, packed_seq_params=PackedSeqParams(cu, cu.clone()))
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(cu_seqlens=cu))
    torch.testing.assert_close(out, maskc.run(spec, q, k, v).flatten(1))
    given = PackedSeqParams(cu, cu)
    one, other = (CoreAttention(CONFIG, n, AttnMaskType.padding_causal) for n in (1, 2))
    one(q, k, v, None, packed_seq_params=given)
    first = megatron._DOCUMENTS.mask(cu, cu, True)
    torch.testing.assert_close(other(q, k, v, None, packed_seq_params=given), out)
    assert megatron._DOCUMENTS.mask(cu, cu, True) is first, "the layers of a step share one mask"
    cu[1] = 7
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(cu_seqlens=cu))
    torch.testing.assert_close(one(q, k, v, None, packed_seq_params=given), maskc.run(spec, q, k, v).flatten(1))


def test_the_mask_may_be_given() -> None:
    q, k, v = _tensors()
    spec = maskc.compile("std:sliding_window").bind(window=5)
    core = CoreAttention(CONFIG)
    wanted = maskc.run(spec, *(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(2)
    torch.testing.assert_close(core(q, k, v, spec), wanted)
    torch.testing.assert_close(core(q, k, v, Attend(spec, deterministic=True)), wanted)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("M551", lambda q: CoreAttention(CONFIG)(q, q, q, torch.zeros(1, 1, 24, 24, dtype=torch.bool))),
        ("M551", lambda q: CoreAttention(CONFIG)(q, q, q, None, attention_bias=torch.zeros(1))),
        ("M551", lambda q: CoreAttention(CONFIG, attention_dropout=0.1)(q, q, q, None)),
        ("M551", lambda q: CoreAttention(SimpleNamespace(softmax_type="learnable"))),
        ("M552", lambda q: CoreAttention(CONFIG)(q, q, q, None)),
        ("M552", lambda q: CoreAttention(CONFIG, attn_mask_type=AttnMaskType.padding)(q, q, q, None)),
        ("M553", lambda q: CoreAttention(CONFIG)(q, q, q, Attend({"full_attention": maskc.compile("std:full").bind()}))),
    ],
)
def test_what_is_refused(code: str, call: Any) -> None:
    with pytest.raises(MaskcError, match=code):
        call(_tensors()[0])
