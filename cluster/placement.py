"""Where Ray puts replicas, as the configuration says and Serve 2.60 can.

Serve spreads the replicas of a deployment over the nodes that fit, as far as it can. `placement: pack` fills
a node before the next one; Serve knows it for all deployments of a cluster together, from an environment
variable that it reads at its start. (A placement group per replica does not pack: Ray puts each where most is
free.) No replica needs a placement group: a worker is one process, and its GPUs are on one node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError, field_validator

from common.errors import ConfigError
from common.options import Options

PACK_VARIABLE = "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY"


class NodeChoice(StrEnum):
    """Which of the nodes that fit a replica gets."""

    SPREAD = "spread"  # the one with the fewest replicas, as far as Serve can
    PACK = "pack"  # the fullest


class NodeOptions(Options):
    """Which nodes fit, besides having what a replica reserves."""

    labels: dict[str, str] = Field(
        default={},
        description="labels of the nodes that replicas may be on, such as {baton/role: prefill}; a value may "
        "begin with !, or be in(a, b) or !in(a, b)",
    )
    accelerator_type: str | None = Field(
        default=None, min_length=1, description="the nodes' accelerator, as Ray calls it, such as H200"
    )
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="of this deployment; 1: no two on a node, whatever is free"
    )

    @field_validator("labels")
    @classmethod
    def _selectable(cls, labels: dict[str, str]) -> dict[str, str]:
        # Here, because it loads Ray Serve, and most configurations say nothing of labels.
        from ray.serve.schema import RayActorOptionsSchema

        try:
            RayActorOptionsSchema(label_selector=labels)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from None
        return labels

    def actor_options(self) -> dict[str, Any]:
        """The part of a deployment's `ray_actor_options`."""
        options: dict[str, Any] = {}
        if self.labels:
            options["label_selector"] = self.labels
        if self.accelerator_type is not None:
            options["accelerator_type"] = self.accelerator_type
        return options


def check_placement(placement: NodeChoice, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError when Serve was not started to place replicas like that."""
    packs = environment.get(PACK_VARIABLE, "0") == "1"
    if packs != (placement is NodeChoice.PACK):
        raise ConfigError(
            "placement",
            f"{placement} is asked, and Serve {'packs' if packs else 'spreads'} replicas here",
            f"set {PACK_VARIABLE}={int(not packs)} where Ray is started, on every node",
        )
