"""Policies by name."""

from __future__ import annotations

import random

from router.affinity_policy import PrefixAffinity
from router.kv_policy import KVPolicy
from router.options import PolicyWeights
from router.policy import Policy
from router.simple_policies import LeastLoaded, Random, RoundRobin
from wire.errors import ConfigError

POLICIES: dict[str, type[Policy]] = {
    "kv": KVPolicy,
    "prefix-affinity": PrefixAffinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": Random,
}


def make_policy(
    name: str, weights: PolicyWeights, alone_tokens: int, chance: random.Random | None = None
) -> Policy:
    """The policy of that name. Raises ConfigError listing the names there are."""
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    return POLICIES[name](weights, alone_tokens, chance or random.Random())
