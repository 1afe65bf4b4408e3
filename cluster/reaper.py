"""Reaper: ends worker replicas that are still there after their lease has ended.

Such a process is stopped, cut off or stuck. It may still write into the memory of decode workers, which keep
those pages in quarantine until it is gone (docs/decisions/0004-fences.md). Serve's health check finds it,
too, but only after its own time-out, and not while the process answers Serve and nobody else.
"""

from __future__ import annotations

import logging
import threading

import ray
from ray.exceptions import RayError

from cluster.worker_ids import parse_worker_id
from wire.records import WorkerRecord

log = logging.getLogger(__name__)

_SERVE_NAMESPACE = "serve"


class Reaper:
    """Kills by the name that Serve gives to a replica's actor, so never a process that is not ours."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name

    def end(self, record: WorkerRecord) -> None:
        """Kill the worker's replica, if it is still there. Serve starts another one.

        Does not wait: Ray may take long to answer, and the caller renews the leases of all workers.
        """
        threading.Thread(target=self._kill, args=(record,), name="reaper", daemon=True).start()

    def _kill(self, record: WorkerRecord) -> None:
        deployment, replica = parse_worker_id(record.id)
        name = f"SERVE_REPLICA::{self._app_name}#{deployment}#{replica}"
        try:
            actor = ray.get_actor(name, namespace=_SERVE_NAMESPACE)
            log.warning("worker %s is killed: its lease has ended and its process is still there", record.id)
            ray.kill(actor)
        except ValueError:
            pass  # there is no such actor any more
        except RayError as error:
            log.warning("worker %s cannot be killed, Serve's health check must: %s", record.id, error)
