"""bench.tier_curves counts where every prompt token came from, and counts the same again."""

from __future__ import annotations

import pytest

from bench.tier_curves import Bench, serve
from bench.tier_rig import PAGE_SIZE, Moved, Sources, made_model
from bench.tier_trace import draw_trace
from kvcache.tiers.config import TierConfig


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    scratch = tmp_path_factory.mktemp("curves")
    return Bench(*made_model(scratch / "model", 64, 1), scratch)


def served(bench: Bench, folder: str, ratio: float) -> tuple[Sources, Moved]:
    tiers = TierConfig(
        ratio=ratio, prefetch_policy="wait_complete", prefetch_threshold=PAGE_SIZE, prefetch_if_slower=True
    )
    return serve(bench.rig(bench.with_files(tiers, folder)), draw_trace(3)[:60])


def test_what_is_found_below_the_device_is_found_nowhere_else(bench: Bench) -> None:
    alone, _ = serve(bench.rig(TierConfig()), draw_trace(3)[:60])
    small, moved = served(bench, "small", 1.0)
    large, fewer = served(bench, "large", 8.0)
    assert alone.host == alone.storage == 0
    assert small.storage > large.storage == 0
    assert large.host > small.host
    assert small.computed == large.computed < alone.computed
    assert moved.to_device * PAGE_SIZE == small.host + small.storage
    assert moved.from_storage > fewer.from_storage == 0
    assert served(bench, "again", 1.0) == (small, moved)
