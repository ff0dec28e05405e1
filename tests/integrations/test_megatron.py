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
    arbitrary = 5
    causal_bottom_right = 6


@dataclass
class PackedSeqParams:
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None


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
    torch.testing.assert_close(core(q, k, v, None, packed_seq_params=PackedSeqParams(cu)), out)
    given = PackedSeqParams(cu, cu)
    one, other = (CoreAttention(CONFIG, n, AttnMaskType.padding_causal) for n in (1, 2))
    one(q, k, v, None, packed_seq_params=given)
    first = megatron._DOCUMENTS.mask(megatron.Packed.of(given), "padding_causal")
    torch.testing.assert_close(other(q, k, v, None, packed_seq_params=given), out)
    assert megatron._DOCUMENTS.mask(megatron.Packed.of(given), "padding_causal") is first, "the layers of a step share one mask"
    cu[1] = 7
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(cu_seqlens=cu))
    torch.testing.assert_close(one(q, k, v, None, packed_seq_params=given), maskc.run(spec, q, k, v).flatten(1))


@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.padding_causal])
def test_documents_that_are_padded_lie_at_their_padded_offsets(kind: AttnMaskType) -> None:
    q, k, v = (x[:, 0] for x in _tensors(20))
    given = PackedSeqParams(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 12], [0, 5, 12], [0, 8, 20], [0, 8, 20])))
    out = CoreAttention(CONFIG, 1, kind)(q, k, v, None, packed_seq_params=given)
    alone = maskc.compile("std:causal" if kind is AttnMaskType.padding_causal else "std:full").bind()
    for start, stop in ((0, 5), (8, 15)):
        torch.testing.assert_close(out[start:stop], maskc.run(alone, *(x[start:stop] for x in (q, k, v))).flatten(1))
    assert not out[5:8].any()
    assert not out[15:].any()


def test_offsets_of_inference_mode_are_read_anew() -> None:
    """Nothing counts what is written to them."""
    with torch.inference_mode():
        q, k, v = (x[:, 0] for x in _tensors())
        cu = torch.tensor([0, 5, 24], dtype=torch.int32)
        core, given = CoreAttention(CONFIG, 1, AttnMaskType.padding_causal), PackedSeqParams(cu)
        core(q, k, v, None, packed_seq_params=given)
        cu[1] = 7
        spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(cu_seqlens=cu))
        torch.testing.assert_close(core(q, k, v, None, packed_seq_params=given), maskc.run(spec, q, k, v).flatten(1))


def test_the_corner_that_the_diagonal_ends_in_is_said() -> None:
    q, k, v = _tensors()
    out = CoreAttention(CONFIG, 1, AttnMaskType.causal_bottom_right)(q[-5:], k, v, None)
    torch.testing.assert_close(out, CoreAttention(CONFIG, 1, AttnMaskType.causal)(q, k, v, None)[-5:])


def test_the_mask_may_be_given() -> None:
    q, k, v = _tensors()
    spec = maskc.compile("std:sliding_window").bind(window=5)
    core = CoreAttention(CONFIG)
    wanted = maskc.run(spec, *(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(2)
    torch.testing.assert_close(core(q, k, v, spec), wanted)
    torch.testing.assert_close(core(q, k, v, Attend(spec, deterministic=True)), wanted)


OFFSETS = torch.tensor([0, 6, 12], dtype=torch.int32)


def packed(q: torch.Tensor, given: Any, kind: AttnMaskType = AttnMaskType.padding_causal) -> torch.Tensor:
    return CoreAttention(CONFIG, 1, kind)(q[:, 0], q[:, 0], q[:, 0], None, packed_seq_params=given)


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("M551", lambda q: CoreAttention(CONFIG)(q, q, q, torch.zeros(1, 1, 24, 24, dtype=torch.bool))),
        ("M551", lambda q: CoreAttention(CONFIG)(q, q, q, None, attention_bias=torch.zeros(1))),
        ("M551", lambda q: CoreAttention(CONFIG, attention_dropout=0.1)(q, q, q, None)),
        ("M551", lambda q: CoreAttention(SimpleNamespace(softmax_type="learnable"))),
        ("M551", lambda q: CoreAttention(CONFIG, softmax_offset=q)),
        ("M551", lambda q: CoreAttention(SimpleNamespace(window_size=(8, 0)), 1, AttnMaskType.causal)(q, q, q, None)),
        ("M551", lambda q: CoreAttention(SimpleNamespace(context_parallel_size=2), 1, AttnMaskType.causal)(q, q, q, None)),
        ("M551", lambda q: packed(q, PackedSeqParams(OFFSETS, OFFSETS // 2))),
        ("M551", lambda q: packed(q, PackedSeqParams(OFFSETS, OFFSETS, OFFSETS * 2, OFFSETS))),
        ("M552", lambda q: packed(q, PackedSeqParams(OFFSETS), AttnMaskType.arbitrary)),
        ("M552", lambda q: packed(q, SimpleNamespace(cu_seqlens_q=None, cu_seqlens_kv=None))),
        ("M552", lambda q: CoreAttention(CONFIG, 1, AttnMaskType.causal)(q[:5], q, q, None)),
        ("M552", lambda q: CoreAttention(CONFIG)(q, q, q, None)),
        ("M552", lambda q: CoreAttention(CONFIG, attn_mask_type=AttnMaskType.padding)(q, q, q, None)),
        ("M553", lambda q: CoreAttention(CONFIG)(q, q, q, Attend({"full_attention": maskc.compile("std:full").bind()}))),
    ],
)
def test_what_is_refused(code: str, call: Any) -> None:
    with pytest.raises(MaskcError, match=code):
        call(_tensors()[0])
