"""`attn_implementation="maskc"`: packed equals unpacked, sliding and global layers, GQA, checkpointing; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import maskc
from maskc.diagnostics import MaskcError

transformers = pytest.importorskip("transformers")

from examples.finetune_packed import documents, main, packed_loss, small_model, unpacked_loss  # noqa: E402
from maskc.integrations import transformers as hf  # noqa: E402
from tests.gpu import special_transformers  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    hf.register()


def _grads(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packed_documents_equal_unpacked_ones() -> None:
    model, docs = small_model(), documents()
    a, b = packed_loss(model, docs), unpacked_loss(model, docs)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_grads(model, a), _grads(model, b), rtol=1e-9, atol=1e-11)


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    first, *steps = capsys.readouterr().out.splitlines()
    assert float(first.rpartition(" ")[2]) < 1e-12
    assert float(steps[-1].rpartition(" ")[2]) < float(steps[0].rpartition(" ")[2])


def test_causal_equals_the_models_own_attention() -> None:
    model, doc = small_model(), documents()[2][None]
    mine = model(doc, maskc=maskc.compile("std:causal").bind(), use_cache=False).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(mine, model(doc, use_cache=False).logits, rtol=1e-10, atol=1e-12)


def test_gradient_checkpointing_recomputes_with_the_mask() -> None:
    model, docs = small_model(), documents()
    plain = _grads(model, packed_loss(model, docs))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(_grads(model, packed_loss(model, docs)), plain, rtol=1e-12, atol=1e-14)


def _gemma(layer_types: list[str]) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=layer_types,
        pad_token_id=0,
        attn_implementation="maskc",
    )
    return transformers.Gemma3ForCausalLM(config).to(torch.float64)


def test_sliding_and_global_layers_from_one_file() -> None:
    """Two masks of std:gemma3, against the model's own attention on one document."""
    model, doc = _gemma(["sliding_attention", "full_attention"]), documents()[2][None]
    masks = hf.layer_masks("std:gemma3", full_attention="global", sliding_attention="local")
    n = doc.shape[1]
    specs = masks.bind(doc=maskc.segments(lengths=[n]), image=maskc.spans(lengths=[]), window=5)
    mine = model(doc, maskc=specs, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(mine, model(doc, use_cache=False).logits, rtol=1e-9, atol=1e-11)


def test_documents_from_position_ids_are_explicit() -> None:
    model, docs = small_model(), documents()
    positions = torch.cat([torch.arange(len(d)) for d in docs])[None]
    spec = maskc.compile("std:doc_causal").bind(doc=maskc.segments(positions=positions))
    packed = model(torch.cat(docs)[None], position_ids=positions, maskc=spec, use_cache=False).logits[0]
    alone = model(docs[2][None], maskc=maskc.compile("std:causal").bind(), use_cache=False).logits[0]
    torch.testing.assert_close(packed[10:33], alone, rtol=1e-10, atol=1e-12)


def test_layers_without_a_mask_are_refused() -> None:
    with pytest.raises(MaskcError, match=r"M552.*layer 0 has no mask"):
        small_model()(documents()[0][None], use_cache=False)


def test_masks_must_fit_the_layer_types() -> None:
    spec = maskc.compile("std:causal").bind()
    with pytest.raises(MaskcError, match=r"M553.*one mask was given for layers of type sliding_attention, full_attention"):
        _gemma(["sliding_attention", "full_attention"])(documents()[0][None], maskc=spec, use_cache=False)
    with pytest.raises(MaskcError, match="M553"):
        small_model()(documents()[0][None], maskc={"sliding_attention": spec}, use_cache=False)
    with pytest.raises(MaskcError, match=r"M553.*CompiledMask\(causal.*is no bound mask"):
        small_model()(documents()[0][None], maskc=maskc.compile("std:causal"), use_cache=False)


@pytest.mark.parametrize(
    ("wanted", "keywords"),
    [
        ("attention_mask hides tokens", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])}),
        ("prepared mask", {"attention_mask": torch.zeros(1, 1, 9, 9)}),
        ("output_attentions = True", {"output_attentions": True}),
        ("softcap = 30.0", {"softcap": 30.0}),
        ("s_aux = a tensor", {"s_aux": torch.zeros(4)}),
        ("segments.cu_seqlens", {"cu_seq_lens_q": torch.tensor([0, 9])}),
        ("unheard_of = 3", {"unheard_of": 3}),
    ],
)
def test_what_masks_cannot_do_is_refused(wanted: str, keywords: dict[str, Any]) -> None:
    spec = maskc.compile("std:causal").bind()
    with pytest.raises(MaskcError, match=f"(?s)M551.*{wanted}"):
        small_model()(documents()[0][None], maskc=spec, use_cache=False, **keywords)


def test_dropout_is_refused_in_training_only() -> None:
    model, doc, spec = small_model(), documents()[0][None], maskc.compile("std:causal").bind()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.eval()
    model(doc, maskc=spec, use_cache=False)
    model.train()
    with pytest.raises(MaskcError, match=r"M551.*dropout = 0.1"):
        model(doc, maskc=spec, use_cache=False)


def test_a_cache_is_refused_once_it_holds_tokens() -> None:
    model, doc, spec = small_model(), documents()[0][None], maskc.compile("std:causal").bind()
    out = model(doc, maskc=spec, use_cache=True)
    name = "cache" if "cache" in out else "past_key_values"  # its name changes between versions
    with pytest.raises(MaskcError, match=r"M551.*cache holds 9 tokens"):
        model(doc[:, :1], maskc=spec, **{name: out[name]})


def test_all_ones_are_no_padding() -> None:
    model, doc, spec = small_model(), documents()[0][None], maskc.compile("std:causal").bind()
    a = model(doc, maskc=spec, use_cache=False, attention_mask=torch.ones_like(doc)).logits
    assert torch.equal(a, model(doc, maskc=spec, use_cache=False).logits)


@pytest.mark.parametrize("case", [special_transformers.packed, special_transformers.sliding_and_global], ids=lambda c: c.__name__)
def test_cases_for_a_gpu_are_right_and_can_fail(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case("cpu", torch.float32) == ""
    causal = maskc.compile("std:causal").bind()
    right = hf.run
    monkeypatch.setattr(hf, "run", lambda spec, *tensors, **options: right(causal, *tensors, **options))
    assert "error" in case("cpu", torch.float32)


@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma3TextConfig", "GPT2Config"])
def test_models_that_keep_documents_apart_pass(name: str) -> None:
    model = _tiny(name)
    model.train()
    hf.check_model(model)
    assert model.training


@pytest.mark.parametrize(
    "name",
    [
        "BloomConfig",  # attends by itself and never looks at the mask
        "MambaConfig",  # carries a state
    ],
)
def test_models_that_a_mask_does_not_reach_are_refused(name: str) -> None:
    with pytest.raises(MaskcError, match="M554"):
        hf.check_model(_tiny(name))


def test_a_model_that_keeps_keywords_to_itself_is_named() -> None:
    with pytest.raises(MaskcError, match="StableLmAttention is not handed"):
        hf.check_model(_tiny("StableLmConfig"))


def _tiny(name: str) -> Any:
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    config = getattr(transformers, name)(**size)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="maskc")
