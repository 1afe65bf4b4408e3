"""The node where Ray has put a replica: the address to bind to, and the rack."""

from __future__ import annotations

import ray

from common.errors import ConfigError

AUTO = "auto"
RACK_LABEL = "baton/rack"
"""The label of Ray's nodes that names their rack: `ray start --labels baton/rack=r7`."""
_LOOPBACK = ("127.", "::1", "localhost")


def node_interface(interface: str) -> str:
    """`interface` itself, or the node's own address for `auto`.

    Raises ConfigError for a loopback address when the cluster has other nodes.
    """
    if interface == AUTO:
        return str(ray.util.get_node_ip_address())
    others = sum(1 for node in ray.nodes() if node["Alive"]) - 1
    if others > 0 and interface.startswith(_LOOPBACK):
        raise ConfigError(
            "interface", f"{interface} cannot be reached from {others} other node(s)", f"use {AUTO}"
        )
    return interface


def node_rack() -> str:
    """The rack that this node's labels name; "": none."""
    return str(ray.get_runtime_context().get_node_labels().get(RACK_LABEL, ""))
