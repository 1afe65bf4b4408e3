"""What the tiers below the device hold and have done, for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcache.tiers.tiers import Tiers


def tier_report(tiers: Tiers | None) -> dict[str, Any]:
    """Empty without lower tiers. `host` has pages by group; `storage` is what the backend says of itself."""
    if tiers is None:
        return {}
    arenas = tiers.host.pool.arenas.items()
    storage = tiers.storage
    return {
        "is_idle": tiers.is_idle,
        "host": {
            name: {"total": arena.num_pages, "free": arena.allocator.available_pages()}
            for name, arena in arenas
        },
        "moves": asdict(tiers.moves.counts),
        "reads": asdict(tiers.reads.counts),
        "written_back": asdict(tiers.host.written_back),
        "storage": None if storage is None else {**asdict(storage.counts), **asdict(storage.stats())},
    }
