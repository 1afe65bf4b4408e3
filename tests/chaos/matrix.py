"""The matrix: role x state x fault x transport, and which cells cannot exist."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.chaos.states import STATES

ROLES = ("P", "D", "router", "directory")
FAULTS = ("kill", "stop", "thaw", "partition router-worker", "partition P-D", "lossy", "slow", "abort")
"""`stop` is stopped and continued; `thaw` is stopped, replaced, and continued after that."""
TRANSPORTS = ("shm", "tcp", "mooncake")
ENGINES = ("fake", "tiny")
_TINY_SHARE = 0.25
_ON_PREFILL = ("queued", "first chunk", "between chunks", "transferring", "last chunk")


class Cell(NamedTuple):
    """One scenario. `engine` is drawn: the fake one, or a tiny model."""

    role: str
    state: str
    fault: str
    transport: str
    engine: str

    def __str__(self) -> str:
        return "/".join(self)


def why_not(role: str, state: str, fault: str) -> str | None:
    """Why a cell cannot exist, whatever the transport; None if it can."""
    worker = role in ("P", "D")
    if fault.startswith("partition") and not worker:
        return f"a {role} is not at an end that is named: the cells of P and D cut both ends"
    if fault == "abort" and not worker:
        return "a client's leaving reaches the workers: the cells of P and D show what they do"
    if fault == "abort" and state != "draining" and (role == "P") != (state in _ON_PREFILL):
        return "the request is not with this role then, and aborting has no other victim"
    if fault == "thaw" and role == "directory":
        return "its replacement needs its address, which a stopped process keeps"
    if state == "draining" and role == "directory":
        return "a directory holds no requests, so it has nothing to drain"
    if state == "draining" and fault == "thaw":
        return "a supervisor replaces nothing that leaves by itself"
    if state == "draining" and role == "router" and fault in ("kill", "stop"):
        return "a router that is told to leave breaks its streams at once, so no later fault finds them"
    return None


def cells(seed: int, only: str = "") -> Iterator[Cell]:
    """Every cell that exists, in an order drawn by the seed; again and again, with other engines.

    `only` narrows to role/state/fault/transport/engine, or the first of these; "*" or "" is any.
    """
    wanted = only.split("/") if only else []
    rng = random.Random(seed)
    existing = [
        (role, state, fault, transport)
        for role in ROLES
        for state in STATES
        for fault in FAULTS
        for transport in TRANSPORTS
        if why_not(role, state, fault) is None
    ]
    if not any(_fits((*one, engine), wanted) for one in existing for engine in ENGINES):
        reasons = {why_not(*wanted[:3])} if len(wanted) > 2 else {"no such name"}
        raise ValueError(f"no cell is {only!r}: {reasons}")
    while True:
        rng.shuffle(existing)
        for one in existing:
            drawn = "tiny" if rng.random() < _TINY_SHARE else "fake"
            engine = wanted[4] if len(wanted) > 4 and wanted[4] in ENGINES else drawn
            cell = Cell(*one, engine)
            if _fits(cell, wanted):
                yield cell


def _fits(cell: tuple[str, ...], wanted: list[str]) -> bool:
    return all(part in ("", "*", name) for part, name in zip(wanted, cell, strict=False))
