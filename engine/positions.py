"""How long a context of a model may be."""

from __future__ import annotations

from typing import Any


def longest_context(config: Any) -> int:
    """Positions of a transformers config: max_position_embeddings, or more if it is stretched by yarn.

    Checkpoints to which yarn is added, as Qwen's model cards say, keep the number that they had without it.
    """
    positions: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not original:
        return positions
    return max(positions, int(original * (rope.get("factor") or 1)))
