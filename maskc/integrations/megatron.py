"""An attention core in the shape of Megatron-Core's `DotProductAttention`; Megatron itself is not imported.

    spec.submodules.core_attention = ModuleSpec(module=maskc.integrations.megatron.CoreAttention)

The mask travels as the `attention_mask` of the model's forward: a bound mask, or `Attend` with the group and the plan of
context parallelism. Without one, `packed_seq_params` and `attn_mask_type` say everything for documents, causal and full
masks; a window of the configuration needs a mask that says so. Whatever would change the result beside the mask is refused
(M551).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.constructors import segments
from maskc.convert.varlen import from_cu_seqlens
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.integrations.attend import Attend
from maskc.runtime.run import run
from maskc.targets import load

_HARMLESS = frozenset(("cp_comm_type", "k_channels", "model_comm_pgs", "name", "pg_collection", "v_channels"))
"""Arguments of core attentions that the result does not depend on."""
_IMPLIED = {"causal": "std:causal", "causal_bottom_right": "std:bottom_right", "no_mask": "std:full"}
_PACKED = (*_IMPLIED, "padding", "padding_causal", "padding_causal_bottom_right")
_NO_WINDOW: tuple[object, ...] = (None, (-1, -1), (-1, 0))


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
        for name, given in kwargs.items():
            if name not in _HARMLESS and given is not None:
                raise error("M551", f"{name} = {given!r:.60}", None, "maskc does not know it")
        window = getattr(config, "window_size", None)
        self.window = tuple(window) if isinstance(window, list | tuple) else window
        self.ranks = int(getattr(config, "context_parallel_size", 1))

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
        if self.ranks > 1 and (how is None or how.group is None):
            hint = "pass Attend(mask, group, plan) as attention_mask"
            raise error("M551", f"context_parallel_size = {self.ranks}, but no group was given", None, hint)
        if mask is None:
            mask = self._implied(kind, packed_seq_params, query.shape[0] == key.shape[0])
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

    def _implied(self, kind: str, packed: Any, square: bool) -> BoundMask:
        """The mask of a call without one: documents by their offsets, or a mask without data by name."""
        if self.window not in _NO_WINDOW:
            hint = "pass a bound mask that says so, of std:sliding_window or std:doc_window"
            raise error("M551", f"window_size = {self.window}, but layer {self.layer_number} has no mask", None, hint)
        hint = "pass a bound mask as attention_mask"
        if packed is not None and kind in _PACKED:
            return _DOCUMENTS.mask(Packed.of(packed), kind)
        if packed is not None or kind not in _IMPLIED:
            raise error("M552", f"layer {self.layer_number} of attn_mask_type {kind or 'None'} has no mask", None, hint)
        if kind == "causal" and not square:
            raise error("M552", "causal says nothing of rows and keys of different numbers", None, hint + ": std:bottom_right?")
        return _plain(_IMPLIED[kind])


class Packed(NamedTuple):
    """Offsets of packed documents in rows and keys, and where the documents lie that are padded, else None."""

    rows: Tensor
    keys: Tensor
    padded_rows: Tensor | None
    padded_keys: Tensor | None

    @classmethod
    def of(cls, given: Any) -> Packed:
        """Those of Megatron's `PackedSeqParams`; keys and padding may be left out."""
        rows, keys = given.cu_seqlens_q, getattr(given, "cu_seqlens_kv", None)
        if not isinstance(rows, Tensor):
            raise error("M552", f"packed_seq_params.cu_seqlens_q is {type(rows).__name__}, not the offsets of documents")
        padded = getattr(given, "cu_seqlens_q_padded", None), getattr(given, "cu_seqlens_kv_padded", None)
        return cls(rows, rows if keys is None else keys, *padded)

    def mask(self, kind: str) -> BoundMask:
        """Raises M551 for what offsets cannot say."""
        causal, square = "causal" in kind, _equal(self.rows, self.keys)
        moved = not _equal(self.rows, self.padded_rows) or not _equal(self.keys, self.padded_keys)
        if moved and not (square and _equal(self.padded_rows, self.padded_keys)):
            raise error("M551", "documents of rows and of keys are padded each in their own way", None, "pass a bound mask")
        if causal and not square and "bottom_right" not in kind:
            hint = f"{kind}_bottom_right, or pass a bound mask"
            raise error("M551", f"{kind} says nothing of documents with rows and keys of different numbers", None, hint)
        if not moved:
            return from_cu_seqlens(self.rows, None if square else self.keys, causal=causal)
        assert self.padded_rows is not None
        starts = self.padded_rows[:-1]
        ranges = torch.stack((starts, starts + self.rows.diff()), 1)
        return load("std:doc_causal" if causal else "std:doc_full").bind(doc=segments(ranges=ranges))


class _Documents:
    """The mask of the offsets that were asked for last: the layers of a step share it."""

    def __init__(self) -> None:
        self._last: tuple[Packed, object, BoundMask] | None = None

    def mask(self, packed: Packed, kind: str) -> BoundMask:
        """That of these tensors as they are now: one that was written to since is another."""
        state = kind, *map(_version, packed)
        known = self._last
        if known is None or None in state or known[1] != state or any(a is not b for a, b in zip(known[0], packed, strict=True)):
            known = self._last = packed, state, packed.mask(kind)
        return known[2]


_DOCUMENTS = _Documents()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or a is b or torch.equal(a, b)


def _version(t: Tensor | None) -> int | None:
    """Rises when the tensor is written to; None where nothing counts that, under `torch.inference_mode`."""
    return -1 if t is None else None if t.is_inference() else t._version


@cache
def _plain(name: str) -> BoundMask:
    """A mask without data."""
    return load(name).bind()


def _name(kind: Any) -> str:
    """The name of Megatron's `AttnMaskType`, which is an enum, or of a plain string."""
    return str(getattr(kind, "name", kind or ""))
