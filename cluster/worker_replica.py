"""A prefill or decode worker as a Serve replica.

Ray places, watches and ends it. Requests, tokens and pages do not pass through Serve.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.autoscaling import LOAD
from cluster.directory_actor import DirectoryFinder
from cluster.model_files import model_directory
from cluster.node import node_interface, node_rack
from cluster.reaper import worker_id
from cluster.refusal import readable_refusal
from common.garbage import freeze_gc
from scaling.load import load_share, worker_sample
from wire.records import Role
from worker.options import WorkerOptions
from worker.transfer_log import tell_transfer

if TYPE_CHECKING:
    from worker.loop import Worker

_DIRECTORY_WAIT_S = 120.0


class WorkerReplica:
    """Owns one worker for as long as Serve keeps the replica."""

    def __init__(self, role: Role, options: WorkerOptions, drain_s: float) -> None:
        """Load the model and join the directory. Raises ReplicaRefused for options that cannot work."""
        self._drain_s = drain_s
        context = serve.get_replica_context()
        finder = DirectoryFinder(context.app_name)
        with readable_refusal():
            self._options = options.model_copy(
                update={
                    "worker_id": worker_id(role, context.replica_tag),
                    "model": str(model_directory(options.model)),
                    "interface": node_interface(options.interface),
                    "rack": options.rack or node_rack(),
                    "directory": finder.wait(_DIRECTORY_WAIT_S),
                }
            )
            self._worker = make_worker(role, self._options, finder)
            self._worker.start()
        tell_transfer(self._options, sum(node["Alive"] for node in ray.nodes()))
        freeze_gc()

    async def check_health(self) -> None:
        """Serve's health check. Raises when the engine loop is dead or stuck; Serve then replaces the
        replica."""
        self._worker.healthy()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's autoscaling hook: what LoadPolicy and ObjectivePolicy read."""
        record, metrics = self._worker.record(), self._worker.metrics
        sample = worker_sample(record, metrics.prompts, metrics.prefill_tokens, metrics.decode_tokens)
        return {LOAD: load_share(record, self._options.max_prefill_tokens), **asdict(sample)}

    async def __del__(self) -> None:
        """Drain and close. Serve awaits this, within graceful_shutdown_timeout_s, before it ends the process.

        Serve's own drain returns at once: it counts requests that came through Serve, and there are none.
        """
        if hasattr(self, "_worker"):
            await asyncio.to_thread(self._worker.drain, self._drain_s)
            await asyncio.to_thread(self._worker.close)


def make_worker(role: Role, options: WorkerOptions, finder: DirectoryFinder) -> Worker:
    """The worker of that role.

    Imported here and not above: the CLI and the process that builds the application load this module, too,
    and importing torch would cost them seconds and hundreds of MB.
    """
    if role is Role.PREFILL:
        from prefill_node.worker import PrefillWorker

        return PrefillWorker(options, finder.find)
    from decode_node.worker import DecodeWorker

    return DecodeWorker(options, finder.find)
