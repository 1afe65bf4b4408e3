"""Names of weights in published files, where transformers knows them for a model with images alone."""

from __future__ import annotations

from functools import cache

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

_TEXT_CLASSES = {"minimax_m3_vl": "MiniMaxM3VLForCausalLM"}
"""model_type of the whole -> the class of its text part. By the part's model_type transformers would convert
the whole's weights twice."""


@cache
def register_names() -> None:
    """Let transformers convert weights of text parts as it does in the whole: all but the beginnings of
    names, for which text_weights() of engine/text_part.py is."""
    for model_type, text_class in _TEXT_CLASSES.items():
        conversions = get_checkpoint_conversion_mapping(model_type) or []
        within = [one for one in conversions if not one.source_patterns[0].startswith("^")]
        register_checkpoint_conversion_mapping(text_class, within)
