"""The configuration of an application: what `baton serve` and `serve run` are told, checked at the edge.

One file describes the router, the prefill and the decode workers. `worker` holds what both kinds of worker
share; `prefill.options` and `decode.options` override it. With `roles: dynamic` there is one kind of worker,
`dynamic`, instead of the two, for each model. P and D must agree in AGREED_OPTIONS: a difference is refused
here, before any process starts, and by the directory for workers that join by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from cluster.deployments import (
    DynamicDeployment,
    ModelSection,
    PrefillDeployment,
    RouterDeployment,
    TenantOptions,
    WorkerDeployment,
    reserved_options,
)
from cluster.model_cache import ModelCache
from cluster.placeholders import refuse_placeholders
from cluster.placement import NodeChoice
from cluster.role_keeper import RolePlan
from cluster.router_config import RouterConfig
from common.errors import ConfigError
from common.host import LOOPBACK
from common.options import parse_options
from router.options import OutputOptions, RoutedModel, RouterOptions
from router.placement.policies import make_policy
from router.placement_options import PolicyWeights
from router.text.chat_template import template_text
from wire.options import ServedModel, SocketOptions
from wire.records import Role
from worker.options import WorkerOptions, WorkerSettings
from worker.tenant_options import TenantShareOptions, check_shares

AGREED_OPTIONS = ("page_size", "dtype", "weight_dtype", "kv_cache_dtype")
"""Options whose difference between P and D makes every hand-off impossible."""

OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""What a Ray that is started here sets aside. Nothing of ours goes through it; Ray wants at least 75 MiB."""

DYNAMIC = "dynamic"
"""Key of the section of workers whose roles change."""

_OF_ONE_MODEL = (*ServedModel.model_fields, *OutputOptions.model_fields, "prefill", "decode", DYNAMIC)


class ServeConfig(ServedModel, OutputOptions, SocketOptions):
    """One model, served by one router deployment, one of prefill workers and one of decode workers, or with
    `roles: dynamic` one of both. `models` names several instead, each with its own workers."""

    model: str = Field(default="", description="directory or Hugging Face id of the model")
    models: tuple[ModelSection, ...] = Field(
        default=(), description="models and versions of models behind one router, instead of `model`"
    )
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
    model_cache_days: float = Field(
        default=7.0, gt=0, description="a copy in model_cache is deleted that nobody has used for so long"
    )
    placement: NodeChoice = Field(
        default=NodeChoice.SPREAD,
        description="spread: replicas of a deployment over the nodes that fit; pack: fill a node first",
    )
    worker: WorkerSettings = Field(
        default_factory=WorkerSettings, description="worker options that prefill and decode share"
    )
    tenants: dict[str, TenantOptions] = Field(
        default={},
        description="weights and shares of memory by tenant, for the router and all workers; their own "
        "options come before",
    )
    router: RouterDeployment = RouterDeployment()
    roles: Literal["fixed", "dynamic"] = Field(
        default="fixed", description="fixed: prefill and decode; dynamic: workers that change their roles"
    )
    prefill: PrefillDeployment = PrefillDeployment()
    decode: WorkerDeployment = WorkerDeployment()
    dynamic: DynamicDeployment = DynamicDeployment()

    @field_validator("tenants")
    @classmethod
    def _fit(cls, value: dict[str, TenantOptions]) -> dict[str, TenantOptions]:
        check_shares(value)
        return value

    @property
    def served(self) -> tuple[ModelSection, ...]:
        """The models and their versions, in either form."""
        if self.models:
            return self.models
        one = {key: getattr(self, key) for key in _OF_ONE_MODEL}
        return (ModelSection(**one),)

    def worker_sections(self) -> dict[str, WorkerDeployment]:
        """The deployments of workers that run, by their kind, with the model if there are several."""
        return {
            f"{kind}-{one.suffix}" if self.models else kind: section
            for one in self.served
            for kind, section in ({DYNAMIC: one.dynamic} if self.roles == DYNAMIC else one.sections()).items()
        }

    def model_of(self, key: str) -> ModelSection:
        """The model whose workers a deployment has."""
        _, _, suffix = key.partition("-")
        return next(one for one in self.served if not suffix or one.suffix == suffix)

    def role_plans(self) -> dict[str, RolePlan]:
        """What the directory needs to know to assign roles, by deployment; {}: they are fixed."""
        return {
            deployment_name(key): RolePlan(one.ttft_s, one.itl_s, one.period_s, one.drain_s)
            for key, one in self.worker_sections().items()
            if isinstance(one, DynamicDeployment)
        }

    @property
    def cache(self) -> ModelCache | None:
        """Where each host has its copies of models, if it has."""
        return None if self.model_cache is None else ModelCache(self.model_cache, self.model_cache_days)

    def given_options(self, key: str) -> dict[str, Any]:
        """What is said of the options of one deployment's workers, the most specific last. Of `threads`, null
        says nothing."""
        section, one = self.worker_sections()[key], self.model_of(key)
        found: dict[str, Any] = {}
        for options in (self.worker, one.worker, section.options):
            given = options.given()
            found |= {name: value for name, value in given.items() if (name, value) != ("threads", None)}
        return found

    def worker_options(self, key: str) -> WorkerOptions:
        """Options of one deployment's workers, without a directory."""
        section, one = self.worker_sections()[key], self.model_of(key)
        default = reserved_options(section.num_cpus, section.num_gpus)
        shares = {
            tenant: TenantShareOptions(min_share=given.min_share, max_share=given.max_share)
            for tenant, given in self.tenants.items()
        }
        return WorkerOptions(
            **{**default, "tenants": shares, **self.given_options(key)},
            **self._sockets(),
            model=one.model,
            served_model_name=one.model_name,
            generation_config=one.generation_config,
            model_version=one.model_version,
        )

    def router_options(self) -> RouterOptions:
        """Options of the router, without a directory."""
        sections: dict[str, list[ModelSection]] = {}
        for one in self.served:
            sections.setdefault(one.model_name, []).append(one)
        models = tuple(_routed(versions[0]) for versions in sections.values())
        given = self.router.options.given()
        weights = {tenant: options.weight for tenant, options in self.tenants.items()}
        given["tenant_weights"] = {**weights, **given.get("tenant_weights", {})}
        return RouterOptions(**given, **self._sockets(), models=models)

    def router_config(self) -> RouterConfig:
        """What a router takes while it runs."""
        weights: dict[str, dict[str, float]] = {one.model_name: {} for one in self.served}
        for one in self.served:
            if one.weight is not None:
                weights[one.model_name][one.model_version] = one.weight
        return RouterConfig(version_weights=weights)

    def cpus(self) -> float:
        """CPUs that the whole application reserves at its largest."""
        sections: list[RouterDeployment | WorkerDeployment] = [self.router, *self.worker_sections().values()]
        return sum(most_replicas(section) * section.num_cpus for section in sections)

    def shutdown_s(self) -> float:
        """How long the application may take to end: Serve's bound of the slowest deployment, and a bit."""
        sections = (self.router, *self.worker_sections().values())
        return max(section.graceful_shutdown_timeout_s for section in sections) + 15.0

    def _sockets(self) -> dict[str, Any]:
        return {
            "interface": self.interface,
            "ports": self.ports,
            "cluster_secret_file": self.cluster_secret_file,
        }


def _routed(one: ModelSection) -> RoutedModel:
    """Its text side. A template is read here: the router may be on another node."""
    template = one.chat_template
    return RoutedModel(
        model=Path(one.model),
        served_model_name=one.model_name,
        generation_config=one.generation_config,
        tool_call_parser=one.tool_call_parser,
        reasoning_parser=one.reasoning_parser,
        chat_template=None if template is None else template_text(template),
    )


def deployment_name(key: str) -> str:
    """Serve's name of a deployment of workers: ids of workers begin with it."""
    return key.replace(DYNAMIC, "worker", 1) if key.startswith(DYNAMIC) else key


def most_replicas(section: RouterDeployment | WorkerDeployment) -> int:
    """Replicas a deployment may grow to."""
    scaling = section.autoscaling_config
    return section.num_replicas if scaling is None else scaling.max_replicas


def parse_config(raw: dict[str, Any]) -> ServeConfig:
    """A checked configuration. Raises ConfigError naming the first wrong key."""
    refuse_placeholders(raw)
    config = parse_options(ServeConfig, raw)
    _check_sections(config)
    _check_models(config)
    _check_policy(config)
    options = {key: config.worker_options(key) for key in config.worker_sections()}
    for key, found in options.items():
        _check_context(found, key)
        _check_gpus(found, config.worker_sections()[key].num_gpus, key)
        if key.startswith(Role.PREFILL):
            _check_agreement(found, options[key.replace(Role.PREFILL, Role.DECODE, 1)])
    return config


def _check_models(config: ServeConfig) -> None:
    """One form or the other, and versions that can be told apart."""
    if not config.models:
        if not config.model:
            raise ConfigError("model", "no model is named", "give its directory or id, or several in models")
        return
    for key in sorted({*_OF_ONE_MODEL} & config.model_fields_set):
        raise ConfigError(key, "it is for one model, and models names several", "move it into models")
    suffixes = [one.suffix for one in config.models]
    for number, one in enumerate(config.models):
        if suffixes.index(one.suffix) != number:
            raise ConfigError(
                f"models.{number}.model_version",
                f"its workers would be named {one.suffix}, as those of another entry",
                "give versions of one model different values of model_version",
            )
        alike = [other for other in config.models if other.model_name == one.model_name]
        if one.weight is None and any(other.weight is not None for other in alike):
            raise ConfigError(
                f"models.{number}.weight",
                f"another version of {one.model_name} has one, so this gets no streams",
                "give all of them a weight, or none",
            )


def _check_policy(config: ServeConfig) -> None:
    try:
        make_policy(config.router.options.policy, PolicyWeights(), 0)
    except ConfigError as error:
        raise ConfigError(f"router.options.{error.key}", error.problem, error.remedy) from None


def _check_sections(config: ServeConfig) -> None:
    idle = {"prefill", "decode"} if config.roles == DYNAMIC else {DYNAMIC}
    given = {"": config.model_fields_set}
    given |= {f"models.{number}.": one.model_fields_set for number, one in enumerate(config.models)}
    for prefix, keys in given.items():
        for key in sorted(idle & keys):
            problem = f"it has no effect with roles: {config.roles}"
            raise ConfigError(f"{prefix}{key}", problem, "remove it, or change roles")


def _check_context(options: WorkerOptions, key: str) -> None:
    context, pool = options.max_context_tokens, options.max_total_tokens
    if context is not None and pool is not None and context > pool:
        raise ConfigError(
            f"{key}.options.max_context_tokens",
            f"a context of {context} tokens does not fit a pool of {pool}",
            f"lower it, or raise max_total_tokens to {context} or more",
        )


def _check_gpus(options: WorkerOptions, num_gpus: float, key: str) -> None:
    """Each rank has a GPU of its own."""
    if options.device != "cpu" and 0 < num_gpus < options.tp_size > 1:
        raise ConfigError(
            f"{key}.num_gpus",
            f"it is {num_gpus:g}, and the model is computed by {options.tp_size} ranks",
            f"give {options.tp_size}, or change tp_size",
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
