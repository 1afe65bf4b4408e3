"""The sections of a configuration that become Serve deployments, and those of the models that they serve."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import Field, model_validator

from cluster.placement import NodeOptions
from common.options import Options
from router.options import MOST_WEIGHT, OutputOptions, RouterSettings
from wire.options import ServedModel
from worker.options import GPU_MEMORY_UTILIZATION, WorkerSettings
from worker.tenant_options import TenantShareOptions

DRAIN_SHARE = 0.8  # of the time after which Serve ends a replica


class Autoscaling(Options):
    """How far and how fast Serve may change a deployment's replicas."""

    min_replicas: int = Field(default=1, ge=1, description="replicas that always run")
    max_replicas: int = Field(default=2, ge=1, description="replicas at most")
    initial_replicas: int | None = Field(
        default=None, ge=1, description="replicas at the start; None: min_replicas"
    )
    upscale_delay_s: float = Field(default=30.0, ge=0, description="how long the load must stay high")
    downscale_delay_s: float = Field(default=600.0, ge=0, description="how long the load must stay low")
    look_back_period_s: float = Field(default=30.0, gt=10, description="window over which load is averaged")

    @model_validator(mode="after")
    def _bounds(self) -> Autoscaling:
        if not self.min_replicas <= (self.initial_replicas or self.min_replicas) <= self.max_replicas:
            raise ValueError("min_replicas <= initial_replicas <= max_replicas does not hold")
        return self


class RouterAutoscaling(Autoscaling):
    """The router is scaled by the requests that Serve itself counts."""

    target_ongoing_requests: float = Field(default=200.0, gt=0, description="requests in flight per replica")


class WorkerAutoscaling(Autoscaling):
    """Workers are scaled by what they report: Serve sees none of their requests. `downscale_delay_s` holds
    for an objective, too: it is how long fewer replicas must have been enough."""

    target_load: float = Field(
        default=0.7,
        gt=0,
        description="share of a worker's capacity to aim at (1.0: full; more: requests wait)",
    )
    objective_s: float | None = Field(
        default=None,
        gt=0,
        description="p95 to meet, of TTFT (prefill) or ITL (decode); replaces target_load (docs/scaling.md)",
    )
    start_s: float = Field(
        default=60.0, ge=0, description="with objective_s: how long a new replica takes until it serves"
    )

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> WorkerAutoscaling:
        idle = {"start_s"} if self.objective_s is None else {"target_load", "upscale_delay_s"}
        for key in sorted(idle & self.model_fields_set):
            raise ValueError(f"{key} has no effect {'without' if key == 'start_s' else 'with'} objective_s")
        return self


class DynamicAutoscaling(WorkerAutoscaling):
    """Of workers that change their roles: the objectives are `ttft_s` and `itl_s` of their section."""

    min_replicas: int = Field(default=2, ge=2, description="workers that always run, one in each role")
    max_replicas: int = Field(default=4, ge=2, description="workers at most, in all")

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> DynamicAutoscaling:
        for key in sorted({"objective_s", "target_load", "upscale_delay_s"} & self.model_fields_set):
            raise ValueError(f"{key} has no effect: ttft_s and itl_s are the objectives of dynamic roles")
        return self


class Deployment(NodeOptions):
    """What a Serve deployment is given: replicas, resources, nodes and bounds."""

    num_replicas: int = Field(default=1, ge=1, description="replicas, when autoscaling_config is not set")
    num_cpus: float = Field(default=0.3, ge=0, description="CPUs a replica reserves; fractions are fine")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs a replica reserves")
    resources: dict[str, float] = Field(default={}, description="custom Ray resources a replica reserves")
    env: dict[str, str] = Field(default={}, description="environment variables of the replicas")
    max_surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="new replicas that an update starts before it stops old ones, in percent; they need "
        "resources of their own. 0: old ones stop first",
    )
    drain_s: float = Field(
        default=60.0, gt=0, description="how long a replica that leaves may finish its requests"
    )
    health_check_period_s: float = Field(
        default=5.0, gt=0, description="how often Serve asks a replica whether it is well"
    )
    health_check_timeout_s: float = Field(
        default=15.0, gt=0, description="a replica that does not answer for so long is replaced"
    )

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """Serve's own bound: draining takes at most DRAIN_SHARE of it."""
        return self.drain_s / DRAIN_SHARE


Section = TypeVar("Section", bound="RouterDeployment | WorkerDeployment")


def _one_number(section: Section) -> Section:
    """Serve itself takes no number of replicas that are scaled."""
    if section.autoscaling_config is not None and "num_replicas" in section.model_fields_set:
        raise ValueError("num_replicas has no effect with autoscaling_config: leave one of them out")
    return section


class RouterDeployment(Deployment):
    """The HTTP front."""

    num_cpus: float = Field(default=0.2, ge=0, description="CPUs a replica reserves; fractions are fine")
    autoscaling_config: RouterAutoscaling | None = None
    max_ongoing_requests: int = Field(
        default=10_000, ge=1, description="requests in flight per replica, then 503"
    )
    options: RouterSettings = Field(default_factory=RouterSettings, description="the router's own options")

    _scaled = model_validator(mode="after")(_one_number)


class WorkerDeployment(Deployment):
    """Prefill or decode workers."""

    autoscaling_config: WorkerAutoscaling | None = None
    max_ongoing_requests: int = Field(
        default=8,
        ge=1,
        description="Serve-visible calls; requests for tokens come over ZeroMQ and are not counted",
    )
    options: WorkerSettings = Field(
        default_factory=WorkerSettings, description="worker options that differ from `worker`"
    )

    _scaled = model_validator(mode="after")(_one_number)


class PrefillDeployment(WorkerDeployment):
    """Prefill workers; none of them means that decode workers prefill too (colocated)."""

    num_replicas: int = Field(
        default=1,
        ge=0,
        description="replicas, when autoscaling_config is not set; 0: decode workers prefill too (colocated)",
    )


class DynamicDeployment(WorkerDeployment):
    """Workers of one model whose roles follow the load: one Serve deployment, because a replica cannot change
    its deployment."""

    num_replicas: int = Field(
        default=2, ge=2, description="workers in all, when autoscaling_config is not set; each role has one"
    )
    autoscaling_config: DynamicAutoscaling | None = None
    ttft_s: float = Field(default=2.0, gt=0, description="p95 of TTFT to meet (docs/scaling.md)")
    itl_s: float = Field(default=0.05, gt=0, description="p95 of ITL to meet")
    period_s: float = Field(default=5.0, gt=0, description="between two decisions who has which role")


FOLLOWING = ("threads", "gpu_memory_utilization")
"""Worker options that follow from what a replica reserves, where nobody says them."""


def reserved_options(num_cpus: float, num_gpus: float) -> dict[str, Any]:
    """FOLLOWING: a fraction of a core is one thread, a fraction of a GPU that fraction of its memory."""
    options: dict[str, Any] = {"threads": max(1, int(num_cpus))}
    if 0 < num_gpus < 1:
        options["gpu_memory_utilization"] = GPU_MEMORY_UTILIZATION * num_gpus
    return options


class TenantOptions(TenantShareOptions):
    """What a tenant gets of the workers' memory, and of the turns of rooms that wait."""

    weight: float = Field(
        default=1.0, gt=0, description="of the tenant when rooms wait, as in the router's tenant_weights"
    )


class ModelSection(ServedModel, OutputOptions):
    """One version of one model, with workers of its own: an entry of `models`."""

    weight: float | None = Field(
        default=None,
        ge=0,
        le=MOST_WEIGHT,
        description="share of the model's new streams among its versions; null for all: by decode capacity",
    )
    worker: WorkerSettings = Field(
        default_factory=WorkerSettings, description="worker options that differ from the common `worker`"
    )
    prefill: PrefillDeployment = PrefillDeployment()
    decode: WorkerDeployment = WorkerDeployment()
    dynamic: DynamicDeployment = DynamicDeployment()

    @property
    def suffix(self) -> str:
        """What its deployments are named by, beside their role."""
        named = f"{self.model_name}-{self.model_version}" if self.model_version else self.model_name
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", named)

    def sections(self) -> dict[str, WorkerDeployment]:
        """Its deployments of workers that run, by role."""
        colocated = self.prefill.num_replicas == 0 and self.prefill.autoscaling_config is None
        return {"decode": self.decode} if colocated else {"prefill": self.prefill, "decode": self.decode}
