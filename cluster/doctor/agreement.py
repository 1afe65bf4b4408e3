"""Checks of what all nodes must agree on: versions, clocks, the secret, and the way to each other."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from cluster.doctor.facts import Case, Finding, Grade, NodeFacts, Reach
from cluster.doctor.node_checks import wants_mooncake

_Value = TypeVar("_Value", bound=Hashable)

MOST_CLOCK_S = 1.0
_REPLACE = {
    "Baton": "copy the same source or image to every node (ray up, or the image's tag)",
    "Ray": "install the same Ray on every node, and start Ray there again",
    "Python": "use the same Python on every node",
}


def check_versions(case: Case) -> Iterator[Finding]:
    """Everything that is needed is installed, in the same version as on the other nodes."""
    names = list(dict.fromkeys(name for node in case.nodes for name in node.versions))
    usual = {name: _most_common([node.versions.get(name, "") for node in case.nodes]) for name in names}
    for node in case.nodes:
        wrong = []
        for name in names:
            here, others = node.versions.get(name, ""), usual[name]
            if here != others:
                found = f"{name} {here or 'is not installed'} here, {others or 'none'} on other nodes"
                wrong.append(_wrong_version(node.node, name, found))
            elif not here and (name != "Mooncake" or wants_mooncake(case.config)):
                wrong.append(_wrong_version(node.node, name, f"{name} is not installed"))
        said = ", ".join(f"{name} {version}" for name, version in node.versions.items() if version)
        yield from wrong or [Finding("versions", node.node, Grade.OK, said)]


def _wrong_version(node: str, name: str, found: str) -> Finding:
    alike = f"install the same {name} on every node (make setup, or an image of deploy/docker)"
    return Finding("versions", node, Grade.FAULT, found, _REPLACE.get(name, alike))


def check_clocks(case: Case) -> Iterator[Finding]:
    """Clocks agree. Resume tokens, certificates and the times in logs and traces depend on it."""
    usual = statistics.median_low(node.clock_ahead_s for node in case.nodes)
    for node in case.nodes:
        ahead = node.clock_ahead_s - usual
        found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others"
        if abs(ahead) - node.clock_error_s > MOST_CLOCK_S:
            remedy = "run a time service there (chrony, systemd-timesyncd) and set the clock once"
            yield Finding("clock", node.node, Grade.FAULT, found, remedy)
        elif len(case.nodes) > 1:
            yield Finding("clock", node.node, Grade.OK, f"{found}, known to {node.clock_error_s:.2f} s")


def check_reach(case: Case) -> Iterator[Finding]:
    """Every node gets through to every other one, on one port of each range."""
    by_target: dict[str, list[Reach]] = defaultdict(list)
    for reach in case.reaches:
        by_target[reach.target.node].append(reach)
    for node, reaches in by_target.items():
        failed = [reach for reach in reaches if reach.problem]
        sources = ", ".join(sorted({reach.source for reach in failed}))
        host = reaches[0].target.host
        if not failed:
            count = len({reach.source for reach in reaches})
            yield Finding("reachable", node, Grade.OK, f"{host}, from {count} node(s)")
        elif len(failed) == len(reaches):
            found = f"the announced address {host} is not reached from {sources}: {failed[0].problem}"
            remedy = "set interface to the device or address of the network that all nodes share, and open it"
            yield Finding("reachable", node, Grade.FAULT, found, remedy)
        else:
            yield from _closed_ports(node, failed)


def _closed_ports(node: str, failed: Sequence[Reach]) -> Iterator[Finding]:
    for use in dict.fromkeys(reach.target.use for reach in failed):
        some = [reach for reach in failed if reach.target.use == use]
        target = some[0].target
        sources = ", ".join(sorted({reach.source for reach in some}))
        found = f"port {target.port} of ports.{use} is closed to {sources}: {some[0].problem}"
        which = target.ports if target.ports != "0" else "all ports, or set a range and open that"
        yield Finding(
            "reachable", node, Grade.FAULT, found, f"open {which} between the nodes (docs/security.md)"
        )


def check_secret(case: Case) -> Iterator[Finding]:
    """What a node uses as its secret is accepted by all others."""
    usual = _most_common([node.secret_digests for node in case.nodes])
    for node in case.nodes:
        others = [one for one in case.nodes if one is not node and "secret" not in one.unusable]
        own = node.secret_digests
        if "secret" in node.unusable:
            why = node.unusable["secret"]
            yield Finding("secret", node.node, Grade.FAULT, why.problem, why.remedy)
        elif all(_accepts(one, node) for one in others) or (own == usual and len(case.nodes) > 2):
            said = f"{len(own)} accepted" if own else "none: every process that reaches a port is believed"
            yield Finding("secret", node.node, Grade.OK, said)
        else:
            found = "another one than on other nodes" if own else "none here, and other nodes have one"
            remedy = "put the same cluster_secret_file on every node, with mode 600"
            yield Finding("secret", node.node, Grade.FAULT, found, remedy)


def _accepts(one: NodeFacts, other: NodeFacts) -> bool:
    """Whether the secret that the other uses, the first of its file, is one that this node accepts."""
    if not other.secret_digests:
        return not one.secret_digests
    return other.secret_digests[0] in one.secret_digests


def _most_common(values: Sequence[_Value]) -> _Value:
    return Counter(values).most_common(1)[0][0]
