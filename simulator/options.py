"""What is simulated: the model of a worker and the cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field, model_validator

from common.options import Options
from router.options import LeaseOptions
from router.placement_options import AdmissionOptions, PlacementOptions


class Schedule(StrEnum):
    """What a worker with both prompts and running requests does next."""

    PREFILL_FIRST = "prefill-first"  # a prompt chunk while there is one, else a decode step
    DECODE_FIRST = "decode-first"  # a decode step while anything runs, else prompt chunks
    MIXED = "mixed"  # both in one step


class WorkerModel(Options):
    """How fast a worker is and what it holds. The defaults describe a 70B model with grouped-query attention
    on eight H100 (docs/routing.md has the arithmetic). One step takes

        max(step_s, prompt tokens / prefill_tokens_per_s) + row_s rows + context_s context
    """

    page_tokens: ClassVar[int] = 512  # no option: it is the size of blocks in traces
    prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="prompt tokens computed in a second")
    chunk_tokens: int = Field(8192, ge=1, description="prompt tokens of one step at most")
    step_s: float = Field(0.010, ge=0, description="duration of a step at least: the weights are read once")
    row_s: float = Field(50e-6, ge=0, description="added for each request that decodes in the step")
    context_s: float = Field(20e-9, ge=0, description="added for each token of context of those requests")
    kv_tokens: int = Field(1_000_000, ge=1, description="KV capacity")
    max_running: int = Field(256, ge=1, description="requests that may be reserved or running on D")
    kv_bytes_per_token: int = Field(327_680, ge=1, description="of all layers")
    link_bytes_per_s: float = Field(100e9, gt=0, description="of a worker's network, each way")
    rack_bytes_per_s: float = Field(100e9, gt=0, description="the same, to a worker in the same rack")
    host_bytes_per_s: float = Field(100e9, gt=0, description="between two workers of one host, each pair")
    hicache_ratio: float = Field(0.0, ge=0, description="host memory for KV, over kv_tokens; 0: none")
    hicache_size: float = Field(0.0, ge=0, description="the same in GB, instead of the ratio")
    storage_tokens: int = Field(0, ge=0, description="KV tokens that a worker's storage holds")
    load_bytes_per_s: float = Field(400e9, gt=0, description="from host memory to the device")
    storage_bytes_per_s: float = Field(25e9, gt=0, description="from storage to host memory")
    fetches_at_once: int = Field(4, ge=1, description="by other workers from one; it refuses more")
    schedule: Schedule = Schedule.MIXED

    @property
    def host_tokens(self) -> int:
        """KV tokens that host memory holds."""
        if self.hicache_size > 0:
            return int(self.hicache_size * 1e9 / self.kv_bytes_per_token)
        return int(self.hicache_ratio * self.kv_tokens)


class Autoscale(StrEnum):
    """What decides how many workers there are."""

    FIXED = "fixed"
    LOAD = "load"  # the sum of the loads they report, with Serve's delays
    SLO = "slo"  # forecasts and objectives


class ScalingOptions(Options):
    """How the fleet changes during a run. `prefill` and `decode` are the workers at its start."""

    policy: Autoscale = Autoscale.FIXED
    switch_roles: bool = Field(
        False, description="workers change between prefill and decode; their number stays (policy: fixed)"
    )
    period_s: float = Field(5.0, gt=0, description="between two decisions")
    start_s: float = Field(60.0, ge=0, description="until a new worker serves")
    switch_s: float = Field(1.0, ge=0, description="from the end of a worker's drain until its new role")
    most: int = Field(64, ge=1, description="workers of a role, at most")
    hold_s: float = Field(30.0, ge=0, description="slo: how long fewer workers must be enough")
    target_load: float = Field(0.7, gt=0, description="load: mean load to aim at")
    upscale_delay_s: float = Field(30.0, ge=0, description="load: how long the load must stay high")
    downscale_delay_s: float = Field(600.0, ge=0, description="load: how long the load must stay low")
    look_back_s: float = Field(30.0, gt=0, description="load: window over which a worker's load is averaged")

    @model_validator(mode="after")
    def _roles_of_a_fixed_number(self) -> ScalingOptions:
        if self.switch_roles and self.policy is not Autoscale.FIXED:
            raise ValueError("switch_roles needs policy=fixed: workers change roles, not their number")
        return self


class SimulationOptions(PlacementOptions, LeaseOptions):
    """A cluster, the objectives, and the delays of what the router is told."""

    prefill_on_decode_tokens: int = Field(
        512, ge=0, description="as the router's: one page, which is larger in a trace"
    )
    admission: AdmissionOptions = AdmissionOptions()
    prefill: int = Field(8, ge=0, description="prefill workers; 0: the decode workers do everything")
    decode: int = Field(8, ge=1, description="decode workers")
    workers_per_host: int = Field(
        0,
        ge=0,
        description="of each role; then transfers are measured, as by the router. 0: nobody shares one",
    )
    hosts_per_rack: int = Field(0, ge=0, description="0: there are no racks")
    routers: int = Field(1, ge=1, description="router replicas; requests arrive at them in turn")
    worker: WorkerModel = WorkerModel()
    scaling: ScalingOptions = ScalingOptions()
    slo_ttft_s: float = Field(2.0, gt=0, description="time to first token, at most")
    slo_itl_s: float = Field(0.05, gt=0, description="a request's mean time between tokens, at most")
    speed: float = Field(1.0, gt=0, description="factor by which arrivals are faster than in the trace")
    seed: int = 1
    ignore_tenants: bool = Field(False, description="everybody is one tenant, and all pages are shared")
    sharing_min_tenants: int = Field(
        0, ge=0, description="K: pages that K to 2K - 1 tenants have asked for become everybody's; 0: never"
    )
    sharing_epoch_s: float = Field(60.0, gt=0, description="how often pages become everybody's")
    events: bool = Field(True, description="workers publish KV events")
    event_delay_s: float = Field(0.005, ge=0, description="until a KV event is in the index")
    report_interval_s: float = Field(
        1.0, gt=0, description="longest time between a worker's reports of its load"
    )
    report_gap_s: float = Field(
        0.1, gt=0, description="shortest time between them, when the load has changed"
    )
    view_interval_s: float = Field(0.1, gt=0, description="between the directory's Views")
    message_s: float = Field(0.0005, ge=0, description="time that a message takes")

    @model_validator(mode="after")
    def _racks_of_hosts(self) -> SimulationOptions:
        if self.hosts_per_rack and not self.workers_per_host:
            raise ValueError("hosts_per_rack needs workers_per_host")
        return self

    @model_validator(mode="after")
    def _leases_outlast_reports(self) -> SimulationOptions:
        if self.lease_s <= self.report_interval_s + self.report_gap_s + self.view_interval_s:
            raise ValueError("lease_s must be longer than the report's interval, gap and the View's interval")
        return self
