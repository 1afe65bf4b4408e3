"""Settings: what was said while a cluster runs, and which all its processes know alike.

The directory tells them with every View and every Announced, and is told them with every Watch and every
Announce. All keep what was said last. So nothing is lost while one router or worker lives, whatever else is
started again, and nothing is stored anywhere (docs/decisions/0040-settings.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from wire.numbers import Natural, Quantity

MOST_SETTINGS = 1000  # of each kind


class Setting(msgspec.Struct, frozen=True):
    """What was said last of one thing. What replaces it has the next `revision`."""

    revision: Natural

    def is_later_than(self, other: Setting | None) -> bool:
        """Whether this holds, and not the other. Of two that were said at once all take the same."""
        return other is None or (self.revision, _packed(self)) > (other.revision, _packed(other))


class ModelWeights(Setting, frozen=True):
    """How the new streams of a model are divided among its versions. `weights` of version names are those in
    force; {}: by decode capacity.

    `configured` are those of the configuration that was deployed last: a router that starts with the same
    says nothing new, so what an operator has said since stays.
    """

    weights: dict[str, Quantity]
    configured: dict[str, Quantity]


class DeploymentRoles(Setting, frozen=True):
    """How many workers of a deployment with dynamic roles an operator wants in each role. 0 and 0: the roles
    follow the load. Which worker has which role, the workers themselves know."""

    prefill: Natural
    decode: Natural


class TenantGeneration(Setting, frozen=True):
    """A tenant was forgotten: `revision` is its generation from then on (wire/page_hash.py), and pages of the
    generations in `forgotten` may still lie somewhere."""

    forgotten: list[Natural]


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that was said. `weights` are by model, `roles` by deployment, `tenants` by name."""

    weights: dict[str, ModelWeights] = {}
    roles: dict[str, DeploymentRoles] = {}
    tenants: dict[str, TenantGeneration] = {}

    def with_told(self, told: Settings) -> Settings:
        """These with what another process knows and was said later. The same object if that is nothing."""
        weights, roles = _latest(self.weights, told.weights), _latest(self.roles, told.roles)
        tenants = _latest(self.tenants, told.tenants)
        is_same = weights is self.weights and roles is self.roles and tenants is self.tenants
        return self if is_same else Settings(weights, roles, tenants)


NO_SETTINGS = Settings()

_Kind = TypeVar("_Kind", bound=Setting)


def _latest(known: dict[str, _Kind], told: Mapping[str, _Kind]) -> dict[str, _Kind]:
    """What is known is never given up, and always takes the later word. Of new names only as many are taken
    as there is room for, in the order of the names."""
    later = {name: one for name, one in told.items() if one.is_later_than(known.get(name))}
    new = sorted(later.keys() - known.keys())
    for name in new[max(0, MOST_SETTINGS - len(known)) :]:
        del later[name]
    return {**known, **later} if later else known


def _packed(setting: Setting) -> bytes:
    return msgspec.msgpack.encode(setting, order="deterministic")
