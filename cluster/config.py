"""The configuration of one served model: what `baton serve` and `serve run` are told, checked at the edge.

One file describes the router, the prefill and the decode workers. `worker` holds what both kinds of worker
share; `prefill.options` and `decode.options` override it. With `roles: dynamic` there is one kind of worker,
`dynamic`, instead of the two. P and D must agree in AGREED_OPTIONS: a difference
is refused here, before any process starts, and by the directory for workers that join by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from cluster.placeholders import refuse_placeholders
from cluster.placement import NodeChoice, NodeOptions
from cluster.role_keeper import RolePlan
from common.errors import ConfigError
from common.host import LOOPBACK
from common.options import Options, parse_options
from router.options import RouterOptions, RouterSettings
from wire.options import ServedModel, SocketOptions
from wire.records import Role
from worker.options import WorkerOptions, WorkerSettings

AGREED_OPTIONS = ("page_size", "dtype", "kv_cache_dtype")
"""Options whose difference between P and D makes every hand-off impossible."""


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


class Deployment(NodeOptions):
    """What a Serve deployment is given: replicas, resources, nodes and bounds."""

    num_replicas: int = Field(default=1, ge=1, description="replicas, when autoscaling_config is not set")
    num_cpus: float = Field(default=0.3, ge=0, description="CPUs a replica reserves; fractions are fine")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs a replica reserves")
    resources: dict[str, float] = Field(default={}, description="custom Ray resources a replica reserves")
    env: dict[str, str] = Field(default={}, description="environment variables of the replicas")
    drain_s: float = Field(
        default=60.0, gt=0, description="how long a replica that leaves may finish its requests"
    )
    health_check_period_s: float = Field(default=5.0, gt=0)
    health_check_timeout_s: float = Field(default=15.0, gt=0)

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """Serve's own bound: draining takes at most 80% of it."""
        return self.drain_s / 0.8


class RouterDeployment(Deployment):
    """The HTTP front."""

    num_cpus: float = Field(default=0.2, ge=0, description="CPUs a replica reserves; fractions are fine")
    autoscaling_config: RouterAutoscaling | None = None
    max_ongoing_requests: int = Field(
        default=10_000, ge=1, description="requests in flight per replica, then 503"
    )
    options: RouterSettings = Field(default_factory=RouterSettings, description="the router's own options")


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


class PrefillDeployment(WorkerDeployment):
    """Prefill workers; none of them means that decode workers prefill too (colocated)."""

    num_replicas: int = Field(
        default=1, ge=0, description="replicas; 0: decode workers prefill too (colocated)"
    )


class DynamicDeployment(WorkerDeployment):
    """Workers whose roles follow the load: one Serve deployment, because a replica cannot change its
    deployment."""

    num_replicas: int = Field(default=2, ge=2, description="workers in all; each role has at least one")
    ttft_s: float = Field(default=2.0, gt=0, description="p95 of TTFT to meet (docs/scaling.md)")
    itl_s: float = Field(default=0.05, gt=0, description="p95 of ITL to meet")
    period_s: float = Field(default=5.0, gt=0, description="between two decisions who has which role")

    @model_validator(mode="after")
    def _one_count(self) -> DynamicDeployment:
        if self.autoscaling_config is not None:
            raise ValueError("autoscaling_config: with dynamic roles num_replicas is the number of workers")
        return self


DYNAMIC = "dynamic"
"""Key of the section of workers whose roles change."""


class ServeConfig(ServedModel, SocketOptions):
    """One model, served by one router deployment, one of prefill workers and one of decode workers, or with
    `roles: dynamic` one of both."""

    interface: str = Field(
        default=LOOPBACK,
        description="what sockets bind to and peers reach: an address, a network device or a name; auto: "
        "each node's own address",
    )
    model_cache: Path | None = Field(
        default=None,
        description="directory of each host, to which one of its workers copies a model directory for all; "
        "null: it is read where it is. Hub models are in Hugging Face's cache (HF_HOME)",
    )
    placement: NodeChoice = Field(
        default=NodeChoice.SPREAD,
        description="spread: replicas of a deployment over the nodes that fit; pack: fill a node first",
    )
    worker: WorkerSettings = Field(
        default_factory=WorkerSettings, description="worker options that prefill and decode share"
    )
    router: RouterDeployment = RouterDeployment()
    roles: Literal["fixed", "dynamic"] = Field(
        default="fixed", description="fixed: prefill and decode; dynamic: workers that change their roles"
    )
    prefill: PrefillDeployment = PrefillDeployment()
    decode: WorkerDeployment = WorkerDeployment()
    dynamic: DynamicDeployment = DynamicDeployment()

    @property
    def colocated(self) -> bool:
        """True when there are no prefill workers."""
        return self.prefill.num_replicas == 0 and self.prefill.autoscaling_config is None

    def worker_sections(self) -> dict[str, WorkerDeployment]:
        """The deployments of workers that run, by their key here."""
        if self.roles == DYNAMIC:
            return {DYNAMIC: self.dynamic}
        prefill: dict[str, WorkerDeployment] = {} if self.colocated else {Role.PREFILL: self.prefill}
        return {**prefill, Role.DECODE: self.decode}

    def role_plan(self) -> RolePlan | None:
        """What the directory needs to know to assign roles; None: they are fixed."""
        if self.roles != DYNAMIC:
            return None
        one = self.dynamic
        return RolePlan(one.ttft_s, one.itl_s, one.period_s, one.drain_s)

    def worker_options(self, key: str) -> WorkerOptions:
        """Options of one kind of worker, without a directory."""
        section = self.worker_sections()[key]
        # A replica computes with what it reserved: a fraction of a core is one thread.
        default = {"threads": max(1, int(section.num_cpus))}
        return WorkerOptions(
            **{**default, **self.worker.given(), **section.options.given()}, **self._identity()
        )

    def router_options(self) -> RouterOptions:
        """Options of the router, without a directory."""
        return RouterOptions(**self.router.options.given(), **self._identity())

    def cpus(self) -> float:
        """CPUs that the whole application reserves at its largest."""
        sections: list[RouterDeployment | WorkerDeployment] = [self.router, *self.worker_sections().values()]
        return sum(most_replicas(section) * section.num_cpus for section in sections)

    def shutdown_s(self) -> float:
        """How long the application may take to end: Serve's bound of the slowest deployment, and a bit."""
        sections = (self.router, *self.worker_sections().values())
        return max(section.graceful_shutdown_timeout_s for section in sections) + 15.0

    def _identity(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "served_model_name": self.model_name,
            "interface": self.interface,
            "ports": self.ports,
            "cluster_secret_file": self.cluster_secret_file,
        }


def most_replicas(section: RouterDeployment | WorkerDeployment) -> int:
    """Replicas a deployment may grow to."""
    scaling = section.autoscaling_config
    return section.num_replicas if scaling is None else scaling.max_replicas


def parse_config(raw: dict[str, Any]) -> ServeConfig:
    """A checked configuration. Raises ConfigError naming the first wrong key."""
    refuse_placeholders(raw)
    config = parse_options(ServeConfig, raw)
    _check_sections(config)
    options = {key: config.worker_options(key) for key in config.worker_sections()}
    for key, found in options.items():
        _check_context(found, key)
    if Role.PREFILL in options:
        _check_agreement(options[Role.PREFILL], options[Role.DECODE])
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Serve config files are accepted too: their first application's `args`.

    A `model` directory may be named relative to the current directory or to the file's.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}", "give a readable file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not YAML: {error}", "correct the file") from None
    if isinstance(raw, dict) and isinstance(raw.get("applications"), list):
        raw = raw["applications"][0].get("args", {})
    if not isinstance(raw, dict):
        raise ConfigError("config", f"{path} is not a mapping", "see `baton config --schema`")
    model = raw.get("model")
    if isinstance(model, str) and not Path(model).is_dir() and (path.parent / model).is_dir():
        return {**raw, "model": str((path.parent / model).absolute())}
    return raw


def _check_sections(config: ServeConfig) -> None:
    idle = {"prefill", "decode"} if config.roles == DYNAMIC else {DYNAMIC}
    for key in sorted(idle & config.model_fields_set):
        raise ConfigError(key, f"it has no effect with roles: {config.roles}", "remove it, or change roles")


def _check_context(options: WorkerOptions, key: str) -> None:
    context, pool = options.max_context_tokens, options.max_total_tokens
    if context is not None and pool is not None and context > pool:
        raise ConfigError(
            f"{key}.options.max_context_tokens",
            f"a context of {context} tokens does not fit a pool of {pool}",
            f"lower it, or raise max_total_tokens to {context} or more",
        )


def _check_agreement(prefill: WorkerOptions, decode: WorkerOptions) -> None:
    for key in AGREED_OPTIONS:
        ours, theirs = getattr(prefill, key), getattr(decode, key)
        if ours != theirs:
            raise ConfigError(
                f"decode.options.{key}",
                f"prefill has {ours} and decode has {theirs}, so their pages differ",
                f"set {key} once, under worker",
            )
