"""Pools of several ranks, each with a part of every page in memory of its own: what one side wrote, the other
has, whatever the parts of both. tcp and Mooncake are the real ones, cuda_ipc's driver is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import TransferError
from common.host import host_identity
from kvcache.divided import pool_of_parts
from kvcache.indexed_layout import IndexedKVGroupSpec
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, rank_spec
from kvcache.open_pool import open_pool
from kvcache.page_parts import PageParts
from kvcache.page_runs import as_pages
from kvcache.pool import KVCache
from kvcache.quant import KVFormat
from kvtransfer.cuda_ipc import CudaIpcSender
from kvtransfer.frames import PoolInfo
from kvtransfer.mooncake import MooncakeSender
from kvtransfer.pages import PageWrite
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import GroupRegion, SpreadRegion, pool_region, spread_region
from kvtransfer.select import open_receiver, open_sender
from tests.kvtransfer.peers import SHORT
from tests.kvtransfer.stand_in_copies import StandInCopies
from tests.support.cuda_stand_in import FAR, StandInDriver, stand_in_memory
from tests.support.rank_rig import memories, pool_in, put_pages, shared_pool
from wire.messages.transfer import KVTarget

PAGES, PAGE = 12, 4
SRC, DST = as_pages([3, 4, 5, 9, 1]), as_pages([7, 8, 2, 11, 10])
HEADS = KVGroupSpec((0, 1, 4), 4, 16, torch.bfloat16)
FEW_HEADS = replace(HEADS, kv_heads=2)
FP8 = replace(HEADS, head_dim=32, stored=KVFormat.FP8_E4M3)
LATENTS = LatentGroupSpec((0, 1), kv_lora_rank=16, rope_dim=8, dtype=torch.bfloat16)
INDEXED = IndexedKVGroupSpec((0, 1, 4), 4, 16, torch.bfloat16, index_dim=24)
LARGE = KVGroupSpec((0, 1), 8, 2048, torch.float32)  # the parts of four ranks are written directly, too
GPUS = [f"{number:032x}" for number in range(4)]


def fill(pool: KVCache) -> None:
    """Random pages, the same ones for every way in which they lie."""
    pages = torch.from_numpy(
        np.random.default_rng(5).integers(0, 256, (PAGES + 1, pool.page_bytes), np.uint8)
    )
    put_pages(pool, torch.arange(PAGES + 1), pages)


def check_landed(spec: GroupSpec, target: KVCache, parts: int) -> None:
    """The target's parts are those of a pool that was given the pages at once."""
    whole, expected = shared_pool(spec, PAGES, PAGE), on_host(spec, parts)
    fill(whole)
    put_pages(expected, torch.from_numpy(DST), whole.bytes[SRC])
    for found, wanted in zip(memories(target), memories(expected), strict=True):
        assert torch.equal(found, wanted)
    whole.close()
    expected.close()


def on_host(spec: GroupSpec, parts: int) -> KVCache:
    return pool_in(parts, spec, PAGES, PAGE)


def on_gpus(spec: GroupSpec, parts: int, driver: StandInDriver) -> tuple[KVCache, GroupRegion]:
    """A pool whose parts lie on as many GPUs, and its region."""
    gpus = [stand_in_memory(driver, number) for number in range(parts)]
    own = rank_spec(spec, parts)
    nbytes = KVCache.bytes_needed(own, PAGES, PAGE)
    pools = [open_pool(own, PAGES, PAGE, buffer=gpu.allocate(nbytes)) for gpu in gpus]
    regions = tuple(
        GroupRegion(one.bytes, one.fd, StandInCopies(late=True), gpu, one.page_parts)
        for one, gpu in zip(pools, gpus, strict=True)
    )
    if parts == 1:
        return pools[0], regions[0]
    whole = pool_of_parts(spec, pools)
    return whole, spread_region(whole, regions)


@contextmanager
def receiving(backend: str, spec: GroupSpec, there: GroupRegion) -> Iterator[PoolReceiver]:
    with closing(open_receiver({spec.name: there}, backend, bounds=SHORT)) as receiver:
        receiver.open(1, 0, {spec.name: DST})
        yield receiver


def send(backend: str, spec: GroupSpec, here: GroupRegion, receiver: PoolReceiver) -> None:
    with closing(open_sender({spec.name: here}, host_identity(), backend, bounds=SHORT)) as sender:
        target = KVTarget(1, 0, "d", host_identity(), "layout", receiver.endpoints, {}, 0)
        size = sender.write(sender.choose(target), PageWrite(1, 0, spec.name, SRC, DST))
    assert size == len(SRC) * spec.page_bytes(PAGE)
    assert receiver.landed(1, 0).missing == {}


RANKS = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)]


@pytest.mark.parametrize(
    "spec", [HEADS, FEW_HEADS, FP8, LATENTS, INDEXED], ids=["heads", "few", "fp8", "latents", "indexed"]
)
@pytest.mark.parametrize(("here", "there"), RANKS)
def test_between_gpus(spec: GroupSpec, here: int, there: int) -> None:
    ours, theirs = StandInDriver(GPUS), StandInDriver(GPUS)
    source, from_region = on_gpus(spec, here, ours)
    target, to_region = on_gpus(spec, there, theirs)
    fill(source)
    with receiving("cuda_ipc", spec, to_region) as receiver:
        send("cuda_ipc", spec, from_region, receiver)
        check_landed(spec, target, there)
    assert len(ours.mapped) == here, "what was mapped of the other side is not mapped any more"
    assert ("cuMemcpy2DAsync" in ours.calls) == (from_region.page_parts.ranges != to_region.page_parts.ranges)


@pytest.mark.parametrize(
    ("backend", "spec", "here", "there"),
    [
        pytest.param("mooncake", LARGE, 2, 2, id="mooncake-direct"),
        pytest.param("mooncake", LARGE, 1, 2, id="mooncake-large-1to2"),
        pytest.param("mooncake", LARGE, 4, 2, id="mooncake-large-4to2"),
        pytest.param("mooncake", HEADS, 2, 2, id="mooncake-small"),
        pytest.param("mooncake", LATENTS, 2, 1, id="mooncake-latents"),
        pytest.param("tcp", LARGE, 2, 4, id="tcp-large"),
        pytest.param("tcp", HEADS, 4, 1, id="tcp-small"),
        pytest.param("tcp", LATENTS, 1, 2, id="tcp-latents"),
        pytest.param("tcp", INDEXED, 4, 2, id="tcp-indexed"),
    ],
)
def test_over_the_network(
    backend: str, spec: GroupSpec, here: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[Any] = []
    move = MooncakeSender._move_direct
    monkeypatch.setattr(MooncakeSender, "_move_direct", lambda *given: (direct.append(given), move(*given)))
    source, target = on_host(spec, here), on_host(spec, there)
    fill(source)
    with receiving(backend, spec, pool_region(target)) as receiver:
        send(backend, spec, pool_region(source), receiver)
        check_landed(spec, target, there)
    assert bool(direct) == (backend == "mooncake" and spec is LARGE and here == there)
    source.close()
    target.close()


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3)])
def test_whole_pages_in_each_memory_of_a_host(here: int, there: int) -> None:
    source, target = on_host(LATENTS, here), on_host(LATENTS, there)
    fill(source)
    with receiving("shm", LATENTS, pool_region(target)) as receiver:
        send("shm", LATENTS, pool_region(source), receiver)
        check_landed(LATENTS, target, there)
    source.close()
    target.close()


def test_auto_takes_shared_memory_for_latents_of_ranks_and_tcp_for_parts_of_heads() -> None:
    latents, heads = on_host(LATENTS, 2), on_host(HEADS, 2)
    for pool, backends in ((latents, ("shm", "tcp")), (heads, ("tcp",))):
        with closing(open_receiver({"group": pool_region(pool)}, bounds=SHORT)) as receiver:
            assert receiver.backends == backends
        pool.close()


def test_a_gpu_of_several_that_is_not_reached_is_an_obstacle() -> None:
    uuids = [GPUS[0], FAR]
    _, there = on_gpus(HEADS, 2, StandInDriver(uuids))
    _, here = on_gpus(HEADS, 1, StandInDriver(uuids))
    with receiving("auto", HEADS, there) as receiver, closing(CudaIpcSender({"full": here}, SHORT)) as sender:
        assert sender.obstacle(receiver.endpoints[0]) == "this worker's GPU has no peer access to it"


@pytest.mark.parametrize("part", [0, 1])
def test_a_copy_that_fails_on_one_gpu_is_waited_for_on_all(part: int) -> None:
    ours = StandInDriver(GPUS)
    _, here = on_gpus(HEADS, 2, ours)
    _, there = on_gpus(HEADS, 2, StandInDriver(GPUS))

    class Failing(StandInCopies):
        def put(self, copy: Any) -> Any:
            queued = super().put(copy)
            if not failed:
                failed.append(True)
                raise RuntimeError("CUDA error: unknown error")
            return queued

    failed: list[bool] = []
    broken = [
        replace(one, copies=Failing(late=True)) if i == part else one for i, one in enumerate(here.parts)
    ]
    assert isinstance(here, SpreadRegion)
    regions = {"full": replace(here, of_ranks=tuple(broken))}
    with receiving("cuda_ipc", HEADS, there) as receiver, closing(CudaIpcSender(regions, SHORT)) as sender:
        with pytest.raises(TransferError, match="copying on the GPU failed"):
            sender.write(receiver.endpoints[0], PageWrite(1, 0, "full", SRC, DST))
        for one in regions["full"].parts:
            assert isinstance(one.copies, StandInCopies)
            assert not one.copies.queued, "nothing is under way any more"
        assert receiver.close_room(1, 0).wait(5)


@pytest.mark.parametrize(
    ("ptrs", "ranges"),
    [((1,), 2), ((1, 2), 0), ((1, 2, 3), 3)],
    ids=["one is missing", "none", "not of blocks"],
)
def test_a_peer_whose_parts_cannot_be_is_not_written_to(ptrs: tuple[int, ...], ranges: int) -> None:
    info = PoolInfo(LARGE.page_bytes(PAGE), PAGES + 1, ptrs, ranges)
    with pytest.raises(TransferError, match=r"not of this model|where all parts"):
        info.takes_directly(PageParts(LARGE.blocks))
