"""Ids of the workers in replicas."""

from __future__ import annotations


def worker_id(deployment: str, replica: str) -> str:
    """The id of the worker in a replica. `replica`: the replica's unique part, as Serve names it."""
    return f"{deployment}-{replica}"


def parse_worker_id(worker: str) -> tuple[str, str]:
    """The deployment and the replica of a worker's id; "" is the deployment of an id that has none."""
    deployment, _, replica = worker.rpartition("-")
    return deployment, replica
