"""Accepts or refuses a checkpoint at load.

An attention function sees no mask, and a pack holds several sequences. A feature that changes which tokens a
query sees, or that treats the whole input as one sequence, would be computed WRONGLY without an error. So a
checkpoint is accepted only if the engine computes every such feature of its config.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.formats import stored_format
from engine.errors import UnsupportedModel
from engine.families import block_sparse, chunked, compressed, dense, hybrid, latent, shared, windowed
from engine.families.base import Family

FAMILIES: dict[str, Family] = {
    **block_sparse.FAMILIES,
    **chunked.FAMILIES,
    **compressed.FAMILIES,
    **dense.FAMILIES,
    **hybrid.FAMILIES,
    **latent.FAMILIES,
    **shared.FAMILIES,
    **windowed.FAMILIES,
}
"""model_type -> its family. Each is tested token by token against transformers.generate."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional"})
"""Types that depend only on a token's own position, "longrope" and "dynamic" as far as longest_context()
goes: in a longer sequence all tokens would have other frequencies."""

_MUST_BE_OFF = {
    "attn_logit_softcapping": "the paged backends do not compute soft-capped attention scores",
    "final_logit_softcapping": "the sampler does not compute soft-capped logits",
    "attention_chunk_size": "chunked attention is computed in the families that have it",
    "alibi": "the paged backends do not add ALiBi's bias to scores",
    "num_kv_shared_layers": "layers that read another layer's KV are computed in the families that have them",
    "kv_lora_rank": "latent attention (MLA) needs a page layout of its own",
    "index_topk": "attention to what an indexer chooses is computed over latents alone",
    "cross_attention_layers": "cross attention needs an encoder's KV",
}
"""config.json key -> why any value other than null, false, 0 or an empty list is refused."""


_AMONG_IMAGES = "vision"
"""Gemma 4: the tokens of an image see one another. Text is causal."""

_NOT_SERVED = {
    "jamba": "transformers' scan of several tokens ignores the state that is passed to it",
}
"""model_type -> why transformers does not compute the model exactly if a prompt is cut into chunks."""


def check_model(config: Any) -> Family:
    """The family of a transformers config. Raises UnsupportedModel if the engine would not be exact."""
    family = _family(config)
    for key, why in _MUST_BE_OFF.items():
        value = getattr(config, key, None)
        if value and key not in family.allows:
            raise UnsupportedModel(f"{key} is {value!r} in config.json: {why}", "use a model without it")
    stored_format(config)  # raises for a format that is not read
    _check_masks(config, family)
    _check_rope(config)
    family.check(config)
    return family


def _family(config: Any) -> Family:
    supported = f"use one of {', '.join(sorted(FAMILIES))}"
    model_type = getattr(config, "model_type", None)
    architectures = getattr(config, "architectures", None) or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise UnsupportedModel(
            f"architectures is {architectures!r} in config.json: no causal LM head", supported
        )
    if model_type not in FAMILIES:
        why = _NOT_SERVED.get(str(model_type), "it is not in the table")
        raise UnsupportedModel(f"model_type {model_type!r} in config.json: {why}", supported)
    family = FAMILIES[model_type]
    if architectures and {family.architecture, family.published}.isdisjoint(architectures):
        raise UnsupportedModel(
            f"architectures is {architectures!r} in config.json, not {family.architecture}", supported
        )
    return family


def _check_masks(config: Any, family: Family) -> None:
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if not getattr(config, "is_causal", True) or bidirectional not in (None, False, _AMONG_IMAGES):
        raise UnsupportedModel("config.json asks for bidirectional attention", "use a causal decoder")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - family.layer_types)
    if unknown:
        raise UnsupportedModel(
            f"layer_types in config.json holds {', '.join(unknown)}",
            f"use a model with {', '.join(sorted(family.layer_types))} layers only",
        )


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [one for one in rope.values() if isinstance(one, dict)]
    for one in by_layer_type or [rope]:
        rope_type = one.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(
                f"rope_type {rope_type!r} in config.json is not known to depend on a token's position alone",
                f"use a model with rope_type {', '.join(sorted(ROPE_TYPES))}",
            )
