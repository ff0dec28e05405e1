"""Hugging Face Transformers: `attn_implementation="maskc"`.

    from maskc.integrations.transformers import layer_masks, register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="maskc")
    masks = layer_masks("gemma3.mask", full_attention="global", sliding_attention="local")
    out = model(tokens, position_ids=positions, labels=labels, maskc=masks.bind(doc=maskc.segments(lengths=lengths), ...))

The mask of a call travels as the keyword `maskc`, which the models hand down to their attention: a bound mask, one per
layer type, or `Attend` with a process group and a plan. It is there again when a checkpointed layer is recomputed. Some
models take the keyword and attend by themselves all the same: `check_model(model)` tells, once for a kind of model. The
masks that Transformers derives by itself (from the configuration, position_ids and attention_mask) are not used, and
whatever would change the result beside the mask is refused (M551).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maskc.binding.bound import BoundMask
from maskc.binding.constructors import segments
from maskc.compiled import CompiledMask
from maskc.diagnostics import Diagnostic, MaskcError, error
from maskc.integrations.attend import Attend
from maskc.runtime.run import run
from maskc.targets import load

__all__ = ["Attend", "LayerMasks", "attention", "check_model", "layer_masks", "no_mask", "register"]

NAME = "maskc"

# what models hand to their attention beside the mask and does not touch the result
_HARMLESS = frozenset(
    (
        "cache_position",
        "cache",
        "is_causal",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "sliding_window",
        "use_cache",
    )
)
_ELSEWHERE = {
    "softcap": "score capping is not supported",
    "s_aux": "attention sinks are not supported",
    "output_attentions": "probabilities are never formed",
    "cu_seq_lens_q": "documents are part of the mask: bind segments(cu_seqlens=...)",
    "cu_seq_lens_k": "documents are part of the mask: bind segments(cu_seqlens=...)",
    "max_length_q": "documents are part of the mask: bind segments(cu_seqlens=...)",
    "max_length_k": "documents are part of the mask: bind segments(cu_seqlens=...)",
}


@dataclass(frozen=True, slots=True)
class LayerMasks:
    """Compiled masks by layer type of the model."""

    masks: Mapping[str, CompiledMask]

    def bind(self, **inputs: Any) -> dict[str, BoundMask]:
        """The data of one batch, bound to the mask of every layer type; see `CompiledMask.bind`."""
        return {kind: mask.bind(**inputs) for kind, mask in self.masks.items()}


def layer_masks(target: str | Path, **layers: str) -> LayerMasks:
    """Masks of one file for the layer types of a model: layer_masks("gemma3.mask", full_attention="global", ...)."""
    return LayerMasks({kind: load(f"{target}:{name}") for kind, name in layers.items()})


def register() -> None:
    """Make "maskc" known to Transformers, in its attention and in its mask interface. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)


def check_model(model: torch.nn.Module, tokens: int = 16) -> None:
    """Raise M554 unless documents are kept apart: new tokens in one of two must not change what the model says of the other.

    That fails for models that do not attend through the interface, and for layers beside attention that carry a state from
    token to token (state spaces, linear attention, convolutions), which no mask reaches. The model takes `input_ids`.
    """
    half, vocabulary = tokens // 2, int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
    place = torch.arange(tokens, device=next(model.parameters()).device)[None]
    ids = place % (vocabulary // 2) + vocabulary // 2
    changed = torch.where(place < half, ids - vocabulary // 2, ids)
    mask, training = load("std:doc_causal"), model.training

    def reach(lengths: list[int]) -> Tensor:
        masks = dict.fromkeys(_kinds(model), mask.bind(doc=segments(lengths=lengths)))
        one, other = (model(input_ids=x, maskc=masks, use_cache=False)[0][:, half:] for x in (ids, changed))
        moved: Tensor = (one - other).abs().amax()
        return moved

    model.eval()
    try:
        with torch.no_grad():
            apart, together = reach([half, tokens - half]), reach([tokens])
    finally:
        model.train(training)
    if apart > together * torch.finfo(together.dtype).eps ** 0.5:  # sums in another order differ by less
        name, hint = type(model).__name__, "models of transformers whose layers call the attention interface, and attend only"
        raise error("M554", f"{name}: tokens of one document change what the model says of another", None, hint)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    maskc: BoundMask | Mapping[str, BoundMask] | Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a layer: query [B, Hq, S, D], key and value [B, Hk, S, D] -> ([B, S, Hq, D], None).

    Raises MaskcError: M551 for what masks cannot do, M552 without a mask, M553 for masks that do not fit the model.
    """
    _refuse(attention_mask, dropout, kwargs)
    if maskc is None:
        hint = f"call model(..., maskc=mask.bind(...)); if you did, {type(module).__name__} is not handed the model's keywords"
        raise error("M552", f"layer {_index(module)} has no mask", None, hint)
    how = maskc if isinstance(maskc, Attend) else Attend(maskc)
    spec = _mask_of(module, how.masks)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = run(spec, q, k, v, scale=scaling, **how.options)
    assert isinstance(out, Tensor)
    return out, None


def no_mask(
    *, attention_mask: Tensor | None = None, q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0, **kwargs: Any
) -> None:
    """What Transformers calls to make a mask: none is made, the call brings its own.

    Raises M551 for a padding mask that hides tokens (one host synchronisation) and for a key-value cache that is not
    empty.
    """
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).bool().all()):
        hint = "bind it: maskc.segments(ids=..., pad=...), or std:key_padding, std:left_padding"
        raise error("M551", "attention_mask hides tokens, but padding is part of the mask", None, hint)
    if int(q_offset) or int(kv_offset):
        hint = "pass use_cache=False; masks are for training and prefill"
        raise error("M551", f"the key-value cache holds {int(q_offset)} tokens already", None, hint)


def _refuse(attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    wrong = []
    if attention_mask is not None:
        text = "attention_mask is a prepared mask; the mask of the call is `maskc=`"
        wrong.append(Diagnostic("M551", text, help="maskc.convert.from_dense reads a bool mask exactly"))
    if dropout:
        wrong.append(Diagnostic("M551", f"dropout = {dropout}", help="set config.attention_dropout = 0.0"))
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            shown = "a tensor" if isinstance(given, Tensor) else repr(given)
            wrong.append(Diagnostic("M551", f"{name} = {shown[:40]}", help=_ELSEWHERE.get(name, "maskc does not know it")))
    if wrong:
        raise MaskcError(wrong)


def _mask_of(module: torch.nn.Module, masks: BoundMask | Mapping[str, BoundMask]) -> BoundMask:
    """The mask of a layer by its type."""
    types = _layer_types(module)
    kinds = _kinds(module)
    if isinstance(masks, BoundMask):
        if len(kinds) > 1:
            raise error("M553", f"one mask was given for layers of type {', '.join(kinds)}", None, "give one for each type")
        return masks
    if not isinstance(masks, Mapping):
        raise error("M553", f"maskc = {masks!r:.60} is no bound mask", None, "give mask.bind(...), or one for each type of layer")
    if sorted(masks) != sorted(kinds):
        raise error("M553", f"masks are for layers of type {', '.join(sorted(masks))}, the model has {', '.join(sorted(kinds))}")
    index = _index(module)
    return masks[types[index] if types else "full_attention"]


def _layer_types(module: torch.nn.Module) -> list[str]:
    config: Any = getattr(module, "config", None)
    return list(getattr(config, "layer_types", None) or [])


def _kinds(module: torch.nn.Module) -> dict[str, None]:
    """Its layer types, each once."""
    return dict.fromkeys(_layer_types(module)) or {"full_attention": None}


def _index(module: torch.nn.Module) -> int:
    found = getattr(module, "layer_idx", None)
    return found if isinstance(found, int) else 0
