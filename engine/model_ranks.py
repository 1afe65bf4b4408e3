"""ModelRanks: a model that is loaded in one or several ranks, of which this process is the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from engine.config import EngineConfig
from engine.loader import check_divisible, load_model
from engine.ranks.pools import own_part
from engine.ranks.ranks import Ranks
from engine.runner import ModelRunner
from kvcache.pool import KVCache


class ModelRanks:
    """The other ranks are ended by the last runner's `close`, or by this one's if there is no runner."""

    def __init__(self, config: EngineConfig, devices: Sequence[str], timeout_s: float) -> None:
        """Load the model in a rank for each device, of which `config.device` is the first. See Ranks. Raises
        ConfigError for what cannot work."""
        self._config = config
        self._ranks: Ranks | None = None
        if len(devices) == 1:
            self.loaded = load_model(config)
            return
        check_divisible(config, len(devices))
        with ExitStack() as opened:
            self._ranks = opened.enter_context(Ranks(config, devices, timeout_s))
            self.loaded = load_model(config, self._ranks.group)
            self._ranks.await_loaded()
            opened.pop_all()

    def open(self, pools: Mapping[str, KVCache], config: EngineConfig | None = None) -> ModelRunner:
        """A runner over whole pools, which no other runner uses any more. Raises ConfigError."""
        config = config or self._config
        if self._ranks is None:
            return ModelRunner(self.loaded, pools, config)
        self._ranks.open_pools(pools)
        return ModelRunner(self.loaded, own_part(pools, self._ranks.group), config, ranks=self._ranks)

    def give_back(self) -> None:
        """Have the other ranks give their GPUs what they do not use: runners that were opened are over."""
        if self._ranks is not None:
            self._ranks.give_back()

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()


def rank_devices(first: str, size: int) -> list[str]:
    """The devices of a worker's ranks: a GPU each, or one CPU."""
    device = torch.device(first)
    if device.type != "cuda":
        return [first] * size
    return [f"cuda:{(device.index or 0) + rank}" for rank in range(size)]
