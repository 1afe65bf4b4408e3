"""cuda_ipc over a stand-in for the driver: who takes it, when a write is over, and when it fails."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ConfigError, TransferError
from common.host import host_identity
from kvcache.device_memory import DeviceMemory
from kvcache.page_runs import as_pages
from kvtransfer.channel import Uncertain
from kvtransfer.copies import CudaCopies
from kvtransfer.cuda_ipc import CudaIpcSender
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion
from kvtransfer.select import open_receiver, open_sender
from tests.kvtransfer.peers import SHORT, pool
from tests.kvtransfer.stand_in_copies import StandInCopies
from tests.support.cuda_stand_in import FAR, HERE, NEAR, StandInDriver, stand_in_memory
from wire.messages.transfer import KVTarget

PAGES, SIZE = 16, 4096
SRC, DST = as_pages([3, 4, 5, 9, 1]), as_pages([7, 8, 2, 11, 12])
WRITE = PageWrite(1, 0, "full", SRC, DST)


@contextmanager
def decode(
    memory: DeviceMemory | None = None, backend: str = "auto"
) -> Iterator[tuple[PoolReceiver, torch.Tensor]]:
    """A decode worker's pool on a GPU, with room 1 open, and its bytes."""
    with (memory or stand_in_memory()).allocate(PAGES * SIZE) as buffer:
        tensor = buffer.tensor.view(PAGES, SIZE)
        regions = {
            "full": GroupRegion(tensor, buffer.fd, StandInCopies(late=True), memory or stand_in_memory())
        }
        with closing(open_receiver(regions, backend, bounds=SHORT)) as receiver:
            receiver.open(1, 0, {"full": DST})
            yield receiver, tensor


def target(receiver: PoolReceiver, host: str | None = None) -> KVTarget:
    return KVTarget(1, 0, "decode-1", host or host_identity(), "layout", receiver.endpoints, {}, 0)


def source(
    copies: StandInCopies | None = None, driver: StandInDriver | None = None
) -> dict[str, GroupRegion]:
    """A prefill worker's pool on a GPU."""
    region = pool(PAGES, SIZE, 1, memory=stand_in_memory(driver))
    return {"full": replace(region, copies=copies or StandInCopies(late=True))}


class FailingCopies(StandInCopies):
    """A GPU whose next `failures` copies are over, and not done."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__(late=True)
        self.failures = failures
        self.error = error

    def put(self, copy: Any) -> Any:
        self.failures -= 1
        if self.failures >= 0:
            return SimpleNamespace(wait=self._fail)
        return super().put(copy)

    def _fail(self) -> None:
        raise self.error


# -- who takes it ------------------------------------------------------------------------------------


def test_auto_takes_it_between_two_gpus_of_one_host_and_tcp_elsewhere() -> None:
    with decode() as (receiver, _), closing(open_sender(source(), host_identity(), bounds=SHORT)) as sender:
        assert receiver.backends == ("cuda_ipc", "tcp")
        assert sender.backends == ("cuda_ipc", "shm", "tcp")
        assert sender.choose(target(receiver)).backend == "cuda_ipc"
        assert sender.choose(target(receiver, "another")).backend == "tcp"


def test_what_is_on_the_host_is_not_sent_from_there() -> None:
    arenas = {"full": pool(PAGES, SIZE, 2)}
    with (
        decode() as (receiver, _),
        closing(open_sender(source(), host_identity(), bounds=SHORT, arenas=arenas)) as sender,
    ):
        by_gpu, by_tcp = sender.choose(target(receiver)), sender.choose(target(receiver, "another"))
        assert not sender.reads_host(by_gpu)
        assert sender.reads_host(by_tcp)
        with pytest.raises(TransferError, match="no such pages"):
            sender.write(by_gpu, replace(WRITE, on_host=True))


def test_a_worker_on_the_host_does_not_take_it_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with decode() as (receiver, _):
        caplog.clear()
        with closing(open_sender({"full": pool(PAGES, SIZE)}, host_identity(), bounds=SHORT)) as sender:
            assert sender.backends == ("shm", "tcp")
            assert sender.choose(target(receiver)).backend == "tcp"
        assert not caplog.records


@pytest.mark.parametrize(
    ("region", "says"),
    [
        (pool(PAGES, SIZE, staged=True), "the GPU cannot share its memory"),
        (pool(PAGES, SIZE, memory=stand_in_memory()), "group full is in memory of its own"),
        (pool(PAGES, SIZE), "not on a GPU"),
    ],
)
def test_a_pool_that_cannot_be_shared_is_not_offered_and_the_log_says_why(
    region: GroupRegion, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_receiver({"full": region}, bounds=SHORT)) as receiver:
        assert receiver.backends == ("tcp",)
    if region.copies is not None:
        assert says in caplog.text
    with pytest.raises(ConfigError, match=f"cuda_ipc does not work here: .*{says}") as caught:
        open_receiver({"full": region}, "cuda_ipc")
    assert caught.value.key == "kv_transfer_backend"


def test_prefill_says_why_it_does_not_take_it(caplog: pytest.LogCaptureFixture) -> None:
    regions = {"full": pool(PAGES, SIZE, staged=True)}
    with closing(open_sender(regions, host_identity(), bounds=SHORT)) as sender:
        assert "cuda_ipc" not in sender.backends
    assert "no cuda_ipc between the workers of this host: the GPU cannot share its memory" in caplog.text
    with pytest.raises(ConfigError, match="cannot share"):
        open_sender(regions, host_identity(), "cuda_ipc")


def test_a_pool_on_a_gpu_is_not_offered_as_shared_memory() -> None:
    """It has a descriptor, which is no memory file."""
    with decode() as (receiver, _):
        regions = receiver.regions
        with pytest.raises(ConfigError, match="not in one"):
            open_receiver(regions, "shm")


def test_a_gpu_without_peer_access_is_not_written_to(caplog: pytest.LogCaptureFixture) -> None:
    far = stand_in_memory(StandInDriver([FAR]))
    regions = source(driver=StandInDriver([HERE, NEAR, FAR]))
    with decode(far) as (receiver, _), closing(open_sender(regions, host_identity(), bounds=SHORT)) as sender:
        for _ in range(3):
            assert sender.choose(target(receiver)).backend == "tcp"
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"cuda_ipc is not used towards GPU {FAR}: this worker's GPU has no peer access to it"
    ]


def test_a_hidden_gpu_without_peer_access_costs_one_write(caplog: pytest.LogCaptureFixture) -> None:
    """Only opening its memory shows it; the room's next epoch goes another way."""
    far = stand_in_memory(StandInDriver([FAR]))
    regions = source(driver=StandInDriver([HERE]))
    with (
        decode(far) as (receiver, there),
        closing(open_sender(regions, host_identity(), bounds=SHORT)) as sender,
    ):
        first = sender.choose(target(receiver))
        assert first.backend == "cuda_ipc"
        with pytest.raises(TransferError, match="cannot map the decode worker's pool: cuMemSetAccess"):
            sender.write(first, WRITE)
        second = sender.choose(target(receiver))
        assert second.backend == "tcp"
        sender.write(second, WRITE)
        assert torch.equal(there[DST], regions["full"].tensor[SRC])
    assert f"cuda_ipc is not used towards GPU {FAR} from now on" in caplog.text


def test_a_driver_that_does_not_answer_is_an_obstacle() -> None:
    driver = StandInDriver()
    with (
        decode() as (receiver, _),
        closing(open_sender(source(driver=driver), host_identity(), bounds=SHORT)) as sender,
    ):
        driver.failing["cuDeviceGetCount"] = "CUDA_ERROR_NOT_SUPPORTED"
        assert sender.choose(target(receiver)).backend == "tcp"


# -- a write -----------------------------------------------------------------------------------------


def test_pages_land_and_a_run_of_neighbours_is_one_copy() -> None:
    driver = StandInDriver()
    regions = source(driver=driver)
    with decode() as (receiver, there), closing(CudaIpcSender(regions, SHORT)) as sender:
        assert sender.write(receiver.endpoints[0], WRITE) == len(SRC) * SIZE
        expected = torch.zeros_like(there)
        expected[DST] = regions["full"].tensor[SRC]
        assert torch.equal(there, expected)
        assert driver.calls.count("cuMemcpyAsync") == 4
        assert receiver.landed(1, 0).missing == {}
        assert receiver.landed(1, 0).backend == "cuda_ipc"
    assert driver.leftovers == 0


def test_the_receiver_is_told_when_the_copies_are_done_and_not_before() -> None:
    class Watched(StandInCopies):
        def run(self, last: Any) -> None:
            assert receiver.landed(1, 0).missing == {"full": len(DST)}
            assert receiver.grants(1, 0)
            super().run(last)

    with decode() as (receiver, _), closing(CudaIpcSender(source(Watched(late=True)), SHORT)) as sender:
        sender.write(receiver.endpoints[0], WRITE)
        assert receiver.landed(1, 0).missing == {}


def test_an_event_is_recorded_behind_the_copies_on_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    stream = SimpleNamespace(cuda_stream=77)

    class Event:
        def record(self, on: Any) -> None:
            seen.append(("event", on.cuda_stream))

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda on: closing(SimpleNamespace(close=lambda: None)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    copies = CudaCopies(torch.device("cuda", 0))
    copies.put(lambda: seen.append(("copy", copies.stream))).wait()
    assert seen == [("copy", 77), ("event", 77)]


def test_a_receiver_that_leaves_in_the_middle_of_a_copy_costs_the_write_only() -> None:
    """Its memory is there as long as it is mapped."""

    class Leaving(StandInCopies):
        def run(self, last: Any) -> None:
            if not done:
                done.append(True)
                receiver.close()
                buffer.close()
                gc.collect()
            super().run(last)

    done: list[bool] = []
    memory = stand_in_memory()
    buffer = memory.allocate(PAGES * SIZE)
    tensor = buffer.tensor.view(PAGES, SIZE)
    regions = {"full": GroupRegion(tensor, buffer.fd, StandInCopies(late=True), memory)}
    receiver = open_receiver(regions, "cuda_ipc", bounds=SHORT)
    receiver.open(1, 0, {"full": DST})
    del tensor, regions
    with closing(CudaIpcSender(source(Leaving(late=True)), SHORT)) as sender:
        with pytest.raises(TransferError):
            sender.write(receiver.endpoints[0], WRITE)
        with decode() as (other, there):
            sender.write(other.endpoints[0], WRITE)
            assert there[DST].any()


def test_the_pools_of_a_drained_peer_are_unmapped() -> None:
    driver = StandInDriver()
    with decode() as (receiver, _), closing(CudaIpcSender(source(driver=driver), SHORT)) as sender:
        sender.write(receiver.endpoints[0], WRITE)
        assert len(driver.mapped) == 1
        sender.drain(receiver.endpoints[0])
        assert driver.leftovers == 0


def test_a_receiver_that_announces_more_than_it_has_is_not_written_to() -> None:
    memory = stand_in_memory()
    with memory.allocate(SIZE) as buffer:
        tensor = torch.zeros((PAGES * 16, SIZE), dtype=torch.uint8)
        regions = {"full": GroupRegion(tensor, buffer.fd, StandInCopies(late=True), memory)}
        with closing(open_receiver(regions, "cuda_ipc", bounds=SHORT)) as receiver:
            receiver.open(1, 0, {"full": DST})
            sender = CudaIpcSender(source(), SHORT)
            with closing(sender), pytest.raises(TransferError, match="cannot map"):
                sender.write(receiver.endpoints[0], WRITE)


@pytest.mark.parametrize("page", [PAGES, 1 << 40, -1])
def test_a_granted_page_outside_the_pool_is_not_written(page: int) -> None:
    with decode() as (receiver, there):
        receiver._rooms.open(2, 0, {"full": np.array([page])})
        sender = CudaIpcSender(source(), SHORT)
        with closing(sender), pytest.raises(TransferError, match="does not have"):
            sender.write(receiver.endpoints[0], PageWrite(2, 0, "full", SRC[:1], np.array([page])))
        assert not there.any()


# -- a write that fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TransferError("late"), RuntimeError("CUDA error: unknown error")])
def test_a_copy_that_fails_and_is_over_gives_its_grant_back(error: Exception) -> None:
    regions = source(FailingCopies(1, error))
    with decode() as (receiver, _), closing(CudaIpcSender(regions, SHORT)) as sender:
        with pytest.raises(TransferError, match="copying on the GPU failed") as caught:
            sender.write(receiver.endpoints[0], WRITE)
        assert not isinstance(caught.value, Uncertain)
        assert receiver.close_room(1, 0).wait(5)


def test_a_call_that_the_driver_refuses_gives_its_grant_back() -> None:
    driver = StandInDriver()
    with decode() as (receiver, _), closing(CudaIpcSender(source(driver=driver), SHORT)) as sender:
        driver.failing["cuMemcpyAsync"] = "CUDA_ERROR_INVALID_VALUE"
        with pytest.raises(TransferError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
            sender.write(receiver.endpoints[0], WRITE)
        assert receiver.close_room(1, 0).wait(5)


@pytest.mark.parametrize("error", [TransferError("late"), RuntimeError("CUDA error: illegal address")])
def test_a_copy_whose_end_is_not_seen_keeps_grant_and_mapping(error: Exception) -> None:
    """It may land at any time: the pages stay in quarantine until this process ends."""
    driver = StandInDriver()
    regions = source(FailingCopies(2, error), driver)
    with decode() as (receiver, _), closing(CudaIpcSender(regions, SHORT)) as sender:
        with pytest.raises(Uncertain):
            sender.write(receiver.endpoints[0], WRITE)
        assert not receiver.close_room(1, 0).wait(1)
        sender.drain(receiver.endpoints[0])
        assert len(driver.mapped) == 1
