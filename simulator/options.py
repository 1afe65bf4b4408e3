"""What is simulated: the model of a worker and the cluster."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from common.options import Options
from router.options import AdmissionOptions, LeaseOptions, PlacementOptions


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

    prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="prompt tokens computed in a second")
    chunk_tokens: int = Field(8192, ge=1, description="prompt tokens of one step at most")
    step_s: float = Field(0.010, ge=0, description="duration of a step at least: the weights are read once")
    row_s: float = Field(50e-6, ge=0, description="added for each request that decodes in the step")
    context_s: float = Field(20e-9, ge=0, description="added for each token of context of those requests")
    kv_tokens: int = Field(1_000_000, ge=1, description="KV capacity")
    max_running: int = Field(256, ge=1, description="requests that may be reserved or running on D")
    kv_bytes_per_token: int = Field(327_680, ge=1, description="of all layers")
    link_bytes_per_s: float = Field(100e9, gt=0, description="of a worker's network, each way")
    page_tokens: int = Field(512, ge=1, description="tokens of a page: the size of blocks in traces")
    schedule: Schedule = Schedule.MIXED


class SimulationOptions(PlacementOptions, LeaseOptions):
    """A cluster, the objectives, and the delays of what the router is told."""

    prefill_on_decode_tokens: int = Field(
        512, ge=0, description="as the router's: one page, which is larger in a trace"
    )
    admission: AdmissionOptions = AdmissionOptions()
    prefill: int = Field(8, ge=0, description="prefill workers; 0: the decode workers do everything")
    decode: int = Field(8, ge=1, description="decode workers")
    routers: int = Field(1, ge=1, description="router replicas; requests arrive at them in turn")
    worker: WorkerModel = WorkerModel()
    slo_ttft_s: float = Field(2.0, gt=0, description="time to first token, at most")
    slo_itl_s: float = Field(0.05, gt=0, description="a request's mean time between tokens, at most")
    speed: float = Field(1.0, gt=0, description="factor by which arrivals are faster than in the trace")
    seed: int = 1
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
    def _leases_outlast_reports(self) -> SimulationOptions:
        if self.lease_s <= self.report_interval_s + self.report_gap_s + self.view_interval_s:
            raise ValueError("lease_s must be longer than the report's interval, gap and the View's interval")
        return self
