"""The host tier's memory: as large as it was asked for, also when it is pinned for a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import pytest
import torch

from common.errors import ConfigError
from kvcache.buffers import HUGE_PAGE_BYTES
from kvcache.layout import KVGroupSpec, StateGroupSpec, StateTensor
from kvcache.tiers.host_pool import HostPool

FULL = KVGroupSpec((0, 1), 2, 8, torch.float32)
STATE = StateGroupSpec((StateTensor(2, "conv", (4, 3), torch.float32),))
EMPTY = KVGroupSpec((), 2, 8, torch.float32, name="window", window=4)
PAGE_SIZE = 4
GPU = torch.device("cuda", 1)


class Cudart:
    """Stands in for torch's bindings of the CUDA runtime: what is registered, and on which device."""

    class cudaError(IntEnum):
        success = 0
        cudaErrorMemoryAllocation = 2

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False
        self.current = torch.device("cuda", 0)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> cudaError:
        assert (self.current, flags) == (GPU, 0)
        if not self.refuses:
            self.registered[address] = nbytes
        return self._done()

    def cudaHostUnregister(self, address: int) -> cudaError:
        assert self.current == GPU
        del self.registered[address]
        return self._done()

    def cudaGetErrorString(self, code: cudaError) -> str:
        return "out of memory" if code else "no error"

    def _done(self) -> cudaError:
        return self.cudaError.cudaErrorMemoryAllocation if self.refuses else self.cudaError.success


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "_cudart", cudart)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", cudart.device)
    return cudart


def made(gpu: torch.device | None = GPU) -> HostPool:
    return HostPool([FULL, STATE, EMPTY], PAGE_SIZE, {"full": 10, "state": 4, "window": 10}, gpu)


def test_exactly_the_pages_are_pinned_until_the_pool_is_closed(cudart: Cudart) -> None:
    pool = made()
    arenas = [pool.arenas[name] for name in ("full", "state")]
    assert cudart.registered == {arena.bytes.data_ptr(): arena.bytes.numel() for arena in arenas}
    assert [len(arena.bytes) for arena in arenas] == [11, 5]
    pool.close()
    assert not cudart.registered
    arenas[0].bytes.fill_(1)
    pool.close()


def test_torch_takes_pinned_pages_for_pinned(cudart: Cudart) -> None:
    """It asks CUDA about the start of a tensor's storage. Large memory starts within its mapping."""
    pool = HostPool([FULL], PAGE_SIZE, {"full": 2 * HUGE_PAGE_BYTES // FULL.page_bytes(PAGE_SIZE)}, GPU)
    pages = pool.arenas["full"].bytes
    assert pages.untyped_storage().data_ptr() in cudart.registered
    assert pages.data_ptr() % HUGE_PAGE_BYTES == 0
    pool.close()


def test_memory_that_cannot_be_pinned_is_refused_by_the_keys_that_ask_for_it(cudart: Cudart) -> None:
    cudart.refuses = True
    with pytest.raises(ConfigError, match=r"cannot be pinned .*out of memory") as refused:
        made()
    assert refused.value.key == "hicache_ratio"


def test_memory_that_stays_pinned_is_logged(cudart: Cudart, caplog: pytest.LogCaptureFixture) -> None:
    pool = made()
    cudart.refuses = True
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert "host memory stays pinned: out of memory" in caplog.text


def test_without_a_gpu_nothing_is_pinned(cudart: Cudart) -> None:
    pool = made(None)
    assert not cudart.registered
    pool.close()
