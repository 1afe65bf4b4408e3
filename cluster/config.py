"""The configuration of one served model: what `baton serve` and `serve run` are told, checked at the edge.

One file describes the router, the prefill and the decode workers. `worker` holds what both kinds of worker
share; `prefill.options` and `decode.options` override it. Where P and D must agree (AGREED_OPTIONS) and do
not, they are refused here, before any process starts; the directory refuses it again for workers that join
by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator

from common.errors import ConfigError
from common.options import Options, parse_options
from kvcache.eviction import eviction_policy
from router.options import RouterOptions
from wire.records import Role
from worker.options import WorkerOptions

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
    """Workers are scaled by the load that they report: Serve sees none of their requests."""

    target_load: float = Field(
        default=0.7,
        gt=0,
        description="share of a worker's capacity to aim at (1.0: full; more: requests wait)",
    )


class Deployment(Options):
    """What a Serve deployment is given: replicas, resources and bounds."""

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
    options: dict[str, Any] = Field(default={}, description="keys of the router's own options")


class WorkerDeployment(Deployment):
    """Prefill or decode workers."""

    autoscaling_config: WorkerAutoscaling | None = None
    max_ongoing_requests: int = Field(
        default=8,
        ge=1,
        description="Serve-visible calls; requests for tokens come over ZeroMQ and are not counted",
    )
    options: dict[str, Any] = Field(default={}, description="worker options that differ from `worker`")


class PrefillDeployment(WorkerDeployment):
    """Prefill workers; none of them means that decode workers prefill too (colocated)."""

    num_replicas: int = Field(
        default=1, ge=0, description="replicas; 0: decode workers prefill too (colocated)"
    )


class ServeConfig(Options):
    """One model, served by one router deployment, one of prefill workers and one of decode workers."""

    model: str = Field(description="directory or Hugging Face id of the model")
    served_model_name: str | None = Field(
        default=None, description="name in the API; default: the model's last path part"
    )
    interface: str = Field(
        default="127.0.0.1",
        description="address sockets bind to and peers reach; auto: each node's own address",
    )
    cluster_secret: str | None = Field(default=None, description="when set, every socket speaks CURVE")
    worker: dict[str, Any] = Field(default={}, description="worker options that prefill and decode share")
    router: RouterDeployment = RouterDeployment()
    prefill: PrefillDeployment = PrefillDeployment()
    decode: WorkerDeployment = WorkerDeployment()

    @field_validator("served_model_name")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("an empty name cannot be asked for: remove it or give one")
        return value

    @property
    def colocated(self) -> bool:
        """True when there are no prefill workers."""
        return self.prefill.num_replicas == 0 and self.prefill.autoscaling_config is None

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model).name

    def section(self, role: Role) -> WorkerDeployment:
        """The deployment of that kind of worker."""
        return self.prefill if role is Role.PREFILL else self.decode

    def worker_options(self, role: Role) -> dict[str, Any]:
        """Options of one kind of worker, as its WorkerOptions will read them (no directory yet)."""
        section = self.section(role)
        # A replica computes with what it reserved: a fraction of a core is one thread.
        default = {"threads": max(1, int(section.num_cpus))}
        return {**default, **self.worker, **section.options, **self._identity()}

    def router_options(self) -> dict[str, Any]:
        """Options of the router, as its RouterOptions will read them (no directory yet)."""
        return {**self.router.options, **self._identity()}

    def cpus(self) -> float:
        """CPUs that the whole application reserves at its largest."""
        workers = [self.decode] if self.colocated else [self.decode, self.prefill]
        sections: list[RouterDeployment | WorkerDeployment] = [self.router, *workers]
        return sum(most_replicas(section) * section.num_cpus for section in sections)

    def shutdown_s(self) -> float:
        """How long the application may take to end: Serve's bound of the slowest deployment, and a bit."""
        sections = (self.router, self.prefill, self.decode)
        return max(section.graceful_shutdown_timeout_s for section in sections) + 15.0

    def _identity(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "served_model_name": self.name,
            "interface": self.interface,
            "cluster_secret": self.cluster_secret,
        }


def most_replicas(section: RouterDeployment | WorkerDeployment) -> int:
    """Replicas a deployment may grow to."""
    scaling = section.autoscaling_config
    return section.num_replicas if scaling is None else scaling.max_replicas


def parse_config(raw: dict[str, Any]) -> ServeConfig:
    """A checked configuration. Raises ConfigError naming the first wrong key, nested options included."""
    config = parse_options(ServeConfig, raw)
    _parse_nested(RouterOptions, config.router_options(), "router.options")
    options = {}
    for role in Role:
        options[role] = _parse_nested(WorkerOptions, config.worker_options(role), f"{role}.options")
        _check_eviction(options[role], role)
        _check_context(options[role], role)
    if not config.colocated:
        _check_agreement(options[Role.PREFILL], options[Role.DECODE])
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Serve config files are accepted too: their first application's `args`."""
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
    return raw


def json_schema() -> dict[str, Any]:
    """JSON schema of the configuration, with the options of workers and router in their places."""
    schema = ServeConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for options in (WorkerOptions, RouterOptions):
        nested = options.model_json_schema()
        definitions.update(nested.pop("$defs", {}))
        nested["properties"] = {
            key: value for key, value in nested["properties"].items() if key not in _SET_BY_CONFIG
        }
        nested["required"] = [key for key in nested.get("required", []) if key not in _SET_BY_CONFIG]
        definitions[options.__name__] = nested
    schema["properties"]["worker"] = {"$ref": "#/$defs/WorkerOptions"}
    for section in ("WorkerDeployment", "PrefillDeployment"):
        definitions[section]["properties"]["options"] = {"$ref": "#/$defs/WorkerOptions"}
    definitions["RouterDeployment"]["properties"]["options"] = {"$ref": "#/$defs/RouterOptions"}
    return schema


_SET_BY_CONFIG = frozenset(
    {"model", "served_model_name", "interface", "cluster_secret", "directory", "worker_id"}
)


NestedType = TypeVar("NestedType", bound=BaseModel)


def _parse_nested(kind: type[NestedType], raw: dict[str, Any], where: str) -> NestedType:
    """Options inside the configuration; an error names the key with the section it stands in."""
    try:
        return parse_options(kind, raw)
    except ConfigError as error:
        raise _within(error, where) from None


def _check_eviction(options: WorkerOptions, role: Role) -> None:
    """The worker would refuse it too, but only after its process has started."""
    try:
        eviction_policy(options.eviction_policy)
    except ConfigError as error:
        raise _within(error, f"{role}.options") from None


def _within(error: ConfigError, where: str) -> ConfigError:
    """The same, its key named with the section it stands in."""
    problem = str(error).removeprefix(f"{error.key}: ").removesuffix(f"; {error.remedy}")
    return ConfigError(f"{where}.{error.key}", problem, error.remedy)


def _check_context(options: WorkerOptions, role: Role) -> None:
    context, pool = options.max_context_tokens, options.max_total_tokens
    if context is not None and pool is not None and context > pool:
        raise ConfigError(
            f"{role}.options.max_context_tokens",
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
