"""Models of Hugging Face Transformers on a GPU: packed documents and two masks of one file, against the models in fp64.

The yardstick is the same model in bf16 under its own attention ("sdpa"): maskc may be off by twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

import maskc
from maskc.codegen.render import CudaSource
from tests.gpu import warm

LENGTHS = (130, 1, 257, 40)


def special_cases() -> list[tuple[str, Callable[[], str]]]:
    if find_spec("transformers") is None:
        return []
    return [("transformers/packed llama", packed), ("transformers/sliding and global gemma3", sliding_and_global)]


def sources() -> Iterator[CudaSource]:
    for name in ("std:doc_causal", "std:gemma3:global", "std:gemma3:local"):
        yield from warm.built(maskc.compile(name), 64)


def packed(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    """Loss and gradients of packed documents, against the documents one by one under causal attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, head_dim=64, attention_dropout=0.0, **shape)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 97, (1, n), generator=generator) for n in LENGTHS]
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(lengths=list(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]

    def one_row(model: Any) -> torch.Tensor:
        tokens, at = torch.cat(documents, 1).to(model.device), positions.to(model.device)
        logits = model(tokens, position_ids=at, maskc=spec, use_cache=False).logits
        return sum((_loss(x, t) for x, t in zip(logits.split(LENGTHS, 1), documents, strict=True)), torch.zeros(()))

    def one_by_one(model: Any) -> torch.Tensor:
        every = (_loss(model(t.to(model.device), use_cache=False).logits, t) for t in documents)
        return sum(every, torch.zeros(()))

    return _compared(lambda: LlamaForCausalLM(config), one_row, one_by_one, device, dtype)


def sliding_and_global(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    """Layers of two types with the two masks of std:gemma3, against the model's own masks on one document."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from maskc.integrations.transformers import layer_masks

    kinds = ["sliding_attention", "full_attention"]
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(
        vocab_size=97, num_hidden_layers=2, head_dim=64, sliding_window=50, layer_types=kinds, pad_token_id=0, **shape
    )
    document = torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    masks = layer_masks("std:gemma3", full_attention="global", sliding_attention="local")
    specs = masks.bind(doc=maskc.segments(lengths=[sum(LENGTHS)]), image=maskc.spans(lengths=[]), window=50)

    def ours(model: Any) -> torch.Tensor:
        return _loss(model(document.to(model.device), maskc=specs, use_cache=False).logits, document)

    def theirs(model: Any) -> torch.Tensor:
        return _loss(model(document.to(model.device), use_cache=False).logits, document)

    return _compared(lambda: Gemma3ForCausalLM(config), ours, theirs, device, dtype)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens that have a next one."""
    wanted = tokens[0, 1:].to(logits.device)
    wide = logits[0, :-1].double() if logits.dtype == torch.float64 else logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(wide, wanted, reduction="sum").cpu()


def _compared(
    make: Callable[[], Any],
    ours: Callable[[Any], torch.Tensor],
    theirs: Callable[[Any], torch.Tensor],
    device: str,
    dtype: torch.dtype,
) -> str:
    """The error of each parameter's gradient, and of the loss, under maskc and under sdpa, both against sdpa in fp64."""
    from maskc.integrations.transformers import register

    register()

    def results(loss: Callable[[Any], torch.Tensor], name: str, kind: torch.dtype) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = make().to(dtype).to(device, kind)  # the same weights, rounded once
        model.set_attn_implementation(name)
        value = loss(model)
        value.backward()
        return {"loss": value.detach().double(), **{n: p.grad.double() for n, p in model.named_parameters()}}

    got, naive, exact = results(ours, "maskc", dtype), results(theirs, "sdpa", dtype), results(theirs, "sdpa", torch.float64)
    for name, right in exact.items():
        error, allowed = ((x[name] - right).norm().item() for x in (got, naive))
        if not error <= 2 * allowed + torch.finfo(dtype).eps * right.norm().item():
            return f"{name}: error {error:.2e}, sdpa in {dtype} has {allowed:.2e}"
    return ""
