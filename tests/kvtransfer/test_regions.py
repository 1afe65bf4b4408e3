"""Which of a worker's memory is open to transfers."""

from __future__ import annotations

import torch

from kvcache.config import CacheConfig
from kvcache.layout import KVGroupSpec, LatentGroupSpec, StateGroupSpec, StateTensor
from kvcache.memory import build_memory
from kvcache.page_parts import PageParts
from kvtransfer.region import pool_regions
from kvtransfer.select import open_receiver
from tests.kvtransfer.peers import SHORT

WINDOW = KVGroupSpec((0, 1), kv_heads=2, head_dim=8, dtype=torch.bfloat16, name="window", window=32)
STATE = StateGroupSpec((StateTensor(2, "conv", (3, 4), torch.float32),))
NO_LAYERS = KVGroupSpec((), kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LATENT = LatentGroupSpec((0,), kv_lora_rank=16, rope_dim=4, dtype=torch.bfloat16)
CONFIG = CacheConfig(256, 128, 4, max_chunk_tokens=32, mamba_track_interval=16)


def test_every_group_with_bytes_has_a_region_of_its_own() -> None:
    with build_memory(CONFIG, (LATENT, WINDOW, STATE)) as memory:
        regions = pool_regions(memory)
        assert list(regions) == ["latent", "window", "state"]
        for spec in memory.specs:
            region, pool = regions[spec.name], memory.kv_caches[spec.name]
            assert (region.ptr, region.nbytes, region.page_bytes) == (
                pool.bytes.data_ptr(),
                pool.bytes.numel(),
                pool.page_bytes,
            )
            assert region.num_pages == memory.allocators[spec.name].num_pages + 1
            assert region.page_parts == PageParts(4 if spec is WINDOW else 1), "K and V of both layers"
        assert regions["state"].page_bytes == STATE.page_bytes(16)
        assert regions["latent"].page_bytes == 16 * 20 * 2


def test_a_primary_group_of_no_layers_has_none_and_shared_memory_still_works() -> None:
    shared = CacheConfig(256, 128, 4, max_chunk_tokens=32, mamba_track_interval=16, shared=True)
    with build_memory(shared, (NO_LAYERS, WINDOW, STATE)) as memory:
        regions = pool_regions(memory)
        assert list(regions) == ["window", "state"]
        assert len({region.fd for region in regions.values()} - {None}) == 2
        receiver = open_receiver(regions, "auto", bounds=SHORT)
        assert receiver.backends == ("shm", "tcp")
        receiver.close()
