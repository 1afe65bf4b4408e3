"""Memory of a GPU that other processes map, over a stand-in for the driver."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import inspect
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from kvcache.config import CacheConfig
from kvcache.device_memory import DeviceError, DeviceMemory, allocate_exported, device_memory
from kvcache.memory import build_memory
from kvcache.page_parts import RowsCopy
from tests.kvcache.support import SPEC
from tests.support.cuda_record import read, recorded, recorded_version
from tests.support.cuda_stand_in import FAR, GRANULARITY, HERE, NEAR, StandInDriver, stand_in_memory

LOCK = Path(__file__).parents[2] / "deploy" / "docker" / "cuda.lock"
SIZE = 3 * GRANULARITY - 100
GPU = torch.device("cuda", 0)


def bytes_at(ptr: int, nbytes: int) -> bytes:
    return bytes((ctypes.c_uint8 * nbytes).from_address(ptr))


def test_what_one_process_writes_the_other_reads() -> None:
    owner, peer = stand_in_memory(), stand_in_memory()
    with owner.allocate(SIZE) as buffer:
        assert buffer.tensor.shape == (SIZE,)
        assert not buffer.tensor.any()
        assert buffer.fd is not None
        assert not os.get_inheritable(buffer.fd)
        mapping = peer.open(buffer.fd, SIZE)
        source = torch.arange(1, 101, dtype=torch.uint8)
        peer.copy([RowsCopy(mapping.ptr + SIZE - 100, source.data_ptr(), 100, 1, 0, 0)], stream=0)
        assert buffer.tensor[-100:].tolist() == list(range(1, 101))
        mapping.close()
        mapping.close()


def test_the_memory_outlives_its_owner_as_long_as_a_peer_maps_it() -> None:
    """A peer that copies while the owner goes writes to nobody's memory, and does not fault."""
    driver = StandInDriver()
    buffer = stand_in_memory(driver).allocate(SIZE)
    buffer.tensor.fill_(7)
    assert buffer.fd is not None
    mapping = stand_in_memory().open(buffer.fd, SIZE)
    buffer.close()
    gc.collect()
    assert driver.leftovers == 0
    assert bytes_at(mapping.ptr, SIZE) == b"\7" * SIZE
    mapping.close()


def test_a_tensor_keeps_the_mapping() -> None:
    driver = StandInDriver()
    with stand_in_memory(driver).allocate(SIZE) as buffer:
        tensor = buffer.tensor[:10]
    gc.collect()
    tensor.fill_(1)
    assert len(driver.mapped) == 1
    del tensor
    gc.collect()
    assert driver.leftovers == 0
    assert "cuCtxSynchronize" in driver.calls, "what is queued may use it"


ALLOCATION = (
    "cuCtxSetCurrent", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap",
    "cuMemSetAccess",
)  # fmt: skip
OPENING = (
    "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuCtxSetCurrent",
)  # fmt: skip


@pytest.mark.parametrize("call", ALLOCATION)
def test_an_allocation_that_fails_leaves_nothing(call: str) -> None:
    driver = StandInDriver()
    memory, before = stand_in_memory(driver), len(os.listdir("/proc/self/fd"))
    driver.failing[call] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DeviceError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.allocate(SIZE)
    assert driver.leftovers == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", OPENING)
def test_an_opening_that_fails_leaves_nothing(call: str) -> None:
    driver = StandInDriver()
    memory = stand_in_memory(driver)
    driver.failing[call] = "CUDA_ERROR_NOT_SUPPORTED"
    with stand_in_memory().allocate(SIZE) as buffer:
        assert buffer.fd is not None
        with pytest.raises(DeviceError, match=call):
            memory.open(buffer.fd, SIZE)
    assert driver.leftovers == 0


@pytest.mark.parametrize("nbytes", [4 * GRANULARITY, 1 << 46, 1 << 60, 0, -1])
def test_memory_is_not_opened_with_another_size(nbytes: int) -> None:
    driver = StandInDriver()
    with stand_in_memory().allocate(SIZE) as buffer:
        assert buffer.fd is not None
        with pytest.raises(DeviceError):
            stand_in_memory(driver).open(buffer.fd, nbytes)
    assert driver.leftovers == 0


def test_a_descriptor_of_something_else_is_refused() -> None:
    with open("/dev/null", "rb") as file, pytest.raises(DeviceError, match="cuMemImportFromShareableHandle"):
        stand_in_memory().open(file.fileno(), SIZE)


def test_memory_of_a_gpu_without_peer_access_is_refused() -> None:
    far, here = StandInDriver([FAR]), StandInDriver([HERE])
    with stand_in_memory(far).allocate(SIZE) as buffer:
        assert buffer.fd is not None
        with pytest.raises(DeviceError, match="cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE"):
            stand_in_memory(here).open(buffer.fd, SIZE)
    assert here.leftovers == 0


def test_which_gpus_are_reached() -> None:
    memory = stand_in_memory(StandInDriver([HERE, NEAR, FAR]))
    assert memory.uuid == HERE
    assert [memory.reaches(uuid) for uuid in (HERE, NEAR, FAR)] == [True, True, False]
    assert stand_in_memory(StandInDriver([HERE])).reaches(FAR), (
        "hidden from this process: only opening can tell"
    )


def test_every_thread_gets_the_context() -> None:
    memory, failed = stand_in_memory(), []

    def use() -> None:
        try:
            memory.copy([], 0)
            source = torch.ones(8, dtype=torch.uint8)
            memory.copy([RowsCopy(source.data_ptr(), source.data_ptr() + 4, 4, 1, 0, 0)], 0)
        except DeviceError as error:
            failed.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert not failed


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory"),
        ("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "as a descriptor"),
    ],
)
def test_a_gpu_that_cannot_share_says_what_it_lacks(attribute: str, says: str) -> None:
    with pytest.raises(DeviceError, match=f"cuda:0 has no {says}|exports no memory {says}"):
        stand_in_memory(StandInDriver(lacking=[attribute]))


@pytest.mark.parametrize("capable", [True, False])
def test_a_network_card_may_read_the_pool_where_that_works(
    capable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [] if capable else ["CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"]
    driver, asked = StandInDriver(lacking=lacking), []
    create = StandInDriver.cuMemCreate

    def recorded_create(self: StandInDriver, size: int, prop: object, flags: int) -> int:
        asked.append(getattr(prop.allocFlags, "gpuDirectRDMACapable", 0))  # type: ignore[attr-defined]
        return create(self, size, prop, flags)

    monkeypatch.setattr(StandInDriver, "cuMemCreate", recorded_create)
    stand_in_memory(driver).allocate(SIZE).close()
    assert asked == [int(capable)]


# -- pools -------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda.bindings is installed here")
def test_without_the_driver_pools_are_torchs_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    device_memory.cache_clear()
    with caplog.at_level(logging.INFO):
        assert allocate_exported(GPU, SIZE) is None
        assert allocate_exported(GPU, SIZE) is None
    assert [record.message for record in caplog.records] == [
        "memory of cuda:0 cannot be shared with other processes: No module named 'cuda'"
    ]
    device_memory.cache_clear()


def test_memory_that_torch_does_not_take_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    driver = StandInDriver()
    memory, before = DeviceMemory(driver, GPU), len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match="torch makes no tensor of it"):
        memory.allocate(SIZE)
    gc.collect()
    assert driver.leftovers == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_cannot_be_had_to_be_shared_is_torchs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StandInDriver()
    memory = stand_in_memory(driver)
    driver.failing["cuMemCreate"] = "CUDA_ERROR_OUT_OF_MEMORY"
    monkeypatch.setattr("kvcache.device_memory.device_memory", lambda _: memory)
    assert allocate_exported(GPU, SIZE) is None
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_torch_gives_back_what_it_keeps_before_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandInDriver()
    memory = stand_in_memory(driver)
    monkeypatch.setattr("kvcache.device_memory.device_memory", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: driver.calls.append("empty_cache"))
    buffer = allocate_exported(GPU, SIZE)
    assert buffer is not None
    buffer.close()
    assert driver.calls.index("empty_cache") < driver.calls.index("cuMemCreate")


@pytest.mark.parametrize("shared", [True, False])
def test_only_a_pool_that_is_to_be_shared_is_exported(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def exported(device: torch.device, nbytes: int) -> None:
        made.append(nbytes)

    monkeypatch.setattr("kvcache.memory.allocate_exported", exported)
    with build_memory(CacheConfig(64, 32, 2, device="meta", shared=shared), [SPEC]) as memory:
        assert memory.kv_caches[memory.specs[0].name].fd is None
        assert made == ([memory.kv_caches[memory.specs[0].name].bytes.numel()] if shared else [])


def test_a_pool_lies_in_the_buffer_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandInDriver()
    memory = stand_in_memory(driver)
    monkeypatch.setattr(
        "kvcache.memory.allocate_shared", memory.allocate
    )  # tensors of the stand-in are the CPU's
    with build_memory(CacheConfig(64, 32, 2, shared=True), [SPEC]) as built:
        pool = built.kv_caches[built.specs[0].name]
        assert pool.fd is not None
        mapping = stand_in_memory().open(pool.fd, pool.bytes.numel())
        pool.bytes[2].fill_(9)
        page = bytes_at(mapping.ptr + 2 * pool.page_bytes, pool.page_bytes)
        assert page == b"\x09" * pool.page_bytes


# -- the stand-in ------------------------------------------------------------------------------------


def test_the_recorded_version_is_the_one_that_gpu_nodes_install() -> None:
    assert f"cuda-bindings=={recorded_version()}\n" in LOCK.read_text()


def test_the_record_is_what_the_package_says() -> None:
    """Compared where cuda.bindings is installed."""
    if importlib.util.find_spec("cuda") is None:
        assert recorded()["functions"]["cuMemMap"]
        return
    from cuda.bindings import driver

    assert read(driver) == recorded()


@pytest.mark.parametrize("name", list(recorded()["functions"]))
def test_the_stand_in_takes_what_the_driver_takes(name: str) -> None:
    parameters = list(inspect.signature(vars(StandInDriver)[name]).parameters)
    assert parameters == ["self", *recorded()["functions"][name]]
