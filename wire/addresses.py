"""Mailbox and event addresses: `tcp://host:port/KEY`, or `tcp://host:port`.

KEY names the process that binds the address, by 64 hexadecimal digits: in a cluster with a secret its CURVE
public key, else a number that it has drawn. So what is sent to a process is never taken by its successor at
that port. A mailbox without a key is that of a directory at a fixed port, whose successor is meant
(wire/security.py). The addresses of KV events have a key only in a cluster with a secret: readers of other
makes know no keys. Addresses come from other processes, so they are checked before anything connects to them.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import NamedTuple

from common.errors import WireError

LONGEST_ADDRESS = 255  # bytes: its length is one byte of a frame
_KEY_BYTES = 32
_ADDRESS = re.compile(
    r"(tcp://(?:\[[0-9a-fA-F:.]+(?:%[A-Za-z0-9_.-]+)?\]|[A-Za-z0-9](?:[A-Za-z0-9_.-]*)):([0-9]{1,5}))"
    r"(?:/([0-9a-f]{64}))?"
)


class Address(NamedTuple):
    """`endpoint` is ZeroMQ's; `key` is hexadecimal, or ""."""

    endpoint: str
    key: str


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """The parts of an address. Raises WireError for anything else."""
    found = _ADDRESS.fullmatch(text) if len(text) <= LONGEST_ADDRESS else None
    if found is None or not 0 < int(found[2]) < 65_536:
        raise WireError(f"{text[:LONGEST_ADDRESS]!r} is no address of the form tcp://host:port[/key]")
    return Address(found[1], found[3] or "")


def draw_key() -> str:
    """A key for the addresses of a process, in a cluster without a secret."""
    return secrets.token_hex(_KEY_BYTES)


def keyed(endpoint: str, key: str) -> str:
    """The address of the process with that key; "": without one."""
    return f"{endpoint}/{key}" if key else endpoint


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
