"""A hand-off between two workers whose pools are on GPUs of one host, over a stand-in for the driver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from decode_node.worker import DecodeWorker
from kvcache.device_memory import ExportedBuffer
from kvcache.page_parts import ONE_PART, PageParts
from kvtransfer.region import GroupRegion
from prefill_node.worker import PrefillWorker
from tests.kvtransfer.stand_in_copies import StandInCopies
from tests.support.cuda_stand_in import FAR, HERE, StandInDriver, stand_in_memory
from tests.support.granted_writer import GrantedWriter
from tests.support.hand_off import GROUPS, Pair, held, pair, prompt_of, right
from wire.messages.rooms import Timeline
from wire.messages.transfer import KVTarget
from worker.loop import Worker
from worker.options import WorkerOptions

PREFILL, DECODE = StandInDriver([HERE]), StandInDriver([HERE])
"""Of two processes that see one GPU each."""


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pools of workers are on a GPU and exported. Each worker has a driver of its own."""
    drivers = [DECODE]  # of the worker that is being opened, at the end

    def opening(worker: type[Worker], driver: StandInDriver) -> Callable[[WorkerOptions], Worker]:
        def open_worker(options: WorkerOptions) -> Worker:
            drivers.append(driver)
            return worker(options)  # type: ignore[call-arg]  # each role's class knows its role

        return open_worker

    def allocate(nbytes: int) -> ExportedBuffer:
        return stand_in_memory(drivers[-1]).allocate(nbytes)

    def region_of(pool: torch.Tensor, fd: int | None = None, parts: PageParts = ONE_PART) -> GroupRegion:
        return GroupRegion(pool, fd, StandInCopies(late=True), stand_in_memory(drivers[-1]), parts)

    monkeypatch.setattr("tests.support.hand_off.PrefillWorker", opening(PrefillWorker, PREFILL))
    monkeypatch.setattr("tests.support.hand_off.DecodeWorker", opening(DecodeWorker, DECODE))

    monkeypatch.setattr("kvcache.memory.allocate_shared", allocate)
    monkeypatch.setattr("kvtransfer.region.region_of", region_of)
    yield
    monkeypatch.setattr(DECODE, "_devices", [HERE])


def backend_of(both: Pair) -> str:
    """Over which the next room's pages come, as decode tells the router."""
    while True:
        letter = both.hold_back(Timeline)
        both.arrive(letter)
        if letter.sender == both.decode.record().mailbox:
            return str(letter.message.kv_backend)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(("full", *groups)))
def test_rooms_are_handed_off_from_gpu_to_gpu(groups: tuple[str, ...]) -> None:
    copies = PREFILL.calls.count("cuMemcpyAsync")
    with pair(groups) as both:
        assert both.decode.record().transfer_backends == ("cuda_ipc", "tcp")
        for room in (1, 2):
            both.ask(room, prompt_of(room, 50), 6)
            assert backend_of(both) == "cuda_ipc"
            both.run_dry()
            assert both.outputs[room].tokens == right(both, room, groups)
        assert PREFILL.calls.count("cuMemcpyAsync") > copies
        assert PREFILL.mapped
        both.settle()
    del both  # and with it the workers' own pools
    gc.collect()
    assert not PREFILL.leftovers, "prefill unmaps what it has mapped"


def test_what_was_reserved_is_quarantined_until_the_fence() -> None:
    with pair() as both:
        both.ask(1, prompt_of(1, 50), 6)
        target = both.hold_back(KVTarget).message
        assert isinstance(target, KVTarget)
        writer = GrantedWriter(target, backend="cuda_ipc")
        both.abort(1)
        both.run_dry_without(both.prefill)
        assert both.decode.check_memory().quarantined_pages == len(target.groups["full"].page_ids)
        both.ask(2, prompt_of(1, 50), 6)
        again = both.hold_back(KVTarget)
        assert not set(target.groups["full"].page_ids) & set(again.message.groups["full"].page_ids)
        both.arrive(again)
        writer.end()
        both.turn(both.decode)
        assert both.decode.check_memory().quarantined_pages == 0
        both.run_dry()
        assert both.outputs[2].tokens == right(both, 2)
        both.settle()


def test_without_peer_access_the_room_comes_again_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill does not see decode's GPU, so it learns that when it maps the pool."""
    monkeypatch.setattr(DECODE, "_devices", [FAR])
    with pair() as both:
        both.ask(1, prompt_of(1, 50), 6)
        both.run_dry()
        rejected = both.outputs[1].rejected
        assert rejected is not None
        assert "cannot map the decode worker's pool: cuMemSetAccess" in rejected.message
        both.restart(1, split=True)
        assert backend_of(both) == "tcp"
        both.run_dry()
        assert both.outputs[1].tokens == right(both, 1)
        both.settle()
        assert held(both.decode) == {}
