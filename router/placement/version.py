"""ModelVersion: the workers of one version of one model, and the rooms that wait for them.

Workers are of one version when they serve one model under one version name (which the operator gives, "" is
usual) and have one fingerprint (of their weights and dtype). Only they exchange KV: each version has a placer
and an admission of its own, so no policy ever sees workers of two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b

from router.placement.admission import Admission
from router.placement.placer import Placer
from wire.records import Role, WorkerRecord

_TAG_BYTES = 3
_JUDGED = 20  # streams: the latest ones
_JUDGED_AT_LEAST = 8


class VersionHealth:
    """Whether the latest streams of a version went well."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_JUDGED)

    def note(self, well: bool) -> None:
        """A stream got its first token, or its workers failed it."""
        self._latest.append(well)

    @property
    def failing(self) -> bool:
        """Whether more than half failed, of enough."""
        return len(self._latest) >= _JUDGED_AT_LEAST and sum(self._latest) * 2 < len(self._latest)


class ModelVersion:
    """One version. Belongs to one event loop."""

    def __init__(self, name: str, fingerprint: str | None, placer: Placer, admission: Admission) -> None:
        """`fingerprint` is None before any worker is known: then the first version to come becomes this."""
        self.name = name
        self.fingerprint = fingerprint
        self.placer = placer
        self.admission = admission
        self.rooms = 0  # of requests that are assigned to it
        self.streams = 0  # requests that began on it
        self.workers = 0  # live
        self.health = VersionHealth()
        self.held_back = False  # it failed, and gets no new streams while another version serves

    def is_of(self, record: WorkerRecord) -> bool:
        """Whether a worker is of this version."""
        return (self.name, self.fingerprint) == (record.version, record.fingerprint)

    @property
    def in_use(self) -> bool:
        """Whether it has workers, or rooms that wait for them or have their turn in its admission."""
        return bool(self.workers or self.rooms or self.admission.queued or self.admission.in_flight)

    @property
    def tag(self) -> bytes:
        """3 bytes that stand for the version, for the ids of its streams. Zeros: of no worker yet."""
        return bytes(_TAG_BYTES) if self.fingerprint is None else self._digest(b"tag", _TAG_BYTES)

    @property
    def serving(self) -> bool:
        """Whether a decode worker takes new work."""
        return any(one.record.role is Role.DECODE for one in self.placer.fleet.active())

    def capacity(self) -> int:
        """KV tokens of the decode workers that take new work."""
        active = self.placer.fleet.active()
        return sum(one.record.total_tokens for one in active if one.record.role is Role.DECODE)

    def rank(self, key: bytes, share: float) -> float:
        """Where the version stands for a key among others: the least is chosen."""
        drawn = int.from_bytes(self._digest(key, 8), "big")
        return -math.log((drawn + 0.5) / 2.0**64) / share

    def _digest(self, key: bytes, size: int) -> bytes:
        identity = self.name.encode() + b"\0" + (self.fingerprint or "").encode()
        return blake2b(key, digest_size=size, key=blake2b(identity, digest_size=32).digest()).digest()


def shares(versions: list[ModelVersion], weights: Mapping[str, float]) -> list[float]:
    """The share of new streams that each serving version should get, as positive numbers or 0.

    `weights` are of version names. Versions of one name share its weight by their decode capacity. Without
    weights, or when no version with a weight serves, all share by capacity.
    """
    capacities = [0 if one.held_back else one.capacity() for one in versions]
    if not any(capacities):
        capacities = [one.capacity() for one in versions]
    by_name: dict[str, int] = {}
    for one, capacity in zip(versions, capacities, strict=True):
        by_name[one.name] = by_name.get(one.name, 0) + capacity
    weighted = [
        weights.get(one.name, 0.0) * capacity / max(1, by_name[one.name])
        for one, capacity in zip(versions, capacities, strict=True)
    ]
    return weighted if any(weighted) else [float(capacity) for capacity in capacities]


def chosen(shared: list[tuple[ModelVersion, float]], key: bytes) -> ModelVersion | None:
    """The version for a new stream among versions with their shares; None while none has a share.

    Weighted rendezvous hashing: one key always leads to one version, and a change of the shares moves only as
    many keys as it must. So a conversation stays where its prefix is cached.
    """
    serving = [(one, share) for one, share in shared if share > 0]
    return min(serving, key=lambda pair: pair[0].rank(key, pair[1]))[0] if serving else None
