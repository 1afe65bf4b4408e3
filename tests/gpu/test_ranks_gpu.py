"""Models in several ranks on GPUs, in real processes, against transformers.generate."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from kvcache.layout import KVGroupSpec
from kvtransfer.cuda_ipc import CudaIpcSender
from kvtransfer.pages import PageWrite
from kvtransfer.region import pool_region
from kvtransfer.select import open_receiver
from kvtransfer.transport import Bounds
from tests.engine.conftest import PROMPTS, Drawn
from tests.gpu.test_worker_gpu import OUTPUTS, serve
from tests.support.driver import Driver
from tests.support.rank_rig import memories, open_ranks, pool_in, put_pages, spread_pool

PAGE, PAGES = 16, 40


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen2_moe"])
def test_two_ranks_on_one_gpu(family: str, drawn: Drawn, device: str) -> None:
    """They exchange values through the host: NCCL wants a GPU for each."""
    path, expected = drawn(family)
    with open_ranks(path, 2, PAGE, PAGES, divided=True, device=device) as (runner, _):
        driver = Driver(runner, PAGES, PAGE)
        lanes = [driver.add(prompt) for prompt in PROMPTS]
        driver.generate(lanes, 32, chunk=7, stagger=9)
    assert [lane.outputs for lane in lanes] == [answer[:32] for answer in expected]


def test_pages_of_several_memories_go_to_the_host_and_back(device: str) -> None:
    spec = KVGroupSpec((0, 1, 2), 4, 64, torch.bfloat16)
    pool = spread_pool(spec, 2, PAGES, PAGE, device)
    region = pool_region(pool)
    for part in pool.parts:
        part.bytes.random_(0, 256)
    pages, places = np.array([3, 1, 7, 30]), np.array([5, 2, 8, 31])
    read = [bytes(host.view()) for host in region.to_host(pages)]
    for host, data in zip(region.from_host(places), read, strict=True):
        host.view()[:] = data
    torch.cuda.synchronize(device)
    for part in pool.parts:
        assert torch.equal(part.bytes[places], part.bytes[pages])
    pool.close()


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 2)])
def test_pages_go_from_gpu_to_gpu_between_pools_in_parts(here: int, there: int, device: str) -> None:
    """All parts are on one GPU here, each in memory of its own."""
    spec = KVGroupSpec((0, 1, 2), 4, 64, torch.bfloat16)
    source, target, expected = (pool_in(n, spec, PAGES, PAGE, device) for n in (here, there, there))
    written = torch.randint(0, 256, (PAGES + 1, source.page_bytes), dtype=torch.uint8, device=device)
    put_pages(source, torch.arange(PAGES + 1, device=device), written)
    pages, places = np.array([3, 4, 1, 7, 30]), np.array([5, 6, 2, 8, 31])
    put_pages(expected, torch.tensor(places, device=device), written[pages])
    torch.cuda.synchronize(device)
    with (
        closing(open_receiver({"full": pool_region(target)}, "cuda_ipc")) as receiver,
        closing(CudaIpcSender({"full": pool_region(source)}, Bounds())) as sender,
    ):
        receiver.open(1, 0, {"full": places})
        sender.write(receiver.endpoints[0], PageWrite(1, 0, "full", pages, places))
        for found, wanted in zip(memories(target), memories(expected), strict=True):
            assert torch.equal(found, wanted)
    for pool in (source, target, expected):
        pool.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_a_worker_of_two_gpus(family: str, dtype: str, drawn: Drawn) -> None:
    """With recorded steps, one step ahead, from a measured capacity."""
    path, expected = drawn(family)
    found = serve(path, device="cuda:0", dtype=dtype, tp_size=2)
    assert [len(answer) for answer in found] == [OUTPUTS] * 3
    if dtype == "float32":
        assert found == [answer[:OUTPUTS] for answer in expected]
