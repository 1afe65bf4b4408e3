"""The node where Ray has put a replica: the address to bind to, and the rack."""

from __future__ import annotations

import ray

from common.errors import ConfigError
from common.host import AUTO, is_loopback, local_address

RACK_LABEL = "baton/rack"
"""The label of Ray's nodes that names their rack: `ray start --labels baton/rack=r7`."""


def node_interface(interface: str) -> str:
    """The address that `interface` means on this node; for `auto`, the one that Ray uses.

    Raises ConfigError for one that means nothing here, and for loopback when the cluster has other nodes.
    """
    if interface == AUTO:
        return local_address(str(ray.util.get_node_ip_address()))
    address = local_address(interface)
    others = sum(1 for node in ray.nodes() if node["Alive"]) - 1
    if others > 0 and is_loopback(address):
        raise ConfigError(
            "interface", f"{interface} cannot be reached from {others} other node(s)", f"use {AUTO}"
        )
    return address


def node_rack() -> str:
    """The rack that this node's labels name; "": none."""
    return str(ray.get_runtime_context().get_node_labels().get(RACK_LABEL, ""))
