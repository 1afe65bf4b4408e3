"""What a worker's log says of the way that its pages take to other hosts."""

from __future__ import annotations

import logging

from kvtransfer.mooncake_engine import why_no_rdma
from worker.options import WorkerOptions

log = logging.getLogger(__name__)


def tell_transfer(options: WorkerOptions, hosts: int) -> None:
    """Say why pages go to other hosts over TCP, if they do and nobody has asked for it. `hosts`: of the whole
    cluster; on a single one nobody wants to know."""
    why = why_no_rdma() if options.kv_transfer_backend == "auto" and hosts > 1 else ""
    if why:
        log.warning(
            "kv_transfer_backend is auto: pages go to other hosts over tcp, and mooncake is not offered: %s "
            "(kv_transfer_backend: mooncake would take Mooncake over TCP)",
            why,
        )
