"""SGLang's own Python RadixCache beside ours, if `sglang` can be imported (tried with 0.5.9)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.radix_tree import Tree

Tokens = npt.NDArray[np.int32]


class _Allocator:
    """Takes slots back and never runs short: only the tree is measured."""

    device = torch.device("cpu")

    def free(self, slots: torch.Tensor) -> None:
        """Do nothing."""


class SGLangTree:
    """SGLang's Tree. Its keys are lists, as in SGLang's requests."""

    def __init__(self, page_size: int, tokens: int) -> None:
        del tokens
        self._radix: Any = import_module("sglang.srt.mem_cache.radix_cache")
        self._base: Any = import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._cache = self._radix.RadixCache.create_simulated(
            mock_allocator=_Allocator(), page_size=page_size
        )
        self._slots = torch.empty(0, dtype=torch.int64)

    def key(self, tokens: Tokens) -> Any:
        return self._radix.RadixKey(tokens.tolist())

    def hit(self, key: Any) -> None:
        """Match, take the indices, lock and unlock, as SGLang's scheduler does."""
        match = self._cache.match_prefix(self._base.MatchPrefixParams(key=key))
        _ = match.device_indices
        self._cache.inc_lock_ref(match.last_device_node)
        self._cache.dec_lock_ref(match.last_device_node)

    def insert(self, tokens: Tokens) -> None:
        key = self.key(tokens)
        self.reserve(key)
        self.insert_key(key)

    def reserve(self, key: Any) -> None:
        self._slots = torch.arange(len(key), dtype=torch.int64)

    def insert_key(self, key: Any) -> None:
        self._cache.insert(self._base.InsertParams(key=key, value=self._slots))

    def evict(self, tokens: int) -> int:
        return int(self._cache.evict(self._base.EvictParams(num_tokens=tokens)).num_tokens_evicted)


def open_sglang() -> Callable[[int, int], Tree] | None:
    """SGLangTree, or None if sglang cannot be imported."""
    try:
        import_module("sglang.srt.mem_cache.radix_cache")
    except Exception as error:  # noqa: BLE001  its imports fail in many ways
        print(f"sglang is not measured: {type(error).__name__}: {error}".splitlines()[0])
        return None
    return SGLangTree
