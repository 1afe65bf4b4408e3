"""How long a context of a model may be."""

from __future__ import annotations

from typing import Any

from torch import nn


def longest_context(config: Any) -> int:
    """Positions of a transformers config: max_position_embeddings, but with yarn and longrope.

    Checkpoints to which yarn is added, as Qwen's model cards say, keep the number that they had without it:
    the original one times the factor may be more. With longrope it is the original one: in a longer sequence
    the earlier tokens have other keys, too, and transformers computes all of them anew.
    """
    positions: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if not original:
        return positions
    match rope.get("rope_type"):
        case "yarn":
            return max(positions, int(original * (rope.get("factor") or 1)))
        case "longrope":
            return min(positions, int(original))
    return positions


def keep_frequencies(model: nn.Module) -> None:
    """Let rotary embeddings of "longrope" and "dynamic" keep the frequencies that they have up to
    longest_context().

    They would choose them anew in each forward, by operators that a recorded step cannot have at its first
    run.
    """
    modules: Any = model.modules()
    for module in modules:
        match getattr(module, "rope_type", None):
            case str(kind):
                module.rope_type = _kept(kind)
            case dict(kinds):  # by the type of the layers
                module.rope_type = {layers: _kept(kind) for layers, kind in kinds.items()}


def _kept(rope_type: str) -> str:
    return "default" if rope_type in ("longrope", "dynamic") else rope_type
