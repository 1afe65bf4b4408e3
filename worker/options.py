"""WorkerOptions: everything that a prefill or decode worker can be told, checked at the edge.

There is a class per concern; all keys are on one level. Defaults that a room has as well are the room's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from common.errors import ConfigError
from common.options import Options
from kvcache.config import CacheConfig, KVEventsConfig
from kvcache.eviction import eviction_policy
from kvcache.tenancy.config import TenancyConfig
from kvcache.tiers.config import TierConfig
from scheduler.config import SchedulerConfig
from wire.checksums import ChecksumMode
from wire.options import ServedModel, SocketOptions
from worker.tenant_options import TenantSharesOptions

GPU_MEMORY_UTILIZATION = 0.9
"""Of a worker that has a GPU to itself."""


class EngineOptions(Options):
    """How the model is computed."""

    engine: Literal["transformers", "fake"] = Field(
        "transformers", description="fake: no model is computed, for tests and measurements of all else"
    )
    fake_step_s: float = Field(0.0, ge=0, description="fake engine: seconds a forward takes")
    fake_groups: tuple[Literal["window", "state"], ...] = Field(
        (), description="fake engine: kinds of layers beside full attention"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto (the model's), float32, bfloat16 or float16"
    )
    weight_dtype: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="of linear layers: auto (dtype, with coded exponents on CPUs that gain by it; fp8, "
        "MXFP4, NVFP4 and int4 stay as stored), bfloat16, or on a CPU int8 (weights and inputs are rounded)",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto (a GPU where there is one), cpu, cuda or cuda:N",
    )
    tp_size: int = Field(
        1,
        ge=1,
        description="ranks: processes that compute the model together, each a part of every layer (tensor "
        "parallelism); each on a GPU of its own, from device on",
    )
    attention_backend: Literal["auto", "cpu", "torch", "flashinfer"] = Field(
        "auto", description="auto: flashinfer on a GPU, cpu where its kernels are compiled, else torch"
    )
    linear_backend: Literal["auto", "packed", "torch"] = Field(
        "auto", description="products with weights: packed (CPU kernels) where it can, or torch"
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"] = Field(
        "auto",
        description="how KV is stored: auto (in dtype), fp8_e4m3, fp8_e5m2 or fp4_e2m1",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="compute threads, of all ranks together; None: under Ray Serve num_cpus, with `baton "
        "serve` the cores divided by the workers, in a worker by itself half the cores; at least 1",
    )
    overlap_depth: Literal[0, 1] | None = Field(
        None,
        description="1: a step is launched before the last one's result is known; None: 1 on a GPU, else 0",
    )


class KVEventsOptions(Options):
    """`kv_events_config`: whether and how KV placement is published."""

    enable: bool = Field(True, description="false: routers do not know what this worker caches")
    topic: str = Field(KVEventsConfig.topic, description="of the published messages, as in vLLM")
    buffer_batches: int = Field(KVEventsConfig.buffer_batches, ge=1, description="batches kept for replay")
    buffer_bytes: int = Field(
        KVEventsConfig.buffer_bytes, ge=1, description="bytes of them, of public pages and of private ones"
    )


class MemoryOptions(Options):
    """KV memory: its size, its page, what is cached and what is published of it."""

    page_size: int = Field(CacheConfig.page_size, description="tokens of a KV page, a power of two")
    max_total_tokens: int | None = Field(
        None, ge=1, description="KV capacity of a worker in tokens; None: from kv_memory_fraction"
    )
    kv_memory_fraction: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="on the CPU: share of free memory (of a container: within its limit) for KV when "
        "max_total_tokens is not given",
    )
    gpu_memory_utilization: float = Field(
        GPU_MEMORY_UTILIZATION,
        gt=0,
        le=1,
        description="on a GPU: share of its memory for the worker; KV takes what weights and the largest "
        "forward leave of it when max_total_tokens is not given",
    )
    swa_full_tokens_ratio: float | None = Field(
        None,
        gt=0,
        le=1,
        description="capacity for sliding-window layers, as a share of max_total_tokens; None: 0.8, but 0.1 "
        "with compressed attention",
    )
    max_mamba_cache_size: int | None = Field(
        None,
        ge=1,
        description="states of linear attention or Mamba that a worker keeps; None: from the requests",
    )
    mamba_track_interval: int = Field(
        CacheConfig.mamba_track_interval,
        ge=1,
        description="tokens between the states that decode keeps; a multiple of page_size",
    )
    max_context_tokens: int | None = Field(
        None, ge=1, description="longest prompt + output; None: the model's"
    )
    prefix_cache: Literal["radix", "none"] = Field(
        "radix", description="whether KV of prompts and outputs is kept for later requests"
    )
    eviction_policy: str = Field(
        CacheConfig.eviction_policy,
        description="which cached prefix goes first: lru, mru, lfu, fifo, filo, priority or slru",
    )
    sharing_min_tenants: int = Field(
        TenancyConfig.users,
        ge=0,
        description="K: pages that K to 2K - 1 tenants have computed become everybody's; 0: never",
    )
    sharing_epoch_s: float = Field(
        TenancyConfig.epoch_s, gt=0, description="how often, in seconds, pages become everybody's"
    )
    sharing_burst: int = Field(
        TenancyConfig.burst,
        ge=0,
        description="more requests of a tenant in an epoch that end just after others' common pages: a burst "
        "of guesses, and few tenants' pages stop being everybody's; 0: never",
    )
    hicache_ratio: float = Field(
        0.0, ge=0, description="KV pages kept in host memory for each one on the device; 0: no host tier"
    )
    hicache_size: float = Field(
        0.0, ge=0, description="the same as a size in GB, which takes the place of the ratio; 0: none"
    )
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        "write_through",
        description="when pages go to the host: once cached, once another request finds them, when evicted",
    )
    hicache_write_pace: float = Field(
        0.0, ge=0, description="GB/s at most of copies to the host, beside which forwards run; 0: no limit"
    )
    hicache_storage_backend: str = Field(
        "",
        description="where KV pages outlive the worker: file, mooncake ... or module:Class",
    )
    hicache_storage_path: Path | None = Field(None, description="the directory of storage that keeps files")
    hicache_storage_url: str = Field("", description="the address of storage that is a server")
    hicache_storage_size: float = Field(
        0.0, ge=0, description="GB that all workers together keep in storage; 0: the backend's own bound"
    )
    hicache_storage_fsync: bool = Field(
        False, description="files: a page is on the disk before it can be found"
    )
    hicache_storage_direct_io: bool = Field(False, description="files: past the kernel's page cache")
    hicache_storage_backend_extra_config: dict[str, Any] = Field(
        {}, description="what else the storage backend can be told"
    )
    hicache_decode_offload_tokens: int = Field(
        TierConfig.decode_offload_tokens,
        ge=0,
        description="so many tokens of an answer go down at a time while it is generated; 0: all at its end",
    )
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = Field(
        "timeout", description="how long a request waits for what storage has of its prompt"
    )
    hicache_storage_prefetch_threshold: int = Field(
        TierConfig.prefetch_threshold, ge=1, description="tokens: fewer are computed rather than read"
    )
    hicache_storage_prefetch_if_slower: bool = Field(
        False, description="read from storage also what would be computed sooner"
    )
    kv_events_config: KVEventsOptions = Field(
        KVEventsOptions(), description="KV events, for example {enable: false}"
    )

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 1 or value & (value - 1):
            raise ValueError(f"{value} is not a power of two: use 1, 2, 4, 8, 16, 32 or 64")
        return value

    @field_validator("eviction_policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        try:
            eviction_policy(value)
        except ConfigError as error:
            raise ValueError(f"{error.problem}: {error.remedy}") from None
        return value


class SchedulingOptions(Options):
    """Admission, chunks and batches."""

    max_running_requests: int = Field(
        SchedulerConfig.max_running_requests, ge=1, description="that a worker computes at once"
    )
    chunked_prefill_size: int | None = Field(
        SchedulerConfig.chunked_prefill_size, ge=1, description="tokens of a prefill chunk; None: unlimited"
    )
    max_prefill_tokens: int = Field(
        SchedulerConfig.max_prefill_tokens, ge=1, description="prefill tokens of one step over all requests"
    )
    last_chunk_tokens: int = Field(
        SchedulerConfig.last_chunk_tokens,
        ge=0,
        description="0: no limit; else a cut prompt ends with a chunk this small, to ship less at once",
    )
    decode_reserve_tokens: int = Field(
        SchedulerConfig.decode_reserve_tokens,
        ge=0,
        description="growth that admission keeps free per request",
    )


class HandOffOptions(Options):
    """KV from prefill to decode."""

    kv_transfer_backend: Literal["auto", "cuda_ipc", "shm", "tcp", "mooncake"] = Field(
        "auto", description="auto, cuda_ipc, shm, tcp or mooncake"
    )
    kv_checksums: ChecksumMode = Field(
        ChecksumMode.SAMPLED,
        description="what of a hand-off is compared with what was sent, by CRC-32: none, sampled (4 KiB in "
        "every 64 MiB of a group, and at least one) or all (every page); the stricter of P's and D's counts",
    )
    transfer_timeout_s: float = Field(60.0, gt=0, description="bound on one chunk's transfer")
    hand_off_timeout_s: float = Field(
        120.0, gt=0, description="the other worker of a room that answers nothing that long has lost it"
    )


class PeerOptions(Options):
    """Pages from other workers' caches."""

    peer_lend_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="of its pages on device and host each, what may be locked for workers that copy them",
    )
    peer_fetches_per_source: int = Field(
        4, ge=0, description="fetches from one worker at a time; 0: nothing is fetched"
    )
    peer_fetch_min_tokens: int = Field(
        256, ge=1, description="fewer missing tokens of a prompt are computed, not fetched"
    )
    peer_fetch_min_s: float = Field(
        0.05, gt=0, description="a fetch may take that long, or as long as computing what it brings"
    )

    @property
    def peer_fetch(self) -> bool:
        """Whether this worker takes part: it fetches, and lends."""
        return self.peer_fetches_per_source > 0 and self.peer_lend_share > 0


class LivenessOptions(Options):
    """Leases and bounds on silence."""

    join_timeout_s: float = Field(60.0, gt=0, description="bound on the directory's first answer")
    announce_interval_s: float = Field(
        1.0,
        gt=0,
        description="how often a worker renews its lease and tells its load; never less than three times in "
        "a lease",
    )
    output_lease_s: float = Field(
        60.0, gt=0, description="how long finished output waits for the router's Ack"
    )
    resume_grace_s: float = Field(
        30.0, gt=0, description="how long the rooms of a router that is gone wait for another router"
    )
    idle_check_interval_s: float = Field(
        30.0,
        gt=0,
        description="seconds between two checks that memory balances, while nothing is to be done",
    )
    stuck_after_s: float = Field(
        10.0,
        ge=1,  # a turn without work waits for half a second
        description="an engine loop is stuck after that, and 5 times its forward's predicted duration",
    )

    @property
    def first_forward_s(self) -> float:
        """So long may a forward take that is the first of its kind: it may compile kernels."""
        return 12 * self.stuck_after_s


class PlaceOptions(Options):
    """Where a worker is."""

    rack: str = Field(
        "", description="workers with equal labels share a switch: pages between them are expected to be "
        "faster; under Ray the default is the node's label baton/rack",
    )  # fmt: skip


class WorkerSettings(
    EngineOptions,
    MemoryOptions,
    TenantSharesOptions,
    SchedulingOptions,
    HandOffOptions,
    PeerOptions,
    LivenessOptions,
    PlaceOptions,
):
    """Worker options."""


class WorkerOptions(WorkerSettings, ServedModel, SocketOptions):
    """Options of one worker process. The role is the program's (prefill_node or decode_node)."""

    worker_id: str | None = Field(None, description="default: role and a random suffix")
    directory: str | None = Field(
        None, description="mailbox address of the directory; None: announce to nobody"
    )
