"""Names of weights in published files, where transformers knows them for a model with images alone."""

from __future__ import annotations

from functools import cache

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

_TEXT_CLASSES = {
    "minimax_m3_vl": "MiniMaxM3VLForCausalLM",
    "mistral_large4": "MistralLarge4ForCausalLM",
    "step3p7": "Step3p7ForCausalLM",
}
"""model_type of the whole -> the class of its text part. By the part's model_type transformers would convert
the whole's weights twice."""

_NOT_WITHIN = ("^", r"attention\.w")
"""How patterns begin that are of the whole alone: of the beginnings of names, and of layers for images."""


@cache
def register_names() -> None:
    """Let transformers convert weights of text parts as it does in the whole: all but the beginnings of
    names, for which text_weights() of engine/text_part.py is, and what layers for images have."""
    for model_type, text_class in _TEXT_CLASSES.items():
        conversions = get_checkpoint_conversion_mapping(model_type) or []
        within = [one for one in conversions if not one.source_patterns[0].startswith(_NOT_WITHIN)]
        register_checkpoint_conversion_mapping(text_class, within)
