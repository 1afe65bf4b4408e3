"""The Ray that runs already, and what our application on it announces."""

from __future__ import annotations

import os
import re
import socket

import ray
from ray.exceptions import RayError

from cluster.directory_actor import DirectoryFinder
from common.errors import ConfigError, Unavailable

APP_NAME = "baton"
_CONNECT_S = 5.0
_HOST_PORT = re.compile(r"([^/]+):(\d+)")


def announced_listeners() -> list[str]:
    """URLs of the admin listeners of the application on this machine's Ray; none without one."""
    address = running_ray()
    if address is None:
        return []
    connect_ray(address)
    try:
        return DirectoryFinder(APP_NAME).admins()
    except Unavailable:
        return []
    finally:
        ray.shutdown()


def connect_ray(address: str, worker_logs: bool = False) -> None:
    """Connect to the Ray at `address`, HOST:PORT or `auto`. Raises ConfigError when it cannot be used."""
    there = _HOST_PORT.fullmatch(address)
    try:
        if there is not None:  # Ray itself would try for minutes
            socket.create_connection((there[1].strip("[]"), int(there[2])), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=worker_logs, logging_level="ERROR")
    except (RayError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "RAY_ADDRESS", f"{address} is no Ray that can be used: {error}", "give its HOST:PORT, or auto"
        ) from None


def running_ray() -> str | None:
    """Address of the Ray that RAY_ADDRESS names or that this machine runs; None when there is none."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return None if address == "local" else address
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        return None
    address = str(ray.get_runtime_context().gcs_address)
    ray.shutdown()
    return address
