"""Models of text alone for which transformers has only the whole, with images: its own decoder, with
generate()."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    Glm5NextTextConfig,
    MistralLarge4TextConfig,
    Step3p7TextConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from engine.text_models import causal_class


def register(config_class: Any, name: str) -> None:
    """Let AutoModelForCausalLM make the class `name` of such configs."""
    without_generate = causal_class(name)

    class TextWithGenerate(without_generate, GenerationMixin):  # type: ignore[misc, valid-type]
        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            past_key_values: Any = None,
            logits_to_keep: int = 0,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
            logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
            if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
                logits = torch.tanh(logits / cap) * cap
            return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    TextWithGenerate.__name__ = name
    AutoModelForCausalLM.register(config_class, TextWithGenerate, exist_ok=True)


def register_all() -> None:
    register(Glm5NextTextConfig, "Glm5NextForCausalLM")
    register(MistralLarge4TextConfig, "MistralLarge4ForCausalLM")
    register(Step3p7TextConfig, "Step3p7ForCausalLM")
