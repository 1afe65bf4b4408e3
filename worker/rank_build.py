"""A worker of several ranks: their processes, then the model's parts, then pages that all of them map."""

from __future__ import annotations

from contextlib import ExitStack

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.loader import check_divisible, load_model
from engine.ranks.pools import own_heads
from engine.ranks.ranks import Ranks
from engine.runner import ModelRunner
from kvcache.config import CacheConfig
from kvcache.memory import Memory, build_memory
from worker.capacity import cache_config, host_budget
from worker.options import WorkerOptions


def build_of_ranks(
    options: WorkerOptions, config: EngineConfig, chosen: CacheConfig
) -> tuple[ModelRunner, Memory]:
    """Load the model in `options.tp_size` processes, of which this is the first, and allocate its pools.
    Raises ConfigError for what cannot work."""
    if config.device != "cpu":
        raise ConfigError("tp_size", f"it is {options.tp_size}, and the device {config.device}", "use 1")
    check_divisible(config, options.tp_size)
    with ExitStack() as opened:
        ranks = Ranks(config, options.tp_size, options.first_forward_s)
        opened.callback(ranks.close)
        loaded = load_model(config, ranks.group)
        ranks.await_loaded()
        sizes = cache_config(options, loaded.spec, chosen, host_budget(options))
        memory = build_memory(sizes, loaded.spec.groups)
        opened.callback(memory.close)
        ranks.open_pools(memory.kv_caches)
        runner = ModelRunner(loaded, own_heads(memory.kv_caches, ranks.group), config, ranks=ranks)
        opened.pop_all()
    return runner, memory
