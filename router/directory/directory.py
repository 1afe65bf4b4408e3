"""Directory: the live workers, under leases (docs/decisions/0016). Pure: time is passed in, nothing is sent.

It decides who may join: workers of one version of one model exchange pages, so a record whose page layout
differs from that of a live worker of the same version is refused, naming the configuration key to change.
Other weights are another version; so are the same in another dtype, if they have another `model_version`
(docs/decisions/0037-versions.md).

A restart loses nothing: workers announce themselves again within a lease, and no View is sent before, so that
routers keep their last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.directory.incarnations import Incarnations
from wire.messages.directory import Announce, Announced, AnnounceRefused, Join, Joined, Replaced, Withdraw
from wire.records import GroupLayout, WorkerRecord

_WEIGHT_DTYPES = frozenset({"float32", "bfloat16", "float16"})  # any other is set by kv_cache_dtype
_LONGEST_PAUSE = 0.3  # between two calls of `expire`, as a share of a lease
_STATE = "state"  # the kind of group whose dtype names those of the model's state tensors


@dataclass(slots=True)
class _Lease:
    record: WorkerRecord
    deadline: float


class Directory:
    """Worker records whose lease holds."""

    def __init__(self, lease_s: float, settles_at: float = 0.0) -> None:
        """Leases last `lease_s` seconds.

        Until `settles_at` workers of an earlier directory may announce themselves: no incarnation is issued
        and no View is sent. A directory at an address that nobody has used before can settle at once.
        """
        self.lease_s = lease_s
        self.settles_at = settles_at
        self.version = 0
        self._incarnations = Incarnations(settles_at)
        self._leases: dict[str, _Lease] = {}
        self._ended: dict[tuple[str, int], _Lease] = {}  # by id and incarnation; lost after their deadline
        self._looked_at: float | None = None

    def join(self, message: Join, now: float) -> Joined | Replaced | None:
        """Issue an incarnation, and end the lease of an older process of that id. None: ask again later."""
        answer = self._incarnations.join(message, self.lease_s, now)
        if isinstance(answer, Joined):
            lease = self._leases.get(message.worker)
            if lease is not None and lease.record.incarnation != answer.incarnation:
                self._end(message.worker)
            self._incarnations.forget(self._leases)
        return answer

    def announce(self, message: Announce, now: float) -> Announced | AnnounceRefused | Replaced:
        """Grant a lease, or renew it with the current load. Only the newest process of an id gets one."""
        record = message.record
        if not self._incarnations.admit(message):
            return Replaced(record.id, message.nonce)
        known = self._leases.get(record.id)
        if known is None or known.record.incarnation != record.incarnation:  # a renewal is admitted already
            refusal = self._refusal(record)
            if refusal is not None:
                return refusal
        if known is None or (known.record.incarnation, known.record.draining) != (
            record.incarnation,
            record.draining,
        ):
            self.version += 1
        self._leases[record.id] = _Lease(record, now + self.lease_s)
        self._ended.pop((record.id, record.incarnation), None)
        return Announced(record.id, record.incarnation, self.lease_s)

    def remember(self, seen: dict[str, int]) -> None:
        """A router has seen these incarnations, by worker id: the lease of an older process ends."""
        for worker in self._incarnations.remember(seen):
            if worker in self._leases:
                self._end(worker)

    def withdraw(self, message: Withdraw) -> bool:
        """Remove a worker that leaves on purpose. Returns False when that incarnation was not there."""
        self._incarnations.withdraw(message)
        self._ended.pop((message.worker, message.incarnation), None)
        lease = self._leases.get(message.worker)
        if lease is None or lease.record.incarnation != message.incarnation:
            return False
        self._end(message.worker)
        return True

    def expire(self, now: float) -> list[WorkerRecord]:
        """Remove, and return, the workers whose lease has ended. Call it several times per lease.

        After a longer pause this process was itself stopped or blocked. Renewals have then come that it has
        not read, so all leases last longer by the pause.
        """
        pause_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if pause_s > _LONGEST_PAUSE * self.lease_s:
            for lease in [*self._leases.values(), *self._ended.values()]:
                lease.deadline += pause_s
        ended = [lease.record for lease in self._leases.values() if lease.deadline <= now]
        for record in ended:
            self._end(record.id)
            self._ended[record.id, record.incarnation] = _Lease(record, now + self.lease_s)
        return ended

    def lost(self, now: float) -> list[WorkerRecord]:
        """The workers whose lease ended a lease ago, and that have neither announced themselves again nor
        withdrawn. Each is returned once. Their processes may still be there, stopped or cut off."""
        lost = [key for key, lease in self._ended.items() if lease.deadline <= now]
        return [self._ended.pop(key).record for key in lost]

    def record(self, worker: str) -> WorkerRecord | None:
        """The worker's record, if its lease holds."""
        lease = self._leases.get(worker)
        return None if lease is None else lease.record

    def records(self) -> list[WorkerRecord]:
        """All workers whose lease held at the last `expire`."""
        return [lease.record for lease in self._leases.values()]

    def __len__(self) -> int:
        """How many workers' leases held at the last `expire`. Any thread may ask."""
        return len(self._leases)

    def _end(self, worker: str) -> None:
        del self._leases[worker]
        self.version += 1

    def _refusal(self, record: WorkerRecord) -> AnnounceRefused | None:
        for lease in self._leases.values():
            other = lease.record
            if other.id == record.id or (other.model, other.version) != (record.model, record.version):
                continue
            difference = _difference(record, other)
            # A dtype is part of the fingerprint, and more often a mistake than another version.
            if difference is not None and (
                other.fingerprint == record.fingerprint or difference[0] == "dtype"
            ):
                key, mine, theirs = difference
                return AnnounceRefused(
                    record.id, record.incarnation, key,
                    f"{mine} here, but live worker {other.id!r} of model {record.model!r} has {theirs}",
                    f"start every worker of one version with the same {key}, or name another model_version",
                )  # fmt: skip
        return None


def _difference(a: WorkerRecord, b: WorkerRecord) -> tuple[str, object, object] | None:
    """The first thing in which two workers of one version may not differ: (configuration key, a's, b's)."""
    a_groups = {group.name: group for group in a.groups}
    b_groups = {group.name: group for group in b.groups}
    if a_groups.keys() != b_groups.keys():
        return "model", f"KV groups {sorted(a_groups)}", f"{sorted(b_groups)}"
    for name in sorted(a_groups):
        found = _group_difference(a_groups[name], b_groups[name])
        if found is not None:
            return found
    return None


def _group_difference(a: GroupLayout, b: GroupLayout) -> tuple[str, object, object] | None:
    for key in ("kind", "page_size", "dtype", "tile_order", "shape", "page_bytes"):
        ours, theirs = getattr(a, key), getattr(b, key)
        if ours != theirs:
            named: str = key if key in ("page_size", "dtype", "tile_order") else "model"
            if key == "dtype" and not {ours, theirs} <= _WEIGHT_DTYPES:
                named = "model" if a.kind == _STATE else "kv_cache_dtype"
            return named, f"{key} {ours} of group {a.name}", f"{key} {theirs}"
    return None
