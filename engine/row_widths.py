"""How wide the rows of keys and values are in pages.

A page has rows of one width. Where a model's values are narrower than its keys (MiMo), or where no kernel of
the device has heads of their width, attention fills rows up with zeros. Zeros add nothing to a score, and
what they make of values is cut off.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.cuda.limits import DTYPES, HEAD_DIMS
from kvcache.layout import GroupSpec, KVGroupSpec


def fitted(groups: tuple[GroupSpec, ...], config: EngineConfig) -> tuple[GroupSpec, ...]:
    """The groups with rows that kernels of the device read. On a GPU rows that FlashInfer does not attend to
    become those of its next width, unless they would take twice the memory: plain torch is far slower."""
    if torch.device(config.device).type != "cuda" or config.attention == "torch":
        return groups
    return tuple(_for_flashinfer(group) if isinstance(group, KVGroupSpec) else group for group in groups)


def _for_flashinfer(group: KVGroupSpec) -> KVGroupSpec:
    width = next((dim for dim in HEAD_DIMS if dim >= group.head_dim), group.head_dim)
    if group.dtype not in DTYPES or width >= 2 * group.head_dim:
        return group
    return replace(group, head_dim=width)
