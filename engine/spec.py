"""The properties of a model that the rest of a worker needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvcache.layout import GroupSpec


@dataclass(frozen=True)
class ModelSpec:
    """A loaded model's properties. Two workers exchange KV only if their `fingerprint`s are equal."""

    groups: tuple[GroupSpec, ...]  # one pool each; the first is the primary group
    vocab_size: int  # of the logits: token ids are in [0, vocab_size)
    max_position: int  # longest context in tokens
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    model_type: str
    dtype: torch.dtype  # of weights and activations
