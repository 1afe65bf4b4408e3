"""The words in capitals in deploy/, for what only the user knows. Baton does not start with one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.errors import ConfigError

PLACEHOLDERS = {
    "HEAD_ADDRESS": "the address of the head node",
    "WORKER_ADDRESS_1": "the address of a worker node",
    "WORKER_ADDRESS_2": "the address of a worker node",
    "REDIS_ADDRESS": "the address of the Redis that keeps Ray's state",
    "IMAGE": "the image that was built from deploy/docker/",
    "AMI_ID": "the id of a machine image of AWS",
    "SUBNET_ID": "the id of a subnet of AWS",
    "SECURITY_GROUP_ID": "the id of a security group of AWS",
    "PROJECT_ID": "the id of a project of Google Cloud",
    "BOOT_IMAGE": "a boot image of Google Cloud",
    "GPU_IMAGE": "a boot image of Google Cloud with NVIDIA's driver",
}
"""Placeholder to what belongs in its place; docs/operations.md names the files, too."""


def refuse_placeholders(raw: dict[str, Any]) -> None:
    """Raises ConfigError that names the first key of a configuration whose value is still a placeholder."""
    for key, value in _strings(raw, ""):
        if value in PLACEHOLDERS:
            raise ConfigError(key, f"{value} is a placeholder", f"put {PLACEHOLDERS[value]} in its place")


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every string in nested mappings and lists, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _strings(inner, f"{key}.{position}")
