"""CacheClearing: what a worker does when an operator has its cache cleared."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.memory import Memory
from kvcache.radix_tree import evict_all
from kvcache.tiers.mover import Failed
from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheCleared, CacheTier, ClearCache
from worker.command_answers import CommandAnswers


class CacheClearing:
    """Clears tiers, from the device down, and answers. Engine loop's thread only.

    Requests that run keep what they use. A page that leaves the device may go to the host: clear that, too,
    to be rid of it.
    """

    def __init__(self, memory: Memory, send: Callable[[str, AnyMessage], None]) -> None:
        self._memory = memory
        self._answers = CommandAnswers[CacheCleared](send)

    def clear(self, sender: str, message: ClearCache) -> None:
        """Act on a message. The answer to one that clears a storage goes out when that is done."""
        key = sender, message.token
        if not self._answers.is_new(key):
            return
        freed: dict[CacheTier, int] = {}
        tiers = self._memory.tiers
        if "device" in message.tiers:
            freed["device"] = evict_all(self._memory.cache.tree)
        if "host" in message.tiers and tiers is not None:
            freed["host"] = tiers.host.clear()
        if "storage" not in message.tiers or tiers is None or tiers.storage is None:
            self._answers.answer(key, CacheCleared(message.token, freed))
            return

        def done(told: int | Failed | None) -> None:
            match told:
                case Failed(error):
                    cleared = CacheCleared(message.token, freed, f"storage: {error!r}")
                case None:
                    cleared = CacheCleared(message.token, freed, "storage: this backend cannot be cleared")
                case blobs:
                    cleared = CacheCleared(message.token, {**freed, "storage": blobs})
            self._answers.answer(key, cleared)

        tiers.storage.clear(done)
