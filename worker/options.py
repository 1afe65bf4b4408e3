"""WorkerOptions: everything a prefill or decode worker can be told, checked at the edge."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from common.options import Options


class KVEventsOptions(Options):
    """`kv_events_config`: whether and how KV placement is published."""

    enable: bool = True
    topic: str = "kv-events"
    buffer_batches: int = Field(10_000, ge=1, description="batches kept for replay")


class WorkerOptions(Options):
    """Options of one worker process. The role is the program's (prefill_node or decode_node)."""

    # who it is
    model: str = Field(description="directory or Hugging Face id of the model")
    served_model_name: str | None = Field(
        None, description="name in the API; default: the model's last path part"
    )
    worker_id: str | None = Field(None, description="default: role and a random suffix")
    directory: str | None = Field(
        None, description="mailbox address of the directory; None: announce to nobody"
    )
    interface: str = Field("127.0.0.1", description="address that sockets bind to and peers reach")
    cluster_secret: str | None = Field(None, description="when set, every socket speaks CURVE")

    # the engine
    engine: Literal["transformers", "fake"] = "transformers"
    fake_step_s: float = Field(0.0, ge=0, description="fake engine: seconds a forward takes")
    fake_groups: tuple[Literal["window", "state"], ...] = Field(
        (), description="fake engine: kinds of layers beside full attention"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "cpu", "torch", "flashinfer"] = "auto"
    linear_backend: Literal["auto", "packed", "torch"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"] = Field(
        "auto", description="how keys, values and latents are stored; auto: in dtype"
    )
    threads: int | None = Field(None, ge=1, description="compute threads; None: half the cores, at least 1")
    overlap_depth: Literal[0, 1] = Field(
        0, description="1: a step is launched before the last one's result is known"
    )

    # memory
    page_size: int = Field(16, description="tokens of a page, a power of two")
    max_total_tokens: int | None = Field(None, ge=1, description="KV capacity; None: from kv_memory_fraction")
    kv_memory_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of free memory for KV when not given"
    )
    swa_full_tokens_ratio: float = Field(
        0.8, gt=0, le=1, description="capacity for sliding-window layers, as a share of max_total_tokens"
    )
    max_mamba_cache_size: int | None = Field(
        None, ge=1, description="states of linear attention or Mamba kept at once; None: from the requests"
    )
    mamba_track_interval: int = Field(
        256, ge=1, description="tokens between the states that decode keeps; a multiple of page_size"
    )
    max_context_tokens: int | None = Field(
        None, ge=1, description="longest prompt + output; None: the model's"
    )
    max_running_requests: int = Field(64, ge=1)
    prefix_cache: Literal["radix", "none"] = "radix"
    eviction_policy: str = "lru"
    kv_events_config: KVEventsOptions = KVEventsOptions()

    # scheduling
    chunked_prefill_size: int | None = Field(
        512, ge=1, description="tokens of a prefill chunk; None: unlimited"
    )
    max_prefill_tokens: int = Field(8192, ge=1, description="prefill tokens of one step over all requests")
    last_chunk_tokens: int = Field(
        0,
        ge=0,
        description="0: no limit; else a cut prompt ends with a chunk this small, to ship less at once",
    )
    decode_reserve_tokens: int = Field(512, ge=0, description="growth that admission keeps free per request")

    # the hand-off
    kv_transfer_backend: Literal["auto", "shm", "tcp", "mooncake"] = "auto"
    kv_checksums: bool = Field(False, description="CRC-32 of every page, verified by the receiver")
    transfer_timeout_s: float = Field(60.0, gt=0, description="bound on one chunk's transfer")
    hand_off_timeout_s: float = Field(
        120.0, gt=0, description="bound on waiting for the other half of a room"
    )

    # liveness
    join_timeout_s: float = Field(60.0, gt=0, description="bound on the directory's first answer")
    announce_interval_s: float = Field(1.0, gt=0)
    output_lease_s: float = Field(
        60.0, gt=0, description="how long finished output waits for the router's Ack"
    )
    stuck_after_s: float = Field(120.0, gt=0, description="an engine loop silent for longer is unhealthy")

    @property
    def model_name(self) -> str:
        """The model's name in the API and in the page hash."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 1 or value & (value - 1):
            raise ValueError(f"{value} is not a power of two: use 1, 2, 4, 8, 16, 32 or 64")
        return value
