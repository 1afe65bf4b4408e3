"""The Ray Serve application: `serve run deploy/local.yaml`, or `import_path: cluster.app:build`.

    HTTP -> Serve proxy -> router (ingress) ~~ZeroMQ~~> prefill ==KV==> decode ~~ZeroMQ~~> router

Serve places, replaces and scales the three deployments; with `roles: dynamic` there is one of workers instead
of two. Several models have workers of their own each. The ingress is bound to the workers' handles so that
they belong to the application; it does not call them.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve

from cluster.autoscaling import LoadPolicy, ObjectivePolicy
from cluster.config import DYNAMIC, ServeConfig, deployment_name, parse_config
from cluster.deployments import (
    FOLLOWING,
    Deployment,
    DynamicDeployment,
    RouterDeployment,
    WorkerAutoscaling,
    WorkerDeployment,
)
from cluster.local import ROUTER
from cluster.overrides import Planned
from cluster.placement import check_placement
from cluster.router_replica import RouterReplica
from cluster.worker_replica import WorkerReplica
from router.keys import API_KEYS_ENV
from wire.records import Role

_CONSTRUCTOR_TRIES = 3  # Serve's default of 20 would load a model that cannot work 20 times
_SHUTDOWN_POLL_S = 0.2
_DECISION_S = 10.0  # as often as Serve's replicas push their figures


def build(args: dict[str, Any]) -> serve.Application:
    """The application for a configuration (cluster/config.py). Raises ConfigError when it cannot work."""
    config = parse_config(args)
    check_placement(config.placement)
    return application(config)


def application(config: ServeConfig) -> serve.Application:
    """The application for a configuration that has been checked."""
    return router_application(config, *(_bind_worker(config, key) for key in config.worker_sections()))


def router_application(config: ServeConfig, *workers: serve.Application) -> serve.Application:
    """The ingress alone, or with the worker deployments that belong to it."""
    settings = {**_router_settings(config.router), "user_config": config.router_config().model_dump()}
    ingress = serve.deployment(name=ROUTER, **settings)(serve.ingress()(RouterReplica))
    keyed = API_KEYS_ENV in os.environ
    return ingress.bind(config.router_options(), config.role_plans(), *workers, keys_given=keyed)


def _bind_worker(config: ServeConfig, key: str) -> serve.Application:
    section, options = config.worker_sections()[key], config.worker_options(key)
    kind = key.partition("-")[0]
    role = None if kind == DYNAMIC else Role(kind)
    settings = _worker_settings(section, kind)
    deployment = serve.deployment(name=deployment_name(key), **settings)(WorkerReplica)
    follows = frozenset(FOLLOWING) - config.given_options(key).keys()
    scales = section.autoscaling_config is not None
    planned = Planned(scales, section.drain_s, frozenset(section.env), follows)
    return deployment.bind(role, options, planned, config.cache)


def _router_settings(section: RouterDeployment) -> dict[str, Any]:
    # A log line per request costs more than choosing its workers. /metrics and /debug/trace show more.
    settings = {**_common_settings(section), "logging_config": {"enable_access_log": False}}
    if section.autoscaling_config is not None:
        settings["autoscaling_config"] = section.autoscaling_config.model_dump(exclude_none=True)
    return settings


def _worker_settings(section: WorkerDeployment, role: str) -> dict[str, Any]:
    settings = _common_settings(section)
    if section.autoscaling_config is not None:
        objectives = _objectives(section, section.autoscaling_config.objective_s, role)
        settings["autoscaling_config"] = _scaling(section.autoscaling_config, objectives)
    return settings


def _objectives(section: WorkerDeployment, objective_s: float | None, role: str) -> dict[str, float | None]:
    """p95 of TTFT and ITL, as far as the number of workers depends on them."""
    if isinstance(section, DynamicDeployment):
        return {"ttft_s": section.ttft_s, "itl_s": section.itl_s}
    ttft = role == Role.PREFILL
    return {"ttft_s": objective_s if ttft else None, "itl_s": None if ttft else objective_s}


def _scaling(scaling: WorkerAutoscaling, objectives: dict[str, float | None]) -> dict[str, Any]:
    settings = scaling.model_dump(exclude_none=True, exclude={"target_load", "objective_s", "start_s"})
    if not any(objectives.values()):
        return {**settings, "policy": _policy(LoadPolicy, target_load=scaling.target_load)}
    policy = _policy(
        ObjectivePolicy,
        **objectives,
        start_s=scaling.start_s,
        hold_s=scaling.downscale_delay_s,
        period_s=_DECISION_S,
    )
    # The policy has hysteresis of its own: Serve's delays would come on top.
    return {**settings, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "policy": policy}


def _policy(policy: type, **options: Any) -> dict[str, Any]:
    return {"policy_function": f"{policy.__module__}:{policy.__name__}", "policy_kwargs": options}


def _common_settings(section: RouterDeployment | WorkerDeployment) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_ongoing_requests": section.max_ongoing_requests,
        "graceful_shutdown_timeout_s": section.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_POLL_S,
        "health_check_period_s": section.health_check_period_s,
        "health_check_timeout_s": section.health_check_timeout_s,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "ray_actor_options": _actor_options(section),
        "max_surge_percent": section.max_surge_percent,
    }
    if section.autoscaling_config is None:
        settings["num_replicas"] = section.num_replicas
    if section.max_replicas_per_node is not None:
        settings["max_replicas_per_node"] = section.max_replicas_per_node
    return settings


def _actor_options(section: Deployment) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": section.num_cpus, "num_gpus": section.num_gpus}
    if section.resources:
        options["resources"] = section.resources
    if section.env:
        options["runtime_env"] = {"env_vars": section.env}
    return options | section.actor_options()
