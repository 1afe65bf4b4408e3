"""A prefill or decode worker, or one that changes its role, as a Serve replica.

Ray places, watches and ends it. Requests, tokens and pages do not pass through Serve.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.autoscaling import LOAD
from cluster.directory_actor import DirectoryFinder
from cluster.model_cache import ModelCache
from cluster.model_files import model_directory
from cluster.node import node_interface, node_rack
from cluster.overrides import Deployed, Planned
from cluster.refusal import readable_refusal
from cluster.start_notes import told
from cluster.worker_ids import worker_id
from common.descriptors import allow_descriptors
from common.garbage import freeze_gc
from common.start_log import start_log
from scaling.load import load_share, worker_sample
from wire.records import Role
from worker.options import WorkerOptions
from worker.transfer_log import tell_transfer

if TYPE_CHECKING:
    from worker.loop import Worker
    from worker.role import WorkerRole
    from worker.switch import SwitchingWorker

log = logging.getLogger(__name__)

_DIRECTORY_WAIT_S = 120.0


class WorkerReplica:
    """Owns one worker for as long as Serve keeps the replica."""

    def __init__(
        self, role: Role | None, options: WorkerOptions, planned: Planned, cache: ModelCache | None
    ) -> None:
        """Load the model and join the directory. Raises ReplicaRefused for options that cannot work.

        Without a `role` the directory says which one it has, then and later.
        """
        allow_descriptors()
        self._planned = planned
        self._unheeded: list[str] = []  # what was said of it last
        context = serve.get_replica_context()
        finder = DirectoryFinder(context.app_name)
        name = worker_id(context.deployment, context.replica_tag)
        with readable_refusal(), told(lambda text: finder.add_start_note(name, text)):
            given = Deployed.here()
            given.check_scaling()
            self._look_at_overrides()
            self._options = options.model_copy(
                update={
                    **given.options(planned),
                    "worker_id": name,
                    "model": str(model_directory(options.model, cache=cache.directory if cache else None)),
                    "interface": node_interface(options.interface),
                    "rack": options.rack or node_rack(),
                    "directory": finder.wait(_DIRECTORY_WAIT_S),
                }
            )
            start_log.info("loading %s", self._options.model_name)
            self._worker = make_worker(role, self._options, finder, given.drain_s(planned))
            self._worker.start()
        if cache is not None:
            cache.remove_unused()
        tell_transfer(self._options, sum(node["Alive"] for node in ray.nodes()))
        freeze_gc()

    async def check_health(self) -> None:
        """Serve's health check. Raises when the engine loop is dead or stuck; Serve then replaces the
        replica."""
        self._worker.healthy()
        self._look_at_overrides()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's autoscaling hook: what LoadPolicy and ObjectivePolicy read."""
        record = self._worker.record()
        return {LOAD: load_share(record, self._options.max_prefill_tokens), **asdict(worker_sample(record))}

    async def __del__(self) -> None:
        """Drain and close. Serve awaits this, within graceful_shutdown_timeout_s, before it ends the process.

        Serve's own drain returns at once: it counts requests that came through Serve, and there are none.
        """
        if hasattr(self, "_worker"):
            await asyncio.to_thread(self._worker.drain, Deployed.here().drain_s(self._planned))
            await asyncio.to_thread(self._worker.close)

    def _look_at_overrides(self) -> None:
        """Say what of `deployments` has no effect, once. Serve changes scaling while the replica runs: to
        refuse then would end workers that serve."""
        unheeded = Deployed.here().unheeded(self._planned)
        for problem in unheeded:
            if problem not in self._unheeded:
                log.warning("%s", problem)
        self._unheeded = unheeded


def make_worker(
    role: Role | None, options: WorkerOptions, finder: DirectoryFinder, drain_s: float
) -> Worker | SwitchingWorker:
    """The worker of that role, or one that changes it and drains for `drain_s` at most.

    Imported here and not above: the CLI and the process that builds the application load this module, too,
    and importing torch would cost them seconds and hundreds of MB.
    """
    from decode_node.role import DecodeRole
    from prefill_node.role import PrefillRole
    from worker.loop import Worker
    from worker.switch import SwitchingWorker

    roles: dict[Role, type[WorkerRole[Any]]] = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}
    if role is not None:
        return Worker(options, roles[role], finder.find)
    assert options.worker_id is not None, "a replica names its worker"
    first = finder.first_role(options.worker_id, _DIRECTORY_WAIT_S)
    return SwitchingWorker(options, roles, first, drain_s, finder.find)
