"""RouterConfig: what a router takes while it runs, as `user_config` of its Serve deployment.

`cluster.app:build` makes it of `models[].weight`. In a Serve config it may also be given under `deployments`:
then `serve deploy` changes it without restarting a replica, which a change under `args` does.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from common.errors import ConfigError
from common.options import Options, parse_options
from router.options import RoutedModel, VersionWeights


class RouterConfig(Options):
    """`user_config` of the deployment `router`."""

    version_weights: dict[str, VersionWeights] = Field(
        default={},
        description=f"by served_model_name: {RoutedModel.model_fields['version_weights'].description}. A "
        "model that is not named keeps what it has",
    )


def parse_router_config(raw: dict[str, Any], models: frozenset[str]) -> RouterConfig:
    """A checked configuration for a router of these models. Raises ConfigError."""
    config = parse_options(RouterConfig, raw)
    for name in config.version_weights:
        if name not in models:
            raise ConfigError(
                f"user_config.version_weights.{name}",
                f"no model has this name; there are {', '.join(sorted(models))}",
                "give one of them",
            )
    return config
