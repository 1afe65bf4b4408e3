"""Models: the served models of one router, each with its versions.

A view's workers are divided by model, version name and fingerprint, so that nothing of two versions ever
meets: each has its fleet, policy, sessions and queue. They share the index, whose pages are by worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from router.placement.admission import Admission
from router.placement.broken_pairs import BrokenPairs
from router.placement.load_estimate import AssignedLoad, WorkerLoadEstimate
from router.placement.placer import Placer
from router.placement.transfer_rates import TransferPair
from router.placement.version import ModelVersion, VersionHealth, chosen, shares
from wire.messages.rooms import Timeline
from wire.records import Role, WorkerRecord

log = logging.getLogger(__name__)


class ModelVersions:
    """One model. There is always a version; before any worker is known it stands for the first to come."""

    def __init__(
        self, name: str, weights: Mapping[str, float], make: Callable[[], tuple[Placer, Admission]]
    ) -> None:
        """`weights` of version names divide the new streams (version.py)."""
        self.name = name
        self.context_limit: int | None = None  # the longest prompt + output that all workers take
        self._weights = dict(weights)
        self._make = make
        self.all = [ModelVersion("", None, *make())]
        self._past_changes = 0  # versions that came, and all changes of those that went
        self._shares: tuple[int, list[tuple[ModelVersion, float]]] = (-1, [])  # with `changes`

    @property
    def changes(self) -> int:
        """Grows when other workers take new work than before."""
        return self._past_changes + sum(one.placer.fleet.changes for one in self.all)

    def update(self, records: list[WorkerRecord], now: float) -> None:
        """Take a new View of the model's workers."""
        self.context_limit = min((one.max_context_tokens for one in records), default=self.context_limit)
        for record in records:
            self._make_known(record)
        for version in self.all:
            own = [record for record in records if version.is_of(record)]
            version.workers = len(own)
            version.placer.update(own, now)
        kept = [one for one in self.all if one.in_use] or self.all[:1]
        self._past_changes += sum(1 + one.placer.fleet.changes for one in self.all if one not in kept)
        self.all = kept

    def choose(self, key: bytes) -> ModelVersion:
        """The version for a new stream. Equal keys get the same while the same versions serve."""
        if len(self.all) == 1:
            return self.all[0]
        return chosen(self.shares(), key) or self.all[0]

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Divide new streams by these weights of version names from now on."""
        self._weights = dict(weights)
        self._shares = (-1, [])
        for version in self.all:
            version.health, version.held_back = VersionHealth(), False

    def failed(self, version: ModelVersion) -> None:
        """A version's workers have failed a stream. If it fails too many, others get the new streams, until
        somebody weighs them again."""
        version.health.note(False)
        if version.health.failing and not version.held_back and self.another_serves(version):
            version.held_back = True
            self._shares = (-1, [])
            log.warning(
                "model %s: version %r (%s) fails most of its streams and gets no new ones",
                self.name, version.name, version.fingerprint,
            )  # fmt: skip

    def another_serves(self, instead_of: ModelVersion) -> bool:
        """Whether a version but this one serves, and is not held back."""
        return any(one.serving and not one.held_back for one in self.all if one is not instead_of)

    def tagged(self, tag: bytes) -> ModelVersion | None:
        """The version with that tag, if it is known."""
        return next((one for one in self.all if one.fingerprint is not None and one.tag == tag), None)

    def shares(self) -> list[tuple[ModelVersion, float]]:
        """Each version with its part of the new streams; 0 for all while none serves."""
        changes = self.changes
        if self._shares[0] != changes:
            found = shares(self.all, self._weights)
            total = sum(found) or 1.0
            pairs = zip(self.all, found, strict=True)
            self._shares = changes, [(one, share / total) for one, share in pairs]
        return self._shares[1]

    def _make_known(self, record: WorkerRecord) -> None:
        first = self.all[0]
        if first.fingerprint is None:
            first.name, first.fingerprint = record.version, record.fingerprint
        if not any(one.is_of(record) for one in self.all):
            self.all.append(ModelVersion(record.version, record.fingerprint, *self._make()))
            self._past_changes += 1


def model_report(model: ModelVersions) -> dict[str, object]:
    """A model's versions, for /debug/models. `share` is the part of new streams; 0 while it serves none."""
    versions = []
    for version, share in model.shares():
        records = [one.record for one in version.placer.fleet.estimates()]
        workers = {str(role): [one.id for one in records if one.role is role] for role in Role}
        versions.append(
            {
                "version": version.name, "fingerprint": version.fingerprint, "share": share,
                "serving": version.serving, "workers": workers, "rooms": version.rooms,
                "held_back": version.held_back, "queued": version.admission.queued,
                "streams": version.streams,
            }
        )  # fmt: skip
    return {"model": model.name, "max_model_len": model.context_limit, "versions": versions}


class Models:
    """All models of a router. Implements LoadBook for its peers. Belongs to one event loop."""

    def __init__(
        self,
        weights: Mapping[str, Mapping[str, float]],
        make: Callable[[BrokenPairs], tuple[Placer, Admission]],
    ) -> None:
        """`weights`: of each served model, by version name. `make` is called for each version."""
        self.broken_pairs = BrokenPairs()
        self._suspected: frozenset[str] = frozenset()

        def make_version() -> tuple[Placer, Admission]:
            placer, admission = make(self.broken_pairs)
            placer.suspect(self._suspected)
            return placer, admission

        self.by_name = {name: ModelVersions(name, given, make_version) for name, given in weights.items()}

    @property
    def changes(self) -> int:
        """How often the workers that take new work have changed. It grows with every change."""
        return sum(model.changes for model in self.by_name.values())

    def versions(self) -> Iterator[ModelVersion]:
        """All versions of all models."""
        return (version for model in self.by_name.values() for version in model.all)

    def of_worker(self, record: WorkerRecord) -> ModelVersion | None:
        """The version that a worker is of, if it is known."""
        model = self.by_name.get(record.model)
        return next((one for one in model.all if one.is_of(record)), None) if model is not None else None

    def update(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Take a new View's workers of the served models."""
        by_model: dict[str, list[WorkerRecord]] = {name: [] for name in self.by_name}
        for record in records:
            by_model[record.model].append(record)
        for name, own in by_model.items():
            self.by_name[name].update(own, now)

    def suspect(self, workers: frozenset[str]) -> None:
        """These, and no others, are suspected of being gone."""
        self._suspected = workers
        for version in self.versions():
            version.placer.suspect(workers)

    def waiting(self) -> dict[str, float]:
        """Rooms that wait because decode is full, by decode worker: the part of each."""
        return {worker: part for one in self.versions() for worker, part in one.admission.waiting().items()}

    def tick(self, now: float) -> None:
        """Give up pages that were expected and have come or will not."""
        for version in self.versions():
            version.placer.tick(now)

    def worker_at(self, mailbox: str) -> WorkerRecord | None:
        """The live worker at an address."""
        found = (version.placer.worker_at(mailbox) for version in self.versions())
        return next((record for record in found if record is not None), None)

    def transferred(self, to: str, told: Timeline) -> TransferPair | None:
        """As `Placer.transferred`, of the worker's version."""
        found = (version.placer.transferred(to, told) for version in self.versions())
        return next((pair for pair in found if pair is not None), None)

    # -- LoadBook ------------------------------------------------------------------------------

    def estimate(self, worker: str) -> WorkerLoadEstimate | None:
        """A live worker's estimate."""
        found = (version.placer.fleet.estimate(worker) for version in self.versions())
        return next((one for one in found if one is not None), None)

    def estimates(self) -> list[WorkerLoadEstimate]:
        """The estimates of all live workers."""
        return [one for version in self.versions() for one in version.placer.fleet.estimates()]

    def set_peers(self, estimate: WorkerLoadEstimate, load: AssignedLoad) -> None:
        """The other routers together have assigned this load to a live worker."""
        version = self.of_worker(estimate.record)
        if version is not None:
            version.placer.fleet.set_peers(estimate, load)
