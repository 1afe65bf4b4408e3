"""Mailbox and event addresses: `tcp://host:port`, and in a cluster with a secret `tcp://host:port/KEY`.

KEY is the CURVE public key of the process that binds the address, 64 hexadecimal digits. An address without
a key, in a cluster with a secret, is that of a directory at a fixed port (wire/security.py). Addresses come
from other processes, so they are checked before anything connects to them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from common.errors import WireError

LONGEST_ADDRESS = 255  # bytes: its length is one byte of a frame
_ADDRESS = re.compile(
    r"(tcp://(?:\[[0-9a-fA-F:.]+(?:%[A-Za-z0-9_.-]+)?\]|[A-Za-z0-9](?:[A-Za-z0-9_.-]*)):([0-9]{1,5}))"
    r"(?:/([0-9a-f]{64}))?"
)


class Address(NamedTuple):
    """`endpoint` is ZeroMQ's; `key` is the hexadecimal public key, or ""."""

    endpoint: str
    key: str


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """The parts of an address. Raises WireError for anything else."""
    found = _ADDRESS.fullmatch(text) if len(text) <= LONGEST_ADDRESS else None
    if found is None or not 0 < int(found[2]) < 65_536:
        raise WireError(f"{text[:LONGEST_ADDRESS]!r} is no address of the form tcp://host:port[/key]")
    return Address(found[1], found[3] or "")


def same_process(one: str, other: str) -> bool:
    """Whether two addresses may be of one process. Only keys tell processes apart."""
    return one == other or _key_of(one) == _key_of(other)


def is_directory(sender: str, configured: str | None) -> bool:
    """Whether a message came from the directory that is configured at that address.

    A directory at a fixed port has no key in its address, and proves by its key that it is one. Its host may
    have several addresses and names, so they are not compared.
    """
    return sender == configured or not _key_of(sender)


def _key_of(address: str) -> str:
    try:
        return parse_address(address).key
    except WireError:
        return ""
