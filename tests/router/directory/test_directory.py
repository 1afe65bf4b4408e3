from __future__ import annotations

import time
from typing import Any

import pytest

from router.directory.client import DirectoryClient
from router.directory.directory import GENERATION_SHIFT, Directory
from router.directory.server import DirectoryHost, DirectoryServer
from tests.support.fake_worker import FakeWorker, group_layout
from wire.mailbox import Mail, Mailbox
from wire.messages import Announce, Announced, AnnounceRefused, View, Watch, Withdraw
from wire.records import GroupLayout, Role, WorkerRecord


def record(worker: str = "p0", incarnation: int = 1, **changes: Any) -> WorkerRecord:
    base: dict[str, Any] = {
        "id": worker, "incarnation": incarnation, "role": Role.PREFILL, "mailbox": f"tcp://{worker}",
        "events": "", "replay": "", "model": "m", "fingerprint": "f", "groups": (group_layout(),),
        "max_context_tokens": 100, "total_tokens": 100, "max_running_requests": 1, "pid": 1, "host": "h",
        "transfer_backends": ("shm",),
    }  # fmt: skip
    return WorkerRecord(**{**base, **changes})


def test_a_lease_is_renewed_or_ends() -> None:
    directory = Directory(lease_s=3.0, started_at_ms=7)
    first = directory.version
    assert directory.announce(Announce(record()), now=0.0) == Announced("p0", 1, 3.0)
    assert directory.version == first + 1
    directory.announce(Announce(record()), now=2.0)
    assert directory.version == first + 1  # a renewal is no change of membership
    assert directory.expire(now=4.9) == []
    assert [r.id for r in directory.expire(now=5.0)] == ["p0"]
    assert directory.version == first + 2
    assert directory.view().records == []


def test_draining_and_a_restart_change_the_version() -> None:
    directory = Directory(3.0, 7)
    directory.announce(Announce(record()), 0.0)
    before = directory.version
    directory.announce(Announce(record(draining=True)), 0.1)
    directory.announce(Announce(record(incarnation=2)), 0.2)
    assert directory.version == before + 2
    assert [r.incarnation for r in directory.view().records] == [2]


def test_only_its_own_incarnation_withdraws_a_worker() -> None:
    directory = Directory(3.0, 7)
    directory.announce(Announce(record(incarnation=2)), 0.0)
    assert not directory.withdraw(Withdraw("p0", 1))
    assert directory.withdraw(Withdraw("p0", 2))
    assert directory.view().records == []


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("page_size", {"groups": (group_layout(page_size=32),)}),
        ("dtype", {"groups": (group_layout(dtype="bfloat16"),)}),
        ("kv_cache_dtype", {"groups": (group_layout(dtype="fp8_e4m3:scale=1"),)}),
        ("tile_order", {"groups": (group_layout(tile_order="dot_pairs"),)}),
        ("model", {"groups": (group_layout(kind="window"),)}),
        ("model", {"fingerprint": "other"}),
        ("model", {"groups": ()}),
    ],
)
def test_a_worker_that_cannot_exchange_pages_is_refused(key: str, changes: dict[str, Any]) -> None:
    directory = Directory(3.0, 7)
    directory.announce(Announce(record("p0")), 0.0)
    refused = directory.announce(Announce(record("d0", **changes)), 0.1)
    assert isinstance(refused, AnnounceRefused)
    assert refused.key == key
    assert "'p0'" in refused.problem
    assert key in refused.remedy
    assert [r.id for r in directory.view().records] == ["p0"]
    other_model = directory.announce(Announce(record("d0", model="n", **changes)), 0.1)
    assert isinstance(other_model, Announced)


def test_a_refused_worker_may_join_when_the_other_is_gone() -> None:
    directory = Directory(3.0, 7)
    directory.announce(Announce(record("p0")), 0.0)
    odd = Announce(record("d0", groups=(group_layout(page_size=32),)))
    assert isinstance(directory.announce(odd, 0.1), AnnounceRefused)
    directory.expire(3.0)
    assert isinstance(directory.announce(odd, 3.1), Announced)


def test_of_two_workers_with_one_id_the_older_is_refused() -> None:
    directory = Directory(3.0, 7)
    directory.announce(Announce(record(incarnation=5)), 0.0)
    refused = directory.announce(Announce(record(incarnation=4)), 0.1)
    assert isinstance(refused, AnnounceRefused)
    assert refused.key == "worker_id"


def view(generation: int, number: int, *records: WorkerRecord) -> View:
    return View((generation << GENERATION_SHIFT) + number, list(records))


def test_a_client_keeps_its_view_over_a_restart_of_the_directory() -> None:
    client = DirectoryClient("d", lambda *_: None, grace_s=6.0)
    change = client.take(view(1, 5, record("a"), record("b")), 0.0)
    assert [r.id for r in change.joined] == ["a", "b"]
    change = client.take(view(2, 0), 1.0)
    assert (change.lost, sorted(client.workers)) == ([], ["a", "b"])
    client.take(view(2, 1, record("a")), 2.0)
    assert sorted(client.workers) == ["a", "b"]
    change = client.take(view(2, 1, record("a")), 7.1)  # b has not come back
    assert [r.id for r in change.lost] == ["b"]


def test_a_client_ignores_a_late_view_and_sees_restarted_workers_as_lost_and_joined() -> None:
    client = DirectoryClient("d", lambda *_: None, grace_s=6.0)
    client.take(view(1, 5, record("a")), 0.0)
    client.take(view(1, 4), 0.1)
    assert list(client.workers) == ["a"]
    change = client.take(view(1, 6, record("a", incarnation=2)), 0.2)
    assert [r.incarnation for r in change.lost] == [1]
    assert [r.incarnation for r in change.joined] == [2]


def test_a_client_repeats_its_watch() -> None:
    sent: list[tuple[str, object]] = []
    client = DirectoryClient("d", lambda to, message: sent.append((to, message)), grace_s=6.0)
    for now in (0.0, 0.5, 1.1):
        client.tick(now)
    client.move("e")
    client.tick(1.2)
    assert sent == [("d", Watch()), ("d", Watch()), ("e", Watch())]


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_over_mailboxes_a_dead_worker_leaves_the_view(secret: str | None) -> None:
    with DirectoryHost(cluster_secret=secret, lease_s=0.5) as host:
        from wire.security import curve_for

        with Mailbox(curve=curve_for(secret)) as watcher:
            worker = FakeWorker(Role.DECODE, host.address, secret=secret, announce_s=0.1)
            assert worker.leased.wait(5)
            watcher.send(host.address, Watch())
            assert ids_seen(watcher, lambda ids: ids == [worker.record.id])
            worker.die()
            assert ids_seen(watcher, lambda ids: ids == [])


def ids_seen(watcher: Mailbox, good: Any) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for mail in watcher.wait(0.2):
            if isinstance(mail.message, View) and good([r.id for r in mail.message.records]):
                return True
    return False


def test_every_view_says_who_watches() -> None:
    sent: list[tuple[str, list[str]]] = []

    def send(to: str, message: object) -> None:
        assert isinstance(message, View)
        sent.append((to, message.routers))

    server = DirectoryServer(Directory(3.0, 7), send)
    server.tick(0.0)
    server.handle(Mail("one", Watch()), 0.0)
    server.handle(Mail("two", Watch()), 1.0)
    assert ("one", ["one", "two"]) in sent, "the first is told at once"
    assert ("two", ["one", "two"]) in sent
    sent.clear()
    server.handle(Mail("two", Watch()), 4.0)
    server.tick(5.5)
    assert sent == [("two", ["one", "two"]), ("two", ["two"])], "the first watches no more"


def test_group_layouts_are_compared_by_name_not_by_order() -> None:
    def named(name: str) -> GroupLayout:
        layout = group_layout()
        return GroupLayout(name, *[getattr(layout, f) for f in layout.__struct_fields__[1:]])

    directory = Directory(3.0, 7)
    directory.announce(Announce(record("a", groups=(named("x"), named("y")))), 0.0)
    answer = directory.announce(Announce(record("b", groups=(named("y"), named("x")))), 0.0)
    assert isinstance(answer, Announced)
