"""Another host: a network namespace joined to this one by a cable."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_numbers = itertools.count()


class OtherHost(NamedTuple):
    """`cable` is the name of the cable's end there."""

    name: str
    address: str
    cable: str

    @property
    def command(self) -> tuple[str, ...]:
        """In front of a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def set_cable(self, state: str) -> None:
        """Plug it in ("up") or out ("down")."""
        _ip("-n", self.name, "link", "set", self.cable, state)


def why_no_other_host() -> str:
    """Why there cannot be one here; "" when there can."""
    allowed = os.geteuid() == 0 and shutil.which("ip") is not None
    return "" if allowed else "network namespaces need root and iproute2"


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make one, and end it."""
    number = os.getpid() * 4 + next(_numbers)
    name, here, there = f"bt{number}", f"bta{number}", f"btb{number}"
    net = f"10.{number % 250}.{number // 250 % 250}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("addr", "add", f"{net}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        yield OtherHost(name, f"{net}.2", there)
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
