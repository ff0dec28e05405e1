"""An attention core in the shape of Megatron-Core's `DotProductAttention`; Megatron itself is not imported.

    spec.submodules.core_attention = ModuleSpec(module=maskc.integrations.megatron.CoreAttention)

The mask travels as the `attention_mask` of the model's forward: a bound mask, or `Attend` with the group and the plan of
context parallelism. Without one, `packed_seq_params` and `attn_mask_type` say everything for documents, causal and full
masks. Whatever would change the result beside the mask is refused (M551).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.convert.varlen import from_cu_seqlens
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.integrations.attend import Attend
from maskc.runtime.run import run
from maskc.targets import load


class CoreAttention(torch.nn.Module):
    """Core attention: query [sq, b, np, hn], key and value [sk, b, ng, hn] -> [sq, b, np * hn]; packed without b.

    Constructor and forward take what Megatron's own module takes. Arguments that ask for anything but masked attention
    (dropout, a bias, sinks) raise M551, here or at the first call.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = getattr(config, "attention_dropout", 0.0) if attention_dropout is None else attention_dropout
        self.deterministic = bool(getattr(config, "deterministic_mode", False))
        kind = getattr(config, "softmax_type", "vanilla")
        if kind != "vanilla":
            raise error("M551", f"softmax_type = {kind!r}", None, "attention sinks are not supported")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: BoundMask | Attend | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Raises MaskcError: M551 for what masks cannot do, M552 where nothing says what the layer sees."""
        self._refuse(attention_mask, attention_bias)
        kind = _name(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        packed = query.ndim == 3
        how = attention_mask if isinstance(attention_mask, Attend) else None
        mask = how.masks if how is not None else attention_mask
        if mask is None:
            mask = self._implied(kind, packed_seq_params)
        if not isinstance(mask, BoundMask):
            raise error("M553", f"layer {self.layer_number} takes one bound mask, not {type(mask).__name__}")
        options = how.options if how is not None else {"deterministic": self.deterministic}
        q, k, v = (x if packed else x.transpose(0, 1) for x in (query, key, value))
        out = run(mask, q, k, v, scale=self.softmax_scale, **options)
        assert isinstance(out, Tensor)
        return (out if packed else out.transpose(0, 1)).flatten(-2)

    def _refuse(self, attention_mask: object, attention_bias: Tensor | None) -> None:
        wrong = []
        if isinstance(attention_mask, Tensor):
            hint = "pass a bound mask; maskc.convert.from_dense(~attention_mask) reads Megatron's bool masks (True = hidden)"
            wrong.append(Diagnostic("M551", "attention_mask is a tensor", help=hint))
        if attention_bias is not None:
            wrong.append(Diagnostic("M551", "attention_bias is a tensor", help="scores cannot be changed, only masked"))
        if self.dropout and self.training:
            wrong.append(Diagnostic("M551", f"attention_dropout = {self.dropout}", help="set attention_dropout = 0.0"))
        if wrong:
            raise MaskcError(wrong)

    def _implied(self, kind: str, packed_seq_params: Any) -> BoundMask:
        """The mask of a call without one: documents by their offsets, or `causal` and `no_mask` by name."""
        causal = "causal" in kind
        if packed_seq_params is not None:
            return _DOCUMENTS.mask(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv, causal)
        if kind in ("causal", "no_mask"):
            return _plain("std:causal" if kind == "causal" else "std:full")
        text = f"layer {self.layer_number} of attn_mask_type {kind or 'None'} has no mask"
        raise error("M552", text, None, "pass a bound mask as attention_mask")


class _Documents:
    """The mask of the offsets that were asked for last: the layers of a step share it."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, tuple[int, int, bool], BoundMask] | None = None

    def mask(self, cu_q: Tensor, cu_kv: Tensor, causal: bool) -> BoundMask:
        """That of these tensors as they are now: one that was written to since is another."""
        state = _version(cu_q), _version(cu_kv), causal
        if self._last is None or self._last[0] is not cu_q or self._last[1] is not cu_kv or self._last[2] != state:
            own = None if cu_kv is cu_q or torch.equal(cu_q, cu_kv) else cu_kv
            self._last = cu_q, cu_kv, state, from_cu_seqlens(cu_q, own, causal=causal)
        return self._last[3]


_DOCUMENTS = _Documents()


def _version(t: Tensor) -> int:
    """Rises when the tensor is written to; under `torch.inference_mode` nothing counts."""
    return 0 if t.is_inference() else t._version


@cache
def _plain(name: str) -> BoundMask:
    """A mask without data."""
    return load(name).bind()


def _name(kind: Any) -> str:
    """The name of Megatron's `AttnMaskType`, which is an enum, or of a plain string."""
    return str(getattr(kind, "name", kind or ""))
