"""SwitchingWorker: what is asked of it while it changes its role, and what happens when that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from common.errors import ConfigError, WorkerLost
from common.secrets import ClusterSecret, open_secret
from decode_node.role import DecodeRole
from prefill_node.role import PrefillRole
from router.directory.server import DirectoryHost
from tests.router.conftest import wait_until
from tests.support.kv_events_reader import Pages, pages_of, replayed
from wire.codec import pack_tokens
from wire.events import BlockStored, decode_batch
from wire.mailbox import Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.caches import Inspect, Inspected
from wire.messages.directory import RoleSet, SetRole, Watch
from wire.messages.rooms import Abort, Decode, Rejected, Tokens
from wire.page_hash import event_hashes, namespace_seed, owned_digests, page_digests
from wire.records import Role
from wire.request import GenerateRequest, SamplingParams
from wire.security import curve_for
from worker.loop import Worker
from worker.options import WorkerOptions
from worker.services import Services
from worker.switch import SwitchingWorker

ROLES = {Role.PREFILL: PrefillRole, Role.DECODE: DecodeRole}
DRAIN_S = 10.0


class Cluster:
    """A directory, and a member of the cluster that speaks for it and for a router."""

    def __init__(self, cleanup: ExitStack, secret_file: Path | None = None) -> None:
        self._cleanup = cleanup
        self._secret_file = secret_file
        secret: ClusterSecret | None = open_secret(secret_file)
        self.directory = cleanup.enter_context(DirectoryHost(secret=secret))
        # Without a secret it is believed to be the directory, because its address has no key.
        self.mailbox = cleanup.enter_context(Mailbox(curve=curve_for(secret), key=""))

    def worker(self, roles: dict[Role, Any] = ROLES, drain_s: float = DRAIN_S) -> SwitchingWorker:
        """One that has joined, in the decode role."""
        options = WorkerOptions(
            model="fake", engine="fake", fake_step_s=0.005, max_total_tokens=4096, page_size=4,
            max_context_tokens=4000, worker_id="w0", directory=self.directory.address,
            cluster_secret_file=self._secret_file,
        )  # fmt: skip
        worker = SwitchingWorker(options, roles, Role.DECODE, drain_s)
        self._cleanup.callback(worker.close)
        worker.start()
        return worker

    def ask(self, mailbox: str, role: Role) -> str:
        """The problem in the answer."""
        self.mailbox.send(mailbox, SetRole(role))
        answer = self.wait_for(RoleSet)
        assert isinstance(answer, RoleSet)
        assert (answer.worker, answer.role) == ("w0", role)
        return answer.problem

    def nodes(self, mailbox: str) -> list[dict[str, object]]:
        """What the worker's tree holds."""
        self.mailbox.send(mailbox, Inspect("nodes", 1))
        answer = self.wait_for(Inspected)
        assert isinstance(answer, Inspected)
        return list(json.loads(answer.body))

    def wait_for(self, kind: type[AnyMessage], timeout_s: float = 10.0) -> AnyMessage | None:
        found: list[AnyMessage] = []

        def come() -> bool:
            found.extend(mail.message for mail in self.mailbox.wait(0.05) if isinstance(mail.message, kind))
            return bool(found)

        try:
            wait_until(come, timeout_s)
        except AssertionError:
            return None
        return found[0]

    def begin_long_room(self, worker: SwitchingWorker, tenant: str = "") -> None:
        """A room that does not end by itself. Returns when it runs."""
        sampling = SamplingParams(max_new_tokens=3000, ignore_eos=True)
        request = GenerateRequest(
            request_id="r", room=1, epoch=1, prompt=pack_tokens([*range(40)]), sampling=sampling,
            tenant=tenant,
        )  # fmt: skip
        self.mailbox.send(worker.record().mailbox, Decode(request))
        assert self.wait_for(Tokens) is not None


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def cluster(cleanup: ExitStack) -> Cluster:
    return Cluster(cleanup)


def test_what_waits_in_routers_is_in_the_workers_load(cluster: Cluster) -> None:
    worker = cluster.worker()
    cluster.mailbox.send(cluster.directory.address, Watch(1, waiting={"w0": 2.5}))
    wait_until(lambda: worker.record().load.waiting_in_routers == 2.5)
    cluster.mailbox.send(cluster.directory.address, Watch(2))
    wait_until(lambda: worker.record().load.waiting_in_routers == 0.0)


def test_a_change_of_role_is_a_new_incarnation_that_tells_its_tree_first(cluster: Cluster) -> None:
    worker = cluster.worker()
    cluster.begin_long_room(worker)
    before = worker.record()
    cluster.mailbox.send(before.mailbox, Abort(1, 1))
    assert cluster.ask(before.mailbox, Role.PREFILL) == ""
    wait_until(lambda: worker.record().role is Role.PREFILL and worker.record().incarnation > 0, 10.0)
    after = worker.record()
    held = cluster.nodes(after.mailbox)
    assert (after.id, after.pid, after.draining) == ("w0", before.pid, False)
    assert after.incarnation == before.incarnation + 1
    assert not {after.mailbox, after.events, after.replay} & {before.mailbox, before.events, before.replay}
    worker.healthy()
    pages = Pages("fake")
    pages.apply(replayed(after.replay))
    assert pages.held == pages_of(held, "fake", 4)
    assert len(pages.held) >= 10


def test_after_a_change_of_role_private_pages_are_told_on_their_own_stream(cluster: Cluster) -> None:
    worker = cluster.worker()
    cluster.begin_long_room(worker, tenant="ada")
    before = worker.record()
    cluster.mailbox.send(before.mailbox, Abort(1, 1))
    assert cluster.ask(before.mailbox, Role.PREFILL) == ""
    wait_until(lambda: worker.record().role is Role.PREFILL and worker.record().incarnation > 0, 10.0)
    after = worker.record()
    assert after.private_events != before.private_events
    told = [
        event for batch in replayed(after.private_replay).values() for event in decode_batch(batch).events
    ]
    names = [name for event in told if isinstance(event, BlockStored) for name in event.block_hashes]
    digests = page_digests(namespace_seed("fake"), pack_tokens([*range(40)]), 4)
    assert names[:10] == event_hashes(owned_digests(digests, "ada"))
    assert replayed(after.replay) == {}


def test_what_is_asked_during_a_change_is_answered_and_begins_no_other(cluster: Cluster) -> None:
    worker = cluster.worker()
    mailbox = worker.record().mailbox
    assert cluster.ask(mailbox, Role.DECODE) == ""
    cluster.begin_long_room(worker)
    assert not worker.record().draining
    assert cluster.ask(mailbox, Role.PREFILL) == ""
    assert cluster.ask(mailbox, Role.PREFILL) == ""
    assert "about to become a prefill worker" in cluster.ask(mailbox, Role.DECODE)
    cluster.mailbox.send(mailbox, Abort(1, 1))
    wait_until(lambda: worker.record().role is Role.PREFILL and worker.record().incarnation == 2, 10.0)
    # The change is over a moment after the new incarnation has joined; until then it says "ask later".
    wait_until(lambda: cluster.ask(worker.record().mailbox, Role.DECODE) == "", 10.0)
    wait_until(lambda: worker.record().role is Role.DECODE and worker.record().incarnation == 3, 10.0)


def test_rooms_that_do_not_end_go_back_to_their_router_within_the_bound(cluster: Cluster) -> None:
    worker = cluster.worker(drain_s=1.0)
    cluster.begin_long_room(worker)
    assert cluster.ask(worker.record().mailbox, Role.PREFILL) == ""
    rejected = cluster.wait_for(Rejected)
    assert isinstance(rejected, Rejected)
    assert "leaving" in rejected.message


def test_a_worker_that_leaves_while_it_changes_its_role_leaves(cluster: Cluster) -> None:
    worker = cluster.worker()
    cluster.begin_long_room(worker)
    mailbox = worker.record().mailbox
    assert cluster.ask(mailbox, Role.PREFILL) == ""
    assert not worker.drain(0.2)
    worker.close()
    assert worker.record().mailbox == mailbox


class FailingRole(PrefillRole):
    """Cannot be opened."""

    def __init__(self, services: Services) -> None:
        raise ConfigError("kv_transfer_backend", "there is no network", "find one")


def test_a_worker_that_fails_to_change_its_role_is_unhealthy(cluster: Cluster) -> None:
    worker = cluster.worker({Role.DECODE: DecodeRole, Role.PREFILL: FailingRole})
    worker.healthy()
    assert cluster.ask(worker.record().mailbox, Role.PREFILL) == ""

    wait_until(lambda: worker._failure is not None, 10.0)
    with pytest.raises(WorkerLost, match="there is no network"):
        worker.healthy()


def test_a_worker_whose_pages_a_peer_may_still_write_is_unhealthy(cluster: Cluster) -> None:
    """Its memory is not given to the other role."""

    class BusyRole(DecodeRole):
        busy = True

    worker = cluster.worker({Role.DECODE: BusyRole, Role.PREFILL: PrefillRole}, drain_s=0.3)
    assert cluster.ask(worker.record().mailbox, Role.PREFILL) == ""
    wait_until(lambda: worker._failure is not None, 10.0)
    with pytest.raises(WorkerLost, match="not empty"):
        worker.healthy()
    assert worker.record().role is Role.DECODE


def test_a_worker_whose_loop_dies_while_it_drains_is_unhealthy(cluster: Cluster) -> None:
    dying = Event()

    class DyingRole(DecodeRole):
        def poll(self, now: float) -> None:
            assert not dying.is_set(), "out of balance"
            super().poll(now)

    worker = cluster.worker({Role.DECODE: DyingRole, Role.PREFILL: PrefillRole})
    cluster.begin_long_room(worker)
    assert cluster.ask(worker.record().mailbox, Role.PREFILL) == ""
    dying.set()
    wait_until(lambda: worker._failure is not None, 10.0)
    assert worker.record().role is Role.DECODE
    with pytest.raises(WorkerLost, match="out of balance"):
        worker.healthy()


def test_a_worker_with_one_role_refuses_another(cluster: Cluster) -> None:
    options = WorkerOptions(
        model="fake", engine="fake", max_total_tokens=64, worker_id="w0", directory=cluster.directory.address
    )
    worker = Worker(options, DecodeRole)
    try:
        worker.start()
        assert "fixed" in cluster.ask(worker.record().mailbox, Role.PREFILL)
    finally:
        worker.close()


def test_only_the_directory_is_heard(cleanup: ExitStack, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    cluster = Cluster(cleanup, secret)
    worker = cluster.worker()
    cluster.mailbox.send(worker.record().mailbox, SetRole(Role.PREFILL))
    assert cluster.wait_for(RoleSet, 1.0) is None
    assert not worker.record().draining
