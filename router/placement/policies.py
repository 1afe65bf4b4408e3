"""The policies by name."""

from __future__ import annotations

import random

from common.errors import ConfigError
from router.placement.affinity_policy import PrefixAffinity
from router.placement.kv_policy import KVPolicy
from router.placement.peer_fetch import PeerFetch
from router.placement.policy import Policy
from router.placement.simple_policies import LeastLoaded, Random, RoundRobin
from router.placement_options import PolicyWeights

POLICIES: dict[str, type[Policy]] = {
    "kv": KVPolicy,
    "prefix-affinity": PrefixAffinity,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "random": Random,
}


def make_policy(
    name: str,
    weights: PolicyWeights,
    alone_tokens: int,
    chance: random.Random | None = None,
    peer_fetch: bool | None = None,
) -> Policy:
    """Make a policy. Raises ConfigError, with the known names, for an unknown name.

    `peer_fetch`: it names workers to fetch from; None: if it is `kv`. `prefix-affinity` never does: it has no
    index.
    """
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    fetches = name == "kv" if peer_fetch is None else peer_fetch
    peers = PeerFetch(weights) if fetches else None
    return POLICIES[name](weights, alone_tokens, chance or random.Random(), peers)  # noqa: S311 (spreads load)
