"""The copiers between the device's pools and the host's arenas: on a CPU, and the CUDA one over a stand-in
for streams."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.layout import KVGroupSpec, StateGroupSpec, StateTensor
from kvcache.pool import KVCache, MambaPool, MHAKVCache
from kvcache.tiers import copier
from kvcache.tiers.config import TierConfig
from kvcache.tiers.copier import Copier, CudaCopier, HostCopier, open_copier
from kvcache.tiers.host_pool import HostPool
from tests.kvcache.support import SPEC, HandMover, memory, put

FULL = KVGroupSpec((0, 1), 2, 8, torch.float32)
STATE = StateGroupSpec((StateTensor(2, "conv", (4, 3), torch.float32),))
PAGE_SIZE, PAGES = 4, 12


class Streams:
    """Stands in for torch.cuda: who copies on a stream, and who waits for it."""

    def __init__(self) -> None:
        self.unwaited = 0

    def Stream(self, device: torch.device) -> SimpleNamespace:
        assert device.type == "cpu", "the pools of this test"
        return SimpleNamespace(synchronize=self.wait)

    def wait(self) -> None:
        self.unwaited = 0

    @contextmanager
    def stream(self, _: object) -> Any:
        self.unwaited += 1
        yield


def made() -> tuple[dict[str, KVCache], HostPool]:
    """Pools full of different bytes, and empty arenas of both groups."""
    pools: dict[str, KVCache] = {
        "full": MHAKVCache(FULL, PAGES, PAGE_SIZE),
        "state": MambaPool(STATE, PAGES),
    }
    for seed, pool in enumerate(pools.values()):
        drawn = np.random.default_rng(seed).integers(0, 256, tuple(pool.bytes.shape), np.uint8)
        pool.bytes.copy_(torch.from_numpy(drawn))
    host = HostPool([FULL, STATE], PAGE_SIZE, {"full": PAGES, "state": PAGES})
    return pools, host


@pytest.fixture(params=["cpu", "cuda"])
def opened(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Copier, dict[str, KVCache], HostPool, Streams]:
    streams = Streams()
    monkeypatch.setattr(copier.torch, "cuda", streams)
    monkeypatch.setattr(copier, "_PIECE_BYTES", 3 * FULL.page_bytes(PAGE_SIZE))
    pools, host = made()
    chosen: Copier = open_copier(pools, host, 0.0) if request.param == "cpu" else CudaCopier(pools, host)
    return chosen, pools, host, streams


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_pages_go_there_and_back(opened: tuple[Copier, dict[str, KVCache], HostPool, Streams]) -> None:
    chosen, pools, host, streams = opened
    before = {name: pool.bytes.clone() for name, pool in pools.items()}
    device = {"full": ids(7, 2, 3, 4, 5, 11, 1, 9), "state": ids(6)}
    there = {"full": ids(1, 2, 3, 12, 11, 5, 4, 6), "state": ids(3)}
    moved = 8 * pools["full"].page_bytes + pools["state"].page_bytes
    assert chosen.to_host(device, there) == moved
    assert streams.unwaited == 0, "a copy that nobody has waited for"
    for name in pools:
        arena = host.arenas[name].bytes
        assert torch.equal(arena[there[name].astype(int)], before[name][device[name].astype(int)])
        pools[name].bytes.zero_()
    assert chosen.to_device(device, there) == moved
    assert streams.unwaited == 0, "a copy that nobody has waited for"
    for name, pool in pools.items():
        at = device[name].astype(int)
        assert torch.equal(pool.bytes[at], before[name][at])
        rest = np.setdiff1d(np.arange(PAGES + 1), at)
        assert not pool.bytes[rest].any(), "a page that was not asked for was written"


def test_a_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(copier, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    pools, host = made()
    page_bytes = pools["full"].page_bytes
    paced = HostCopier(pools, host, bytes_per_s=2.0 * page_bytes)
    paced.to_host({"full": ids(1, 2, 3, 4, 5, 6)}, {"full": ids(1, 2, 3, 4, 5, 6)})
    assert now[0] == pytest.approx(3.0)
    paced.to_device({"full": ids(1, 2)}, {"full": ids(1, 2)})
    assert now[0] == pytest.approx(3.0), "a load waits for no pace"


@pytest.mark.parametrize(("policy", "slept_s"), [("write_through", 4.0), ("write_back", 0.0)])
def test_an_eviction_waits_for_no_pace(monkeypatch: pytest.MonkeyPatch, policy: str, slept_s: float) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(copier, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    mover, pace = HandMover(), SPEC.page_bytes(PAGE_SIZE) / 2
    tiers = TierConfig(ratio=2.0, write_policy=policy, pace_bytes_per_s=pace)
    with memory(PAGE_SIZE, PAGES, mover=mover, tiers=tiers) as built:
        put(built, range(2 * PAGE_SIZE))
        mover.do_all()
        assert built.tiers is not None
        built.tiers.poll()
        built.cache.tree.evict("full", 2)
        assert sum(node.host is not None for node in built.cache.tree.nodes()) == 1
    assert now[0] == pytest.approx(slept_s)
