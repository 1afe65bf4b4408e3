"""PromptSources: where the KV of a prompt's cached tokens came from."""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages.caches import CacheSource


@dataclass(slots=True)
class PromptSources:
    """Tokens of one prompt that were brought to the device while its request waited. They may have gone
    again."""

    host: int = 0  # from host memory, with those that storage had brought there
    storage: int = 0  # from storage to host memory
    peer: int = 0  # from another worker's cache

    def split(self, cached: int) -> dict[CacheSource, int]:
        """Where `cached` tokens came from, which were found at admission; sources of none are left out.
        What nobody brought was on the device."""
        peer = min(self.peer, cached)
        below = min(self.host, cached - peer)
        storage = min(self.storage, below)
        found: dict[CacheSource, int] = {
            "device": cached - peer - below,
            "host": below - storage,
            "storage": storage,
            "peer": peer,
        }
        return {source: tokens for source, tokens in found.items() if tokens}
