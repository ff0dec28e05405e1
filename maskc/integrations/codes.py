"""Codes of the integrations: the first line is the title, the rest the text of `maskc explain`."""

from __future__ import annotations

CODES: dict[str, str] = {
    "M551": """The framework asks for something that masks cannot do.
maskc computes exact softmax attention under a mask. Dropout on probabilities, score capping, attention sinks, biases, key
and value caches, returned probabilities and padding given beside the mask are refused instead of being left out. The
message names the argument and its value; where there is another way, it says which.""",
    "M552": """A layer has no mask.
With `attn_implementation="maskc"` every call of the model says what its layers see: model(..., maskc=spec), or one bound mask
per layer type. Nothing is guessed from position_ids or an attention_mask: bind `maskc.segments(positions=position_ids)`
yourself if that is what they mean.""",
    "M553": """The masks do not fit the layer types of the model.
A model with several layer types (`config.layer_types`) needs a mask for each of them, and for no other.""",
    "M554": """The mask does not keep documents apart in this model.
Some models take the keyword `maskc` and do not attend through the interface of Transformers (BLOOM, XGLM), so they ignore it
without a word. Others have layers beside attention that carry a state from token to token (Mamba, linear attention,
convolutions), across documents too. `check_model` finds both by a call of the model.""",
}
