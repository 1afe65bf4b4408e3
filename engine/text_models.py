"""Classes of models that read text alone. For some transformers has only the whole, with images."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from torch import nn

_WITHOUT_HEAD = {
    "Glm5NextForCausalLM": "Glm5NextTextModel",
    "MistralLarge4ForCausalLM": "MistralLarge4TextModel",
    "Step3p7ForCausalLM": "Step3p7TextModel",
}
"""Name of the class that transformers does not have -> its class of all but the projection onto the
vocabulary."""


@cache
def causal_class(name: str) -> Any:
    """transformers' class of this name, or one of the same form: `model`, and `lm_head` behind it."""
    if name not in _WITHOUT_HEAD:
        return getattr(transformers, name)
    text_model: Any = getattr(transformers, _WITHOUT_HEAD[name])

    class TextForCausalLM(text_model.__base__):  # type: ignore[misc]
        config_class = text_model.config_class
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    TextForCausalLM._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    TextForCausalLM.__name__ = TextForCausalLM.__qualname__ = name
    # There transformers looks whether the model's experts can be grouped products.
    TextForCausalLM.__module__ = text_model.__module__
    return TextForCausalLM
