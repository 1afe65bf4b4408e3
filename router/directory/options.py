"""DirectoryOptions: a JSON file for `python -m router.directory`."""

from __future__ import annotations

from pydantic import Field

from common.used_ports import LONGEST_LEASE_S
from wire.options import SocketOptions


class DirectoryOptions(SocketOptions):
    """Options of a directory process."""

    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where workers and routers find it again when it is restarted; 0: one of "
        "ports.mailboxes, for a directory that is not",
    )
    lease_s: float = Field(
        5.0, gt=0, le=LONGEST_LEASE_S, description="a worker that is silent for longer counts as lost"
    )
