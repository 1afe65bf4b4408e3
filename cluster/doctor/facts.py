"""What is known of a node before anything is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cluster.config import ServeConfig

UNLIMITED = -1


class Problem(NamedTuple):
    """Why something cannot be used, and what to do: a ConfigError without its key."""

    problem: str
    remedy: str


class PortsFree(NamedTuple):
    """Of a range of ports (`text`, as configured): how many can be bound, of how many."""

    text: str
    free: int
    of: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. Sizes are in bytes."""

    node: str  # what the report calls it
    versions: dict[str, str]  # name -> version, "" when it is not installed
    address: str  # what Baton's sockets on it announce; "" when `interface` means nothing there
    memory: int  # that can be allocated without swapping
    shm: int  # size of /dev/shm
    object_store: int  # what Ray stores there
    resources: dict[str, float]  # as Ray counts them
    labels: dict[str, str] | None = None  # as Ray has them; None: not known without Ray
    gpu_memory: tuple[int, ...] = ()  # of each GPU
    rdma_devices: tuple[str, ...] = ()
    locked_memory: int = UNLIMITED  # limit on it
    clock_ahead_s: float = 0.0  # of the clock where the doctor runs
    clock_error_s: float = 0.0  # the difference is known to within that
    ports: dict[str, PortsFree] = field(default_factory=dict)  # by use: mailboxes, events, kv, mooncake
    secret_digests: tuple[str, ...] = ()  # of the accepted secrets, keyed with this run's challenge
    needs: dict[str, int] = field(default_factory=dict)  # role -> memory of one worker: weights and KV
    unusable: dict[str, Problem] = field(default_factory=dict)  # config, interface, secret, gpu, model


class Target(NamedTuple):
    """A port on which a node listens for a moment. Who connects is told `token`."""

    node: str
    use: str
    ports: str  # the range, as configured
    host: str
    port: int
    token: bytes


class Reach(NamedTuple):
    """Whether `source` got through to a target. `problem` is "" when it did."""

    source: str
    target: Target
    problem: str


class Grade(StrEnum):
    """`NOTE`: worth knowing, and no reason to fail."""

    OK = "ok"
    NOTE = "note"
    FAULT = "FAULT"


class Finding(NamedTuple):
    """One line of the report. `remedy` is "" when there is nothing to do."""

    check: str
    node: str
    grade: Grade
    found: str
    remedy: str = ""


class Case(NamedTuple):
    """What is judged. `reaches`: connections that were tried. `config` is None when only the machine is."""

    nodes: Sequence[NodeFacts]
    reaches: Sequence[Reach]
    config: ServeConfig | None
