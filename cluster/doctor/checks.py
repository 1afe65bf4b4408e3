"""All checks: from the facts of nodes to findings. Nothing here looks at a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.doctor import agreement, node_checks
from cluster.doctor.facts import Case, Finding

_CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    node_checks.check_config,
    agreement.check_versions,
    agreement.check_clocks,
    node_checks.check_addresses,
    node_checks.check_ports,
    agreement.check_reach,
    agreement.check_secret,
    node_checks.check_model,
    node_checks.check_resources,
    node_checks.check_gpus,
    node_checks.check_memory,
    node_checks.check_shared_memory,
    node_checks.check_rdma,
)


def judge(case: Case) -> list[Finding]:
    """What every check finds for each node."""
    return [finding for check in _CHECKS for finding in check(case)]
