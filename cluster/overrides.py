"""What `deployments` of a Serve config put in the place of what `args` say of workers.

Baton builds the application from `args` alone, and Serve merges `deployments` into it afterwards. So each
replica looks at what it was given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from cluster.deployments import DRAIN_SHARE, reserved_options
from common.errors import ConfigError


@dataclass(frozen=True)
class Planned:
    """What `args` say of a replica."""

    scales: bool  # there is an autoscaling_config
    drain_s: float
    env: frozenset[str]  # names of environment variables
    follows: frozenset[str]  # options of FOLLOWING that nobody says


@dataclass(frozen=True)
class Deployed:
    """What a replica has got."""

    deployment: str
    config: Any  # Serve's DeploymentConfig, to which a replica has no public way
    num_cpus: float
    num_gpus: float

    @classmethod
    def here(cls) -> Deployed:
        """Of the replica in this process, now: Serve changes some of it while the replica runs."""
        context = serve.get_replica_context()
        assigned = ray.get_runtime_context().get_assigned_resources()
        cpus, gpus = assigned.get("CPU", 0.0), assigned.get("GPU", 0.0)
        return cls(context.deployment, context._deployment_config, cpus, gpus)

    def options(self, planned: Planned) -> dict[str, Any]:
        """The worker options that follow from what is reserved."""
        reserved = reserved_options(self.num_cpus, self.num_gpus)
        return {key: value for key, value in reserved.items() if key in planned.follows}

    def drain_s(self, planned: Planned) -> float:
        """How long the replica may drain: Serve ends it at its own bound."""
        bound_s: float = self.config.graceful_shutdown_timeout_s
        return min(planned.drain_s, DRAIN_SHARE * bound_s)

    def check_scaling(self) -> None:
        """Raises ConfigError when Serve's own policy scales workers."""
        if self._counts_requests:
            raise self._scaling_error()

    @property
    def _counts_requests(self) -> bool:
        scaling = self.config.autoscaling_config
        return scaling is not None and bool(scaling.policy.is_default_policy_function())

    def _scaling_error(self) -> ConfigError:
        return ConfigError(
            f"deployments.{self.deployment}.autoscaling_config",
            "it takes the place of what args say, and scales by the requests that Serve counts: it counts "
            "none of workers, so there would soon be min_replicas of them",
            "move it into args, to the section of these workers (docs/scaling.md)",
        )

    def unheeded(self, planned: Planned) -> list[str]:
        """What has no effect, or not the one that was meant."""
        found = [str(self._scaling_error())] if self._counts_requests else []
        names = self.config.user_configured_option_names
        if planned.scales and "num_replicas" in names and self.config.num_replicas:
            found.append(
                f"deployments.{self.deployment}.num_replicas has no effect: args give these workers an "
                "autoscaling_config"
            )
        lost = sorted(planned.env - set(os.environ))
        if lost:
            found.append(
                f"deployments.{self.deployment}.ray_actor_options takes the place of all that args reserve: "
                f"env is not set ({', '.join(lost)}); give it in runtime_env.env_vars there"
            )
        return found
